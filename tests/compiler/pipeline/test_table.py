"""Schedules as data: where virtual stages are, and orders put into ticks."""

import pytest

from meshloom.compiler.pipeline.table import PipelineOp, Slot, StagePlacement, TickForm, pack_ticks

PLACEMENTS = [
    StagePlacement(stages, chunks, is_v) for stages in (1, 2, 4) for chunks in (1, 2, 3) for is_v in (False, True)
]


def order_of(stage: int, num_stages: int, num_microbatches: int, ahead: int) -> list[Slot]:
    """Returns the order of 1F1B: `ahead` forward passes for each stage behind come first, then they alternate."""
    warm_up = min(num_microbatches, 1 + ahead * (num_stages - 1 - stage))
    forward = [Slot(PipelineOp.FORWARD, 0, m) for m in range(num_microbatches)]
    backward = [Slot(PipelineOp.BACKWARD, 0, m) for m in range(num_microbatches)]
    order, rest = forward[:warm_up], forward[warm_up:]
    for one in backward:
        order += [one, *rest[:1]]
        rest = rest[1:]
    return order


def gpipe_rows(num_stages: int, num_microbatches: int):
    """Returns (operation, microbatch) by tick and stage, where all go forward before the first goes back."""
    return written_rows(num_stages, num_microbatches, num_stages - 1 + num_microbatches)


def one_f_one_b_rows(num_stages: int, num_microbatches: int):
    """Returns them where a microbatch goes back as soon as it has reached the last stage."""
    return written_rows(num_stages, num_microbatches, num_stages - 1)


def written_rows(num_stages: int, num_microbatches: int, first_backward: int):
    """first_backward: the tick of the last stage's first backward slot."""
    num_ticks = first_backward + num_microbatches + num_stages - 1
    rows = [[[] for _ in range(num_stages)] for _ in range(num_ticks)]
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            rows[stage + microbatch][stage].append(("F", microbatch))
            rows[first_backward + num_stages - 1 - stage + microbatch][stage].append(("BW", microbatch))
    return rows


def rows_of(table):
    return [[sorted((str(slot.op), slot.microbatch) for slot in slots) for slots in row] for row in table.rows]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_each_virtual_stage_has_a_place(placement):
    places = [(placement.stage(k), placement.chunk(k)) for k in range(placement.num_virtual)]
    assert len(set(places)) == placement.num_virtual
    assert [placement.virtual(*place) for place in places] == list(range(placement.num_virtual))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_result_goes_where_the_next_virtual_stage_is(placement):
    for k in range(placement.num_virtual - 1):
        arrives = (placement.stage(k) + placement.direction(k)) % placement.num_stages
        assert arrives == placement.stage(k + 1)


def test_on_two_stages_the_way_back_of_a_v_is_down():
    assert [StagePlacement(2, 2, is_v=True).direction(k) for k in range(3)] == [1, 0, -1]
    assert [StagePlacement(2, 2).direction(k) for k in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 2), (8, 16)])
def test_orders_become_the_tables_that_the_executor_has(stages, microbatches):
    """Those are written tick by tick, not packed."""
    placement = StagePlacement(stages)
    all_forward = [order_of(stage, stages, microbatches, microbatches) for stage in range(stages - 1)]
    all_forward.append(
        [*(Slot(op, 0, m) for op in (PipelineOp.FORWARD, PipelineOp.BACKWARD) for m in range(microbatches))]
    )
    packed = pack_ticks("gpipe", placement, all_forward, TickForm.MULTI)
    assert packed.num_microbatches == microbatches
    alternating = [order_of(stage, stages, microbatches, 2) for stage in range(stages)]
    written = [[sorted(slots) for slots in row] for row in one_f_one_b_rows(stages, microbatches)]
    assert rows_of(pack_ticks("1f1b", placement, alternating, TickForm.MULTI)) == written
    expected = {
        (op, m, s): t
        for t, row in enumerate(gpipe_rows(stages, microbatches))
        for s, slots in enumerate(row)
        for op, m in slots
    }
    for work, tick in packed.ticks.items():
        assert tick <= expected[str(work.op), work.microbatch, work.virtual]


@pytest.mark.parametrize("form", TickForm)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_nothing_runs_before_what_it_needs(stages, microbatches, form):
    orders = [order_of(stage, stages, microbatches, 1) for stage in range(stages)]
    table = pack_ticks("1f1b", StagePlacement(stages), orders, form)
    assert len(table.ticks) == 2 * stages * microbatches
    for work, tick in table.ticks.items():
        for need, is_earlier in table.dependencies(work):
            assert table.ticks[need] <= tick - is_earlier
    if form == TickForm.UNIT:
        assert all(len(slots) <= 1 for row in table.rows for slots in row)


def test_an_order_that_waits_for_itself_is_an_error():
    backward_first = [Slot(PipelineOp.BACKWARD, 0, 0), Slot(PipelineOp.FORWARD, 0, 0)]
    with pytest.raises(ValueError, match="on stage 0, BW of microbatch 0 in chunk 0 waits"):
        pack_ticks("own", StagePlacement(1), [backward_first], TickForm.MULTI)
