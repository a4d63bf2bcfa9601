"""The points of a sweep, and the two files that say what they came to.

`sweep.json` holds the request of a sweep, and `sweep.jsonl` a row for each point that has ended. `meshloom tune` writes
the same two files, so that one table and one page show both.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, model_validator

from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.core.known import text_of
from meshloom.compiler.declare.application import register_function
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.figures import Figure, StepFigures, no_figures, register, text_of_figure
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
