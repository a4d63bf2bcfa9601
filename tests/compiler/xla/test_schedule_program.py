"""Small schedules made by hand, whose times one can add up in one's head: a clock of 1 kHz, a link of 1 kB/s."""

from dataclasses import replace

import pytest

from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.spec.cost_model import cost_model
from meshloom.compiler.spec.kernel_rates import grouped_kernels
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.hlo.flow import num_trips
from meshloom.compiler.xla.hlo.groups import parse_groups
from meshloom.compiler.xla.schedule.kernels import TRITON
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Simulation, Taken, simulate
from meshloom.compiler.xla.schedule.steps import (
    ALL,
    Choices,
    Collective,
    Compute,
    Loop,
    apply_choices,
    conditionals,
    every,
    open_loops,
)
from support.schedules import GATHER, GROUPS, START, attention_of, collectives_of, compute, loop, module

TPU = Chip(
    "tpu",
    clock_hz=1000.0,
    peak_flops_per_second={"bfloat16": 1e3, "float32": 1e3},
    hbm_bytes_per_second=1e6,
    matmul_share=0.8,
    attention=attention_of({128: 0.6}),
)
GPU = Chip(
    "gpu",
    clock_hz=None,
    peak_flops_per_second={"bfloat16": 1e9, "float32": 1e9},
    hbm_bytes_per_second=1e6,
    memory_share=0.9,
)


def one_link(collective: Collective) -> Placed:
    return Placed(collective.num_bytes / 1000, ("link",))


def simulated(text: str, price=one_link, chip: Chip = TPU) -> Simulation:
    return simulate(read_steps(parse_module(text), chip, OPERATIONS), price)


def totals(result: Simulation) -> dict[str, tuple[float, float | None, float]]:
    return {
        name: (each.count, None if each.alone_seconds is None else round(each.alone_seconds, 6), round(each.exposed_seconds, 6))
        for name, each in result.collectives.items()
    }  # fmt: skip


def computed(text: str, chip: Chip = TPU, ops=()) -> dict[str, Compute]:
    return {step.name: step for step in read_steps(parse_module(text), chip, ops) if isinstance(step, Compute)}


def only_collective(text: str) -> Collective:
    (found,) = collectives_of(read_steps(parse_module(text), TPU))
    return found


def test_a_synchronous_collective_is_exposed_whole():
    result = simulated(module(compute("a", 100), f"  %g = {GATHER}", f"  ROOT {compute('b', 50).strip()}"))
    assert result.seconds == pytest.approx(0.214)
    assert totals(result) == {"g": (1, 0.064, 0.064)}
    found = only_collective(module(f"  ROOT %g = {GATHER}"))
    assert (found.kind, found.num_bytes, found.group_size, found.is_async) == ("all-gather", 64, 4, False)


@pytest.mark.parametrize(("sent", "arrives"), [(8, 16), (16, 8)], ids=["there", "back"])
def test_a_ragged_exchange_sends_what_its_smaller_side_holds(sent, arrives):
    """The other side is a buffer with room for uneven loads. 8 rows of 2 bytes from each of 4 devices."""
    places = ", ".join(f"%i{n}" for n in range(4))
    lines = [f"  %rows = bf16[{sent}]{{0}} parameter(1)", f"  %buffer = bf16[{arrives}]{{0}} parameter(2)",
             *(f"  %i{n} = s32[4]{{0}} parameter({n + 3})" for n in range(4)),
             f"  ROOT %r = bf16[{arrives}]{{0}} ragged-all-to-all(%rows, %buffer, {places}), {GROUPS}"]  # fmt: skip
    found = only_collective(module(*lines))
    assert (found.kind, found.num_bytes, found.group_size) == ("all-to-all", 4 * 8 * 2, 4)


def test_a_ragged_exchange_without_a_name_sends_the_share_that_its_operands_tell():
    """XLA for GPUs leaves the name out; the rows are gathered in the scope of the exchange."""
    places = ", ".join(f"%i{n}" for n in range(4))
    lines = ["  %tokens = bf16[8]{0} parameter(1)", "  %buffer = bf16[16]{0} parameter(2)",
             *(f"  %i{n} = s32[4]{{0}} parameter({n + 3})" for n in range(4)),
             '  %rows = bf16[8]{0} copy(%tokens), metadata={op_name="jit(f)/experts=routed/filled=0.5000/sent=0.7500/take"}',
             f"  ROOT %r = bf16[16]{{0}} ragged-all-to-all(%rows, %buffer, {places}), {GROUPS}"]  # fmt: skip
    found = only_collective(module(*lines))
    assert found.num_bytes == 0.75 * 4 * 8 * 2
    assert found.op_name.endswith("take")


@pytest.mark.parametrize(("between", "exposed"), [(100, 0.0), (64, 0.0), (40, 0.024), (0, 0.064)])
def test_what_runs_between_start_and_done_hides_it(between, exposed):
    lines = [f"  %s = {START}", *([compute("a", between)] if between else []),
             "  %d = bf16[32]{0} all-gather-done(%s)", f"  ROOT {compute('b', 10, '%x').strip()}"]  # fmt: skip
    result = simulated(module(*lines))
    assert result.seconds == pytest.approx(0.010 + max(between / 1000, 0.064))
    assert result.collectives["s"].exposed_seconds == pytest.approx(exposed)
    behind = result.collectives["s"].hidden_behind
    assert behind == ({} if not between else {"a": pytest.approx(min(between, 64) / 1000)})
    assert result.compute_seconds == {"other": pytest.approx((between + 10) / 1000)}


def test_a_link_serves_what_it_is_given_in_order():
    lines = [f"  %s1 = {START}", f"  %s2 = {START}", compute("a", 100), "  %d2 = bf16[32]{0} all-gather-done(%s2)",
             "  ROOT %d1 = bf16[32]{0} all-gather-done(%s1)"]  # fmt: skip
    shared = simulated(module(*lines))
    assert shared.seconds == pytest.approx(0.128)
    assert totals(shared) == {"s1": (1, 0.064, 0.0), "s2": (1, 0.064, 0.028)}, "the first had come"
    on_link = [(each.name, each.start_seconds, each.seconds) for each in shared.segments if each.track == "link"]
    assert on_link == [("s1", 0.0, pytest.approx(0.064)), ("s2", pytest.approx(0.064), pytest.approx(0.064))]
    apart = simulated(module(*lines), price=lambda c: Placed(c.num_bytes / 1000, (c.name,)))
    assert apart.seconds == pytest.approx(0.1)
    assert apart.exposed_seconds == 0


