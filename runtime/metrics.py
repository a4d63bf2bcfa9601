"""Metrics of each step: computed once, written to `metrics.jsonl` and TensorBoard, shown by a display."""

import json
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Self

from meshloom.compiler.plan import Plan
from meshloom.compiler.problems import Problem

from .curves import Curves
from .failures import STORAGE, RunFailed
from .files import replace_text


@dataclass(frozen=True)
class Metrics:
    """step: steps done. loss, eval_loss: nats per token; eval_loss is None where no evaluation was due. skipped: the
    step had NaN or infinity and changed nothing. input_wait_seconds: that devices may have stood still for the batch, 0
    where it came while the step before it ran. mfu: model FLOPs / (time x peak), None where the peak is unknown."""

    step: int
    loss: float
    eval_loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool
    tokens_per_second: float
    step_seconds: float
    input_wait_seconds: float
    mfu: float | None


def mfu(plan: Plan, step_seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices (remat excluded); None where the target's peak is unknown."""
    peak = plan.target.peak_flops_per_second
    return plan.model_flops_per_step / (step_seconds * peak * plan.target.num_devices) if peak else None


class MetricsLog:
    """Appends each step to `metrics.jsonl`, whole lines at once; NaN and infinity, which JSON has not, as null.

    A resumed run first drops what it will do again.
    """

    def __init__(self, run_dir: Path, *, first_step: int, tensorboard: bool):
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= first_step]
        replace_text(self.path, "".join(kept))
        self._file = self.path.open("a", buffering=1)
        self._curves = Curves(run_dir / "tensorboard", first_step=first_step) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for log in filter(None, (self._file, self._curves)):
            with suppress(OSError) if isinstance(error, RunFailed) else nullcontext():  # it would be told twice
                log.close()

    def write(self, metrics: Metrics) -> None:
        """Append one step. Raises RunFailed where the disk refuses it."""
        values = {name: _finite(value) for name, value in vars(metrics).items()}
        try:
            self._file.write(json.dumps(values) + "\n")
            if self._curves:
                known = {name: value for name, value in values.items() if name != "step" and value is not None}
                self._curves.add(metrics.step, known)
        except OSError as error:
            what = f"the metrics of step {metrics.step} could not be written: {error.strerror}"
            fix = "make room, and start the same command again"
            raise RunFailed(Problem(str(self.path.parent), what, fix), STORAGE) from error


def _finite(value: float | None) -> float | None:
    return value if value is None or isfinite(value) else None


def _lines(path: Path) -> list[str]:
    """Whole lines; what a killed process left unfinished is not one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
