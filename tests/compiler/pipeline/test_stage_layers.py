"""The layers of each virtual stage."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshloom.compiler.pipeline.buffers import COLUMN_OF, lower_table
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.stage_layers import layers_of, split_evenly
from meshloom.compiler.pipeline.table import PipelineOp, StagePlacement, TickForm


def test_the_ends_have_fewer_layers_where_they_do_not_divide():
    assert split_evenly(126, StagePlacement(16)) == (7, *[8] * 14, 7)


def test_the_last_stage_may_have_fewer():
    assert split_evenly(16, StagePlacement(4), fewer_on_last=2) == (4, 5, 5, 2)
    assert split_evenly(8, StagePlacement(4), fewer_on_last=5) == (2, 3, 2, 1)


def test_chunks_of_a_stage_share_what_is_left():
    """With one layer more than stages have room for, no stage has two more than another."""
    placement = StagePlacement(4, 2)
    totals = split_evenly(12, placement)
    of_stage = [sum(totals[placement.virtual(stage, chunk)] for chunk in range(2)) for stage in range(4)]
    assert of_stage == [3, 3, 3, 3]


@given(st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 40), st.integers(0, 3))
def test_every_layer_is_at_one_place(num_stages, num_chunks, is_v, more, fewer):
    placement = StagePlacement(num_stages, 2 if is_v else num_chunks, is_v)
    num_layers = placement.num_virtual + more
    fewer = fewer if placement.num_virtual > 1 else 0
    totals = split_evenly(num_layers, placement, fewer)
    assert sum(totals) == num_layers
    assert min(totals) >= 1
    dense = num_layers // 3
    layers = layers_of({"dense": dense, "layers": num_layers - dense}, placement, totals)
    for stack, size in (("dense", dense), ("layers", num_layers - dense)):
        rows = layers.rows(stack)
        assert sorted(rows[rows < size].tolist()) == list(range(size))
    order = [
        (stack, layers.first(stack, virtual) + at)
        for virtual, counts in enumerate(layers.counts)
        for stack, count in zip(layers.stacks, counts, strict=True)
        for at in range(count)
    ]
    assert order == [("dense", at) for at in range(dense)] + [("layers", at) for at in range(num_layers - dense)]


def test_two_stacks_are_one_list():
    layers = layers_of({"dense": 3, "layers": 5}, StagePlacement(4), (2, 2, 2, 2))
    assert layers.counts == ((2, 0), (1, 1), (0, 2), (0, 2))
    assert layers.kinds == ((2, 0), (1, 1), (0, 2))
    assert layers.rows("dense").tolist() == [[0, 1], [2, 3], [3, 3], [3, 3]]
    assert layers.rows("layers").tolist() == [[5, 5], [0, 5], [1, 2], [3, 4]]


def test_chunks_of_a_v_are_at_their_places():
    layers = layers_of({"layers": 6}, StagePlacement(2, 2, is_v=True), (1, 2, 2, 1))
    assert layers.rows("layers").tolist() == [[0, 6, 5, 6], [1, 2, 3, 4]]


def test_other_numbers_of_layers_are_an_error():
    with pytest.raises(ValueError, match="are no 6 layers of 2 parts"):
        layers_of({"layers": 6}, StagePlacement(2), (2, 2))


def test_a_branch_is_chosen_by_the_kind_of_its_layers():
    table = build_table("interleaved_1f1b", 2, 2, 2, TickForm.UNIT)
    layers = layers_of({"layers": 6}, table.placement, (1, 2, 2, 1))
    columns = lower_table(table, layers.kind_of).columns
    assert columns.keys() >= {COLUMN_OF[op] for op in table.ops}
    forward = columns[COLUMN_OF[PipelineOp.FORWARD]]
    found = dict.fromkeys(itertools.product(range(table.num_ticks), range(2)), 0)
    for tick, stage, slot in table.slots():
        if slot.op == PipelineOp.FORWARD:
            found[tick, stage] = {0: 1, 1: 2, 2: 2, 3: 1}[table.placement.virtual(stage, slot.chunk)]
    np.testing.assert_array_equal(forward, np.array([[found[t, s] for s in range(2)] for t in range(table.num_ticks)]))
