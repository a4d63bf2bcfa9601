"""What commands print with `--json`, where no other file has its keys; `meshloom schema COMMAND` prints the schemas."""

from typing import Any, Literal

from pydantic import ConfigDict

from meshloom.compiler.spec.calibration_spec import Calibration
from meshloom.models.record import Record

from ..data.store import Index
from ..rundir.folders import RunState


class RunResult(Record):
    """A run, as its directory shows it: a row of `meshloom runs`, and the result of `meshloom train`."""

    directory: str
    command: str
    state: RunState
    why: str | None  # of a run that is neither running nor done
    step: int | None
    num_steps: int | None
    loss: float | None
    eval_loss: float | None
    predicted_seconds: float | None
    began: str | None  # in UTC, as `changed`
    changed: str


class SweepRow(Record):
    """A sweep, as a row of `meshloom runs`. best: the value of `objective` at the best point."""

    directory: str
    command: str
    state: RunState
    why: str | None
    changed: str
    num_points: int | None = None
    statuses: dict[str, int] | None = None
    objective: str = ""
    best: float | None = None


class CalibrateResult(Record):
    """A calibration and its file. notes: what it does not reach, and what it replaces."""

    file: str
    calibration: Calibration
    notes: tuple[str, ...] = ()


class ExportResult(Record):
    """The folder that was written, with the bytes of each file."""

    directory: str
    format: str
    files: dict[str, int]


class DataResult(Record):
    """The folder of shards, with its index."""

    directory: str
    index: Index


class LaunchResult(Record):
    """What was launched, or would be. command: of a process."""

    name: str
    engine: str
    hosts: str
    run_dir: str
    command: str


class PartResult(Record):
    """The loss of the whole, or of a source of a mixture; null: it is not finite, or not known."""

    name: str
    loss: float | None
    perplexity: float | None
    bits_per_byte: float | None
    num_targets: int
    num_sequences: int


class EvaluateResult(Record):
    schema_version: Literal[1]
    weights: dict[Literal["place", "step"], str | int | None]
    split: str
    losses: list[PartResult]
    seconds: float


class TasksResult(Record):
    """The metrics of each task of a harness, and what else the harness says. num_cut: requests that were too long."""

    model_config = ConfigDict(extra="allow")

    schema_version: Literal[1]
    weights: dict[Literal["place", "step"], str | int | None]
    tasks: dict[str, dict[str, Any]]
    num_cut: int
    lm_eval: str


class Because(Record):
    override: str
    because: str


class ImportResult(Record):
    """A declaration of another trainer. without_effect: its keys that change nothing here, by what they are about."""

    peer: str
    place: str
    peer_version: str
    overrides: list[Because]
    without_effect: dict[str, list[str]]
    notes: list[str]
    written: str | None
