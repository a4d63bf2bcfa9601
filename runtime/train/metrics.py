"""Metrics of each step: computed once, written to `metrics.jsonl` and TensorBoard, shown by a display."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self

import numpy as np

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.plan import Plan

from ..core.failures import STORAGE, RunFailed
from ..core.files import free_name, parse_json, replace_bytes
from .time_spent import TimeSpent, take_time_spent


@dataclass(frozen=True)
class Metrics:
    """step: steps done. loss, eval_loss: nats per token; eval_loss is None where no evaluation was due. skipped: the
    step had NaN or infinity and changed nothing. tokens_per_second: of all places of the batch, padding included.
    input_wait_seconds: that devices may have stood still for the batch, 0 where it came while the step before it ran.
    num_targets: tokens of the batch with a loss. mfu: model FLOPs / (time x peak), None where one of the two is
    unknown. num_tokens: seen in all steps so far, without padding. time: when the step was done, in seconds since 1970.
    spent: what the time so far went to. auxiliary: losses and statistics of the model's layers and head, by names such
    as layers/z_loss: means over the tokens of the batch. of_processes:
    their times, by names such as processes/3/input_seconds, for steps that collect them (stragglers.py)."""

    step: int
    loss: float
    eval_loss: float | None
    grad_norm: float
    learning_rate: float
    skipped: bool
    tokens_per_second: float
    step_seconds: float
    input_wait_seconds: float
    num_targets: int
    mfu: float | None
    num_tokens: int
    time: float
    spent: TimeSpent
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    of_processes: Mapping[str, float] = field(default_factory=dict)


def by_layer(auxiliary: Mapping[str, np.ndarray], how: Literal["mean", "each"]) -> dict[str, float]:
    """Returns auxiliary outputs under the names of metrics: {"layers/load": [1, 3]} -> {"layers/load": 2} or, of each,
    {"layers/load/0": 1, "layers/load/1": 3}. The head's are scalars."""
    if how == "mean":
        return {name: float(np.mean(value)) for name, value in auxiliary.items()}
    return {
        f"{name}/{layer}" if value.ndim else name: float(x)
        for name, value in auxiliary.items()
        for layer, x in enumerate(np.atleast_1d(value))
    }


def mfu(plan: Plan, step_seconds: float) -> float | None:
    """Model FLOPs utilisation over all devices (remat excluded); None where the target's peak or the model's FLOPs are
    unknown."""
    peak, flops = plan.target.peak_flops_per_second, plan.model_flops_per_step
    return flops / (step_seconds * peak * plan.target.num_devices) if peak and flops is not None else None


def metrics_of(
    plan: Plan,
    step: int,
    read: Mapping[str, Any],
    eval_loss: float | None,
    spent: TimeSpent,
    *,
    seconds: float,
    num_tokens: int,
    input_wait_seconds: float,
    of_processes: Mapping[str, float] = MappingProxyType({}),
) -> Metrics:
    """Returns the metrics of a step that is done now. read: what the step returned, on the host. seconds: that it
    took. num_tokens: seen in all steps so far."""
    return Metrics(
        step=step,
        loss=float(read["loss"]),
        eval_loss=eval_loss,
        grad_norm=float(read["grad_norm"]),
        learning_rate=float(read["learning_rate"]),
        skipped=bool(read["skipped"]),
        tokens_per_second=plan.spec.tokens_per_step / seconds,
        step_seconds=seconds,
        input_wait_seconds=input_wait_seconds,
        num_targets=round(float(read["num_targets"])),
        mfu=mfu(plan, seconds),
        num_tokens=num_tokens,
        time=time.time(),
        spent=spent,
        auxiliary=by_layer({name: read[name] for name in plan.auxiliary}, plan.spec.logging.layer_metrics),
        of_processes=of_processes,
    )


def values_of(metrics: Metrics) -> dict[str, float | None]:
    """Returns the values of a line of `metrics.jsonl`: what is not finite as None."""
    known = {name: value for name, value in vars(metrics).items() if name not in ("spent", "auxiliary", "of_processes")}
    named = known | metrics.spent.as_metrics() | dict(metrics.auxiliary) | dict(metrics.of_processes)
    return {name: _finite(value) for name, value in named.items()}


def read_metrics(line: str) -> Metrics:
    """Returns the metrics of a line of `metrics.jsonl`; a loss or norm that was not finite as NaN."""
    values: dict[str, Any] = json.loads(line)
    values |= {name: nan for name in ("loss", "grad_norm") if values[name] is None}
    spent = take_time_spent(values)
    own = {each.name: values.pop(each.name) for each in fields(Metrics) if each.name in values}
    of_processes = {name: values.pop(name) for name in list(values) if name.startswith("processes/")}
    return Metrics(**own, spent=spent, auxiliary=values, of_processes=of_processes)


class MetricsLog:
    """Appends each step to `metrics.jsonl`, whole lines at once; NaN and infinity, which JSON has not, as null.

    A resumed run first drops what it will do again. Of a damaged file it keeps the lines that can be read, and a copy
    of the file as it was; `warning` says so. kept_line, last_line: those of the step that the run goes on from, and of
    the last one before it stopped; None where there is none.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError) if isinstance(error, RunFailed) else nullcontext():  # it would be told twice
            self._file.close()

    def write(self, metrics: Metrics) -> None:
        """Appends one step. Raises RunFailed if the disk refuses it."""
        try:
            self._file.write(json.dumps(values_of(metrics)) + "\n")
        except OSError as error:
            what = f"the metrics of step {metrics.step} could not be written: {error.strerror}"
            fix = "free disk space, and start the same command again"
            raise RunFailed(Problem(str(self.path.parent), what, fix), STORAGE) from error


def _finite(value: float | None) -> float | None:
    return value if value is None or isfinite(value) else None


def _read(content: bytes, last_step: int) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Returns the lines that hold a step, with it, and the numbers of those that hold none.

    A last line that is cut off counts as neither where its step, after `last_step`, is done again: a killed process
    leaves it.
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
