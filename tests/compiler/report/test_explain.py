"""What the plan says, against other ways to get its numbers, and how a terminal shows it."""

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from conftest import plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_declared, time_figures
from meshloom.compiler.estimate.step_time import StepTime
from meshloom.compiler.jaxpr.flops import matmul_flops
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import TickForm
from meshloom.compiler.report.explain import MOST_STAGES, explain, pipeline_lines, plan_as_json
from meshloom.compiler.report.explain_estimate import estimate_as_json, print_estimate
from meshloom.compiler.spec.measured_tables import NEEDED
from meshloom.models.family_configs import DecoderConfig
from support.reference import reference_loss

ON_CHIPS = ("precision=bfloat16", "sharding.on_replicated=allow")


def test_a_size_that_nobody_declared_has_its_reason():
    plan = plan_of("target=v5e-4", "target.num_slices=4", "sharding=hsdp", "global_batch_size=16", *ON_CHIPS)
    why = "one for each of the 4 slices: mesh.replica is not set"
    assert plan_as_json(plan)["mesh_reasons"] == {"replica": why}
    file = io.StringIO()
    explain(plan, Console(file))
    assert f"replica=4 {why}" in file.getvalue()


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("h100-8", []),
        ("h100-512", ["64 nodes as 32", "reduce-scatter over fsdp"]),
        ("h200-16", ["network.collectives: as H100", "network.across: as H100", "the times of all-gather"]),
        ("a100-8", ["network.collectives: as H100", "matmuls in bfloat16: 0.87 of the peak"]),
        (
            "v4-8",
            ["chip.efficiency: matmul: as kernels; memory: chosen by compiled rows", "network.call_seconds: as v5p"],
        ),
    ],
)
def test_prices_that_nobody_measured_are_named(target, said):
    plan = plan_of(f"target={target}", "sharding=fsdp", "global_batch_size=512", "model.embed_dim=512", *ON_CHIPS)
    found = plan_as_json(plan)["assumed"]
    assert all(any(part in text for text in found) for part in said)


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("target", "declared", "kinds"),
    [
        ("v5p-8", (), {"attention as splash"}),
        ("v5p-8", ("target.chip.attention={title: mine, source: a trace, forward: 7.7, backward: 19.3}",), set()),
        ("tpu7x-8", (), {"attention as splash", "chip.attention: as v6e"}),
        ("tpu7x-8", ("parallel.attention=xla",), set()),
        ("v5p-8", ("model=mixtral_8x7b", "data=synthetic", "model.num_layers=1"),
         {"attention as splash", "grouped matmuls by megablox", "grouped matmuls by ragged_dot"}),
    ],
)  # fmt: skip
def test_what_the_kernels_of_a_declaration_assume_is_named_by_kind(target, declared, kinds):
    plan = plan_of(
        f"target={target}", "sharding=fsdp", "global_batch_size=512", "sequence_length=256", *declared, *ON_CHIPS
    )
    found = [
        text for text in plan_as_json(plan)["assumed"] if text.startswith(("attention", "grouped", "chip.attention"))
    ]
    assert all(any(text.startswith(each) for text in found) for each in kinds)
    assert len(found) == len(kinds)


@pytest.mark.parametrize(("num_slices", "is_said"), [(1, False), (2, True)])
def test_what_is_assumed_between_slices_is_named_where_there_are_several(num_slices, is_said):
    slices = () if num_slices == 1 else ("target.num_slices=2", "sharding=hsdp")
    plan = plan_of("target=v5e-4", "global_batch_size=16", *slices, *ON_CHIPS)
    found = {text.split(":")[0] for text in plan_as_json(plan)["assumed"]}
    assert ("network.host_bytes_per_second" in found, "network.host_seconds" in found) == (is_said, is_said)


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("target", "sharding", "is_said"),
    [("h100-16", "hsdp", True), ("h100-16", "fsdp", False), ("v5p-16", "hsdp", False)],
)
def test_the_assumed_share_of_sums_over_replicas_is_named_where_gpus_make_them(target, sharding, is_said):
    sizes = ("mesh.fsdp=4", "mesh.replica=-1") if sharding == "hsdp" else ()
    plan = plan_of(f"target={target}", f"sharding={sharding}", "global_batch_size=16", *sizes, *ON_CHIPS)
    found = [each for each in plan_as_json(plan)["assumed"] if each.startswith("exposed_second_sums: 0.45")]
    assert len(found) == is_said


