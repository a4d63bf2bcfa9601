"""Writes the metrics of each step: as a line of `metrics.jsonl`, and to trackers.

A tracker is TensorBoard, Weights & Biases, MLflow, or a user's own class:

    logging.trackers=[tensorboard,wandb,my_package.tracking:MyTracker]

Only process 0 has trackers, since metrics are the same in all processes. A tracker that fails is reported once and then
left out; the run continues. A full disk is an exception: TensorBoard's files are part of the run, like its metrics.

Each of our trackers is in a file of its own, which imports its library and is itself imported only if it is declared.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.user_code import load_class
from meshloom.compiler.declare.run_spec import LoggingSpec, RunSpec
from meshloom.compiler.plan import Plan

from ..core.failures import STORAGE, RunFailed
from ..core.files import free_name, parse_json, replace_bytes, replace_json
from ..rundir.folders import METRICS
from .metrics import Metrics, spent_by_earlier_starts, values_of
from .observer import ObservedRun, Observer

WHERE = "logging.trackers"
IDS_FILE = "trackers.json"  # in a run directory: the trackers' ids of the run, so that a resumed run continues there
OURS = {
    "tensorboard": "tensorboard:TensorBoard",
    "wandb": "weights_and_biases:WeightsAndBiases",
    "mlflow": "mlflow_tracker:MLflow",
}
FAILED = object()


class MetricsLog(Observer):
    """Appends each step to `metrics.jsonl`, a whole line at once. NaN and infinity, which JSON lacks, are null.

    A resumed run first drops the steps that it will repeat. If the file is damaged, the readable lines are kept, and a
    copy of the old file; `warning` says so. kept_line, last_line: the lines of the step that the run continues from,
    and of the last one before it stopped; None if there is none.
    """

    def __init__(self, run_dir: Path, *, first_step: int):
        self.path = run_dir / METRICS
        content = self.path.read_bytes() if self.path.exists() else b""
        lines, damaged = _read(content, first_step)
        kept = [line for step, line in lines if step <= first_step]
        self.warning = None
        if damaged:
            shutil.copyfile(self.path, copy := free_name(self.path))
            what = f"line {damaged[0]} holds no step"
            if len(damaged) > 1:
                what = f"{len(damaged)} lines, from line {damaged[0]} on, hold no step"
            rest = f"all other lines are kept, and the file as it was is {copy}"
            self.warning = f"{self.path} is damaged: {what}; {rest}"
        self.kept_line = parse_json(kept[-1]) if kept else None
        self.last_line = parse_json(lines[-1][1]) if lines else None
        replace_bytes(self.path, b"".join(line + b"\n" for line in kept))
        self._file = self.path.open("a", buffering=1)

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self | None:
        """Returns the log of process 0, which writes for all; None in the others. Warns about a damaged file, and gives
        the stopwatch the time of earlier starts."""
        if not run.processes.is_first:
            return None
        log, watch = cls(run.run_dir, first_step=run.first_step), run.observers.watch
        if log.warning:
            run.announce(f"warning: {log.warning}")
        watch.earlier = spent_by_earlier_starts(log.kept_line, log.last_line, watch.began)
        return log

    def left(self, error: BaseException | None) -> None:
        with suppress(OSError) if isinstance(error, RunFailed) else nullcontext():  # it was reported already
            self._file.close()

    def step_reported(self, metrics: Metrics) -> None:
        """Appends one step. Raises RunFailed if the disk refuses it."""
        try:
            self._file.write(json.dumps(values_of(metrics)) + "\n")
        except OSError as error:
            what = f"the metrics of step {metrics.step} could not be written: {error.strerror}"
            fix = "free disk space, and start the same command again"
            raise RunFailed(Problem(str(self.path.parent), what, fix), STORAGE) from error


def _read(content: bytes, last_step: int) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Returns the lines that hold a step, with its number, and the line numbers of those that hold none.

    A last line that is cut off is left out if its step, after `last_step`, is done again: a killed process leaves such
    a line.
    """
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    steps = [_step_of(line) for line in lines]
    damaged = [number for number, step in enumerate(steps, start=1) if step is None]
    is_done_again = max((step for step in steps if step is not None), default=last_step) >= last_step
    rest = content.rpartition(b"\n")[2]
    is_cut_off = rest.startswith(b"{") and b"\0" not in rest
    if damaged and damaged[-1] == len(lines) and is_cut_off and is_done_again:
        damaged.pop()
    return [(step, line) for line, step in zip(lines, steps, strict=True) if step is not None], damaged


