"""The makespan of a pipeline's table: against its theory, the longest path, and the reading of compiled programs."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.compiler.core.format import human_seconds, human_share
from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.pipeline.buffers import slots_in_use
from meshloom.compiler.pipeline.makespan import (
    AS_SHORT,
    TickLoop,
    TickPart,
    TickPermute,
    TickSlot,
    choose_table,
    time_table,
    time_ticks,
)
from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import PipelineOp, Slot, StagePlacement, TickForm, pack_ticks
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.stage_clocks import StagedDevices, simulate_stages
from meshloom.compiler.xla.schedule.steps import Branches, Compute, Loop, every
from support.pipeline_tables import declared
from support.pipelines import DEVICES, GPIPE, ONE_F_ONE_B, STAGES, Rows
from support.recorded import recorded_text

MULTI, UNIT = TickForm.MULTI, TickForm.UNIT
NEXT = tuple(((stage - 1) % STAGES,) for stage in range(STAGES))  # the stage before sends
BEFORE = tuple(((stage + 1) % STAGES,) for stage in range(STAGES))


def slot(rows: Rows, operation: str) -> TickSlot:
    on = tuple(tuple(int(operation in [each for each, _ in slots]) for slots in row) for row in rows)
    return TickSlot(((), ()), on)


def loop(rows: Rows) -> TickLoop:
    return TickLoop(0, (TickPermute(BEFORE, 0, needed_by=3), slot(rows, "F"), TickPermute(NEXT, 0), slot(rows, "BW")))


def each_stage(*seconds: float) -> np.ndarray:
    """The seconds of each branch of a slot, the same on all stages, of one declaration."""
    return np.array([[[one]] * STAGES for one in seconds])


def makespan(rows: Rows, f: float, b: float, *, permute: float = 0.0, idle: float = 0.0, rest: float = 0.0) -> float:
    seconds = [np.array([permute]), each_stage(idle, f), np.array([permute]), each_stage(idle, b)]
    return float(time_ticks(loop(rows), seconds, np.full((STAGES, 1), rest)).max())


@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (1.0, 0.5), (1.0, 1.0)])
def test_without_permutes_the_bubble_is_that_of_theory(f, b):
    """Eight microbatches on four stages: 3 / 8 of the work."""
    work = 8 * (f + b)
    assert makespan(ONE_F_ONE_B, f, b) == pytest.approx(work * (1 + 3 / 8))
    assert makespan(GPIPE, f, b) == pytest.approx(work * (1 + 3 / 8))


def test_permutes_are_exposed_in_the_ramps_of_1f1b_and_in_each_tick_of_gpipe():
    """Nothing runs beside a permute where a tick has one slot: 22 ticks, of which the last one's is not needed."""
    free, f, b, permute = makespan(ONE_F_ONE_B, 1.0, 2.0), 1.0, 2.0, 0.5
    assert makespan(ONE_F_ONE_B, f, b, permute=permute) - free == pytest.approx(6 * permute)
    longer = makespan(GPIPE, f, b, permute=permute) - makespan(GPIPE, f, b)
    assert 20 * permute <= longer <= 22 * permute


def test_a_head_that_all_stages_run_together_waits_for_the_last():
    """Tick 0: 5 s on stage 0, 1 s on the others; then 2 s on all of them."""
    first = TickSlot(((), ()), ((1, 0, 0, 0),))
    shared = TickSlot(((), ()), ((1,) * STAGES,), is_shared=True)
    found = time_ticks(TickLoop(0, (first, shared)), [each_stage(1, 5), each_stage(0, 2)], np.zeros((STAGES, 1)))
    assert found[:, 0].tolist() == [7] * STAGES


def longest(rows: Rows, parts: tuple[TickPart, ...], f: float, b: float, permute: float, rest: float) -> float:
    """The longest path, from the end to the beginning: each moment is its own work after the latest before it."""
    (_, first, _, second) = parts
    assert isinstance(first, TickSlot)
    assert isinstance(second, TickSlot)

    @cache
    def begin(tick: int, stage: int) -> float:
        return 0.0 if tick == 0 else end(tick - 1, stage)

    @cache
    def forward(tick: int, stage: int) -> float:
        return begin(tick, stage) + f * first.chosen[tick][stage]

    @cache
    def end(tick: int, stage: int) -> float:
        come = max(begin(tick, stage), begin(tick, (stage + 1) % STAGES)) + permute
        backward = max(forward(tick, stage), come) + b * second.chosen[tick][stage]
        sent = max(forward(tick, stage), forward(tick, (stage - 1) % STAGES)) + permute
        return max(backward, sent) + rest

    return max(end(len(rows) - 1, stage) for stage in range(STAGES))


