"""The order in which stages hold layers."""

import pytest

from meshloom.compiler.pipeline.layer_order import layer_order, natural_order, split_evenly
from meshloom.compiler.pipeline.table import StagePlacement


def test_one_chunk_is_in_natural_order():
    assert layer_order(StagePlacement(4), split_evenly(8, StagePlacement(4))) == tuple(range(8))


def test_chunks_of_a_stage_lie_together():
    assert layer_order(StagePlacement(2, 2), (2, 2, 2, 2)) == (0, 1, 4, 5, 2, 3, 6, 7)


def test_the_second_chunk_of_a_v_goes_down():
    assert layer_order(StagePlacement(2, 2, is_v=True), (2, 2, 2, 2)) == (0, 1, 6, 7, 2, 3, 4, 5)


def test_virtual_stages_may_have_different_numbers_of_layers():
    assert layer_order(StagePlacement(2, 2), (1, 2, 2, 1)) == (0, 3, 4, 1, 2, 5)


@pytest.mark.parametrize("placement", [StagePlacement(4, 3), StagePlacement(4, 2, is_v=True), StagePlacement(1, 5)])
def test_natural_order_undoes_it(placement):
    layers = tuple(1 + k % 3 for k in range(placement.num_virtual))
    order, place = layer_order(placement, layers), natural_order(placement, layers)
    assert [order[at] for at in place] == list(range(sum(layers)))


def test_layers_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="6 layers do not divide into 4 virtual stages"):
        split_evenly(6, StagePlacement(2, 2))