def test_a_wait_is_of_those_that_the_awaited_one_queued_behind():
    """Of the 128 ms that compute waits for the second, the first has the link for 54."""
    lines = [f"  %s1 = {START}", compute("a", 10), f"  %s2 = {START}", "  %d2 = bf16[32]{0} all-gather-done(%s2)",
             "  ROOT %d1 = bf16[32]{0} all-gather-done(%s1)"]  # fmt: skip
    result = simulated(module(*lines))
    assert totals(result) == {"s1": (1, 0.064, 0.054), "s2": (1, 0.064, 0.064)}
    assert result.collectives["s1"].hidden_behind == {"a": pytest.approx(0.01)}


def test_a_loop_counts_all_its_trips():
    computations, run = loop(compute("a", 100), f"  %g = {GATHER}", trips=7)
    result = simulated(module(run, before=computations))
    assert result.seconds == pytest.approx(7 * 0.164)
    assert totals(result) == {"g": (7, 0.448, 0.448)}
    assert result.collectives["g"].loops == (("loop", 7),)
    assert result.compute_seconds == {"other": pytest.approx(0.7)}
    on_compute = [each for each in result.segments if each.track == "compute"]
    ends = [each.start_seconds + each.seconds for each in on_compute]
    assert ends[-1] == pytest.approx(result.seconds), "the timeline is as long as the step"
    assert all(a <= b.start_seconds + 1e-9 for a, b in zip(ends, on_compute[1:], strict=False)), "and overlaps nowhere"


def test_nested_loops_multiply():
    inner, run_inner = loop(compute("a", 10), trips=3)
    inner = inner.replace("%cond", "%cond2").replace("%body", "%body2")
    lines = (
        run_inner.replace("ROOT ", "").replace("%cond", "%cond2").replace("%body", "%body2").replace("%loop", "%loop2")
    )
    outer, run = loop(lines, f"  %g = {GATHER}", trips=5)
    result = simulated(module(run, before=inner + "\n" + outer))
    assert result.seconds == pytest.approx(5 * (0.03 + 0.064))
    assert totals(result) == {"g": (5, 0.32, 0.32)}
    assert result.compute_seconds == {"other": pytest.approx(5 * 0.03)}


@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        ("  %b = s32[] get-tuple-element(%c), index=2\n  ROOT %lt = pred[] compare(%i, %b), direction=LT", 6),
        ("  %n = s32[] constant(6)\n  ROOT %lt = pred[] compare(%n, %i), direction=GT", 6),
        ("  %n = s32[] constant(6)\n  ROOT %lt = pred[] compare(%i, %n), direction=LE", 7),
        ("  %n = s32[] constant(6)\n  ROOT %lt = pred[] compare(%i, %n), direction=NE", 6),
        ("  ROOT %lt = pred[] custom-call(%i), custom_call_target=\"unknown\"", None),
    ],
)  # fmt: skip
def test_trips_are_read_from_the_condition(condition, trips):
    computations, run = loop(compute("a", 10), trips=6, condition=condition)
    text = module(run, before=computations)
    assert [each.num_trips for each in every(read_steps(parse_module(text), TPU), Loop)] == [trips]
    assert simulated(text).unknown_loops == (set() if trips else {"loop"})
    known = run + ', backend_config={"known_trip_count":{"n":"9"}}'
    text = module(known, before=computations)
    assert [each.num_trips for each in every(read_steps(parse_module(text), TPU), Loop)] == [9]


SHARED = """\
HloModule two

%cond (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%j, %n)
}

ENTRY %main () -> s32[] {
  %zero = s32[] constant(0)
  %ten = s32[] constant(10)
  %five = s32[] constant(5)
  %a = (s32[], s32[]) tuple(%zero, %ten)
  %b = (s32[], s32[]) tuple(%zero, %five)
  %wa = (s32[], s32[]) while(%a), condition=%cond, body=%body
  %wb = (s32[], s32[]) while(%b), condition=%cond, body=%body
  %x = s32[] get-tuple-element(%wa), index=0
  %y = s32[] get-tuple-element(%wb), index=0
  ROOT %z = s32[] add(%x, %y)
}
"""


def test_loops_that_share_condition_and_body_have_each_its_own_bound():
    read = parse_module(SHARED)
    entry = read.computations[read.entry]
    assert [num_trips(each, entry, read) for each in entry.instructions if each.opcode == "while"] == [10, 5]


FUSED = f"""\
%begin (p: bf16[8]) -> (bf16[8], bf16[32], u32[]) {{
  %p = bf16[8]{{0}} parameter(0)
  %ag.1 = bf16[32]{{0}} all-gather(%p), channel_id=5, {GROUPS}, dimensions={{0}}, metadata={{op_name="gathered"}}
  ROOT %cs = (bf16[8]{{0}}, bf16[32]{{0}}, u32[]) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p: bf16[8], q: bf16[32]) -> (bf16[8], bf16[32]) {{
  %p = bf16[8]{{0}} parameter(0)
  %q = bf16[32]{{0}} parameter(1)
  %ag.2 = bf16[32]{{0}} all-gather(%p), channel_id=5, {GROUPS}, dimensions={{0}}
  %row = bf16[1,8]{{1,0}} bitcast(%p)
  %square = bf16[8,8]{{1,0}} broadcast(%p)
  %dot = bf16[1,8]{{1,0}} convolution(%row, %square), dim_labels=bf_io->bf
  ROOT %t = (bf16[1,8]{{1,0}}, bf16[32]{{0}}) tuple(%dot, %ag.2)
}}

%finish (p: bf16[8], q: bf16[32]) -> bf16[32] {{
  %p = bf16[8]{{0}} parameter(0)
  %q = bf16[32]{{0}} parameter(1)
  %ag.3 = bf16[32]{{0}} all-gather(%p), channel_id=5, {GROUPS}, dimensions={{0}}
  ROOT %cd = bf16[32]{{0}} custom-call(%p, %ag.3, %q), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_collective_that_is_fused_with_matmuls_counts_once():
    lines = [
        "  %start = (bf16[8]{0}, bf16[32]{0}, u32[]) fusion(%x), kind=kCustom, calls=%begin",
        "  %g0 = bf16[8]{0} get-tuple-element(%start), index=0",
        "  %g1 = bf16[32]{0} get-tuple-element(%start), index=1",
        '  %mm = (bf16[8]{0}, bf16[32]{0}) fusion(%g0, %g1), kind=kOutput, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"50"}',
        "  %h0 = bf16[8]{0} get-tuple-element(%mm), index=0",
        "  %h1 = bf16[32]{0} get-tuple-element(%mm), index=1",
        "  %done = bf16[32]{0} fusion(%h0, %h1), kind=kCustom, calls=%finish",
        f"  ROOT {compute('b', 10).strip()}",
    ]
    result = simulated(module(*lines, before=FUSED))
    assert totals(result) == {"start": (1, 0.064, 0.0105)}, "its matmul takes 7 % longer"
    found = result.collectives["start"].collective
    assert (found.kind, found.form, found.op_name, found.num_bytes) == (
        "all-gather",
        "collective fusion",
        "gathered",
        64,
    )
    assert result.compute_seconds == {"matmul": pytest.approx(0.0535), "other": pytest.approx(0.01)}


def test_a_collective_whose_chunks_are_sent_from_within_a_loop_counts_once():
    """It begins before three trips of 50 and ends behind them: 64 long, it is hidden."""
    begin = "  %start = (bf16[8]{0}, bf16[32]{0}, u32[]) fusion(%x), kind=kCustom, calls=%begin"
    chunk = (
        "  %mm = (bf16[8]{0}, bf16[32]{0}) fusion(%x, %x), kind=kOutput, calls=%async_collective_fusion.1, "
        'backend_config={"estimated_cycles":"50"}'
    )
    computations, run = loop(chunk, trips=3)
    carried = run.replace("tuple(%zero, %x, %copied)", "tuple(%zero, %start, %copied)").replace("ROOT %loop", "%loop")
    done = "  ROOT %done = bf16[32]{0} fusion(%loop, %loop), kind=kCustom, calls=%finish"
    result = simulated(module(begin, carried, done, before=FUSED + computations))
    assert totals(result) == {"start": (1, 0.064, 0.0)}
    assert result.compute_seconds == {"matmul": pytest.approx(3 * 0.0535)}, "each takes 7 % longer"


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter():
    scatter = f"""\
