"""Gives a prediction its range, from how far predictions of published runs of its kind were off.

accuracy.json has the factors of the ranges by kind. `python bench/published.py` derives them from published runs
(bench/prediction_range.py), so that 9 of 10 runs lie in the range that the others give. Runs of low precision are pairs
of runs, and how far what float8 gained was off. docs/results/published.md has the runs.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.float_types import peak_name
from ..core.format import counted
from ..core.known import Unknown, each_known

if TYPE_CHECKING:  # `meshloom runs` reads the table without JAX
    from .target import TargetPlan

TABLE = Path(__file__).with_name("accuracy.json")
COVERED = 9, 10  # runs that lie in a range
ALL_CHIPS = "*"
LONG = 32768  # tokens of a sequence
NARROW_PEAKS = ("int8", "float8")  # types of low precision
LOW_PRECISION = "low precision"
CALIBRATED = "a calibrated prediction is not compared with published runs"
Basis = Literal["compiled", "estimated"]
ProgramKind = Literal[
    "dense",
    "experts on TPUs",
    "experts on GPUs",
    "long context",
    "several slices",
    "pipelines",
    "data parallel",
    "low precision",
]


def program_kinds(
    target: "TargetPlan", mesh: Mapping[str, int], sequence_length: int, *, has_experts: bool
) -> tuple[ProgramKind, ...]:
    """Returns the kinds of a program, whose predictions are off for reasons of their own; `dense` if none applies.
    mesh: the sizes of its axes. `low precision` is not among them: `kinds_in_types` adds it."""
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


def kinds_in_types(kinds: Sequence[ProgramKind], matmul_types: Iterable[str]) -> tuple[ProgramKind, ...]:
    """Returns the kinds of a program with the types of its matmuls, which only its operations show. What few bits gain
    is one more error than that of the same program in bfloat16, so no kind is replaced."""
    is_narrow = any(peak_name(each) in NARROW_PEAKS for each in set(matmul_types))
    return (*kinds, LOW_PRECISION) if is_narrow else tuple(kinds)


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a prediction. kinds: of the program. factor: by how much a step may be longer or shorter than
    predicted. num_runs: the number of published runs that the factor comes from. num_on_chip: how many of them ran on
    this chip."""

    kinds: tuple[ProgramKind, ...]
    chip: str
    factor: float
    num_runs: int
    num_on_chip: int

    def range_of(self, seconds: float) -> tuple[float, float]:
        """Returns the range of a step that is predicted to take this many seconds."""
        return seconds / self.factor, seconds * self.factor

    def __str__(self) -> str:
        most, of = COVERED
        combined = ", whose errors are combined" if len(self.kinds) > 1 else ""
        basis = f"{most} of {of} such steps are expected inside, by {counted(self.num_runs, 'published run')}"
        return f"{' and '.join(self.kinds)}{combined}: {basis}, {self.num_on_chip or 'none'} on {self.chip}"


def accuracy_of(target: "TargetPlan", kinds: Sequence[ProgramKind], basis: Basis = "compiled") -> Accuracy | None:
    """Returns the accuracy of predictions for a target, from the runs of all chips if there are none on its own. None
    if nothing is predicted, and with a calibration. basis: what the predictions are made from, a compiled schedule or
    an estimate without one.

    The errors of several kinds have different causes, so their squares add up, as logarithms of factors."""
    if target.chip is None or target.calibration:
        return None
    chip = target.chip.name
    tables = [_table()["kinds"][kind] for kind in kinds]
    factors = [table[basis].get(chip, table[basis][ALL_CHIPS]) for table in tables]
    runs = [table["num_runs"] for table in tables]
    return Accuracy(
        kinds=tuple(kinds),
        chip=chip,
        factor=math.exp(math.hypot(*map(math.log, factors))),
        num_runs=sum(sum(each.values()) for each in runs),
        num_on_chip=sum(each.get(chip, 0) for each in runs),
    )


def range_figures(
    target: "TargetPlan", kinds: Sequence[ProgramKind], seconds: float | Unknown, basis: Basis = "compiled"
) -> dict[str, Any]:
    """Returns the figures of the range of a prediction, as StepFigures has them."""
    accuracy = accuracy_of(target, kinds, basis)
    factor = each_known(seconds, lambda _: accuracy.factor if accuracy else Unknown(CALIBRATED))
    return {"range_factor": factor, "range_basis": each_known(factor, lambda _: str(accuracy))}


def best_published_mfu(target: "TargetPlan") -> float | None:
    """Returns the highest MFU that a published run on the chip reached; None if no such run is known."""
    return None if target.chip is None else best_mfu_on(target.chip.name)


def best_mfu_on(chip: str) -> float | None:
    """Returns the highest MFU that a published run on a chip of this name reached; None if no such run is known."""
    return _table()["best_mfu"].get(chip)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())