@settings(max_examples=40)
@given(*[st.floats(0, 10)] * 4, st.sampled_from([ONE_F_ONE_B, GPIPE]))
def test_the_makespan_is_the_longest_path(f, b, permute, rest, rows):
    expected = longest(rows, loop(rows).parts, f, b, permute, rest)
    assert makespan(rows, f, b, permute=permute, rest=rest) == pytest.approx(expected)


def seconds_of(declared_seconds):
    """Seconds by operation, longer on later stages and second chunks."""
    return lambda op, stage, chunk: declared_seconds[op] * (1 + 0.25 * stage + 0.5 * chunk)


def last_end(table, op_seconds, permute, rest):
    """The end of the last tick, one moment after the other. Each end of a permute waits for the other one."""
    place, stages = table.placement, range(table.placement.num_stages)
    pairs = [(place.stage(k), place.stage(k + 1)) for k in range(place.num_virtual - 1)]
    with_neighbours = [{s, *(one for pair in pairs if s in pair for one in pair)} for s in stages]
    partners = [neighbours if len(stages) > 1 else () for neighbours in with_neighbours]
    ends = [0.0 for _ in stages]

    def run(slots, stage, *ops):
        includes = "R" not in table.ops and {"B", "BW"} & set(ops)
        return sum(
            op_seconds(slot.op, stage, slot.chunk)
            + (op_seconds(PipelineOp.RECOMPUTE, stage, slot.chunk) if includes else 0)
            for slot in slots
            if slot.op in ops
        )

    for row in table.rows:
        begin = ends
        forward = [begin[s] + run(row[s], s, "F") for s in stages]
        again = [forward[s] + run(row[s], s, "R") for s in stages]
        has_backward = table.ops & {PipelineOp.BACKWARD, PipelineOp.INPUT_GRADIENT}
        ready = [max([again[s], *(begin[o] + permute for o in partners[s] if has_backward)]) for s in stages]
        backward = [ready[s] + run(row[s], s, "B", "BW") for s in stages]
        weight = [backward[s] + run(row[s], s, "W") for s in stages]
        ends = [max([weight[s], *(forward[o] + permute for o in partners[s])]) + rest for s in stages]
    return max(ends)


@settings(max_examples=60)
@given(declared(), st.tuples(*[st.floats(0, 4)] * 4), st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([0.0, 0.1]))
def test_the_time_of_a_table_is_that_of_its_moments(declaration, taken, permute, rest):
    f, r, b, w = taken
    op_seconds = seconds_of({"F": f, "R": r, "B": b, "W": w, "BW": b + w})
    table = build_table(*declaration)
    found = time_table(table, op_seconds, permute, rest)
    assert found.seconds == pytest.approx(last_end(table, op_seconds, permute, rest))
    assert found.seconds - found.permutes == pytest.approx(last_end(table, op_seconds, 0.0, rest))
    for stage, work in enumerate(found.work):
        own = [one for one in found.slots if one.stage == stage]
        assert work == pytest.approx(sum(one.end - one.begin for one in own) + rest * table.num_ticks)
        assert all(one.end <= two.begin + 1e-9 for one, two in pairwise(own))
    assert max(one.end for one in found.slots) <= found.seconds + 1e-9


UNIT_SECONDS = {"F": 1.0, "R": 0.0, "B": 1.0, "W": 1.0, "BW": 2.0}


def bubble_of(name, form, stages=4, microbatches=8, seconds=UNIT_SECONDS, **more):
    table = build_table(name, stages, SCHEDULES[name].num_chunks or 2, microbatches, form, **more)
    return time_table(table, lambda op, stage, chunk: seconds[op], 0.0).bubble_of_work


