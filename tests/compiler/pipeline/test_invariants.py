"""Tables broken by hand: each kind of mistake is found, where it is."""

from dataclasses import replace

import pytest

from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import PipelineOp, Slot, TickForm, Violation, find_violations

F, R, B, W, BW = PipelineOp


@pytest.fixture
def table():
    return build_table("1f1b", 2, 1, 4, TickForm.MULTI)


def changed(table, *changes):
    """Returns the table with other slots in these (tick, stage)."""
    rows = [list(row) for row in table.rows]
    for tick, stage, *slots in changes:
        rows[tick][stage] = tuple(Slot(*slot) for slot in slots)
    return replace(table, rows=tuple(map(tuple, rows)))


def said(table):
    return [str(each) for each in find_violations(table)]


def test_the_table_that_the_others_break(table):
    assert [[len(slots) for slots in row] for row in table.rows] == [[1, 0], [1, 2], [2, 2], [2, 2], [1, 2], [1, 0]]
    assert said(table) == []


def test_an_operation_twice(table):
    broken = changed(table, (1, 0, (F, 0, 0)), (0, 0, (F, 0, 1)), (2, 0, (F, 0, 0), (BW, 0, 0)))
    assert said(broken) == [
        "tick 2, stage 0: F of microbatch 0 in chunk 0 has already run in tick 1",
        "stage 0: F of microbatch 2 in chunk 0 never runs",
    ]


def test_an_operation_that_never_runs(table):
    assert said(changed(table, (5, 0))) == ["stage 0: BW of microbatch 3 in chunk 0 never runs"]
    nothing = changed(table, (4, 0), (5, 0))
    assert said(nothing) == ["stage 0: BW of microbatch 2 in chunk 0 and of 1 more never runs"]


def test_a_result_of_the_stage_below_is_of_an_earlier_tick(table):
    early = changed(table, (0, 1, (F, 0, 0)), (1, 1, (BW, 0, 0)))
    what = "F of microbatch 0 in chunk 0 needs F of chunk 0 on stage 0 in an earlier tick, which runs in tick 0"
    assert find_violations(early) == (Violation(0, 1, what),)


def test_a_gradient_of_the_stage_above_is_of_an_earlier_tick(table):
    early = changed(table, (1, 0, (F, 0, 1), (BW, 0, 0)), (2, 0, (F, 0, 2)))
    what = "BW of microbatch 0 in chunk 0 needs BW of chunk 0 on stage 1 in an earlier tick, which runs in tick 1"
    assert find_violations(early) == (Violation(1, 0, what),)


def test_backward_before_forward(table):
    swapped = changed(table, (2, 1, (F, 0, 1), (BW, 0, 2)), (3, 1, (F, 0, 2), (BW, 0, 1)))
    assert Violation(2, 1, "BW of microbatch 2 in chunk 0 needs F of chunk 0, which runs in tick 3") in find_violations(
        swapped
    )


def test_a_weight_gradient_before_its_input_gradient():
    table = build_table("zb_h1", 2, 1, 4, TickForm.MULTI)
    ticks = {slot: tick for tick, stage, slot in table.slots() if stage == 0}
    b, w = ticks[Slot(B, 0, 3)], ticks[Slot(W, 0, 3)]
    assert b == w or b < w
    rows = [list(row) for row in table.rows]
    rows[w][0] = tuple(slot for slot in rows[w][0] if slot != Slot(W, 0, 3))
    rows[0][0] = (*rows[0][0], Slot(W, 0, 3))
    assert f"tick 0, stage 0: W of microbatch 3 in chunk 0 needs B of chunk 0, which runs in tick {b}" in said(
        replace(table, rows=tuple(map(tuple, rows)))
    )


def test_a_gradient_before_its_recomputation():
    table = build_table("1f1b", 1, 1, 1, TickForm.UNIT, recomputes=True)
    assert [slot.op for _, _, slot in table.slots()] == [F, R, B, W]
    swapped = changed(table, (1, 0, (B, 0, 0)), (2, 0, (R, 0, 0)))
    assert said(swapped) == ["tick 1, stage 0: B of microbatch 0 in chunk 0 needs R of chunk 0, which runs in tick 2"]


def test_two_operations_of_one_kind_in_a_tick(table):
    assert said(changed(table, (0, 0, (F, 0, 0), (F, 0, 1)), (1, 0))) == [
        "tick 0, stage 0: F of microbatch 0 in chunk 0 and F of microbatch 1 in chunk 0 are of one kind: "
        "a tick runs one of each"
    ]


def test_operations_of_a_tick_in_another_order(table):
    what = "F of microbatch 2 in chunk 0 follows BW of microbatch 0 in chunk 0: a tick runs F, R, B or BW, W"
    assert said(changed(table, (2, 0, (BW, 0, 0), (F, 0, 2)))) == [f"tick 2, stage 0: {what}"]


def test_joint_and_split_backward_operations_in_one_table(table):
    what = "B of microbatch 3 in chunk 0: the table has BW too; either all is split or nothing"
    assert said(changed(table, (5, 0, (B, 0, 3)))) == [f"tick 5, stage 0: {what}"]


def test_chunks_microbatches_and_stages_that_are_not_there(table):
    assert said(changed(table, (0, 0, (F, 1, 0)))) == [
        "tick 0, stage 0: F of microbatch 0 in chunk 1: the stage has 1 chunk"
    ]
    assert said(changed(table, (0, 0, (F, 0, 4)))) == [
        "tick 0, stage 0: F of microbatch 4 in chunk 0: the table has 4 microbatches"
    ]
    assert said(replace(table, rows=(*table.rows, ((),)))) == ["tick 6, stage 1: the tick has 1 stage"]
