"""The schedule of compiled programs, joined with the plan."""

import re
from dataclasses import replace

import pytest

from conftest import plan_of
from meshloom.compiler.analysis.schedule_analysis import (
    ScheduleAnalysis,
    analyse_schedule,
    match_planned,
    source_by_size,
    source_of,
)
from meshloom.compiler.core.known import Unknown, why_unknown
from meshloom.compiler.core.scopes import Pass
from meshloom.compiler.core.traffic import TrafficSource
from meshloom.compiler.estimate.communication import PlannedCollective
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.jaxpr.flops import ModelFlops
from meshloom.compiler.jaxpr.unknown import UnknownPrimitive
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.steps import Collective
from support.programs import programs_of
from support.schedules import GATHER, GROUPS, START, compute, loop, module

PATHS = ("layers/attention/key_EKD", "layers/mlp/up_EM", "head/kernel_EV")
BACKWARD = "jit(train_step)/shard_map/transpose(jvp())/while/body/closed_call/checkpoint"


@pytest.mark.parametrize(
    ("op_name", "source"),
    [
        ("jit(train_step)/transpose(jvp(head))/weight=head/kernel_EV/reduce_scatter", "head/kernel_EV, backward"),
        (f"{BACKWARD}/rematted_computation/weight=layers/mlp/up_EM/all_gather", "layers/mlp/up_EM, recomputed"),
        ("jit(f)/jvp()/weight=layers/(attention/key_EKD/all_gather:mlp/up_EM/all_gather)",
         "layers/attention/key_EKD and 1 more, forward"),
        ("jit(f)/(weight=head/kernel_EV:weight=layers/mlp/up_EM)/psum", "head/kernel_EV and 1 more, forward"),
        (f"{BACKWARD}/layers/bte,ekd->btkd/dot_general", "bte,ekd->btkd/dot_general, backward"),
        ("jit(train_step)/optimizer/reduce_sum", "optimizer/reduce_sum, update"),
        (f"{BACKWARD}/rematted_computation/layout=mlp_input/sharding_constraint", "mlp_input, recomputed"),
        ("jit(f)/jvp(layers)/while/body/matmul=mlp_output/dot_general", "sum of mlp_output, forward"),
        ("", "made by the compiler"),
    ],
)  # fmt: skip
def test_a_collective_is_named_by_what_it_moves(op_name, source):
    assert str(source_of(op_name, "all-gather", PATHS)) == source


def test_what_reduces_a_weight_is_its_gradient():
    assert (
        str(source_of("jit(f)/shard_map/weight=head/kernel_EV/psum", "all-reduce", PATHS)) == "head/kernel_EV, backward"
    )
    assert str(source_of("jit(f)/jvp(head)/reduce_max", "all-reduce", PATHS)) == "jvp(head)/reduce_max, forward"


TENSOR_4 = (
    "target=h100-4", "sharding=fsdp_tensor", "mesh.tensor=4", "mesh.fsdp=1", "global_batch_size=4",
    "sequence_length=32", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4", "model.mlp_dim=128",
    "model.vocab_size=128", "precision=bfloat16", "sharding.on_replicated=allow",
)  # fmt: skip


def analysed(text: str, *overrides: str) -> tuple[ScheduleAnalysis, Plan]:
    plan = plan_of(*overrides)
    return analyse_schedule(parse_module(text), plan, estimate_step(plan).communication), plan


@pytest.mark.parametrize(
    ("matmul", "expected"),
    [
        ("jvp(layers)/matmul=mlp_output/dot_general", "sum of mlp_output, forward"),
        ("transpose(jvp(layers))/rematted_computation/matmul=attention_output/dot_general",
         "sum of attention_output, recomputed"),
        ("transpose(jvp(layers))/matmul=queries/dot_general", "sum of queries, backward"),
        ("jvp(embed)/select_n", "sum of logits, backward (inferred from its size)"),
    ],
)  # fmt: skip
def test_a_sum_that_lost_its_name_has_that_of_the_matmul_before_it(matmul, expected):
    """As XLA writes reduce-scatters for GPUs: the all-reduce had a name. By size and count alone it could only be the
    head's."""
    wide = "[4,32,64]"
    gemm = 'custom_call_target="__cublas$lt$matmul"'
    text = module(
        f"  %l = bf16{wide} broadcast(%x)",
        f'  %mm = bf16{wide} custom-call(%l), {gemm}, metadata={{op_name="jit(f)/{matmul}"}}',
        f"  %turned = bf16{wide} fusion(%mm), kind=kLoop, calls=%work",
        f"  %seen = bf16{wide} bitcast(%turned)",
        f"  %s = ((bf16{wide}), bf16[4,8,64]) reduce-scatter-start(%seen), {GROUPS}, dimensions={{1}}",
        "  ROOT %d = bf16[4,8,64] reduce-scatter-done(%s)",
    )
    analysis, _ = analysed(text, *TENSOR_4)
    (found,) = analysis.collectives
    assert found.source == expected