def test_bubbles_of_tables_are_those_of_the_papers():
    """Four stages, eight microbatches: 3 / 8 of the work, and the parts of it that chunks and W leave."""
    assert bubble_of("gpipe", MULTI) == pytest.approx(3 / 8)
    assert bubble_of("1f1b", MULTI) == pytest.approx(3 / 8)
    assert bubble_of("1f1b", UNIT) == pytest.approx(1 / 4)
    assert bubble_of("interleaved_1f1b", MULTI) == pytest.approx(3 / 16)
    assert bubble_of("zb_h1", UNIT) == pytest.approx(1 / 8)
    assert bubble_of("zb_v", UNIT) == pytest.approx(1 / 16)
    assert bubble_of("dualpipe_v", UNIT) == pytest.approx(1 / 16)
    with_recompute = {**UNIT_SECONDS, "R": 1.0}
    assert bubble_of("1f1b", UNIT, seconds=with_recompute, recomputes=True) == pytest.approx(3 / 16)
    assert bubble_of("1f1b", MULTI, seconds=with_recompute, recomputes=True) == pytest.approx(9 / 32)
    assert bubble_of("zb_h1", MULTI) > bubble_of("1f1b", MULTI)  # a stage that runs W holds up its neighbours


def test_the_bubble_of_stages_with_unlike_work_is_their_mean():
    """One microbatch through two stages: F takes 1 and 3 s, BW 2 s each. They wait 5 and 3 of 8 s."""
    table = build_table("1f1b", 2, 1, 1, MULTI)
    found = time_table(table, lambda op, stage, chunk: 3.0 if op == "F" and stage == 1 else UNIT_SECONDS[op])
    assert (found.seconds, found.work, found.bubble) == (8, (3, 5), 4)


def test_1f1b_of_joint_operations_one_by_one_is_worse_than_gpipe():
    """Where a stage runs F its neighbours run BW, and wait for each other in each tick: 2/3 of the work."""
    forward, backward = ([Slot(op, 0, m) for m in range(8)] for op in (PipelineOp.FORWARD, PipelineOp.BACKWARD))
    orders = []
    for ahead in (3, 2, 1, 0):
        pairs = zip(forward[ahead:], backward, strict=False)
        orders.append([*forward[:ahead], *(slot for pair in pairs for slot in pair), *backward[8 - ahead :]])
    table = pack_ticks("1f1b", StagePlacement(4), orders, UNIT)
    found = time_table(table, lambda op, stage, chunk: UNIT_SECONDS[op])
    assert found.bubble_of_work == pytest.approx(2 / 3)


def candidates(name="1f1b"):
    return {f"{form} ticks": build_table(name, 4, 1, 8, form) for form in TickForm}


@pytest.mark.parametrize(("permute", "chosen"), [(0.0, "unit ticks"), (1.0, "multi ticks")])
def test_the_form_of_ticks_follows_the_price_of_permutes(permute, chosen):
    """Unit ticks have the shorter ramps, and expose a permute each."""
    found = choose_table(candidates(), lambda table: lambda op, stage, chunk: UNIT_SECONDS[op], permute)
    assert found.label == chosen
    assert found.table == candidates()[chosen]
    other = next(label for label in candidates() if label != chosen)
    slower = time_table(candidates()[other], lambda op, stage, chunk: UNIT_SECONDS[op], permute).seconds
    assert found.time.seconds < slower
    bubble = human_share(found.time.bubble / found.time.seconds)
    expected = f"{chosen}: {human_seconds(found.time.seconds)}, {bubble} of it bubble; {other}: {human_seconds(slower)}"
    assert found.reason == expected


@pytest.mark.parametrize(("ahead", "chosen"), [(0.999, "multi ticks"), (1.001, "unit ticks"), (10.0, "unit ticks")])
def test_of_tables_that_take_about_as_long_the_smaller_is_chosen(ahead, chosen):
    """A permute such that multi ticks, of more slots, are shorter: by less than the tolerance the smaller ones are
    chosen, and by more the shorter ones."""

    def seconds(label, permute):
        return time_table(candidates()[label], lambda op, stage, chunk: UNIT_SECONDS[op], permute).seconds

    low = permute = 0.0
    high = 1.0
    wanted = 1 + (AS_SHORT - 1) / ahead
    for _ in range(60):  # the price at which unit ticks take this much longer
        permute = (low + high) / 2
        is_over = seconds("unit ticks", permute) > wanted * seconds("multi ticks", permute)
        low, high = (low, permute) if is_over else (permute, high)
    found = choose_table(
        candidates(),
        lambda table: lambda op, stage, chunk: UNIT_SECONDS[op],
        permute,
        num_bytes=lambda table: sum(max(slots) for slots in slots_in_use(table).values()),
    )
    sizes = {label: sum(slots_in_use(table)["x"]) for label, table in candidates().items()}
    assert sizes["unit ticks"] < sizes["multi ticks"]
    assert found.label == chosen


