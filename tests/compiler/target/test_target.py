"""Targets: figures with sources, names as users say them, what exists and what does not."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.spec.cost_model import sourced_numbers
from meshloom.compiler.spec.kernel_rates import attention_kernels, grouped_kernels
from meshloom.compiler.spec.measured_tables import shipped_collectives, shipped_matmuls
from meshloom.compiler.spec.target_names import chip_file, examples, is_sized, kinds, problem_of
from meshloom.compiler.spec.target_spec import SwitchSpec, TorusSpec, TpuTarget
from meshloom.compiler.target.target import plan_target, topology_arguments
from support.commands import run_in_process
from support.programs import target_of

CHIPS = [kind for kind in kinds() if kind != "cpu"]
TPUS = [kind for kind in CHIPS if isinstance(chip_file(kind)[1], TorusSpec)]


def test_all_chips_are_there():
    assert set(CHIPS) >= {"v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "h100", "h200", "b200"}


@pytest.mark.parametrize("kind", CHIPS)
def test_every_figure_has_a_source(kind):
    for spec in chip_file(kind):
        figures = set(type(spec).model_fields) - {"name", "known_as", "kind", "device_kind", "sources"}
        assert set(spec.sources) == figures
        for figure, source in spec.sources.items():
            assert source.assumed or re.search(
                r"https://|conf/|libtpu|jax|xla|arXiv|NVIDIA|one device|one host|matmul|v6e|servers",
                source.measured or "",
            ), figure


def test_every_assumption_is_marked_as_one():
    """By a field of its source, in the files of chips, kernels, tables and the cost model, not by a word alone."""
    kernels, grouped = attention_kernels().values(), grouped_kernels().values()
    found = [source for kind in CHIPS for spec in chip_file(kind) for source in spec.sources.values()]
    found += [each.source for each in (*kernels, *grouped, *sourced_numbers().values())]
    found += [each.source for each in (*shipped_collectives().values(), *shipped_matmuls().values())]
    one_chip_as_another = re.compile(r"assum|\bas (v\d|[ahb]\d|gb\d|tpu7x)", re.I)
    assert [each.measured for each in found if each.measured and one_chip_as_another.search(each.measured)] == []


@pytest.mark.parametrize("preset", ["[]", "[scoped_memory]"])
def test_what_a_preset_changes_stays_an_assumption_of_its_chip(preset):
    """The preset gives matmuls a share of their own, and the other figures of `kernels` are still those of v5p."""
    plan = plan_of(
        "target=v6e-8", f"overlap.flag_presets={preset}", "precision=bfloat16", "sharding.on_replicated=allow"
    )
    assert plan.target.chip
    assert plan.target.assumed["chip.kernels"] == "all other passes: as v5p"
    assert (plan.target.chip.kernels == chip_file("v6e")[0].kernels) == (preset == "[]")


@pytest.mark.parametrize("kind", TPUS)
def test_figures_are_near_those_that_jax_has(kind):
    """An independent table of the same chips, in which rounding differs; v5p's bandwidth is the one in dispute."""
    chip, _ = chip_file(kind)
    version = pltpu.ChipVersion({"tpu7x": "7x"}.get(kind, kind))
    theirs, cores = pltpu.get_tpu_info_for_chip(version, 1), chip.num_cores
    assert chip.peak_flops_per_second["bfloat16"] == pytest.approx(theirs.bf16_ops_per_second * cores, rel=0.01)
    assert chip.hbm_bytes == pytest.approx(theirs.hbm_capacity_bytes * cores, rel=0.01)
    assert chip.hbm_bytes_per_second == pytest.approx(
        theirs.mem_bw_bytes_per_second * cores, rel=0.13 if kind == "v5p" else 0.03
    )
    assert chip.vector_memory_bytes == theirs.vmem_capacity_bytes * cores


