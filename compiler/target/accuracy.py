"""Gives a prediction its range, from how far predictions of published runs were off.

accuracy.json has the factors of the ranges. `python bench/published.py` derives them from runs that were not used to
choose any constant of the cost model (bench/prediction_range.py): 8 of 10 runs lie in the range that runs of other
sources, of other kinds of programs and on other chips give. docs/results/published.md has the runs.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..core.format import counted
from ..core.known import Unknown, each_known
from .target import TargetPlan

TABLE = Path(__file__).with_name("accuracy.json")
COVERED = 8, 10  # at least 8 of 10 runs lie in a range
ALL_CHIPS = "*"
CALIBRATED = "a calibrated prediction is not compared with published runs"
Basis = Literal["compiled", "estimated"]


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a prediction. factor: by how much a step may be longer or shorter than predicted. num_runs: the
    number of published runs that the factor comes from. num_on_chip: how many of them ran on this chip. basis: what the
    predictions were made from, a compiled schedule or an estimate without one."""

    chip: str
    factor: float
    num_runs: int
    num_on_chip: int
    basis: Basis = "compiled"

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Returns the range of a step that is predicted to take this many seconds."""
        return seconds / self.factor, seconds * self.factor

    def __str__(self) -> str:
        on_chip = f"{self.num_on_chip} on" if self.num_on_chip else "none on"
        of = counted(self.num_runs, "published run")
        return f"{COVERED[0] / COVERED[1]:.0%} of {of} lie in such a range, {on_chip} {self.chip}"


def accuracy_of(target: TargetPlan, basis: Basis = "compiled") -> Accuracy | None:
    """Returns the accuracy of predictions for a target, from the runs of all chips if there are none on its own. None
    if nothing is predicted; `why_no_range` says why."""
    if target.chip is None or target.calibration:
        return None
    table, chip = _table(), target.chip.name
    factors, runs = table["factors"][basis], table["num_runs"]
    return Accuracy(chip, factors.get(chip, factors[ALL_CHIPS]), sum(runs.values()), runs.get(chip, 0), basis)


def range_figures(target: TargetPlan, seconds: float | Unknown, basis: Basis = "compiled") -> dict[str, Any]:
    """Returns the figures of the range of a prediction, as StepFigures has them."""
    accuracy = accuracy_of(target, basis)
    factor = each_known(seconds, lambda _: accuracy.factor if accuracy else Unknown(CALIBRATED))
    return {"range_factor": factor, "range_basis": each_known(factor, lambda _: str(accuracy))}


def best_published_mfu(target: TargetPlan) -> float | None:
    """Returns the highest MFU that a published run on the chip reached; None if no such run is known."""
    return None if target.chip is None else _table()["best_mfu"].get(target.chip.name)


def why_no_range(target: TargetPlan) -> str | None:
    """Returns the reason why a prediction has no range; None if it has one, or if there is no prediction."""
    return CALIBRATED if target.chip is not None and target.calibration else None


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())