@pytest.mark.parametrize(("room", "chosen"), [(7, "multi ticks"), (3, "unit ticks"), (1, "multi ticks")])
def test_a_table_whose_buffers_have_no_room_is_left_out_if_another_has(room, chosen):
    """Multi ticks are the shorter ones here, and take 7 slots; the others take 3."""
    unlike = {"F": 1.0, "R": 0.0, "B": 3.0, "W": 0.2, "BW": 3.2}
    slots = {"multi ticks": 7, "unit ticks": 3}
    tables = {label: candidates()[label] for label in slots}
    by_table = {table.rows: slots[label] for label, table in tables.items()}
    found = choose_table(
        tables,
        lambda table: lambda op, stage, chunk: unlike[op],
        num_bytes=lambda table: by_table[table.rows],
        room_bytes=room,
    )
    assert found.label == chosen


def test_unit_ticks_are_bad_where_operations_take_unlike_times():
    unlike = {"F": 1.0, "R": 0.0, "B": 3.0, "W": 0.2, "BW": 3.2}
    assert choose_table(candidates(), lambda table: lambda op, stage, chunk: unlike[op]).label == "multi ticks"


@pytest.mark.parametrize(("name", "rows"), [("1f1b", ONE_F_ONE_B), ("gpipe", GPIPE)])
@pytest.mark.parametrize("permute", [0.0, 60e3, 500e3])
def test_the_bubble_of_compiled_programs_is_within_two_percent_of_the_tables(name, rows, permute):
    """Slots, and what a tick does beside them, as long as in the program; the permutes as long as given."""
    module = parse_module(recorded_text(f"pipeline_{name}"))
    steps = read_steps(module, Chip("tpu", 1.0, {}, float("inf")))
    found = simulate_stages(
        steps,
        lambda one: Placed(permute if one.kind == "collective-permute" else 0.0, (one.name,)),
        StagedDevices(rows, [0] * STAGES, DEVICES, module.num_devices),
    )
    (ticks,) = (each for each in steps if isinstance(each, Loop))
    no_f, f, no_b, b = (branch for slot in ticks.body if isinstance(slot, Branches) for branch in slot.branches)
    rest = own(ticks.body)
    outside = own(steps)
    head = 0.0 if name == "1f1b" else sum(each.seconds or 0 for each in every(f, Compute) if "end=last" in each.op_name)
    seconds = [np.array([permute]), each_stage(own(no_f), own(f)), np.array([permute]), each_stage(own(no_b), own(b))]
    seconds[1][1, -1] += head
    table = float(time_ticks(loop(rows), seconds, np.full((STAGES, 1), rest)).max()) + outside
    assert found.seconds == pytest.approx(table, rel=0.01)
    busiest = found.stages[-1]
    bubble = found.seconds - busiest.compute_seconds
    assert bubble == pytest.approx(table - busiest.compute_seconds, rel=0.02)


def own(steps) -> float:
    """The compute of steps, and of loops over layers in them; of no branches."""
    total = 0.0
    for each in steps:
        if isinstance(each, Compute):
            total += each.seconds or 0.0
        elif isinstance(each, Loop) and each.num_trips == 2:
            total += 2 * own(each.body)
    return total


@pytest.mark.parametrize(("head", "alone", "shared"), [(0.5, 0.500, 0.167), (1.0, 0.750, 0.150)])
def test_a_head_makes_all_stages_wait_unless_they_share_it(head, alone, shared):
    """Of four stages with 16 microbatches, and a head of so many times the work of a stage's layers: 16 ticks with it,
    and three without. Over the mean work of a stage."""
    table, work = build_table("1f1b", 4, 1, 16, TickForm.MULTI), 16 * 3 * (1 + head / 4)
    seconds = {PipelineOp.FORWARD: 1.0, PipelineOp.BACKWARD: 2.0, PipelineOp.RECOMPUTE: 0.0}

    ends = {(PipelineOp.FORWARD, 3): 3 * head}
    on_last = time_table(table, lambda op, stage, chunk: seconds[op] + ends.get((op, stage), 0.0))
    assert on_last.seconds / work - 1 == pytest.approx(alone, abs=1e-3)
    over_stages = time_table(table, lambda op, stage, chunk: seconds[op], head_seconds=3 * head / 4)
    assert over_stages.seconds / work - 1 == pytest.approx(shared, abs=1e-3)
    assert over_stages.work == pytest.approx([work] * 4)
