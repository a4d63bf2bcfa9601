"""How far predictions of compiled steps were from steps that ran elsewhere: a range for a prediction.

accuracy.json has, for each chip, the published over the predicted seconds of recipes that no constant of the cost model
was chosen by. `python bench/published.py` writes it; docs/published.md has the recipes.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..core.format import counted
from .target import TargetPlan

TABLE = Path(__file__).with_name("accuracy.json")
COVERED = 8, 10  # so many runs of so many lie in a range, at least
CALIBRATED = "a calibrated prediction is not compared with published runs"


@dataclass(frozen=True)
class Accuracy:
    """ratios: the published over the predicted seconds of checked runs of one chip. elsewhere: of those of others."""

    chip: str
    ratios: tuple[float, ...]
    elsewhere: tuple[float, ...] = ()

    @property
    def largest_error(self) -> float:
        """Returns the largest share by which a run of this chip was off its prediction, or the one that 8 of 10 runs of
        all chips stay below, if it is larger: one or two runs alone say little about the next.

        Of n runs, the next one stays below the k-th smallest error with a probability of k / (n + 1) (split conformal
        prediction, Vovk et al. 2005)."""
        own, errors = _errors(self.ratios), _errors(self.ratios + self.elsewhere)
        most, of = COVERED
        k = min(len(errors), math.ceil(most * (len(errors) + 1) / of))
        return max([*own, errors[k - 1]])

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Returns a range around a prediction that holds all of this chip's runs, and 8 of 10 of all."""
        return seconds * max(0.0, 1 - self.largest_error), seconds * (1 + self.largest_error)

    def __str__(self) -> str:
        own = f"{counted(len(self.ratios), 'published run')} on {self.chip}"
        return f"{own} and in {COVERED[0]} of {COVERED[1]} on all chips" if self.elsewhere else own


def _errors(ratios: tuple[float, ...]) -> list[float]:
    return sorted(abs(ratio - 1) for ratio in ratios)


def accuracy_of(target: TargetPlan) -> Accuracy | None:
    """Returns the accuracy of predictions for a target; None where nothing was checked, and `why_no_range` says why."""
    table, chip = _table(), target.chip
    if chip is None or chip.name not in table or target.calibration:
        return None
    elsewhere = tuple(ratio for name, ratios in table.items() if name != chip.name for ratio in ratios)
    return Accuracy(chip.name, table[chip.name], elsewhere)


def why_no_range(target: TargetPlan) -> str | None:
    """Returns why a prediction has no range; None where it has one, or where there is no prediction either."""
    if target.chip is None or accuracy_of(target):
        return None
    return CALIBRATED if target.calibration else f"no published run on {target.chip.name} was checked"


@cache
def _table() -> dict[str, tuple[float, ...]]:
    return {chip: tuple(ratios) for chip, ratios in json.loads(TABLE.read_text())["ratios"].items()}
