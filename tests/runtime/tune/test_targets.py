"""Targets compared: which of them are a tie, and what the page draws of them over the number of chips."""

import pytest

from meshloom.runtime.sweep.rows import FIGURES, Row, chip_panels, tied_with_best
from support.sweeps import figures, point

STEP = FIGURES["step_seconds"]


def _on(index: int, target: str, seconds: float, factor: float | None = 1.2, **changed) -> Row:
    chip, number = target.split("-")
    known = figures(
        step_seconds=seconds, range_factor=factor, target=target, chip=chip, num_chips=int(number), **changed
    )
    return point(index, {"target": target}, figures=known)


def _tied(rows: list[Row]) -> list[str]:
    return [str(row.swept["target"]) for row in tied_with_best(rows, STEP)]


def test_targets_whose_ranges_overlap_are_a_tie():
    """3 % apart at errors of 20 %: a tie. Twice as long: not one. The order in which they are named does not matter."""
    rows = [_on(0, "v5p-128", 1.03), _on(1, "v6e-64", 1.0), _on(2, "v5e-256", 2.0)]
    assert _tied(rows) == ["v6e-64", "v5p-128"]
    assert _tied(rows[1:]) == ["v6e-64"]
    assert _tied([_on(0, "v6e-64", 1.0, 1.01), _on(1, "v5p-128", 1.03, 1.01)]) == ["v6e-64"]
    assert _tied([_on(0, "v6e-64", 1.0, None), _on(1, "v5p-128", 1.03, None)]) == ["v6e-64"]


def test_predictions_on_one_chip_are_off_together():
    """10 % apart, and a tie on two chips; on one chip the order is surer than the range of each."""
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v6e-64", 1.1)]) == ["v5p-64", "v6e-64"]
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v5p-128", 1.1)]) == ["v5p-64"]
    assert _tied([_on(0, "v5p-64", 1.0), _on(1, "v5p-128", 1.02)]) == ["v5p-64", "v5p-128"]


def test_panels_have_the_best_of_each_target_with_its_range_and_its_tie():
    rows = [
        _on(0, "v5p-64", 2.4, training_cost=100.0), _on(1, "v5p-64", 2.0, training_cost=90.0),
        _on(2, "v6e-256", 1.9, training_cost=300.0), point(3, {"target": "cpu-8"}, status="refused"),
    ]  # fmt: skip
    step, tokens, cost = chip_panels(rows, STEP)
    assert [panel["heading"] for panel in (step, tokens, cost)] == ["step", "tokens/s", "cost of training"]
    assert [(mark["index"], mark["chips"], mark["value"], mark["isTied"]) for mark in step["marks"]] == [
        (1, 64, 2.0, True), (2, 256, 1.9, True),
    ]  # fmt: skip
    assert step["marks"][0]["range"] == pytest.approx((2.0 / 1.2, 2.4))
    assert [mark["value"] for mark in tokens["marks"]] == [65536 / 2.0, 65536 / 1.9]
    assert [mark["value"] for mark in cost["marks"]] == [90.0, 300.0]
    assert chip_panels(rows[:2], STEP) == [], "one number of chips has no figure over it"