V5E = ("target=v5e-4", "mesh.fsdp=4", "precision=bfloat16", "sharding.on_replicated=allow")


def test_times_are_those_of_the_chip_and_its_links():
    """1.5e6 cycles are a millisecond. 4 MiB over lines of two chips, x and y at once, 45 GB/s each."""
    big = START.replace("[8]", "[524288]").replace("[32]", "[2097152]").replace("(%x)", "(%y)")
    lines = ["  %y = bf16[524288]{0} parameter(1)", compute("a", 1_500_000), f"  %s = {big}",
             compute("b", 15_000), "  ROOT %d = bf16[2097152]{0} all-gather-done(%s)"]  # fmt: skip
    analysis, plan = analysed(module(*lines), *V5E)
    (found,) = analysis.collectives
    assert plan.mesh.placement.describe() == {"fsdp": "ICI x (2) x ICI y (2)"}
    alone = 4 * 2**20 * 3 / 4 / 90e9 + 2e-6 + 6e-6  # and a hop along each axis, and the start of a call
    assert (found.kind, found.mesh_axes, found.link, found.bytes) == ("all-gather", ("fsdp",), "ICI", 4 * 2**20)
    assert found.alone_seconds == pytest.approx(alone, rel=1e-6)
    assert found.exposed_seconds == pytest.approx(alone - 1e-5, rel=1e-6)
    assert found.hidden_seconds == pytest.approx(1e-5)
    assert found.hidden_behind == ("b",)
    assert analysis.step.compute_seconds == pytest.approx(1.01e-3)
    assert analysis.step.step_seconds == pytest.approx(1.01e-3 + alone - 1e-5)
    assert analysis.step.exposed_fraction == pytest.approx((alone - 1e-5) / (1e-3 + alone))
    mfu = (plan.model_flops_per_step or 0) / (analysis.step.step_seconds or 0) / (4 * 197e12)
    assert analysis.step.mfu == pytest.approx(mfu)
    assert {event.track for event in analysis.events} == {"compute", "ICI x", "ICI y"}


def test_mfu_of_a_model_with_unknown_flops_is_unknown(monkeypatch):
    unknown = UnknownPrimitive("while", "models.py:12", "layers", "the number of its trips is not known", "use a scan")
    monkeypatch.setattr(Plan, "model_flops", ModelFlops(None, (unknown,)))
    plan = replace(plan_of(*V5E))  # a new one, which has not counted yet
    text = module(compute("a", 1_500_000), "  ROOT %b = bf16[8]{0} parameter(1)")
    analysis = analyse_schedule(parse_module(text), plan, estimate_step(plan).communication)
    assert analysis.step.step_seconds
    assert analysis.step.mfu == Unknown(str(unknown))


def test_loops_are_said_and_add_up():
    computations, run = loop(compute("a", 1500), f"  %g = {START}", "  %d = bf16[32]{0} all-gather-done(%g)", trips=32)
    analysis, _ = analysed(module(run, before=computations), *V5E)
    (found,) = analysis.collectives
    assert (found.count, found.where, found.bytes) == (32, "in a loop of 32 iterations", 32 * 64)
    assert analysis.step.step_seconds == pytest.approx(
        (analysis.step.compute_seconds or 0) + (analysis.step.exposed_seconds or 0)
    )


