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

from omegaconf import OmegaConf
from pydantic import NonNegativeFloat, NonNegativeInt

from meshloom.compiler.declare.compose import Request
from meshloom.models.config import Record

SCHEMA_VERSION = 1  # of sweep.json and sweep.jsonl

SWEEP_FILE = "sweep.json"
ROWS_FILE = "sweep.jsonl"

# done: it has figures. refused: the declaration is wrong. does_not_fit: it needs more memory than a chip has.
# failed: the compiler or the run failed. aborted: the process died. timed_out: it took longer than it may.
# out_of_memory: this machine's memory was used up. discarded: a sieve of `meshloom tune` left it out. running: it has
# not ended; only the page of a sweep that goes on has such rows.
Status = Literal[
    "done", "refused", "does_not_fit", "failed", "aborted", "timed_out", "out_of_memory", "discarded", "running"
]  # fmt: skip
Basis = Literal["estimate", "schedule", "measured"]  # without a compiler; of the compiled program; of a run
SweepCommand = Literal["explain", "compile", "train"]
SWEEP_COMMANDS: tuple[SweepCommand, ...] = ("explain", "compile", "train")
MOST_NAME_BYTES = 200  # file systems allow 255
PRINTED = "output.log"  # of a directory of a point: what its process prints
POINT_NAME = "point_name"  # a resolver of OmegaConf, for hydra.sweep.subdir


class Figures(Record):
    """Figures of one point. Seconds are of one step, bytes of one chip; None: not known, or not of this command."""

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
    step_seconds: NonNegativeFloat | None = None
    range_factor: NonNegativeFloat | None = None  # by which a step may be longer or shorter than predicted
    compute_seconds: NonNegativeFloat | None = None
    exposed_seconds: NonNegativeFloat | None = None
    bubble_seconds: NonNegativeFloat | None = None  # of a pipeline; 0 without one
    tokens_per_second_per_chip: NonNegativeFloat | None = None
    mfu: NonNegativeFloat | None = None
    peak_bytes: NonNegativeInt | None = None
    limit_bytes: NonNegativeInt | None = None
    fits: bool | None = None
    compile_seconds: NonNegativeFloat | None = None
    cost_per_million_tokens: NonNegativeFloat | None = None  # in the currency of the user's price per chip-hour
    training_seconds: NonNegativeFloat | None = None  # for all tokens of the training, where their number is said
    training_cost: NonNegativeFloat | None = None
    final_loss: float | None = None  # of training; infinite and NaN are None
    evaluation_loss: float | None = None
    last_step: NonNegativeInt | None = None


class Row(Record):
    """One point that has ended.

    overrides: as the user typed them, one for each swept key. directory: of the point, relative to the sweep's; None if
    it has none. why: of every status but done. fingerprint: of the lowered program with its options, topology and
    versions; same_as: the index of the point that compiled the same one. swept: the value of each swept key.
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
    """The request of a sweep. overrides: those of every point. axes: swept keys with their values, in the typed
    order."""

    schema_version: int
    command: Literal["explain", "compile", "train", "tune"]
    overrides: tuple[str, ...]
    axes: dict[str, list[Any]]
    num_points: NonNegativeInt | None  # None: a sweeper that chooses as it goes
    objective: str  # the figure that the table is sorted by: step_seconds
    versions: dict[str, str]
    identity: str | None = None  # a hash of what was asked for: the same command goes on in the same directory


# Exit codes of points that did not end by themselves, as `timeout` and shells have them.
TIMED_OUT, KILLED, INTERRUPTED = 124, 137, 130


@dataclass(frozen=True)
class Point:
    """overrides: of the swept keys, as typed. swept: their values. directory: relative to the sweep's."""

    index: int
    overrides: tuple[str, ...]
    swept: dict[str, Any]
    directory: str


@dataclass(frozen=True)
class Task:
    """A point as a worker gets it. request: all of its overrides. allowed: modules whose code it may run. directory:
    where its files go."""

    command: SweepCommand
    request: Request
    allowed: tuple[str, ...]
    directory: Path


class Outcome(Record):
    """The outcome of a point. why: for every status but done. seconds: its time in its worker."""

    status: Status
    exit_code: int
    why: str | None = None
    seconds: NonNegativeFloat | None = None
    fingerprint: str | None = None
    figures: Figures | None = None


def row_of(point: Point, outcome: Outcome, *, has_directory: bool) -> Row:
    """Returns the row of a point that has ended."""
    return Row(
        index=point.index,
        overrides=point.overrides,
        swept=point.swept,
        status=outcome.status,
        why=outcome.why,
        directory=point.directory if has_directory else None,
        exit_code=outcome.exit_code,
        seconds=outcome.seconds,
        fingerprint=outcome.fingerprint,
        figures=outcome.figures,
    )


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
    """Returns the overrides of swept keys among those that Hydra has for a job, as typed: without `++`."""
    return [text.lstrip("+") for text in overrides if text.lstrip("+").partition("=")[0] in swept_keys]


def _point_name(overrides: Sequence[str], swept_keys: str) -> str:
    return directory_name(swept_of(list(overrides), swept_keys.split(" ")))


# Hydra names the directories of other launchers' jobs, some in processes that import this with the job.
OmegaConf.register_new_resolver(POINT_NAME, _point_name, replace=True)
