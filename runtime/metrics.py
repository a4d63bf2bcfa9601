"""Metrics of each step: computed once, written to `metrics.jsonl` and TensorBoard, shown by a display."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboardX import SummaryWriter

from meshloom.compiler.plan import Plan


@dataclass(frozen=True)
class Metrics:
    """step: steps done. loss, eval_loss: nats per token; eval_loss is None where no evaluation was due.
    input_seconds: that the host waited for the batch and its transfer, behind the step before it as long as that runs.
    mfu: model FLOPs / (time x peak), None where the peak is unknown."""

    step: int
    loss: float
    eval_loss: float | None
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    step_seconds: float
    input_seconds: float
    mfu: float | None


def mfu(plan: Plan, step_seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices (remat excluded); None where the target's peak is unknown."""
    peak = plan.target.peak_flops_per_second
    return plan.model_flops_per_step / (step_seconds * peak * plan.target.num_devices) if peak else None


class MetricsLog:
    """Appends each step to `metrics.jsonl`, whole lines at once. A resumed run first drops what it will do again."""

    def __init__(self, run_dir: Path, *, first_step: int, tensorboard: bool):
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= first_step]
        self.path.write_text("".join(kept))
        self._file = self.path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._board:
            self._board.close()

    def write(self, metrics: Metrics) -> None:
        values = asdict(metrics)
        self._file.write(json.dumps(values) + "\n")
        if self._board:
            for name, value in values.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, metrics.step)


def _lines(path: Path) -> list[str]:
    """Whole lines; what a killed process left unfinished is not one."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