def test_a_program_with_devices_in_another_order_is_priced_where_they_lie():
    """A v5e of 4 x 8, in the plan row by row. The program counts down its columns: 4 in order are a line along x."""
    plan = plan_of("target=v5e-32", "global_batch_size=32", "precision=bfloat16", "sharding.on_replicated=allow")
    assert [place[1:3] for place in plan.mesh.placement.places[:9]] == [*((0, y) for y in range(8)), (1, 0)]
    down = [number % 4 * 8 + number // 4 for number in range(32)]

    def found(groups: list[list[int]], order: list[int] | None) -> tuple[float | Unknown, set[str]]:
        listed = str(groups).replace(" ", "").replace("[", "{").replace("]", "}")
        text = module(f"  ROOT %g = {GATHER}").replace(GROUPS, f"replica_groups={listed}").replace("=4", "=32", 1)
        text = text.replace("[8]", "[262144]").replace("[32]", "[1048576]")  # small ones keep no link busy
        analysis = analyse_schedule(parse_module(text), plan, (), order)
        return analysis.collectives[0].alone_seconds, {event.track for event in analysis.events} - {"compute"}

    columns = [[row * 8 + column for row in range(4)] for column in range(8)]
    in_fours = [list(range(first, first + 4)) for first in range(0, 32, 4)]
    assert found(in_fours, down) == found(columns, None)
    assert (found(in_fours, down)[1], found(in_fours, None)[1]) == ({"ICI x"}, {"ICI y"})
    in_eights = [list(range(first, first + 8)) for first in range(0, 32, 8)]  # two columns of four; a row
    two_columns = [one + other for one, other in zip(columns[::2], columns[1::2], strict=True)]
    assert found(in_eights, down) == found(two_columns, None)
    assert (found(in_eights, down)[1], found(in_eights, None)[1]) == ({"ICI x", "ICI y"}, {"ICI y"})


def test_a_collective_of_unknown_devices_has_unknown_times():
    lines = ["  ROOT %g = bf16[32]{0} all-gather(%x), dimensions={0}"]
    analysis, _ = analysed(module(*lines).replace(GROUPS, ""), *V5E)
    (found,) = analysis.collectives
    why = Unknown("the program does not name its group of devices")
    assert (found.alone_seconds, found.exposed_seconds, found.confidence) == (why, why, "low")


def test_a_step_with_a_collective_of_unknown_time_is_a_lower_bound_alone():
    lines = [compute("a", 1_500_000), "  ROOT %g = bf16[32]{0} all-gather(%a), dimensions={0}"]
    analysis, _ = analysed(module(*lines).replace(GROUPS, ""), *V5E)
    step = analysis.step
    assert step.least_seconds == pytest.approx(1e-3)
    (why,) = {step.step_seconds, step.mfu, step.exposed_seconds, step.exposed_fraction}
    assert isinstance(why, Unknown)
    assert isinstance(step.range_factor, Unknown)  # for the program has no matmul, either
    assert "the time of g is not known" in why.why
    assert "does not name its group" in why.why
    priced, _ = analysed(module(compute("a", 1_500_000), f"  ROOT %g = {GATHER}"), *V5E)
    assert priced.step.least_seconds == priced.step.step_seconds


@pytest.mark.parametrize("what", ["kernel", "loop"])
def test_a_step_with_a_kernel_or_a_loop_of_unknown_time_is_a_lower_bound_that_names_it(what):
    line = '  %k = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"\n'
    before, after, named = (
        "",
        line + f"  ROOT {compute('a', 1_500_000).strip()}",
        "1 kernel is not known, and the least counts: k (1)",
    )
    if what == "loop":
        before, after = loop(compute("a", 1_500_000), trips=7)
        before, named = (
            before.replace("direction=LT", "direction=EQ"),
            "loop runs is not known, and one iteration of it counts",
        )
    step = analysed(module(after, before=before), *V5E)[0].step
    assert (step.least_seconds, step.exposed_seconds) == (pytest.approx(1e-3), 0)
    assert named in why_unknown(step.step_seconds)
    assert step.counted_once == (("loop",) if what == "loop" else ())


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "fsdp_tensor"])
def test_every_gather_and_reduction_of_a_weight_is_named_by_its_path(sharding):
    """In a program of the CPU's compiler, whose collectives keep their names."""
    plan = plan_of(f"sharding={sharding}")
    text = programs_of(plan)["train"].as_text()
    analysis = analyse_schedule(parse_module(text), plan, estimate_step(plan).communication)
    paths = [array.array.path for array in plan.sharding.parameters]
    split = {array.array.path for array in plan.sharding.parameters if "fsdp" in str(array.spec)}
    kinds = {(each.kind, path) for each in analysis.collectives for path in paths if each.source.startswith(f"{path},")}
    assert {path for kind, path in kinds if kind == "all-gather"} == split
    exchanged = {
        f"embed/{each.site.name}" for each in plan.operations_of("embedding") if each.chosen.name == "all_to_all"
    }  # token ids are gathered for it
    assert {path for kind, path in kinds if kind == "reduce-scatter"} == split - exchanged
    assert {path for kind, path in kinds if kind == "all-to-all"} == exchanged
    axes = {each.mesh_axes for each in analysis.collectives}
    expected = {"ddp": {("data",)}, "fsdp": {("fsdp",)}, "fsdp_tensor": {("fsdp",), ("tensor",), ("fsdp", "tensor")}}
    assert axes <= expected[sharding]
    whole = plan.mesh.num_shards(("tensor",)) > 1 and 4 * 12 * 32  # bytes, more than of any sum of single values
    moved = {each.source for each in analysis.collectives if each.mesh_axes == ("tensor",) and each.bytes > whole}
    named = re.compile(r"embed|head_input|(sum of )?(queries|keys|values|logits|(attention|mlp)_\w+), ")
    assert all(named.match(source) for source in moved), moved
    assert "simulated devices" in why_unknown(analysis.step.step_seconds)


