"""The points of a sweep: what each declares, where it lies, and what it came to."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import NonNegativeFloat

from meshloom.compiler.config.compose import Request
from meshloom.models.config import Record

from .rows import Figures, Row, Status

SweepCommand = Literal["explain", "compile", "train"]
SWEEP_COMMANDS: tuple[SweepCommand, ...] = ("explain", "compile", "train")
MOST_NAME_BYTES = 200  # file systems allow 255
PRINTED = "output.log"  # of a directory of a point: what its process prints
POINT_NAME = "point_name"  # a resolver of OmegaConf, for hydra.sweep.subdir

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