# Google's own names of slices: pages of each chip, and xpk's table.
@pytest.mark.cases(plain=6)
@pytest.mark.parametrize(
    ("name", "shape", "num_chips", "num_devices"),
    [
        ("v4-8", (2, 2, 1), 4, 4), ("v4-64", (2, 4, 4), 32, 32), ("v4-4096", (8, 16, 16), 2048, 2048),
        ("v5e-4", (2, 2), 4, 4), ("v5e-32", (4, 8), 32, 32), ("v5e-256", (16, 16), 256, 256),
        ("v5p-8", (2, 2, 1), 4, 4), ("v5p-128", (4, 4, 4), 64, 64), ("v5p-256", (4, 4, 8), 128, 128),
        ("v5p-512", (4, 8, 8), 256, 256), ("v5p-2048", (8, 8, 16), 1024, 1024), ("v5p-12288", (16, 16, 24), 6144, 6144),
        ("v6e-64", (8, 8), 64, 64), ("tpu7x-8", (2, 2, 1), 4, 8), ("tpu7x-128", (4, 4, 4), 64, 128),
        ("h100-8", (1, 8), 8, 8), ("h100-64", (8, 8), 64, 64), ("b200-4", (1, 4), 4, 4), ("h200:4x4", (4, 4), 16, 16),
    ],
)  # fmt: skip
def test_names_are_those_of_the_vendors(name, shape, num_chips, num_devices):
    plan = target_of(name)
    assert (plan.shape, plan.num_chips, plan.num_devices) == (shape, num_chips, num_devices)
    assert plan.name == name


def test_google_clouds_name_of_v5e_is_taken():
    assert target_of("v5litepod-256") == target_of("v5e-256")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("v5p-129", "v5p-128, v5p-256"), ("v5p-127", "v5p-64, v5p-128"), ("v5e-3", "v5e-1, v5e-4"), ("v4-1", "v4-8")],
)
def test_a_size_that_does_not_exist_names_its_neighbours(name, nearest):
    problem = problem_of(name, [])
    assert problem.fix.endswith(f"(nearest: {nearest})")
    assert all(map(is_sized, nearest.split(", ")))


@pytest.mark.parametrize(
    ("name", "largest", "num_cores"),
    [("v5p-16384", "v5p-12288", 16384), ("v5e-512", "v5e-256", 512), ("v5litepod-768", "v5e-256", 768),
     ("v5p-12290", "v5p-12288", 2 * 12288), (f"v5p-{10**21}", "v5p-12288", None)],
)  # fmt: skip
def test_a_size_above_a_slice_says_the_largest_and_how_to_have_it(name, largest, num_cores):
    problem = problem_of(name, [])
    assert f"the largest is {largest}" in problem.what
    fix = re.search(r"target=(\S+) target.num_slices=(\d+)", problem.fix)
    assert fix
    assert is_sized(fix[1])
    if num_cores:
        assert int(fix[1].partition("-")[2]) * int(fix[2]) == num_cores


@pytest.mark.cases(plain=3)
@pytest.mark.parametrize("kind", CHIPS)
def test_every_example_exists(kind):
    chip, _ = chip_file(kind)
    assert len(examples(kind)) >= 8
    assert all(map(is_sized, examples(kind)))
    last = examples(kind)[-1]
    assert target_of(last).num_chips * chip.num_cores == int(last.rpartition("-")[2])


def test_a_shape_is_named_by_itself_where_another_has_the_name():
    assert target_of("v5p:4x4x8").name == "v5p-256"
    assert target_of("v5p:4x4x16").name == "v5p:4x4x16"
    assert target_of("v5e-16", num_slices=2).name == "2 x v5e-16"
    assert target_of("v5e-16", num_slices=2).num_devices == 32


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [("v5e", (8, 16), (False, True)), ("v5e", (8, 8), (False, False)), ("v6e", (16, 16), (True, True)),
     ("v5p", (4, 4, 4), (True,) * 3), ("v5p", (2, 4, 4), (False,) * 3), ("tpu7x", (4, 4, 12), (True,) * 3)],
)  # fmt: skip
def test_which_axes_are_rings(kind, shape, expected):
    _, network = chip_file(kind)
    assert isinstance(network, TorusSpec)
    assert network.wraps(shape) == expected


def test_figures_are_of_one_device_and_of_the_compute_type():
    tpu7x, v5p = target_of("tpu7x-8"), target_of("v5p-8")
    assert tpu7x.peak_flops_per_second == 2307e12 / 2  # a chip is two devices
    assert v5p.peak_flops_per_second == 459e12  # two cores are one
    assert (tpu7x.hbm_bytes_per_device or 0) == pytest.approx(94.75 * 2**30)
    peaks = {}
    for compute in ("float32", "bfloat16"):
        chosen = Request(("target=h100-8", f"precision={compute}"))
        peaks[compute] = read_spec(chosen, then=lambda spec: plan_target(spec.target, spec.precision.compute))
    assert peaks["bfloat16"].peak_flops_per_second == 2 * (peaks["float32"].peak_flops_per_second or 0)