%all-reduce-scatter (p: f32[32], i: s32[]) -> f32[8] {{
  %p = f32[32]{{0}} parameter(0)
  %i = s32[] parameter(1)
  %ar = f32[32]{{0}} all-reduce(%p), channel_id=7, {GROUPS}, to_apply=%sum
  %b = f32[32]{{0}} bitcast(%ar)
  ROOT %ds = f32[8]{{0}} dynamic-slice(%b, %i), dynamic_slice_sizes={{8}}
}}
"""
    big = "  %y = f32[32]{0} broadcast(%x)\n  %i = s32[] constant(0)"
    call = "  ROOT %rs = f32[8]{0} fusion(%y, %i), kind=kCustom, calls=%all-reduce-scatter"
    result = simulated(module(big, call, before=scatter))
    (found,) = (each.collective for each in result.collectives.values())
    assert (found.name, found.kind, found.num_bytes, found.dtype) == ("rs", "reduce-scatter", 128, "f32")
    assert result.exposed_seconds == pytest.approx(0.128)
    whole = scatter.replace(
        "ROOT %ds = f32[8]{0} dynamic-slice(%b, %i), dynamic_slice_sizes={8}", "ROOT %ds = f32[32]{0} add(%b, %b)"
    )
    result = simulated(module(big, call, before=whole))
    assert [each.collective.kind for each in result.collectives.values()] == ["all-reduce"]


def test_a_call_to_another_unit_is_the_collective_that_it_calls():
    called = f"""\