def _step_of(line: bytes) -> int | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    step = value.get("step") if isinstance(value, dict) else None
    return step if type(step) is int else None  # `true` is an int too


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it.

    name: `run.name`, or the run directory as typed. is_named: `run.name` was given. tags, notes: the keys of `run`.
    first_step: the steps that are done already, above 0 if the run continues. declaration: the content of `spec.yaml`.
    options: the config group `logging`. warn: shows a problem to the user.
    """

    name: str
    tags: tuple[str, ...]
    notes: str | None
    directory: Path
    first_step: int
    declaration: Mapping[str, Any]
    options: LoggingSpec
    is_named: bool = True
    warn: Callable[[Problem], None] = lambda _: None

    def remembered_id(self, tracker: str, make: Callable[[], str]) -> str:
        """Returns a tracker's id for this run: the one of its first start, or a new one."""
        path = self.directory / IDS_FILE
        ids = parse_json(path.read_bytes()) if path.exists() else {}
        if tracker not in ids:
            ids[tracker] = make()
            replace_json(path, ids)
        return str(ids[tracker])


class Tracker(ABC):
    """Takes the metrics of a run. It is created when the run starts, and called by the thread that trains: do slow work
    in a thread of your own."""

    def __init__(self, run: TrackedRun):
        self.run = run

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of a step, by their names in `metrics.jsonl`, without null values."""

    def close(self, *, has_failed: bool) -> None:  # noqa: B027 (most trackers need none)
        """Ends the tracking of this start. has_failed: an error ended the run; a signal is not an error."""


class Trackers(Observer):
    """The trackers of a run. warn: takes the failure of one of them."""

    def __init__(self, kinds: Sequence[type[Tracker]], run: TrackedRun, warn: Callable[[Problem], None]):
        self._warn = warn
        started = (self._guarded("when it was started", kind, kind, run) for kind in kinds)
        self._open = [tracker for tracker in started if tracker is not FAILED]

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self | None:
        """Returns the declared trackers in process 0; None in the others."""
        if not run.processes.is_first:
            return None
        tracked = tracked_run(run.plan, run.run_dir, run.first_step, run.warn)
        return cls(find_trackers(run.spec.logging), tracked, run.warn)

    def left(self, error: BaseException | None) -> None:
        for each in self._open:
            self._guarded("when it was closed", type(each), each.close, has_failed=isinstance(error, Exception))

    def step_reported(self, metrics: Metrics) -> None:
        self.log(metrics.step, values_of(metrics))

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Gives each tracker the metrics of a step. Raises RunFailed if the disk refuses TensorBoard's."""
        known = {name: value for name, value in values.items() if name != "step" and value is not None}
        logged = [(each, self._guarded(f"at step {step}", type(each), each.log, step, known)) for each in self._open]
        self._open = [each for each, result in logged if result is not FAILED]

    def _guarded(self, when: str, kind: type[Tracker], call: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Returns the result of the call; warns and returns FAILED if it raises."""
        try:
            return call(*values, **named)
        except RunFailed:
            raise
        except Exception as error:
            what = f"{kind.__name__} failed {when}, and gets no more: {type(error).__name__}: {error}"
            self._warn(Problem(WHERE, what, "the run goes on without it; metrics.jsonl has every step"))
            return FAILED


def find_trackers(options: LoggingSpec) -> tuple[type[Tracker], ...]:
    """Returns the classes of the declared trackers. Raises ConfigError for those that cannot be imported."""
    return tuple(all_of(*(lambda name=name: _class_of(name) for name in options.trackers)))


def tracked_run(
    plan: Plan[RunSpec], run_dir: Path, first_step: int, warn: Callable[[Problem], None] = lambda _: None
) -> TrackedRun:
    """Returns a run as trackers know it."""
    spec, labels = plan.spec, plan.spec.run
    return TrackedRun(
        name=labels.name or str(run_dir),
        tags=labels.tags,
        notes=labels.notes,
        directory=run_dir.resolve(),
        first_step=first_step,
        declaration=spec.as_written(),
        options=spec.logging,
        is_named=labels.name is not None,
        warn=warn,
    )


def _class_of(name: str) -> type[Tracker]:
    if name not in OURS:
        return load_class(name, WHERE, Tracker)
    module, _, kind = OURS[name].partition(":")
    try:
        return getattr(import_module(f".{module}", __package__), kind)
    except ImportError as error:
        fix = f"pip install 'meshloom[{name}]', or leave it out"
        raise ConfigError([Problem(WHERE, f"the package of {name} is not installed: {error}", fix)]) from error