def test_names_work_in_a_defaults_list(tmp_path):
    (tmp_path / "experiment").mkdir()
    lines = "# @package _global_\n# mine\ndefaults:\n  - override /target: v5p:4x4x8\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(lines)
    places = f"hydra.searchpath=[meshloom://targets,'file://{tmp_path}']"
    target = read_spec(Request(("experiment=mine", places)), then=lambda spec: spec.target)
    assert target.name == "v5p-256"
    (tmp_path / "experiment" / "mine.yaml").write_text(lines.replace("4x4x8", "4x4x9"))
    with pytest.raises(ConfigError, match="no slice of 4x4x9 chips of v5p"):
        read_spec(Request(("experiment=mine", places)), then=lambda spec: spec.target)


@pytest.mark.ci
def test_help_and_completion_name_the_chips(tmp_path):
    lines = run_in_process("explain", "--help", "target", cwd=tmp_path).stdout.splitlines()
    for kind in CHIPS:
        assert re.search(rf"^  {kind}-N +\w+ \S+", "\n".join(lines), re.M), kind
    line = "meshloom explain target=v5p-1"
    done = run_in_process("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert {"target=v5p-16", "target=v5p-128"} <= set(done.stdout.split())


def test_what_is_attached_is_known_by_its_kind(monkeypatch):
    def attach(kind, coords, slice_index=0):
        devices = [SimpleNamespace(device_kind=kind, coords=at, slice_index=slice_index) for at in coords]
        monkeypatch.setattr(jax, "devices", lambda: devices)
        return read_spec(Request(("target=local",)), then=lambda spec: plan_target(spec.target, "bfloat16"))

    whole = attach("TPU v5 lite", [(x, y, 0) for y in range(4) for x in range(2)])
    assert (whole.num_devices, whole.shape, whole.peak_flops_per_second) == (8, (2, 4), 197e12)
    part = attach("TPU v5 lite", [(0, 0, 0), (1, 1, 0)])
    assert (part.num_devices, part.shape, part.peak_flops_per_second) == (2, None, 197e12)
    gpus = attach("NVIDIA H200", [()] * 8)
    assert (gpus.shape, gpus.peak_flops_per_second) == ((1, 8), 989.4e12)
    assert isinstance(gpus.network, SwitchSpec)
    assert attach("NVIDIA T4", [()] * 2).peak_flops_per_second is None


@pytest.mark.ci
def test_chips_that_are_not_attached_cannot_be_trained_on(tmp_path):
    done = run_in_process("train", "target=v5e-8", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "v5e-8" in done.stderr
    assert "meshloom explain" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.release
def test_a_simulated_run_says_nothing_of_plugins_that_are_installed(tmp_path):
    """JAX would start a plugin, and complain of a driver that is not there, in a run that is not kept to the CPU."""
    args = ["train", "target=cpu-2", "num_steps=1", "global_batch_size=2", "data=synthetic", "checkpoint=disabled",
            "model.num_layers=1", "evaluation.num_batches=1", "schedule.num_warmup_steps=0"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    line = [sys.executable, "-m", "meshloom", *args]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert not re.search(r"plugin|CUDA|libtpu|TPU", done.stdout)


def _topology(name: str):
    spec = read_spec(Request((f"target={name}",)), then=lambda spec: spec.target)
    assert isinstance(spec, TpuTarget)
    arguments = topology_arguments(spec)
    wanted = str(target_of(name).topology_name)
    return topologies.get_topology_desc(platform="tpu", topology_name=wanted, **arguments)


@pytest.mark.tpu
@pytest.mark.ci
@pytest.mark.parametrize("kind", TPUS)
def test_a_program_may_take_what_the_compiler_says(kind):
    """XLA's error about a program that is too large names its limit, in GiB with two digits."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    name = examples(kind)[1]
    device = _topology(name).devices[0]
    x = jax.ShapeDtypeStruct((1 << 17, 1 << 20), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    with pytest.raises(Exception, match=r"exceeds available HBM \(([\d.]+)G\)") as error:
        jax.jit(lambda x: (x * 2) @ x.T[:, :8]).lower(x).compile()
    told = re.search(r"available HBM \(([\d.]+)G\)", str(error.value))
    assert told
    assert (target_of(name).hbm_bytes_per_device or 0) / 2**30 == pytest.approx(float(told[1]), abs=0.005)


@pytest.mark.tpu
@pytest.mark.release
@pytest.mark.parametrize("kind", TPUS)
def test_the_clock_makes_a_large_matmul_run_near_the_peak(kind):
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    name, n = examples(kind)[1], 4096
    x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=SingleDeviceSharding(_topology(name).devices[0]))
    text = jax.jit(lambda a, b: a @ b).lower(x, x).compile().as_text() or ""
    cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
    target = target_of(name)
    assert target.chip
    efficiency = 2 * n**3 / (cycles / target.chip.clock_hz) / (target.peak_flops_per_second or math.inf)
    assert 0.8 < efficiency < 1


def test_the_table_of_the_page_is_that_of_the_files():
    page = (Path(__file__).parents[3] / "docs" / "targets.md").read_text()
    for kind in CHIPS:
        chip, network = chip_file(kind)
        row = next(line for line in page.splitlines() if line.startswith(f"| {kind} |"))
        assert row.split(" | ")[1:-1] == _row(chip, network)


def test_the_constants_of_the_page_are_those_of_the_files():
    page = (Path(__file__).parents[3] / "docs" / "targets.md").read_text()
    constants = page.split("## Every constant")[1].split("\n## ")[0]
    for kind in CHIPS:
        chip, network = chip_file(kind)
        row = next(line for line in constants.splitlines() if line.startswith(f"| {kind} |"))
        assert [cell.strip() for cell in row.split("|")[2:-1]] == _constants(chip, network)


def _constants(chip, network):
    shares = chip.kernels
    latencies = (
        (network.hop_seconds, network.host_seconds, network.call_seconds)
        if isinstance(network, TorusSpec)
        else (0, 0, 0)
    )
    figures = (shares.memory, chip.sustained, chip.power_watts, *(seconds * 1e6 for seconds in latencies))
    kernel = next(name for name, kernel in attention_kernels().items() if kernel == chip.attention)
    return [f"{shares.matmul:g}", kernel, *(f"{figure:g}" if figure else "" for figure in figures)]


def test_the_attention_kernels_of_the_page_are_those_of_the_file():
    page = (Path(__file__).parents[3] / "docs" / "targets.md").read_text()
    rows = {
        tuple(cell.strip().replace(",", "") for cell in line.split("|")[1:-1])
        for line in page.splitlines()
        if line.startswith(tuple(f"| {name} |" for name in attention_kernels()))
    }
    for name, kernel in attention_kernels().items():
        if isinstance(kernel.forward, dict):
            assert isinstance(kernel.backward, dict)
            for head, length in ((h, n) for h, lengths in kernel.forward.items() for n in lengths):
                shares = (f"{each[head][length]:g}" for each in (kernel.forward, kernel.backward))
                assert (name, str(head), str(length), *shares) in rows
        else:
            assert (name, "any", "any", _block(kernel.forward), _block(kernel.backward)) in rows


def _block(rate):
    return (
        f"{rate:g} ps"
        if isinstance(rate, float)
        else f"{rate.share:g} at {rate.least_head}; {rate.lost_flops / 1e6:g} MFLOP"
    )


def _row(chip, network):
    link = network.link_bytes_per_second if isinstance(network, TorusSpec) else network.chip_bytes_per_second
    host = network.host_bytes_per_second if isinstance(network, TorusSpec) else network.node_bytes_per_second
    peak = chip.peak_flops_per_second["bfloat16"]
    return [f"{peak / 1e12:,.0f}", f"{chip.compiler_hbm_bytes / 2**30:.2f} of {chip.hbm_bytes / 2**30:.0f}",
            f"{chip.hbm_bytes_per_second / 1e9:,.0f}", f"{link / 1e9:.0f}", f"{host / 1e9:g}",
            _host_link(chip.host_link)]  # fmt: skip


def _host_link(link):
    both = f"{link.to_device_bytes_per_second / 1e9:g} / {link.to_host_bytes_per_second / 1e9:g}"
    return both if link.num_chips == 1 else f"{both}, of {link.num_chips}"


@pytest.mark.parametrize(
    ("target", "gigabytes"),
    [
        ("v6e-8", (28.4, 29.4)),
        ("tpu7x-8", (14.2, 14.7)),  # two devices to a chip
        ("a100-8", (12.5, 12.5)),  # two chips to a link
        ("a100-1", (25, 25)),
        ("cpu-8", (None, None)),
    ],
)
def test_a_device_has_its_share_of_the_link_to_its_host(target, gigabytes):
    plan = target_of(target)
    for kind, expected in zip(("copy-to-device", "copy-to-host"), gigabytes, strict=True):
        found = plan.host_bytes_per_second(kind)
        assert found == (expected and pytest.approx(expected * 1e9))