%gather_on_sc (p: bf16[8], t: token[]) -> bf16[32] {{
  %p = bf16[8]{{0}} parameter(0)
  %t = token[] parameter(1)
  ROOT %ag = bf16[32]{{0}} all-gather(%p), channel_id=3, {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"
"""
    lines = [
        '  %prepared = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"',
        '  %token = token[] custom-call(%prepared), custom_call_target="PrepareAsyncCallDone"',
        '  %g.call-start = ((bf16[8]{0}, token[]), bf16[32]{0}) call-start(%x, %token), async_execution_thread="sparsecore", to_apply=%gather_on_sc',
        compute("a", 40),
        "  ROOT %g.call-done = bf16[32]{0} call-done(%g.call-start)",
    ]
    result = simulated(module(*lines, before=called))
    assert totals(result) == {"g.call-start": (1, 0.064, 0.024)}
    (found,) = (each.collective for each in result.collectives.values())
    assert (found.kind, found.form, found.num_bytes, found.is_certain) == ("all-gather", "sparsecore call", 64, True)


def test_a_call_that_holds_several_collectives_moves_all_their_arrays():
    called = f"""\
%reduced_on_sc (p: bf16[32], q: bf16[64]) -> (bf16[8], bf16[16]) {{
  %p = bf16[32]{{0}} parameter(0)
  %q = bf16[64]{{0}} parameter(1)
  %rs.1 = bf16[8]{{0}} reduce-scatter(%p), channel_id=3, {GROUPS}, dimensions={{0}}
  %rs.2 = bf16[16]{{0}} reduce-scatter(%q), channel_id=3, {GROUPS}, dimensions={{0}}
  ROOT %t = (bf16[8]{{0}}, bf16[16]{{0}}) tuple(%rs.1, %rs.2)
}}, execution_thread="sparsecore"
"""
    lines = [
        "  %a = bf16[32]{0} broadcast(%x)",
        "  %b = bf16[64]{0} broadcast(%x)",
        '  %s.call-start = ((bf16[32]{0}, bf16[64]{0}), (bf16[8]{0}, bf16[16]{0})) call-start(%a, %b), async_execution_thread="sparsecore", to_apply=%reduced_on_sc',
        "  ROOT %s.call-done = (bf16[8]{0}, bf16[16]{0}) call-done(%s.call-start)",
    ]
    (found,) = (each.collective for each in simulated(module(*lines, before=called)).collectives.values())
    assert (found.kind, found.num_bytes, found.num_elements) == ("reduce-scatter", 2 * (32 + 64), (32, 64))


def test_a_call_that_holds_collectives_of_two_kinds_is_both_one_after_the_other():
    called = f"""\
%mixed_on_sc (p: bf16[32], q: bf16[16], r: bf16[8]) -> (bf16[8], bf16[64], bf16[32]) {{
  %p = bf16[32]{{0}} parameter(0)
  %q = bf16[16]{{0}} parameter(1)
  %r = bf16[8]{{0}} parameter(2)
  %ag.1 = bf16[64]{{0}} all-gather(%q), channel_id=3, {GROUPS}, dimensions={{0}}
  %rs.1 = bf16[8]{{0}} reduce-scatter(%p), channel_id=4, {GROUPS}, dimensions={{0}}
  %ag.2 = bf16[32]{{0}} all-gather(%r), channel_id=5, {GROUPS}, dimensions={{0}}
  ROOT %t = (bf16[8]{{0}}, bf16[64]{{0}}, bf16[32]{{0}}) tuple(%rs.1, %ag.1, %ag.2)
}}, execution_thread="sparsecore"
"""
    lines = [
        "  %a = bf16[32]{0} broadcast(%x)",
        "  %b = bf16[16]{0} broadcast(%x)",
        '  %m.call-start = ((bf16[32]{0}, bf16[16]{0}, bf16[8]{0}), (bf16[8]{0}, bf16[64]{0}, bf16[32]{0})) call-start(%a, %b, %x), async_execution_thread="sparsecore", to_apply=%mixed_on_sc',
        compute("c", 40),
        "  ROOT %m.call-done = (bf16[8]{0}, bf16[64]{0}, bf16[32]{0}) call-done(%m.call-start)",
    ]
    result = simulated(module(*lines, before=called))
    found = {each.collective.kind: each.collective for each in result.collectives.values()}
    assert {kind: (one.instruction, one.num_bytes) for kind, one in found.items()} == {
        "all-gather": ("m.call-start", 2 * (64 + 32)),
        "reduce-scatter": ("m.call-start", 2 * 32),
    }
    apart = sum(each.alone_seconds or 0 for each in result.collectives.values())
    assert apart == pytest.approx(0.192 + 0.064)
    assert result.exposed_seconds == pytest.approx(apart - 0.040), "one link carries both"


def test_a_call_that_hides_its_collective_is_known_by_its_name():
    """The transfer begins at the update; what is called hides the collective behind a custom call."""
    called = """\
%gather_on_sc (p: bf16[8]) -> bf16[32] {
  %p = bf16[8]{0} parameter(0)
  ROOT %c = bf16[32]{0} custom-call(%p), custom_call_target="SparseCoreCall", replica_groups={{0,1,2,3}}
}, execution_thread="sparsecore"

%moved (p: bf16[8]) -> bf16[8] {
  ROOT %p = bf16[8]{0:S(1)} parameter(0)
}, execution_thread="sparsecore"
"""
    lines = [
        '  %all-gather.7.call-start = ((bf16[8]{0}), bf16[32]{0}, u32[]) async-start(%x), async_execution_thread="sparsecore", calls=%gather_on_sc',
        compute("a", 1000),
        "  %all-gather.7.call-update = ((bf16[8]{0}), bf16[32]{0}, u32[]) async-update(%all-gather.7.call-start)",
        compute("b", 40),
        "  %all-gather.7.call-done = bf16[32]{0} async-done(%all-gather.7.call-update)",
        '  %move.call-start = ((bf16[8]{0}), bf16[8]{0}, u32[]) async-start(%x), async_execution_thread="sparsecore", calls=%moved',
        "  ROOT %move.call-done = bf16[8]{0} async-done(%move.call-start)",
    ]
    result = simulated(module(*lines, before=called))
    assert totals(result) == {"all-gather.7.call-update": (1, 0.064, 0.024)}
    (found,) = (each.collective for each in result.collectives.values())
    assert (found.kind, found.form, found.group_size, found.is_certain) == ("all-gather", "sparsecore call", 4, False)


def test_of_two_branches_the_longer_one_counts():
    branches = f"""\
%short (p: bf16[8]) -> bf16[8] {{
  %x = bf16[8]{{0}} parameter(0)
  ROOT {compute("a", 10).strip()}
}}

%long (p: bf16[8]) -> bf16[8] {{
  %x = bf16[8]{{0}} parameter(0)
  %g = {GATHER}
  ROOT {compute("b", 30).strip()}
}}
"""
    run = (
        "  %i = s32[] constant(0)\n  ROOT %c = bf16[8]{0} conditional(%i, %x, %x), branch_computations={%short, %long}"
    )
    result = simulated(module(run, before=branches))
    assert result.seconds == pytest.approx(0.094)
    assert totals(result) == {"g": (1, 0.064, 0.064)}


def test_the_branch_that_ends_last_counts_with_what_is_on_its_way():
    """By itself the branch with compute is the longer one: 70 against 64 ms. Behind a gather of 64 ms the other is."""
    branches = f"""\
%computes (p: bf16[8]) -> bf16[8] {{
  %x = bf16[8]{{0}} parameter(0)
  ROOT {compute("a", 70).strip()}
}}

%gathers (p: bf16[8]) -> bf16[8] {{
  %x = bf16[8]{{0}} parameter(0)
  ROOT %g = {GATHER}
}}
"""
    run = (
        "  %i = s32[] constant(0)\n  %c = bf16[8]{0} conditional(%i, %x, %x), branch_computations={%computes, %gathers}"
    )
    alone = simulated(module(run, "  ROOT %r = bf16[8]{0} copy(%c)", before=branches))
    assert alone.seconds == pytest.approx(0.07)
    lines = [f"  %s = {START}", run, "  ROOT %d = bf16[32]{0} all-gather-done(%s)"]
    queued = simulated(module(*lines, before=branches))
    assert queued.seconds == pytest.approx(0.128)
    assert totals(queued) == {"s": (1, 0.064, 0.064), "g": (1, 0.064, 0.064)}


def test_a_loop_behind_a_long_transfer_settles_before_its_trips_are_counted():
    """The first two gathers of five queue behind 200 ms; the last three meet a free link."""
    computations, run = loop(compute("a", 50), f"  %g = {GATHER}", trips=5)
    long = "  %big = (bf16[8]{0}, bf16[100]{0}) all-gather-start(%y), replica_groups={{0}}, dimensions={0}"
    run = run.replace("ROOT ", "")
    lines = ["  %y = bf16[100]{0} parameter(1)", long, run, "  ROOT %d = bf16[100]{0} all-gather-done(%big)"]
    result = simulated(module(*lines, before=computations))
    assert totals(result) == {"big": (1, 0.2, 0.15), "g": (5, 0.32, 0.32)}
    assert result.seconds == pytest.approx(5 * 0.05 + 0.32 + 0.15)


SENT = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_reduce_operation="SUM",'
    '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)


def test_across_slices_a_send_begins_a_collective_and_what_is_received_ends_it():
    """The hosts have the data when the send is done; the sum is there when it is received."""
    lines = [
        "  %t = token[] after-all()",
        f"  %send = (bf16[8]{{0}}, u32[], token[]) send(%x, %t), channel_id=3, {SENT}",
        f"  %recv = (bf16[8]{{0}}, u32[], token[]) recv(%t), channel_id=2, {SENT}",
        compute("a", 4),
        "  %recv-done = (bf16[8]{0}, token[]) recv-done(%recv), channel_id=2",
        compute("b", 100),
        "  %send-done = token[] send-done(%send), channel_id=3",
        "  ROOT %r = bf16[8]{0} get-tuple-element(%recv-done), index=0",
    ]
    result = simulated(module(*lines))
    assert totals(result) == {"send": (1, 0.016, 0.012)}
    (found,) = (each.collective for each in result.collectives.values())
    assert (found.kind, found.num_slices, found.groups, found.num_bytes) == ("all-reduce", 2, (), 16)
    gathered = simulated(module(*lines).replace("ALL_REDUCE", "ALL_GATHER"))
    assert [each.collective.num_bytes for each in gathered.collectives.values()] == [32]
    unknown = simulated(module(*lines).replace("ALL_REDUCE", "ELSE"))
    (found,) = (each.collective for each in unknown.collectives.values())
    assert (found.kind, found.num_slices, found.is_certain) == ("send", None, False)


def test_pairs_of_gpus_send_until_it_is_received():
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"
    lines = [
        "  %t = token[] after-all()",
        f"  %recv = (bf16[8]{{0}}, u32[], token[]) recv(%t), channel_id=2, {pairs}",
        f"  %send = (bf16[8]{{0}}, u32[], token[]) send(%x, %t), channel_id=2, {pairs}",
        compute("a", 4),
        "  %recv-done = (bf16[8]{0}, token[]) recv-done(%recv), channel_id=2",
        "  %send-done = token[] send-done(%send), channel_id=2",
        "  ROOT %r = bf16[8]{0} get-tuple-element(%recv-done), index=0",
    ]
    result = simulated(module(*lines))
    assert totals(result) == {"send": (1, 0.016, 0.012)}
    (found,) = (each.collective for each in result.collectives.values())
    assert (found.kind, found.groups, found.num_bytes, found.is_certain) == ("send", ((0, 1), (1, 2)), 16, True)


def test_the_bytes_of_an_exchange_are_those_of_all_parts():
    """Each of four devices has a part of the array before and after."""
    found = only_collective(module(f"  ROOT %g = bf16[8]{{0}} all-to-all(%x), {GROUPS}, dimensions={{0}}"))
    assert (found.kind, found.num_bytes, found.num_elements) == ("all-to-all", 64, (32,))


def test_an_all_reduce_is_as_large_as_what_it_gives():
    """TPUs add up in float32 what they are given in bfloat16."""
    line = f"  ROOT %g = f32[8]{{0}} all-reduce(%x), {GROUPS}, to_apply=%work"
    found = only_collective(module(line))
    assert (found.num_bytes, found.dtype, found.is_padded) == (32, "f32", False)


def test_matmuls_of_gpus_are_priced_from_their_shapes():
    """(64, 128) x (128, 32) at 80 % of 1 GFLOP/s, against bytes at 90 % of 1 MB/s."""
    before = "%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  ROOT %b = f32[] parameter(1)\n}"
    lines = [
        "  %l = bf16[64,128]{1,0} broadcast(%x)",
        "  %r = bf16[128,32]{1,0} broadcast(%x)",
        '  ROOT %mm = (bf16[64,32]{1,0}, s8[100]{0}) custom-call(%l, %r), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}',
    ]
    slow = Chip("gpu", None, {"bfloat16": 1e6}, hbm_bytes_per_second=1e12, matmul_share=0.8, memory_share=0.9)
    matmul = computed(module(*lines, before=before), slow)["mm"]
    assert matmul.kind == "matmul"
    assert matmul.priced_by == "flops"
    assert matmul.seconds == pytest.approx(2 * 64 * 128 * 32 / 0.8e6 + cost_model().kernel_gap_seconds)
    fast = replace(slow, peak_flops_per_second={"bfloat16": 1e15}, hbm_bytes_per_second=1e6)
    matmul = computed(module(*lines), fast)["mm"]
    assert matmul.priced_by == "bytes"
    assert matmul.seconds == pytest.approx(
        (64 * 128 * 2 + 128 * 32 * 2 + 64 * 32 * 2 + 100) / 0.9e6 + cost_model().kernel_gap_seconds
    )


def test_a_product_of_blocks_is_a_matmul_in_the_type_of_its_elements():
    """(64, 128) x (32, 128) of 4 bits, with a scale for each 16, at 80 % of 1 MFLOP/s."""
    lines = [
        "  %l = f4e2m1fn[1,64,128]{2,1,0:E(4)} broadcast(%x)",
        "  %r = f4e2m1fn[1,32,128]{2,1,0:E(4)} broadcast(%x)",
        "  %sl = f8e4m3fn[1,64,8]{2,1,0} broadcast(%x)",
        "  %sr = f8e4m3fn[1,32,8]{2,1,0} broadcast(%x)",
        '  ROOT %mm = (bf16[1,64,32]{2,1,0}, u8[0]{0}) custom-call(%l, %r, %sl, %sr), custom_call_target="__cudnn$blockScaledDot"',
    ]
    chip = Chip("gpu", None, {"float4": 1e6}, hbm_bytes_per_second=1e12, matmul_share=0.8, memory_share=0.9)
    matmul = computed(module(*lines), chip)["mm"]
    assert matmul.kind == "matmul"
    assert matmul.priced_by == "flops"
    assert matmul.seconds == pytest.approx(2 * 64 * 128 * 32 / 0.8e6 + cost_model().kernel_gap_seconds)


SLICED = """\
%slice (p: f32[1000], i: s32[]) -> f32[10] {
  %p = f32[1000]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %ds = f32[10]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={10}
}

%write (p: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %u = f32[10]{0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %dus = f32[1000]{0} dynamic-update-slice(%p, %u, %i)
}

%nested (q: f32[1000], j: s32[]) -> f32[10] {
  %q = f32[1000]{0} parameter(0)
  %j = s32[] parameter(1)
  %one = f32[10]{0} fusion(%q, %j), kind=kLoop, calls=%slice
  ROOT %n = f32[10]{0} negate(%one)
}

%slice_of_view (p: f32[1000], i: s32[]) -> f32[10,1] {
  %p = f32[1000]{0} parameter(0)
  %v = f32[10,100]{0,1} bitcast(%p)
  %i = s32[] parameter(1)
  ROOT %ds = f32[10,1]{1,0} dynamic-slice(%v, %i, %i), dynamic_slice_sizes={10,1}
}

%copied (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %c = f32[1000]{0} copy(%p)
}

%slice_of_copy (p: f32[1000], i: s32[]) -> f32[10] {
  %p = f32[1000]{0} parameter(0)
  %f = f32[1000]{0} fusion(%p), kind=kLoop, calls=%copied
  %i = s32[] parameter(1)
  ROOT %ds = f32[10]{0} dynamic-slice(%f, %i), dynamic_slice_sizes={10}
}

%write_to_view (p: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %v = f32[10,100]{0,1} bitcast(%p)
  %u = f32[10]{0} parameter(1)
  %w = f32[10,1]{1,0} bitcast(%u)
  %i = s32[] parameter(2)
  %dus = f32[10,100]{0,1} dynamic-update-slice(%v, %w, %i, %i)
  ROOT %back = f32[1000]{0} bitcast(%dus)
}
"""


@pytest.mark.parametrize(
    "fusion",
    [
        "f32[10]{0} fusion(%big, %i), kind=kLoop, calls=%slice",
        "f32[1000]{0} fusion(%big, %some, %i), kind=kLoop, calls=%write",
        # XLA for TPUs gives the fusion of a matmul the stack of all layers; a fusion within it takes one layer.
        "f32[10]{0} fusion(%big, %i), kind=kOutput, calls=%nested",
        # XLA for GPUs gives fusions the stack of all layers, transposed by a bitcast, and slices or updates a layer.
        "f32[10,1]{1,0} fusion(%big, %i), kind=kLoop, calls=%slice_of_view",
        "f32[1000]{0} fusion(%big, %some, %i), kind=kLoop, calls=%write_to_view",
        # XLA for tpu7x with NATIVE_EMISSION writes the stack in other tiles, in a fusion within it.
        "f32[10]{0} fusion(%big, %i), kind=kLoop, calls=%slice_of_copy",
    ],
    ids=["slice", "update", "slice in a fusion", "slice of a view", "update of a view", "slice of a copy"],
)
def test_only_what_is_touched_of_an_array_counts_as_moved(fusion):
    """A slice of a large operand is read, an update of one is written; the operand itself is neither. So 40 bytes are
    read and 40 written, and the place is read."""
    given = ("  %big = f32[1000]{0} broadcast(%x)", "  %some = f32[10]{0} broadcast(%x)", "  %i = s32[] constant(0)")
    found = computed(module(*given, f"  ROOT %f = {fusion}", before=SLICED), GPU)["f"]
    assert found.seconds == pytest.approx((40 + 40 + 4) / 0.9e6 + cost_model().kernel_gap_seconds)


def test_copies_to_the_host_and_back_run_beside_the_compute():
    """As a TPU program offloads: a layer's activation into the host's stack of them (S(5)), and out of it again. Each
    copies 16 bytes, of which the compute between start and done hides 10 ms."""
    host, device = "bf16[100,8]{1,0:S(5)}", "bf16[1,8]{1,0}"
    lines = [
        "  %i = s32[] constant(0)", f"  %stack = {host} parameter(1)", compute("a", 100),
        f"  %u = (({host}, {device}, s32[]), {host}, u32[]) dynamic-update-slice-start(%stack, %a, %i, %i)",
        compute("b", 10), f"  %done = {host} dynamic-update-slice-done(%u)",
        f"  %s = (({host}, s32[]), {device}, u32[]) dynamic-slice-start(%done, %i, %i), dynamic_slice_sizes={{1,8}}",
        compute("c", 10), f"  ROOT %back = {device} dynamic-slice-done(%s)",
    ]  # fmt: skip
    result = simulated(module(*lines))
    assert result.seconds == pytest.approx(0.132)
    assert totals(result) == {"u": (1, 0.016, 0.006), "s": (1, 0.016, 0.006)}


def test_a_kernel_that_is_not_known_is_counted_and_takes_no_time():
    line = '  ROOT %k = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    result = simulated(module(line))
    assert result.unpriced == {"k": "k"}
    assert result.seconds == 0


def test_a_collective_whose_time_is_not_known_has_none():
    result = simulated(module(f"  ROOT %g = {GATHER}"), price=lambda _: Placed(None, ()))
    assert totals(result) == {"g": (1, None, 0.0)}


@pytest.mark.parametrize(("kernel", "matmuls"), [("splash_mha_fwd", 2), ("splash_mha_dq", 3), ("splash_mha_dkv", 4)])
@pytest.mark.parametrize("batch", ["", "1,", "6,"])
def test_an_attention_kernel_takes_the_time_of_its_matmuls_over_half_of_the_square(kernel, matmuls, batch):
    """Of a single sequence the queries have no dimension for it; masks (s8) come first."""
    shape = f"bf16[{batch}4,256,128]"
    lines = ["  %mask = s8[1,16,16] constant({...})", f"  %q = {shape} parameter(1)", f"  %k = {shape} parameter(2)",
             f'  ROOT %{kernel}.1 = {shape} custom-call(%mask, %q, %k), custom_call_target="tpu_custom_call"']  # fmt: skip
    (found,) = computed(module(*lines)).values()
    flops = 2 * matmuls * 4 * 256 * 256 * 128 / 2 * int(batch.rstrip(",") or 1)
    assert (found.kind, found.priced_by) == ("attention", "flops")
    assert found.seconds == pytest.approx(flops / (0.6 * 1e3))


@pytest.mark.parametrize("batch", ["", "3,"])
def test_one_backward_kernel_takes_the_time_of_five_matmuls(batch):
    """It also returns a partial sum of the queries' gradient for each of 4 blocks of keys; two kernels take seven."""
    q, partials, scratch = f"bf16[{batch}4,256,128]", f"bf16[{batch}4,4,256,128]", "f32[64,128]"
    lines = [f"  %q = {q} parameter(1)", f"  %k = {q} parameter(2)",
             f"  ROOT %splash_mha_dkv.1 = ({scratch}, {scratch}, {partials}, {q}, {q}) custom-call(%q, %k, %k), "
             'custom_call_target="tpu_custom_call"']  # fmt: skip
    (found,) = computed(module(*lines)).values()
    flops = 2 * 5 * 4 * 256 * 256 * 128 / 2 * int(batch.rstrip(",") or 1)
    assert found.seconds == pytest.approx(flops / (0.6 * 1e3))


def test_an_attention_kernel_that_names_its_blocks_takes_the_time_of_those():
    """Queries of 256 tokens and keys of 512, of whose 8 blocks 3 are seen."""
    q, k = "bf16[4,256,128]", "bf16[4,512,128]"
    lines = [f"  %q = {q} parameter(1)", f"  %k = {k} parameter(2)",
             f'  ROOT %splash_mha_fwd.1 = {q} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", '
             'metadata={op_name="jit(step)/attend/blocks=3_of_8/pallas_call"}']  # fmt: skip
    (found,) = computed(module(*lines), ops=OPERATIONS).values()
    assert found.seconds == pytest.approx(2 * 2 * 4 * 256 * 512 * 128 * 3 / 8 / (0.6 * 1e3))


@pytest.mark.parametrize(
    ("size", "share"),
    [
        (128, 0.4),
        (256, 0.6),
        (64, 0.2),  # takes as long as one of 128
        (512, 0.6),
        # For each score 128 / 0.4 = 320 and 256 / 0.6 = 426.7: between them a line, at 192 373.3
        (192, 192 / 373.333),
    ],
)
def test_the_size_of_a_head_decides_what_attention_reaches(size, share):
    q = f"bf16[4,256,{size}]"
    text = module(f"  %q = {q} parameter(1)", f"  %k = {q} parameter(2)",
                  f'  ROOT %splash_mha_fwd.1 = {q} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call"')  # fmt: skip
    (found,) = computed(text, replace(TPU, attention=attention_of({128: 0.4, 256: 0.6}))).values()
    assert found.seconds == pytest.approx(2 * 2 * 4 * 256 * 256 * size / 2 / (share * 1e3), rel=1e-4)


def fused_matmul(cycles: int, convolution: str, *shapes: str) -> str:
    result, left, right = shapes
    return (
        "HloModule m, is_scheduled=true\n\n%fused {\n"
        f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
        f"  ROOT %c = {result} convolution(%a, %b), {convolution}\n}}\n\n"
        f"ENTRY %main {{\n  %x = {left} parameter(0)\n  %y = {right} parameter(1)\n"
        f"  ROOT %f = {result} fusion(%x, %y), kind=kOutput, calls=%fused, "
        f'backend_config={{"estimated_cycles":"{cycles}"}}\n}}\n'
    )


MATMUL = ("dim_labels=bf_io->bf", "bf16[10,30]", "bf16[10,20]", "bf16[20,30]")  # 12,000 FLOPs: 15 s at 0.8 of the peak


@pytest.mark.parametrize(
    ("cycles", "seconds", "by", "estimated"),
    [(14_000, 14.0, "cycles", None), (15_001, 15.0, "bound", 15.001), (60_000, 15.0, "bound", 60.0)],
)
def test_an_estimate_longer_than_a_matmul_can_take_is_bounded(cycles, seconds, by, estimated):
    result = simulated(fused_matmul(cycles, *MATMUL))
    assert result.seconds == pytest.approx(seconds)
    assert result.priced_by == {by: 1}
    over = (estimated or seconds) - seconds
    assert sum(result.bounded.values()) == pytest.approx(over, abs=1e-5)  # 4 us besides the arithmetic
    assert list(result.bounded) == (["f"] if estimated else [])


def test_a_matmul_that_the_memory_limits_is_bounded_by_its_bytes():
    slow = replace(TPU, hbm_bytes_per_second=100.0, memory_share=0.5)
    assert simulated(fused_matmul(60_000, *MATMUL), chip=slow).seconds == pytest.approx(2 * (300 + 200 + 600) / 50)


@pytest.mark.parametrize(
    ("convolution", "shapes", "multiplied"),
    [
        ("dim_labels=0bf_io0->0bf, window={size=1}", ("6,8,30", "6,8,20", "20,30,1"), 6 * 8 * 20 * 30),
        # (6, 8, 20) x (20, 4 heads, 30) -> (6, 8, 4, 30): the heads are a window that slides over padding
        ("dim_labels=0bf1_i1o0->0b1f, window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}",
         ("6,8,4,30", "6,8,20,1", "20,4,30,1"), 6 * 8 * 20 * 4 * 30),
        # 6 matrices (8, 20) x (20, 30): one of the window's six places is on an element, the others between two
        ("dim_labels=0bf_0io->0bf, window={size=6 stride=5 pad=0_0 lhs_dilate=6}",
         ("6,8,30", "6,8,20", "6,20,30"), 6 * 8 * 20 * 30),
        # contracted over the window, too: (8, 6, 20) x (6, 20, 30) -> (8, 30)
        ("dim_labels=b0f_0io->b0f, window={size=6}", ("8,1,30", "8,6,20", "6,20,30"), 8 * 6 * 20 * 30),
    ],
)  # fmt: skip
def test_the_flops_of_a_convolution_are_those_of_the_matmuls_it_stands_for(convolution, shapes, multiplied):
    text = fused_matmul(10**9, convolution, *(f"bf16[{shape}]" for shape in shapes))
    assert simulated(text).seconds == pytest.approx(2 * multiplied / (0.8 * 1e3))


@pytest.mark.parametrize(
    ("config", "num_axes"),
    [
        ('"emitter":"1DAllGatherNonMajorDimImbalanced","debug":"\\ngroup_size = 256 "', 1),
        ('"emitter":"2DAllGatherOnMajorDim","debug":"\\ngroup_size = 16 "', 2),
        (
            '"emitter":"RotatedPincerEmitter","strategy":"StrategyND","debug":"\\nStrategyND{colors:2 phases:2 cores:{16 16}"',
            2,
        ),
        (
            '"emitter":"RotatedPincerEmitter","strategy":"StrategySubgroupND","debug":"\\nStrategySubgroupND{colors:1 phases:2 cores:{4 4}"',
            1,
        ),
        (
            '"emitter":"RotatedPincerEmitter","strategy":"UniDirectionNDRingStrategy","debug":"\\nUniDirectionNDRingStrategy{colors:4 phases:2"',
            2,
        ),
        (
            '"emitter":"RotatedPincerShortEmitter","strategy":"StrategyRing","debug":"\\nStrategyRing{colors:1 phases:1"',
            1,
        ),
        ('"emitter":"AllGatherWithNetRouterEmitter","debug":"\\ngroup_size = 256 "', None),
    ],
)
def test_the_program_says_how_many_axes_carry_a_collective_at_once(config, num_axes):
    line = f'  ROOT %g = {GATHER}, backend_config={{"collective_algorithm_config":{{{config}}}}}'
    found = only_collective(module(line))
    assert found.num_axes == num_axes


def test_a_transfer_ends_where_it_is_received_not_where_it_has_left():
    """16 ms on the link, beside 4 and 10 ms of compute; the second begins after the send is done."""
    lines = [
        "  %t = token[] after-all()",
        f"  %send = (bf16[8]{{0}}, u32[], token[]) send(%x, %t), channel_id=3, {SENT}",
        f"  %recv = (bf16[8]{{0}}, u32[], token[]) recv(%t), channel_id=2, {SENT}",
        compute("a", 4),
        "  %send-done = token[] send-done(%send), channel_id=3",
        compute("b", 10),
        "  %recv-done = (bf16[8]{0}, token[]) recv-done(%recv), channel_id=2",
        "  ROOT %r = bf16[8]{0} get-tuple-element(%recv-done), index=0",
    ]
    result = simulated(module(*lines))
    assert totals(result) == {"send": (1, 0.016, 0.002)}
    alone = simulated(module(*(line for line in lines if "recv" not in line)).replace("%send-done", "ROOT %send-done"))
    assert totals(alone) == {"send": (1, 0.016, 0.012)}, "what nothing answers ends when it is sent"


def test_pairs_of_two_slices_are_their_devices():
    """libtpu 0.0.42.1, of a permute between two slices of four devices: the program is that of one slice."""
    sent = (
        'frontend_attributes={_xla_host_transfer_rendezvous="ppermute.3_0",'
        '_xla_megascale_target={{100000->200000},{100001->200001}},_xla_megascale_transfer_type="ONE_TO_ONE"}'
    )
    lines = ["  %t = token[] after-all()", f"  ROOT %send = (bf16[8]{{0}}, u32[], token[]) send(%x, %t), {sent}"]
    found = only_collective(module(*lines))
    assert (found.kind, found.groups, found.num_slices, found.num_bytes) == ("send", ((0, 4), (1, 5)), None, 16)
    assert found.is_certain
    group = '{{100000,100001,200000,200001}},_xla_megascale_transfer_type="ALL_TO_ALL"'
    exchanged = sent[: sent.index("{{")] + group + "}"
    found = only_collective(module(*lines).replace(sent, exchanged))
    assert (found.kind, found.groups, found.num_bytes) == ("all-to-all", ((0, 1, 4, 5),), 4 * 16)


def test_a_kernel_that_says_its_flops_is_priced_by_them():
    config = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":"1200","bytes_accessed":"1"}}}'
    line = f'  ROOT %k = bf16[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call", {config}'
    result = simulated(module(line))
    assert (result.priced_by, result.unpriced) == ({"flops": 1}, {})
    assert result.seconds == pytest.approx(1200 / (grouped_kernels()["declared"].share * 1e3))


@pytest.mark.parametrize(
    ("result", "operands"),
    [
        ("bf16[64,32]", "bf16[64,16] %rows, bf16[4,16,32] %matrices"),  # rows of 16 by matrices of 16 x 32
        ("bf16[64,32]", "bf16[64,16] %rows, bf16[4,32,16] %matrices"),  # transposed
        ("bf16[4,16,32]", "bf16[64,16] %rows, bf16[64,32] %others"),  # of 4 groups of the 64 rows
    ],
)
def test_a_grouped_matmul_of_a_gpu_takes_one_matrix_for_each_row_that_is_filled(result, operands):
    name = 'metadata={op_name="jit(step)/experts=routed/filled=0.5000/grouped_matmul/pallas_call"}'
    given = [operand.split(" ") for operand in ("s32[4] %sizes", *operands.split(", "))]
    lines = [f"  {each} = {kind} parameter({n + 1})" for n, (kind, each) in enumerate(given)]
    call = f'custom-call({", ".join(each for _, each in given)}), custom_call_target="{TRITON}"'
    text = module(*lines, f"  ROOT %k = {result} {call}, {name}")
    chip = replace(GPU, peak_flops_per_second={"bfloat16": 1e6}, hbm_bytes_per_second=1e12, kernels_share=0.5)
    found = simulated(text, chip=chip)
    assert (found.priced_by, found.unpriced) == ({"flops": 1}, {})
    tile = 64 if result.startswith("bf16[4,") else 128  # of the rows, of which each group computes one tile more
    seconds = (0.5 * 64 + 4 * tile) * 2 * 16 * 32 / (0.5 * grouped_kernels()["triton"].share * 1e6)
    assert found.seconds == pytest.approx(seconds + cost_model().kernel_gap_seconds)
    assert simulated(text.replace("experts=routed", "other"), chip=chip).unpriced == {"k": "k"}


@pytest.mark.parametrize(
    ("line", "attributes", "given", "groups"),
    [
        (GATHER, "channel_id=1, use_global_device_ids=true, ", "{{0,3}}", "{{0,3}}"),
        (GATHER, "", "{{0,1}}", "{{0,2},{1,3}}"),  # replicas, for each partition
        (GATHER, "channel_id=1, ", "{{0,1}}", "{{0,1,2,3}}"),  # replicas with all of their partitions
        (f"bf16[8]{{0}} collective-permute(%x), {GROUPS}", "channel_id=1, ", "{{0,1}}", "{{0,1},{2,3}}"),  # partitions
    ],
)
def test_groups_number_devices_replicas_or_partitions(line, attributes, given, groups):
    """Two replicas of two partitions: devices 0 to 3."""
    text = module(f"  ROOT %g = {line}").replace(GROUPS, f"{attributes}replica_groups={given}")
    text = text.replace("num_partitions=4", "replica_count=2, num_partitions=2")
    found = only_collective(text)
    assert found.groups == parse_groups(groups, 4)


def test_a_user_says_how_often_a_loop_runs_that_does_not_say_it():
    computations, run = loop(compute("a", 100), f"  %g = {GATHER}", trips=7)
    text = module(run, before=computations.replace("direction=LT", "direction=EQ"))
    steps = read_steps(parse_module(text), TPU)
    assert open_loops(steps) == ["loop"]
    for trips in ({"loop": 7}, {ALL: 7}):
        result = simulate(apply_choices(steps, Choices(trips=trips)), one_link)
        assert (result.seconds, result.unknown_loops) == (pytest.approx(7 * 0.164), set())
    known = read_steps(parse_module(module(run, before=computations)), TPU)
    assert simulate(apply_choices(known, Choices(trips={ALL: 3})), one_link).seconds == pytest.approx(7 * 0.164)


@pytest.mark.parametrize("share", [None, 0.0, 0.25, 1.0])
def test_a_branch_takes_its_share_of_the_step(share):
    """100 ms of compute, then a gather of 64 ms in one branch and 10 ms of compute in the other."""
    branches = (
        f"%gathers {{\n  %x = bf16[8]{{0}} parameter(0)\n  ROOT %g = {GATHER}\n}}\n"
        f"%computes {{\n  %x = bf16[8]{{0}} parameter(0)\n  ROOT {compute('b', 10).strip()}\n}}\n"
    )
    chosen = "  ROOT %c = bf16[32]{0} conditional(%p, %x, %x), true_computation=%gathers, false_computation=%computes"
    text = module(compute("a", 100), "  %p = pred[] constant(true)", chosen, before=branches)
    steps = read_steps(parse_module(text), TPU)
    assert conditionals(steps) == ["c"]
    result = simulate(apply_choices(steps, Choices(shares={} if share is None else {"c": share})), one_link)
    taken = 1.0 if share is None else share
    assert result.seconds == pytest.approx(0.1 + taken * 0.064 + (1 - taken) * 0.010)
    assert result.seconds == pytest.approx(sum(result.compute_seconds.values()) + result.exposed_seconds)
    assert result.exposed_seconds == pytest.approx(taken * 0.064)
    if taken:
        assert result.collectives["g"].loops == (("c", Taken(share)),)
