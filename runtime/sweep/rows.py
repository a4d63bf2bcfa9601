"""The points of a sweep, and the two files that say what they came to.

`sweep.json` holds the request of a sweep, and `sweep.jsonl` a row for each point that has ended. `meshloom tune` writes
the same two files, so that one table and one page show both.

Points are compared by their figures, also across targets.
On several targets: v5p-64: 24.1 s (20.1 to 28.9), v5p-128: 12.2 s (10.2 to 14.6), v6e-256: 11.5 s (9.6 to 13.8)
    -> v6e-256 and v5p-128 are a tie: on different chips predictions are off by different factors
"""

import hashlib
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.core.known import known, text_of
from meshloom.compiler.declare.application import register_function
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.figures import FIGURES, Figure, StepFigures, no_figures, register, text_of_figure
from meshloom.models.record import Record

SWEEP_VERSION = 2  # of sweep.json and sweep.jsonl
NO_REASON = "the table of a sweep does not say why"

# done: the point has figures. refused: its declaration is wrong. does_not_fit: it needs more memory than a chip has.
# failed: the compiler or the run failed. aborted: its process died. timed_out: it took longer than allowed.
# out_of_memory: this machine ran out of memory. running: it has not ended; only the page of a running sweep has such
# rows.
Status = Literal["done", "refused", "does_not_fit", "failed", "aborted", "timed_out", "out_of_memory", "running"]
Basis = Literal["estimate", "schedule", "measured"]  # no compiler ran; the compiled program was read; a run was timed
SweepCommand = Literal["explain", "compile", "train"]
SWEEP_COMMANDS: tuple[SweepCommand, ...] = ("explain", "compile", "train")
MOST_NAME_BYTES = 200  # file systems allow 255
PRINTED = "output.log"  # in a point's directory: what its process prints
POINT_NAME = "point_name"  # a resolver of OmegaConf, for hydra.sweep.subdir
_BASES = ("measured", "schedule", "estimate")  # the best informed one first
SAME_CHIP = 0.03  # share of a value: closer estimates on one chip are not told apart; they err in the same direction
NO_RANGE = ("peak_bytes",)  # figures that are not proportional to the step

# The columns of the table on a terminal, if a point has them; the page and the files have all.
SHOWN = ("step_seconds", "mfu", "tokens_per_second_per_chip", "exposed_fraction", "peak_bytes", "memory_fraction",
         "cost_per_million_tokens", "training_seconds", "training_cost", "final_loss", "evaluation_loss")  # fmt: skip


class Figures(StepFigures):
    """The figures of a point, and what they are of. None: unknown, or not made by this command."""

    basis: Basis
    model: str
    target: str
    chip: str
    num_chips: NonNegativeInt
    mesh: str  # "fsdp=16 x tensor=4"
    global_batch_size: NonNegativeInt
    num_microbatches: NonNegativeInt
    tokens_per_step: NonNegativeInt
    num_parameters: NonNegativeInt | None = None
    compile_seconds: NonNegativeFloat | None = None
    cost_per_million_tokens: NonNegativeFloat | None = None  # in the currency of the user's price per chip-hour
    training_seconds: NonNegativeFloat | None = None  # for all tokens of the training, if their number is declared
    training_cost: NonNegativeFloat | None = None
    final_loss: float | None = None  # of the last step; None if infinite or NaN
    evaluation_loss: float | None = None
    last_step: NonNegativeInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_unknowns(cls, given: Any) -> Any:
        """Returns the values of a line, where a figure that is not known is null or left out."""
        if not isinstance(given, dict):
            return given
        return dict(no_figures(NO_REASON)) | {name: value for name, value in given.items() if value is not None}


def lack(figures: StepFigures) -> str:
    """Returns why a step does not fit."""
    if figures.fits is not False:
        return "its arrays on the host do not fit the host's memory"
    return f"needs {text_of_figure(figures, 'peak_bytes')} of {text_of(figures.limit_bytes, human_bytes)} per chip"


register(
    Figure("cost_per_million_tokens", "cost/M tokens", "less", "cost"),
    Figure("training_seconds", "training", "less", "seconds"),
    Figure("training_cost", "cost of training", "less", "cost"),
    Figure("final_loss", "loss", "less", "loss"),
    Figure("evaluation_loss", "held-out loss", "less", "loss"),
    Figure("compile_seconds", "compiled in", "less", "seconds"),
)


class Row(Record):
    """A point that has ended.

    overrides: as the user typed them, one for each swept key. swept: the value of each swept key. why: the reason of
    every status but done. directory: the point's directory, relative to the sweep's; None if it has none. fingerprint:
    identifies the lowered program with its options, topology and versions. same_as: the index of the point that
    compiled the same program.
    """

    index: NonNegativeInt
    overrides: tuple[str, ...]
    swept: dict[str, Any]
    status: Status
    why: str | None = None
    directory: str | None = None
    exit_code: int | None = None
    seconds: NonNegativeFloat | None = None
    fingerprint: str | None = None
    same_as: int | None = None
    figures: Figures | None = None


