"""Writes `metrics.jsonl`: a line for each step."""

import json
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Self

from meshloom.compiler.core.errors import Problem

from ..core.failures import STORAGE, RunFailed
from ..core.files import free_name, parse_json, replace_bytes
from .metrics import Metrics, values_of
from .observer import ObservedRun, Observer
from .time_spent import spent_by_earlier_starts


class MetricsLog(Observer):
    """Appends each step to `metrics.jsonl`, a whole line at once. NaN and infinity, which JSON lacks, are null.

    A resumed run first drops the steps that it will repeat. If the file is damaged, the readable lines are kept, and a
    copy of the old file; `warning` says so. kept_line, last_line: the lines of the step that the run continues from,
    and of the last one before it stopped; None if there is none.
    """

    def __init__(self, run_dir: Path, *, first_step: int):
        self.path = run_dir / "metrics.jsonl"
        content = self.path.read_bytes() if self.path.exists() else b""
        lines, damaged = _read(content, first_step)
        kept = [line for step, line in lines if step <= first_step]
        self.warning = _set_aside(self.path, damaged) if damaged else None
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
            run.say(f"warning: {log.warning}")
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


def _set_aside(path: Path, damaged: list[int]) -> str:
    copy = free_name(path)
    shutil.copyfile(path, copy)
    lines = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, from line {damaged[0]} on,"
    what = "holds no step" if len(damaged) == 1 else "hold no step"
    return f"{path} is damaged: {lines} {what}; all other lines are kept, and the file as it was is {copy}"
