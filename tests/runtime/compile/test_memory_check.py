"""A run that needs more memory than there is, is refused before anything is allocated."""

import re
from dataclasses import fields
from pathlib import Path

import jax
import psutil
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.errors import DOES_NOT_FIT
from meshloom.compiler.xla.aot import ProgramMemory
from meshloom.compiler.xla.programs import lower
from meshloom.runtime.cli.main import run
from meshloom.runtime.compile import run_programs
from meshloom.runtime.compile.run_programs import check_program_memory, check_state_memory
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.core.host_memory import available_bytes
from meshloom.runtime.processes.distributed import Processes

GIB = 2**30


def test_a_model_for_a_pod_is_refused_on_one_machine(tmp_path, monkeypatch, capsys):
    """405 B parameters, each with 12 bytes of float32 weight and moments: no machine that runs tests has so much."""
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().memory_info().rss
    assert run(["train", "model=llama3_405b", "target=cpu-8", "data=synthetic"]) == DOES_NOT_FIT
    assert psutil.Process().memory_info().rss - before < 2 * GIB
    problem, fix = capsys.readouterr().err.strip().splitlines()
    assert "GiB are needed on each of 8 simulated devices for parameters, optimizer state and batch alone;" in problem
    needed, available = re.findall(r"([\d.]+) ([TG])iB are (?:needed|available)", problem)[1:]
    assert (float(needed[0]), needed[1]) == (pytest.approx(405.9e9 * 12 / 2**40, rel=0.05), "T")
    assert float(available[0]) * {"G": GIB, "T": 2**40}[available[1]] < 1.1 * psutil.virtual_memory().total
    assert "set precision=bfloat16_pure, which halves" in fix
    assert "on_out_of_memory=try" in fix
    assert list(tmp_path.iterdir()) == []


def test_activations_that_do_not_fit_are_refused_before_anything_is_allocated():
    """The state has some kilobytes; each of 8 billion tokens has an activation of 128 bytes."""
    plan = plan_of(*LINEAR_STACK, f"global_batch_size={2**29}", "target=cpu-8")
    compiled = lower(plan, plan.mesh.of_devices(jax.devices()), ("train",))["train"].compile()
    with pytest.raises(RunFailed, match="on each of 8 simulated devices for the compiled train step") as raised:
        check_program_memory(plan, compiled, Processes())
    assert raised.value.exit_code == DOES_NOT_FIT


def _refusal(monkeypatch, target: str, **bytes_by_kind: int) -> str:
    """Returns why a program is refused that takes these bytes of a device; "" where it is not."""
    none = dict.fromkeys((field.name for field in fields(ProgramMemory)), 0)
    monkeypatch.setattr(run_programs, "memory_of", lambda _: ProgramMemory(**{**none, **bytes_by_kind}))
    try:
        check_program_memory(plan_of(*LINEAR_STACK, f"target={target}"), None, Processes())
    except RunFailed as error:
        return str(error)
    return ""


def test_gaps_between_arrays_are_no_reason_to_refuse_a_tpus_program(monkeypatch):
    """libtpu compiles programs of 17.6 GiB with gaps and 13.4 without for its 15.75, and fills the gaps itself."""
    assert not _refusal(monkeypatch, "v5e-8", temporaries_bytes=18 * GIB, peak_bytes=13 * GIB)
    told = _refusal(monkeypatch, "v5e-8", temporaries_bytes=18 * GIB, peak_bytes=18 * GIB)
    assert "18.0 GiB are needed on each device of v5e-8 for the compiled train step" in told
    told = _refusal(monkeypatch, "h100-8", temporaries_bytes=100 * GIB, peak_bytes=13 * GIB)
    assert "100.0 GiB are needed on each device of h100-8 for the compiled train step" in told


def test_what_a_program_keeps_on_the_host_has_to_fit_there(monkeypatch):
    monkeypatch.setattr(run_programs, "available_bytes", lambda: 16 * GIB)
    on_device = {"temporaries_bytes": 18 * GIB, "peak_bytes": 18 * GIB}  # which of the two memories it is, is unknown
    assert not _refusal(monkeypatch, "v5e-8", host_bytes=2 * GIB, **on_device)
    told = _refusal(monkeypatch, "v5e-8", host_bytes=3 * GIB, **on_device)
    assert "in the memory of its host: 24.0 GiB are needed, 16.0 GiB are available" in told


def test_the_simulated_devices_of_all_processes_of_a_host_count(monkeypatch):
    plan = plan_of(*LINEAR_STACK)
    of_device = plan.memory.state_bytes + plan.memory.batch
    monkeypatch.setattr(run_programs, "available_bytes", lambda: 6 * of_device)
    check_state_memory(plan, Processes(0, 2, num_on_host=1))  # 4 of the 8 devices
    for processes in (Processes(), Processes(0, 2, num_on_host=2)):
        with pytest.raises(RunFailed, match="of 8 simulated devices"):
            check_state_memory(plan, processes)
        check_state_memory(plan_of(*LINEAR_STACK, "on_out_of_memory=try"), processes)


@pytest.mark.parametrize(
    ("membership", "group", "files"),
    [
        ("0::/user/session\n", "user", {"max": "memory.max", "used": "memory.current", "file": "inactive_file"}),
        (
            "2:cpu,cpuacct:/\n4:memory:/user/session\n0::/\n",
            "memory/user",
            {"max": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "file": "total_inactive_file"},
        ),
        # A container sees its own group as the root, and its path outside of it.
        ("0::/kubepods/pod7\n", "", {"max": "memory.max", "used": "memory.current", "file": "inactive_file"}),
    ],
)
def test_the_limit_of_a_control_group_is_the_limit(tmp_path, membership, group, files):
    """As documented in cgroup-v1/memory.rst and cgroup-v2.rst of Linux; the limit is of a group around this one."""
    folder = tmp_path / "cgroup" / group
    folder.mkdir(parents=True)
    (folder / files["max"]).write_text(f"{3 * 2**20}\n")
    (folder / files["used"]).write_text(f"{2 * 2**20}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{files['file']} {2**19}\n")
    (tmp_path / "membership").write_text(membership)
    assert available_bytes(tmp_path / "cgroup", tmp_path / "membership") == 3 * 2**19
    (folder / files["max"]).write_text(f"{2**63 - 4096}\n" if "limit" in files["max"] else "max\n")
    free = available_bytes(tmp_path / "cgroup", tmp_path / "membership")
    assert free == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_without_control_groups_the_machine_is_the_limit():
    nowhere = Path("/nonexistent")
    assert available_bytes(nowhere, nowhere) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_one_device_is_not_told_as_several(monkeypatch):
    monkeypatch.setattr(run_programs, "available_bytes", lambda: 0)
    with pytest.raises(RunFailed, match="on each of 1 simulated device for parameters"):
        check_state_memory(plan_of(*LINEAR_STACK, "target=cpu-1"), Processes())
