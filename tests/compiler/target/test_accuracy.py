"""The range of a prediction: by runs that were checked, null with a reason where there are none."""

import pytest

from meshloom.compiler.core.format import human_range
from meshloom.compiler.target import accuracy
from meshloom.compiler.target.accuracy import Accuracy, accuracy_of, why_no_range
from support.placements import cached_target_of
from support.profiles import plan_on


def test_a_range_holds_the_runs_that_it_is_made_of():
    """One ran 10 % faster than predicted, one 4 % slower."""
    found = Accuracy("v5e", (0.9, 1.04))
    assert found.range_of(2.0) == pytest.approx((1.8, 2.2))
    assert str(found) == "2 published runs on v5e"
    low, high = found.range_of(1.0)
    assert all(low <= ratio <= high for ratio in found.ratios)


def test_one_run_alone_has_the_range_of_8_of_10_on_all_chips():
    """Of ten runs in all, the next stays below the ninth error with a probability of 9 / 11, below the eighth with
    less than 8 / 10."""
    found = Accuracy("v5p", (1.01,), elsewhere=(0.9, 1.3, 0.98, 1.07, 0.95, 1.08, 0.94, 0.97, 1.04))
    assert found.range_of(1.0) == pytest.approx((0.9, 1.1))
    assert str(found) == "1 published run on v5p and in 8 of 10 on all chips"
    own = Accuracy("v5p", (0.5, 1.01), found.elsewhere)
    assert own.range_of(1.0) == pytest.approx((0.5, 1.5))  # those of the chip are inside, however far off


def test_a_prediction_without_checked_runs_has_a_reason_and_no_range(monkeypatch):
    monkeypatch.setattr(accuracy, "_table", lambda: {"v5e": (0.9,)})
    assert str(accuracy_of(cached_target_of("v5e-4"))) == "1 published run on v5e"
    assert why_no_range(cached_target_of("v5e-4")) is None
    assert accuracy_of(cached_target_of("v5p-8")) is None
    assert why_no_range(cached_target_of("v5p-8")) == "no published run on v5p was checked"
    assert accuracy_of(cached_target_of("cpu-4")) is why_no_range(cached_target_of("cpu-4")) is None


def test_a_calibrated_prediction_is_not_compared_with_other_peoples_runs(monkeypatch):
    monkeypatch.setattr(accuracy, "_table", lambda: {"v5e": (0.9,)})
    calibrated = plan_on("v5e-4", "calibration.chip=v5e", "calibration.matmul=1.5").target
    assert accuracy_of(calibrated) is None
    assert why_no_range(calibrated) == accuracy.CALIBRATED


@pytest.mark.parametrize(
    ("ends", "text"),
    [((1.402, 1.71), "1.40 to 1.71 s"), ((0.95, 1.05), "950 ms to 1.05 s"), ((0.0, 2.0), "0 to 2.00 s")],
)
def test_a_range_names_its_unit_once(ends, text):
    assert human_range(ends) == text