class SweepFile(Record):
    """The request of a sweep. overrides: shared by all points. axes: swept keys with their values, in the order in
    which they were typed."""

    schema_version: int
    command: Literal["explain", "compile", "train", "tune"]
    overrides: tuple[str, ...]
    axes: dict[str, list[Any]]
    num_points: NonNegativeInt | None  # None: the sweeper chooses points as it goes
    objective: str  # the figure that the table is sorted by: step_seconds
    versions: dict[str, str]
    identity: str | None = None  # a hash of the request, by which the same command finds its directory again


# Exit codes of points that did not end by themselves, as `timeout` and shells give them.
TIMED_OUT, KILLED, INTERRUPTED = 124, 137, 130


@dataclass(frozen=True)
class Point:
    """A point of a sweep. overrides: set the swept keys, as typed. swept: the values of these keys. directory: relative
    to the sweep's."""

    index: int
    overrides: tuple[str, ...]
    swept: dict[str, Any]
    directory: str


@dataclass(frozen=True)
class Task:
    """A point as a worker gets it. request: has all overrides of the point. allowed: modules whose code it may run.
    directory: takes its files."""

    command: SweepCommand
    request: Request
    allowed: tuple[str, ...]
    directory: Path


class Outcome(Record):
    """The outcome of a point. why: the reason of every status but done. seconds: the time that its worker took."""

    status: Status
    exit_code: int
    why: str | None = None
    seconds: NonNegativeFloat | None = None
    fingerprint: str | None = None
    figures: Figures | None = None

    def row(self, point: Point, *, has_directory: bool) -> Row:
        """Returns the row of a point that has ended so."""
        directory = point.directory if has_directory else None
        own = {name: getattr(self, name) for name in Outcome.model_fields}
        return Row(index=point.index, overrides=point.overrides, swept=point.swept, directory=directory, **own)


def directory_name(overrides: Sequence[str]) -> str:
    """Returns a directory's name for the overrides of a point: ["mesh.tensor=4", "remat=full"] ->
    "mesh.tensor=4,remat=full". Where characters were replaced or the name is cut, a hash keeps it different."""
    text = ",".join(overrides) or "point"
    name = re.sub(r"[^\w.=@,+-]+", "_", text, flags=re.ASCII).lstrip(".-")
    if name == text and len(name) <= MOST_NAME_BYTES:
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{name[: MOST_NAME_BYTES - 9] or 'point'}-{digest}"


def swept_of(overrides: Sequence[str], swept_keys: Sequence[str]) -> list[str]:
    """Returns those of a job's overrides that set swept keys, as typed: without Hydra's `++`."""
    return [text.lstrip("+") for text in overrides if text.lstrip("+").partition("=")[0] in swept_keys]


# Hydra names the directories of other launchers' jobs, sometimes in a process that imports this module for one job.
register_function(POINT_NAME, lambda overrides, keys: directory_name(swept_of(list(overrides), keys.split(" "))))


def find_figure(name: str, *, where: str) -> Figure:
    """Returns a figure by its name. Raises ConfigError for an unknown one. where: where it was named."""
    if name not in FIGURES:
        raise ConfigError([Problem(where, f"there is no figure '{name}'", use_one_of(name, FIGURES))])
    return FIGURES[name]


def value_of(row: Row, figure: Figure) -> float | None:
    return known(getattr(row.figures, figure.name, None))


def figure_text(row: Row, figure: Figure) -> str:
    """Returns the figure of a point as text; "" if it is unknown."""
    value = value_of(row, figure)
    return "" if value is None else figure.human(value)


def best_first(rows: Iterable[Row], figure: Figure) -> list[Row]:
    """Returns the points that are done, the best first; then the others.

    Measured points come before compiled ones, and these before estimated ones: `meshloom tune` compiles the best of its
    estimates, and its answer is one of them.
    """

    def key(row: Row) -> tuple[bool, int, bool, float, int]:
        value = value_of(row, figure)
        basis = _BASES.index(row.figures.basis) if row.figures else len(_BASES)
        sign = 1 if figure.better == "less" else -1
        return row.status != "done", basis, value is None, sign * (value or 0), row.index

    return sorted(rows, key=key)


def best_of(rows: Iterable[Row], figure: Figure) -> Row | None:
    """Returns the best point; None if no point that is done has this figure."""
    first = next(iter(best_first(rows, figure)), None)
    return first if first and first.status == "done" and value_of(first, figure) is not None else None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other one beats in both coordinates, smaller being better:
    [(1, 5), (2, 6), (3, 1)] -> [0, 2]. They are in the order of the first coordinate. Of equal points the first one is
    taken."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def swept_keys(file: SweepFile, rows: Sequence[Row]) -> list[str]:
    """Returns the keys in which points differ, in the typed order; keys that a sweeper has added come last."""
    keys = list(dict.fromkeys([*file.axes, *(key for row in rows for key in row.swept)]))
    return [key for key in keys if len({typed_value(row, key) for row in rows}) > 1] or keys


