"""How far predictions of compiled steps were from steps that ran elsewhere: a range for a prediction.

accuracy.json has, for each chip, the published over the predicted seconds of recipes that no constant of the cost model
was chosen by. `python bench/published.py` writes it; docs/published.md has the recipes.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..core.format import counted
from .target import TargetPlan

TABLE = Path(__file__).with_name("accuracy.json")
CALIBRATED = "a calibrated prediction is not compared with published runs"


@dataclass(frozen=True)
class Accuracy:
    """ratios: the published over the predicted seconds of checked runs of one chip."""

    chip: str
    ratios: tuple[float, ...]

    @property
    def largest_error(self) -> float:
        """Returns the largest share by which a run was off its prediction."""
        return max(abs(ratio - 1) for ratio in self.ratios)

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Returns a range around a prediction that holds all of these runs."""
        return seconds * max(0.0, 1 - self.largest_error), seconds * (1 + self.largest_error)

    def __str__(self) -> str:
        return f"{counted(len(self.ratios), 'published run')} on {self.chip}"


def accuracy_of(target: TargetPlan) -> Accuracy | None:
    """Returns the accuracy of predictions for a target; None where nothing was checked, and `why_no_range` says why."""
    ratios = _table().get(target.chip.name, ()) if target.chip else ()
    return Accuracy(target.chip.name, ratios) if target.chip and ratios and not target.calibration else None


def why_no_range(target: TargetPlan) -> str | None:
    """Returns why a prediction has no range; None where it has one, or where there is no prediction either."""
    if target.chip is None or accuracy_of(target):
        return None
    return CALIBRATED if target.calibration else f"no published run on {target.chip.name} was checked"


@cache
def _table() -> dict[str, tuple[float, ...]]:
    return {chip: tuple(ratios) for chip, ratios in json.loads(TABLE.read_text())["ratios"].items()}