def test_a_table_of_ones_own_is_no_assumption():
    rows = ", ".join(f"{kind}: {{2x8: '90 250'}}" for kind in NEEDED)
    own = f"{{source: mine, chip_bytes_per_second: 5e10, bytes: 1Mi 4Mi, microseconds: {{{rows}}}}}"
    found = [
        plan_as_json(plan_of("target=b200-16", "sharding=fsdp", "global_batch_size=512", *declared, *ON_CHIPS))[
            "assumed"
        ]
        for declared in ((), (f"target.network.across={own}",))
    ]
    assert ["network.across" in " ".join(each) for each in found] == [True, False]


@pytest.mark.parametrize(("remat", "is_said"), [("full", False), ("offload", True)])
def test_the_assumed_link_to_the_host_is_named_where_arrays_lie_there(remat, is_said):
    plan = plan_of("target=h100-8", "sharding=fsdp", "global_batch_size=512", f"remat={remat}", *ON_CHIPS)
    assert [True for each in plan_as_json(plan)["assumed"] if each.startswith("chip.host_link: PCIe")] == [
        True
    ] * is_said


def test_the_bubble_of_a_pipeline_is_named_beside_what_is_exposed():
    plan = plan_of("target=v5p-8", *ON_CHIPS)
    estimate = estimate_declared(plan)

    def said(time: StepTime[float]) -> tuple[str, float]:
        figures = estimate.figures.model_copy(update=time_figures(plan.target, plan.kinds, time))
        file, found = io.StringIO(), replace(estimate, figures=figures)
        print_estimate(plan, found, Console(file))
        return file.getvalue(), estimate_as_json(plan, found)["time"]["bubble_seconds"]

    without, with_one = said(StepTime(2.0, {("stage",): 0.5})), said(StepTime(2.0, {("stage",): 0.5}, 0.25))
    assert "bubble" not in without[0]
    assert "exposed communication 500 ms over stage, bubble 250 ms" in " ".join(with_one[0].split())
    assert "estimated step: 2.75 s" in " ".join(with_one[0].split())
    assert (without[1], with_one[1]) == (0, 0.25)


@pytest.mark.parametrize("overrides", [(), ("num_microbatches=2",), ("remat=full",)])
def test_model_flops_are_the_textbook_formula(overrides):
    plan = plan_of(*overrides)
    c, s = plan.spec.model, plan.spec
    assert isinstance(c, DecoderConfig)
    weights = c.num_layers * (
        c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.embed_dim * c.mlp_dim
    )
    weights += c.embed_dim * c.vocab_size  # the head; the embedding is a look-up
    attention = 2 * c.num_layers * s.sequence_length * c.num_heads * c.head_dim
    assert plan.model_flops_per_step == 6 * s.tokens_per_step * (weights + attention)


@pytest.mark.parametrize(
    ("model", "length", "tokens_per_second", "teraflops_per_second"),
    [
        ("llama3_8b", 8192, 7207.336, 417.397),
        ("llama2_70b", 4096, 905.021, 402.274),
        ("llama3_70b", 8192, 960.248, 462.297),
    ],
)
def test_model_flops_are_those_that_maxtext_logs(model, length, tokens_per_second, teraflops_per_second):
    """Log lines in AI-Hypercomputer/tpu-recipes, training/trillium: one step in tokens and in FLOPs a second."""
    plan = read_spec(Request((f"model={model}", f"sequence_length={length}", "data=synthetic")), then=plan_run)
    assert plan.model_flops_per_step is not None
    flops_per_token = plan.model_flops_per_step / plan.spec.tokens_per_step
    assert flops_per_token * tokens_per_second / 1e12 == pytest.approx(teraflops_per_second, rel=1e-5)


def test_counted_flops_are_those_of_xla():
    plan = plan_of()
    tokens = jax.ShapeDtypeStruct((plan.spec.global_batch_size, plan.spec.sequence_length), jnp.int32)
    loss = jax.jit(lambda p, t: reference_loss(plan.model, p, t, t))  # unrolled: XLA counts a loop's body once
    traced = loss.trace(plan.model.abstract(), tokens)
    ours = matmul_flops(traced.jaxpr.jaxpr)
    cost = traced.lower().cost_analysis()  # of the program as it is given to XLA
    assert cost
    assert 0.75 < ours / cost["flops"] <= 1.0  # XLA counts the elementwise operations too
    assert 3 * ours == plan.model_flops_per_step


