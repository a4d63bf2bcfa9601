"""The range of a prediction: by published runs, those of other chips too, and none with a calibration."""

import pytest

from meshloom.compiler.core.format import human_range
from meshloom.compiler.target import accuracy
from meshloom.compiler.target.accuracy import Accuracy, accuracy_of, best_published_mfu, why_no_range
from support.placements import cached_target_of
from support.profiles import plan_on

TABLE = {
    "num_runs": {"v5e": 3, "h100": 7},
    "best_mfu": {"v5e": 0.669},
    "factors": {"compiled": {"*": 1.2, "v5e": 1.25}, "estimated": {"*": 1.3, "v5e": 1.3}},
}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setattr(accuracy, "_table", lambda: TABLE)


def test_a_range_is_a_factor_up_and_down():
    assert Accuracy("v5e", 1.25, 10, 3).range_of(2.0) == pytest.approx((1.6, 2.5))


def test_a_chip_without_runs_has_the_range_of_all_and_says_so():
    own, other = (accuracy_of(cached_target_of(name)) for name in ("v5e-4", "tpu7x-8"))
    assert own
    assert other
    assert (own.factor, other.factor) == (1.25, 1.2)
    assert str(own) == "80% of 10 published runs lie in such a range, 3 on v5e"
    assert str(other) == "80% of 10 published runs lie in such a range, none on tpu7x"


def test_an_estimate_has_a_range_of_its_own():
    estimated = accuracy_of(cached_target_of("v5p-8"), "estimated")
    assert estimated
    assert estimated.factor == 1.3


def test_the_best_published_mfu_is_of_the_own_chip():
    assert best_published_mfu(cached_target_of("v5e-4")) == 0.669
    assert best_published_mfu(cached_target_of("v5p-8")) is best_published_mfu(cached_target_of("cpu-4")) is None


def test_what_is_not_a_chip_has_no_range_and_no_reason():
    assert accuracy_of(cached_target_of("cpu-4")) is why_no_range(cached_target_of("cpu-4")) is None


def test_a_calibrated_prediction_is_not_compared_with_other_peoples_runs():
    calibrated = plan_on("v5e-4", "calibration.chip=v5e", "calibration.matmul=1.5").target
    assert accuracy_of(calibrated) is None
    assert why_no_range(calibrated) == accuracy.CALIBRATED


@pytest.mark.parametrize(
    ("ends", "text"),
    [((1.402, 1.71), "1.40 to 1.71 s"), ((0.95, 1.05), "950 ms to 1.05 s"), ((0.0, 2.0), "0 to 2.00 s")],
)
def test_a_range_names_its_unit_once(ends, text):
    assert human_range(ends) == text
