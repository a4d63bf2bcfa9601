"""The makespan of a pipeline's table: against its theory, the longest path, and the reading of compiled programs."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.compiler.estimate.tick_times import TickLoop, TickPart, TickPermute, TickSlot, time_ticks
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.simulate import Priced
from meshloom.compiler.xla.schedule.stage_clocks import StagedDevices, simulate_stages
from meshloom.compiler.xla.schedule.steps import Branches, Compute, Loop, every
from support.pipelines import DEVICES, GPIPE, ONE_F_ONE_B, STAGES, Rows
from support.recorded import recorded_text

NEXT = tuple(((stage - 1) % STAGES,) for stage in range(STAGES))  # the stage before sends
BEFORE = tuple(((stage + 1) % STAGES,) for stage in range(STAGES))


def slot(rows: Rows, operation: str) -> TickSlot:
    on = tuple(tuple(int(operation in [each for each, _ in slots]) for slots in row) for row in rows)
    return TickSlot(((), ()), on)


def loop(rows: Rows) -> TickLoop:
    return TickLoop(0, (TickPermute(BEFORE, 0), slot(rows, "F"), TickPermute(NEXT, 0), slot(rows, "BW")))


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


@settings(max_examples=40, deadline=None)
@given(*[st.floats(0, 10)] * 4, st.sampled_from([ONE_F_ONE_B, GPIPE]))
def test_the_makespan_is_the_longest_path(f, b, permute, rest, rows):
    expected = longest(rows, loop(rows).parts, f, b, permute, rest)
    assert makespan(rows, f, b, permute=permute, rest=rest) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "rows"), [("1f1b", ONE_F_ONE_B), ("gpipe", GPIPE)])
@pytest.mark.parametrize("permute", [0.0, 60e3, 500e3])
def test_the_bubble_of_compiled_programs_is_within_two_percent_of_the_tables(name, rows, permute):
    """Slots, and what a tick does beside them, as long as in the program; the permutes as long as given."""
    module = parse_module(recorded_text(f"pipeline_{name}"))
    steps = read_steps(module, Chip("tpu", 1.0, {}, float("inf")))
    found = simulate_stages(
        steps,
        lambda one: Priced(permute if one.kind == "collective-permute" else 0.0, (one.name,)),
        StagedDevices(rows, STAGES, DEVICES, module.num_devices),
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