def test_flops_of_loops_and_branches():
    a = jnp.ones((4, 8))

    def program(x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ a.T @ a), None), x, None, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: jnp.zeros((2, 2)), x)

    jaxpr = jax.make_jaxpr(program)(jnp.ones((2, 8))).jaxpr
    assert matmul_flops(jaxpr) == 5 * (2 * 2 * 8 * 4 + 2 * 2 * 4 * 8) + 2 * 2 * 8 * 2


def test_memory_of_mixed_precision_adam():
    """16 bytes a parameter: float32 master, two moments and gradient, over the shards; and the bfloat16 copy."""
    memory = plan_of("precision=bfloat16", "sharding=fsdp").memory
    n = plan_of("precision=bfloat16", "sharding=fsdp").num_parameters // 8
    assert (memory.parameters, memory.optimizer, memory.gradients, memory.working_parameters) == (
        4 * n,
        8 * n,
        4 * n,
        2 * n,
    )


def test_json_adds_up_and_is_json():
    plan = plan_of("sharding=fsdp_tensor")
    table = json.loads(json.dumps(plan_as_json(plan)))
    rows = table["arrays"]["parameters"]
    assert sum(row["bytes_per_device"] for row in rows) == plan.memory.parameters
    assert sum(math.prod(row["shape"]) for row in rows) == table["program"]["num_parameters"]
    assert math.prod(table["mesh"].values()) == 8


@pytest.mark.ci
def test_the_largest_model_is_planned_without_its_memory():
    """405 B parameters over 4,096 devices: nothing is allocated. (bench/start.py measures the time.)"""
    code = (
        "from meshloom.runtime.cli.main import run; "
        "assert run(['explain', 'model=llama3_405b', 'target=cpu-4096', 'global_batch_size=4096']) == 0; "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COLUMNS": "240"}
    )
    assert done.returncode == 0, done.stderr
    *lines, peak_kib = done.stdout.splitlines()
    assert int(peak_kib) * 1024 < 1e9
    assert any("405,853,388,800 parameters" in line for line in lines)
    assert any("fsdp=4096" in line for line in lines)


def texts(table, width):
    return [
        "".join(part if isinstance(part, str) else part[0] for part in line) for line in pipeline_lines(table, width)
    ]


def test_stages_have_their_ticks_below_each_other():
    assert texts(build_table("1f1b", 2, 1, 3, TickForm.MULTI), 80) == [
        "  stage 0 F0 F1     F2+BW0 BW1    BW2",
        "  stage 1    F0+BW0 F1+BW1 F2+BW2",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_fits_and_says_how_many_ticks_it_leaves_out(name, width):
    table = build_table(name, 4, SCHEDULES[name].num_chunks or 2, 16, TickForm.UNIT)
    lines = texts(table, width)
    assert max(map(len, lines)) <= width
    shown = len(lines[0].partition(" .. ")[0][len("  stage 0") :].split())
    more = lines[0].partition(" .. ")[2].split()
    ticks_left = int(more[0]) if more else 0
    cells = sum(bool(row[0]) for row in table.rows[: table.num_ticks - ticks_left])
    assert shown == cells


def test_a_second_chunk_is_behind_a_dot():
    assert "F0.1" in texts(build_table("zb_v", 2, 2, 4, TickForm.UNIT), 200)[1]


def test_of_many_stages_the_first_are_shown():
    lines = texts(build_table("gpipe", MOST_STAGES + 4, 1, 2, TickForm.MULTI), 80)
    assert len(lines) == MOST_STAGES + 1
    assert lines[-1] == "  .. 4 more stages"


@pytest.mark.ci
def test_explain_shows_the_table_of_the_plan():
    plan, told = plan_of("mesh.stage=2", "num_microbatches=4", "model.num_layers=4"), io.StringIO()
    assert plan.pipeline
    console = Console(told, width=120)
    explain(plan, console)
    assert "\n".join(texts(plan.pipeline.table, console.width)) in told.getvalue()
