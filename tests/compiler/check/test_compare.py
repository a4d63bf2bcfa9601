"""A difference that cannot be measured never passes."""

import numpy as np
import pytest

from meshloom.compiler.check.compare import Deviation, deviation, deviations, nudged, tolerances, worst

NAN = float("nan")


UNLIKE = (
    ([1.0, NAN], [1.0, 2.0]),
    ([1.0, 2.0], [1.0, NAN]),
    ([1.0], [1.0, 2.0]),
    ([1.0, 1.0], [0.0, 0.0]),
    (None, [1.0]),
    ([1.0], None),
)


@pytest.mark.parametrize(("found", "expected"), UNLIKE)
def test_what_cannot_be_compared_is_infinitely_far(found, expected):
    assert deviation(found, expected) == np.inf
    for tolerance in (0.0, 1.0, np.inf):
        assert not Deviation("x", deviation(found, expected), tolerance).is_within


def test_a_difference_is_a_share_of_the_norm():
    assert deviation([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    assert deviation([0.0], [0.0]) == 0


def test_the_worst_is_the_largest_beside_its_tolerance():
    found = deviations({"a": 1.1, "b": 1.01}, {"a": 1.0, "b": 1.0})
    assert worst(found, {"a": 1.0, "b": 1e-3}).path == "b"
    assert not worst(found, {"a": 1.0}).is_within  # a path of which no rounding is known has no tolerance


def test_rounding_moves_each_number_by_half_of_its_last_digit():
    moved = nudged({"x": np.ones(8, np.float32)}, "bfloat16", seed=0)["x"]
    assert set(np.abs(moved - 1)) == {2.0**-8}
    assert tolerances({"x": 1e-2})["x"] == pytest.approx(0.16)