def test_a_power_limit_slows_arithmetic_and_not_the_memory():
    """Half of the power is half of the arithmetic; a start of 5 us takes as long."""
    target = ("target=h100-4", "mesh.fsdp=4", "precision=bfloat16", "sharding.on_replicated=allow")
    gemm = (
        "  %l = bf16[8192,8192] broadcast(%x)\n  %r = bf16[8192,8192] broadcast(%x)\n"
        '  %mm = bf16[8192,8192] custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    )
    text = module(gemm, "  ROOT %copy = bf16[8192,8192] copy(%mm)")
    whole, limited = (
        analysed(text, *target, *more)[0].compute_seconds for more in ((), ("target.chip.power_limit_watts=350",))
    )
    assert limited["mm"] == pytest.approx(2 * whole["mm"], rel=2e-3)
    assert limited["copy"] == whole["copy"]


def planned(
    source: str, num_elements: int, *, count: int = 3, in_pass: Pass = "backward", **changes
) -> PlannedCollective:
    scatter = PlannedCollective(
        kind="reduce-scatter", mesh_axes=("fsdp",), group_size=16, bytes=4 * num_elements, dtype="float32",
        origin=TrafficSource(activation=source, in_pass=in_pass), rule="sharding.parameters[0]",
    )  # fmt: skip
    return replace(scatter, **changes).times(count)


UP, GATE, NORM = planned("up", 4096), planned("gate", 4096), planned("norm", 256)
PLANNED = (
    UP, GATE, NORM, planned("head", 8192, count=1),
    planned("norm", 256, kind="all-gather", bytes=512, dtype="bfloat16", in_pass="forward"),
    planned("loss", 1, kind="all-reduce", mesh_axes=("replica", "fsdp"), count=1, in_pass="forward"),
    planned("tokens", 1, kind="all-reduce", mesh_axes=("replica", "fsdp"), count=1, dtype="int32", in_pass="forward"),
)  # fmt: skip


def source(*num_elements: int, axes: tuple[str, ...] = ("fsdp",), count: int = 3, **changes) -> str | None:
    found = Collective("c", "all-reduce", 0, "f32", (), False, "synchronous", "", "", num_elements)
    origin = source_by_size(match_planned(replace(found, **changes), axes, count, PLANNED))
    return origin and str(origin)


@pytest.mark.parametrize(
    ("elements", "changes", "expected"),
    [
        ((8192,), {"count": 1}, "head, backward (inferred from its size)"),
        ((4096,), {}, "one of up, gate, backward (inferred from its size)"),
        ((4096, 4096, 256), {}, "up and 2 more, backward (inferred from its size)"),
        ((4096, 256), {}, "one of up, gate and 1 more, backward (inferred from its size)"),
        ((2 * 4096,), {"kind": "reduce-scatter", "count": 3}, "head, backward (inferred from its size)"),
        ((256,), {"is_padded": True, "dtype": "bf16"}, "norm, forward (inferred from its size)"),
        ((256,), {"kind": "all-gather", "dtype": "bf16"}, "norm, forward (inferred from its size)"),
        ((5000,), {}, None),
        ((4096,), {"axes": ("tensor",)}, None),
        ((128,), {"axes": ("replica",), "dtype": "s32"}, "tokens, forward (inferred from its size)"),
        ((128,), {"axes": ("replica",)}, "loss, forward (inferred from its size)"),
    ],
)
def test_source_by_size(elements, changes, expected):
    assert source(*elements, **changes) == expected


def test_many_candidates_are_not_all_named():
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (64,))
    matches = match_planned(found, ("fsdp",), 1, [planned(f"w{i}", 64) for i in range(6)])
    assert str(source_by_size(matches)) == "one of w0, w1, w2, w3 or 2 others, backward (inferred from its size)"


def test_the_matmul_before_a_sum_narrows_its_candidates_down():
    sums = [planned(f"sum of {name}", 64) for name in ("mlp_output", "attention_output")]
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (64,))
    made = replace(found, made_by=("jit(f)/matmul=attention_output/dot_general",))
    origins = [match_planned(each, ("fsdp",), 3, sums)[0].origins for each in (found, made)]
    assert [[origin.activation for origin in each] for each in origins] == [
        ["sum of mlp_output", "sum of attention_output"],
        ["sum of attention_output"],
    ]


def test_arrays_joined_end_to_end_are_all_of_their_size():
    found = Collective("c", "reduce-scatter", 0, "f32", (), False, "synchronous", "", "", (192,))
    matches = match_planned(found, ("fsdp",), 1, [planned(f"w{i}", 64) for i in range(3)])
    assert str(source_by_size(matches)) == "w0 and 2 more, backward (inferred from its size)"