def typed_value(row: Row, key: str) -> str:
    """Returns the value of a swept key as it was typed; "" if the point has none. For "+model@draft=tiny" and the key
    "model@draft" it is "tiny"."""
    for text in row.overrides:  # they have passed Hydra's parser, which takes milliseconds for each
        typed, _, value = text.lstrip("+~").partition("=")
        if typed == key or typed.partition("@")[0] == key:
            return value
    return str(row.swept[key]) if key in row.swept else ""


def influence(rows: Sequence[Row], key: str, figure: Figure) -> float:
    """Returns the share of the variance of a figure's logarithm that a swept key explains alone, from 0 to 1; 0 if too
    little is known.

    For x=1: 1 s, 1 s and x=2: 2 s, 2 s, x explains all; for x=1: 1 s, 2 s and x=2: 1 s, 2 s, it explains nothing.
    """
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.status == "done" and (value := value_of(row, figure)) is not None:
            if value <= 0:
                return 0.0
            groups.setdefault(typed_value(row, key), []).append(math.log(value))
    logs = [value for group in groups.values() for value in group]
    if len(logs) < 2 or len(groups) < 2 or not (whole := pvariance(logs)):
        return 0.0
    middle = fmean(logs)
    between = sum(len(group) * (fmean(group) - middle) ** 2 for group in groups.values()) / len(logs)
    return min(1.0, between / whole)


def name_of(row: Row) -> str:
    """Returns the overrides of a point as a user types them."""
    return shlex.join(row.overrides) if row.overrides else "no override"


def best_on_targets(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point that is done on each target, the best first."""
    done = [row for row in best_first(rows, figure) if row.status == "done" and value_of(row, figure) is not None]
    first = {row.figures.target: row for row in reversed(done) if row.figures}
    return [row for row in done if row.figures and first[row.figures.target] is row]


def range_of(row: Row, value: float | None) -> tuple[float, float] | None:
    """Returns the range of a value that is proportional to the step; None if the row has no range."""
    return None if value is None or row.figures is None else known(row.figures.range_of(value))


def tied_with_best(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point, and those of other targets that may be as good: on another chip if the ranges overlap, on
    the same chip if the values are within a few percent."""
    found = best_on_targets(rows, figure)
    return found[:1] + [row for row in found[1:] if _is_tied(found[0], row, figure)]


def _is_tied(best: Row, row: Row, figure: Figure) -> bool:
    a, b = value_of(best, figure), value_of(row, figure)
    assert a is not None
    assert b is not None
    assert best.figures is not None
    assert row.figures is not None
    if figure.name in NO_RANGE:
        return a == b
    if best.figures.chip == row.figures.chip:
        return max(a, b) <= (1 + SAME_CHIP) * min(a, b)
    (low, high), (other_low, other_high) = range_of(best, a) or (a, a), range_of(row, b) or (b, b)
    return low <= other_high and other_low <= high


def chip_panels(rows: Sequence[Row], figure: Figure) -> list[dict[str, Any]]:
    """Returns the panels of the page over the number of chips: step, tokens per second and cost of the best point on
    each target; none if all targets have the same number of chips."""
    found = best_on_targets(rows, figure)
    if len({row.figures.num_chips for row in found if row.figures}) < 2:
        return []
    tied = {row.index for row in tied_with_best(rows, figure)}
    panels = []
    costs = (FIGURES[name] for name in ("training_cost", "cost_per_million_tokens"))
    cost = [one for one in costs if any(value_of(row, one) is not None for row in found)][:1]  # of the whole, if known
    for heading, kind, of in (
        ("step", "seconds", lambda row: value_of(row, FIGURES["step_seconds"])),
        ("tokens/s", "count", _tokens_per_second),
        *((one.heading, one.kind, lambda row, one=one: value_of(row, one)) for one in cost),
    ):
        marks = [
            {"target": row.figures.target, "chip": row.figures.chip, "chips": row.figures.num_chips, "index": row.index,
             "value": value, "range": range_of(row, value), "isTied": len(tied) > 1 and row.index in tied}
            for row in found if row.figures and (value := of(row)) is not None
        ]  # fmt: skip
        if marks:
            panels.append({"heading": heading, "kind": kind, "marks": sorted(marks, key=lambda mark: mark["chips"])})
    return panels


def _tokens_per_second(row: Row) -> float | None:
    rate = value_of(row, FIGURES["tokens_per_second_per_chip"])
    return None if rate is None or row.figures is None else rate * row.figures.num_chips
