"""Gives a prediction its range, from how far predictions of published runs of its kind were off.

accuracy.json has the factors of the ranges by kind. `python bench/published.py` derives them from runs that were not
used to choose any constant of the cost model (bench/prediction_range.py): at least 8 of 10 runs of a kind lie in its
range. docs/results/published.md has the runs.
"""

import json
from collections.abc import Mapping, Sequence
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
LONG = 32768  # tokens of a sequence
CALIBRATED = "a calibrated prediction is not compared with published runs"
Basis = Literal["compiled", "estimated"]
ProgramKind = Literal[
    "dense", "experts on TPUs", "experts on GPUs", "long context", "several slices", "pipelines", "data parallel"
]


def program_kinds(
    target: TargetPlan, mesh: Mapping[str, int], sequence_length: int, *, has_experts: bool
) -> tuple[ProgramKind, ...]:
    """Returns the kinds of a program, whose predictions are off for reasons of their own; `dense` if none applies.
    mesh: the sizes of its axes."""
    split = {axis for axis, size in mesh.items() if size > 1}
    on_tpus = target.platform == "tpu"
    applies: dict[ProgramKind, bool] = {
        "experts on TPUs": has_experts and on_tpus,
        "experts on GPUs": has_experts and not on_tpus,
        "long context": sequence_length >= LONG or "context" in split,
        "several slices": target.num_slices > 1,
        "pipelines": "stage" in split,
        "data parallel": bool(split) and split <= {"replica", "data"},
    }
    return tuple(kind for kind, is_one in applies.items() if is_one) or ("dense",)


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a prediction. kind: of program, by whose runs predictions are off most. factor: by how much a
    step may be longer or shorter than predicted. num_runs: the number of published runs that the factor comes from.
    num_on_chip: how many of them ran on this chip."""

    kind: ProgramKind
    chip: str
    factor: float
    num_runs: int
    num_on_chip: int

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Returns the range of a step that is predicted to take this many seconds."""
        return seconds / self.factor, seconds * self.factor

    def __str__(self) -> str:
        on_chip = f"{self.num_on_chip} on" if self.num_on_chip else "none on"
        of = f"at least {COVERED[0] / COVERED[1]:.0%} of {counted(self.num_runs, 'published run')}"
        return f"{self.kind}: {of} lie in such a range, {on_chip} {self.chip}"


def accuracy_of(target: TargetPlan, kinds: Sequence[ProgramKind], basis: Basis = "compiled") -> Accuracy | None:
    """Returns the accuracy of predictions for a target, from the runs of all chips if there are none on its own: of
    several kinds the one with the widest range. None if nothing is predicted, and with a calibration. basis: what the
    predictions are made from, a compiled schedule or an estimate without one."""
    if target.chip is None or target.calibration:
        return None
    chip = target.chip.name
    return max((_of_kind(kind, chip, basis) for kind in kinds), key=lambda one: one.factor)


def _of_kind(kind: ProgramKind, chip: str, basis: Basis) -> Accuracy:
    table = _table()["kinds"][kind]
    factors, runs = table[basis], table["num_runs"]
    return Accuracy(kind, chip, factors.get(chip, factors[ALL_CHIPS]), sum(runs.values()), runs.get(chip, 0))


def range_figures(
    target: TargetPlan, kinds: Sequence[ProgramKind], seconds: float | Unknown, basis: Basis = "compiled"
) -> dict[str, Any]:
    """Returns the figures of the range of a prediction, as StepFigures has them."""
    accuracy = accuracy_of(target, kinds, basis)
    factor = each_known(seconds, lambda _: accuracy.factor if accuracy else Unknown(CALIBRATED))
    return {"range_factor": factor, "range_basis": each_known(factor, lambda _: str(accuracy))}


def best_published_mfu(target: TargetPlan) -> float | None:
    """Returns the highest MFU that a published run on the chip reached; None if no such run is known."""
    return None if target.chip is None else _table()["best_mfu"].get(target.chip.name)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())
