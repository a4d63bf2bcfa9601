"""Named schedules: their tables can run, and have the bubbles and the microbatches in flight of the papers."""

from fractions import Fraction

import pytest
from hypothesis import given, settings

from meshloom.compiler.pipeline.schedules import SCHEDULES, build_table
from meshloom.compiler.pipeline.table import PipelineOp, TickForm, find_violations, max_in_flight_of
from support.pipeline_tables import declared

SECONDS = {"F": 1, "R": 1, "B": 1, "W": 1, "BW": 2}
SPLIT = {PipelineOp.INPUT_GRADIENT, PipelineOp.WEIGHT_GRADIENT}


def bubble(table):
    """Returns the time lost of all work, where a tick begins when both neighbours have ended theirs."""
    stages = range(table.placement.num_stages)
    took = [[sum(SECONDS[slot.op] for slot in row[stage]) for stage in stages] for row in table.rows]
    ends = [0 for _ in stages]
    for row in took:
        ends = [max(ends[s], ends[s - 1], ends[(s + 1) % len(stages)]) + row[s] for s in stages]
    return Fraction(max(ends), sum(row[0] for row in took)) - 1


@settings(max_examples=200)
@given(declared(can_run=False))
def test_every_table_can_run(declaration):
    name, stages, chunks, microbatches, form, recomputes = declaration
    kind = SCHEDULES[name]
    if kind.requirement(stages, chunks, microbatches) is not None:
        with pytest.raises(ValueError, match=name):
            build_table(*declaration)
        return
    table = build_table(*declaration)
    assert find_violations(table) == ()
    assert table.placement.num_chunks == chunks
    assert table.num_microbatches == microbatches
    assert (PipelineOp.RECOMPUTE in table.ops) == recomputes
    split = SPLIT if kind.splits(form, recomputes=recomputes) else {PipelineOp.BACKWARD}
    assert table.ops - {PipelineOp.FORWARD, PipelineOp.RECOMPUTE} == split
    if form == TickForm.UNIT:
        assert all(len(slots) <= 1 for row in table.rows for slots in row)


SHAPES = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_bubbles_are_those_of_the_papers(stages, microbatches):
    """Time of the ramps over that of the work: p - 1 of F and of BW, shorter by chunks, and without W where it fills
    them. What is left of a zero-bubble schedule is one F for each stage above the first."""
    ramp = Fraction(stages - 1, microbatches)
    expected = {
        ("gpipe", TickForm.MULTI): ramp,
        ("1f1b", TickForm.MULTI): ramp,
        ("interleaved_1f1b", TickForm.MULTI): ramp / 2,
        ("interleaved_1f1b_breadth_first", TickForm.MULTI): ramp / 2,
        ("1f1b", TickForm.UNIT): ramp * 2 / 3,
        ("interleaved_1f1b", TickForm.UNIT): ramp / 3,
        ("interleaved_1f1b_breadth_first", TickForm.UNIT): ramp / 3,
        ("zb_h1", TickForm.UNIT): ramp / 3,
        ("zb_h2", TickForm.UNIT): ramp / 3,
        ("zb_v", TickForm.UNIT): ramp / 6,
        ("dualpipe_v", TickForm.UNIT): ramp / 6,
    }
    for (name, form), theory in expected.items():
        table = build_table(name, stages, SCHEDULES[name].num_chunks or 2, microbatches, form)
        assert abs(bubble(table) - theory) <= theory / 10, (name, form)


def test_recomputing_while_a_gradient_is_awaited_shortens_the_bubble():
    for name in ("1f1b", "zb_h1", "dualpipe_v"):
        chunks = SCHEDULES[name].num_chunks or 2
        apart = build_table(name, 4, chunks, 8, TickForm.UNIT, recomputes=True)
        assert bubble(apart) < bubble(build_table(name, 4, chunks, 8, TickForm.UNIT))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_microbatches_in_flight(stages):
    def most(name, form, chunks=1):
        return max_in_flight_of(build_table(name, stages, chunks, 4 * stages, form))

    above = range(stages, 0, -1)
    assert most("gpipe", TickForm.MULTI)[0] == 4 * stages
    assert most("1f1b", TickForm.UNIT) == tuple(above)
    assert most("1f1b", TickForm.MULTI) == tuple(2 * n - 1 for n in above)
    assert most("zb_h1", TickForm.UNIT) == (stages,) * stages
    assert most("zb_h2", TickForm.UNIT) == (2 * stages - 1,) * stages
    assert most("zb_v", TickForm.UNIT, 2) == (2 * stages,) * stages  # halves: as much as ZB-H1
    assert max(most("dualpipe_v", TickForm.UNIT, 2)) <= 2 * stages + 1


def test_depth_first_runs_a_group_through_each_chunk_and_breadth_first_all():
    def forward(name):
        table = build_table(name, 2, 2, 4, TickForm.MULTI)
        first = [slot for _, stage, slot in table.slots() if stage == 0 and slot.op == PipelineOp.FORWARD]
        return [(slot.chunk, slot.microbatch) for slot in first]

    chunks_of_two = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert forward("interleaved_1f1b") == chunks_of_two
    assert forward("interleaved_1f1b_breadth_first") == sorted(chunks_of_two)


@pytest.mark.parametrize(
    ("name", "shape", "what"),
    [
        ("1f1b", (4, 2, 8), "1f1b has 1 chunk for each stage, not 2"),
        ("zb_v", (4, 1, 8), "zb_v has 2 chunks for each stage, not 1"),
        ("interleaved_1f1b", (4, 1, 8), "interleaved_1f1b needs at least 2 chunks for each stage, not 1"),
        ("interleaved_1f1b", (4, 2, 6), "as many microbatches for each of 4 stages, and has 6 microbatches"),
        ("dualpipe_v", (4, 2, 7), "needs at least 8 microbatches for 4 stages, and has 7 microbatches"),
    ],
)
def test_what_a_schedule_cannot_run_is_said_with_a_fix(name, shape, what):
    lacks = SCHEDULES[name].requirement(*shape)
    assert lacks is not None
    assert what in lacks[0]
    assert lacks[1]
