"""Computes the metrics of each step, once for all that show them, and the time of a run by kind."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import psutil

from meshloom.compiler.core.format import human_seconds, human_share
from meshloom.compiler.core.known import known
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan

TimeKind = Literal["start", "compile", "restore", "steps", "input", "evaluation", "save", "profile", "redone", "down"]
KINDS: tuple[TimeKind, ...] = get_args(TimeKind)


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of the wall clock by kind. num_starts: the starts of the run so far.

    start: from the start of the process to the first step, without compile and restore. steps: training, without input.
    input: devices stood still for input. evaluation, save: no step ran because of them. profile: beginning and writing
    a trace. redone: time of earlier starts after the checkpoint that the next start began with. down: between the last
    recorded step of a start and the next start.
    """

    num_starts: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Returns the share of all seconds in steps that were kept."""
        return self.seconds["steps"] / self.total if self.total else 0.0

    def as_metrics(self) -> dict[str, float]:
        """Returns the values of a line of `metrics.jsonl`."""
        named = {f"seconds/{kind}": round(seconds, 3) for kind, seconds in self.seconds.items()}
        return {"goodput": self.goodput, "num_starts": self.num_starts, **named}

    def __str__(self) -> str:
        """Returns one line: 84 s, 71.2 % in steps; compile 14.1 s, start 9.2 s."""
        others = sorted(((self.seconds[kind], kind) for kind in KINDS if kind != "steps"), reverse=True)
        parts = ", ".join(f"{kind} {human_seconds(seconds)}" for seconds, kind in others if seconds >= 0.0005)
        return f"{human_seconds(self.total)}, {human_share(self.goodput)} in steps; {parts}".removesuffix("; ")


def spent_by_earlier_starts(kept: Mapping[str, Any] | None, last: Mapping[str, Any] | None, began: float) -> TimeSpent:
    """Returns the time of a run before this start, as its lines of `metrics.jsonl` record it.

    kept: the line of the step that this start continues from; None from the beginning. last: the last line; None if
    there is none. began: the time of this start, in seconds since 1970.
    """
    # An earlier version wrote lines without times.
    if last is None or any(line is not None and "num_starts" not in line for line in (kept, last)):
        return NOTHING
    before, at_end = (take_time_spent(dict(line)) if line else NOTHING for line in (kept, last))
    redone = max(0.0, at_end.total - before.total)
    down = max(0.0, began - float(last["time"]))
    gone = {"redone": before.seconds["redone"] + redone, "down": before.seconds["down"] + down}
    return TimeSpent(at_end.num_starts, {**before.seconds, **gone})


def take_time_spent(values: dict[str, Any]) -> TimeSpent:
    """Removes the values of `as_metrics` from those of a line, and returns them; kinds that are missing are 0. Raises
    KeyError if the line has no times."""
    del values["goodput"]
    return TimeSpent(values.pop("num_starts"), {kind: values.pop(f"seconds/{kind}", 0.0) for kind in KINDS})


def process_began() -> float:
    """Returns the start time of this process, in seconds since 1970."""
    return psutil.Process().create_time()


class Stopwatch:
    """Counts the seconds of this start. began: the time of the start, in seconds since 1970. earlier: the time of
    earlier starts. Only one thread may use it."""

    def __init__(self, began: float):
        self.began, self.earlier = began, NOTHING
        self._seconds = dict.fromkeys(KINDS, 0.0) | {"start": max(0.0, time.time() - began)}
        self._kind: TimeKind = "start"
        self._since = time.perf_counter()

    @contextmanager
    def spending(self, kind: TimeKind) -> Iterator[None]:
        """Within the `with`, time counts as this kind, and afterwards as the kind before."""
        before = self._kind
        self._go_to(kind)
        try:
            yield
        finally:
            self._go_to(before)

    def move(self, seconds: float, to: TimeKind) -> None:
        """Moves seconds from the present kind to another."""
        self._seconds[self._kind] -= seconds
        self._seconds[to] += seconds

    @property
    def step_seconds(self) -> float:
        """Returns the seconds of this start in steps so far, including waits for input."""
        self._go_to(self._kind)
        return self._seconds["steps"] + self._seconds["input"]

    def by_this_start(self) -> TimeSpent:
        """Returns the time of this start so far."""
        self._go_to(self._kind)
        return TimeSpent(1, dict(self._seconds))

    def by_all(self) -> TimeSpent:
        """Returns the time of all starts so far."""
        earlier, own = self.earlier, self.by_this_start()
        return TimeSpent(earlier.num_starts + 1, {kind: earlier.seconds[kind] + own.seconds[kind] for kind in KINDS})

    def _go_to(self, kind: TimeKind) -> None:
        now = time.perf_counter()
        self._seconds[self._kind] += now - self._since
        self._kind, self._since = kind, now


def time_rows(watch: Stopwatch) -> list[tuple[str, str]]:
    """Returns the rows of a summary: the time of this start, and of all starts if there are several."""
    rows, whole = [("time", str(watch.by_this_start()))], watch.by_all()
    return [*rows, (f"time of {whole.num_starts} starts", str(whole))] if whole.num_starts > 1 else rows


@dataclass(frozen=True)
class Metrics:
    """The metrics of a step.

    step: the steps done. loss, eval_loss: nats per token; eval_loss is None if no evaluation was due. skipped: the step
    had NaN or infinity and changed nothing. tokens_per_second: all places of the batch, padding included, per second.
    input_wait_seconds: the time for which devices may have stood still for the batch; 0 if it came while the previous
    step ran. num_targets: the tokens of the batch that have a loss. mfu: model FLOPs / (time x peak); None if one of
    them is unknown. num_tokens: the tokens of all steps so far, without padding. time: the end of the step, in seconds
    since 1970. spent: the time of the run so far, by kind. auxiliary: losses and statistics of the model's layers and
    head, by names such as layers/z_loss; means over the tokens of the batch. observed: values that observers add to
    some steps, by names such as processes/3/input_seconds (watchdog.py).
    """

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
    observed: Mapping[str, float] = field(default_factory=dict)


def by_layer(auxiliary: Mapping[str, np.ndarray], how: Literal["mean", "each"]) -> dict[str, float]:
    """Returns auxiliary outputs by the names of metrics: {"layers/load": [1, 3]} -> {"layers/load": 2} for "mean", and
    {"layers/load/0": 1, "layers/load/1": 3} for "each". The head's outputs are scalars."""
    if how == "mean":
        return {name: float(np.mean(value)) for name, value in auxiliary.items()}
    return {
        f"{name}/{layer}" if value.ndim else name: float(x)
        for name, value in auxiliary.items()
        for layer, x in enumerate(np.atleast_1d(value))
    }


def metrics_of(
    plan: Plan[RunSpec],
    step: int,
    read: Mapping[str, Any],
    eval_loss: float | None,
    spent: TimeSpent,
    *,
    seconds: float,
    num_tokens: int,
    input_wait_seconds: float,
    observed: Mapping[str, float] = MappingProxyType({}),
) -> Metrics:
    """Returns the metrics of a step that is done now. read: the results of the step, on the host. seconds: the time of
    the step. num_tokens: the tokens of all steps so far."""
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
        mfu=known(plan.work.mfu(seconds)),
        num_tokens=num_tokens,
        time=time.time(),
        spent=spent,
        auxiliary=by_layer({name: read[name] for name in plan.auxiliary}, plan.spec.logging.layer_metrics),
        observed=observed,
    )


def values_of(metrics: Metrics) -> dict[str, float | None]:
    """Returns the values of a line of `metrics.jsonl`, with None for values that are not finite."""
    known = {name: value for name, value in vars(metrics).items() if name not in ("spent", "auxiliary", "observed")}
    named = known | metrics.spent.as_metrics() | dict(metrics.auxiliary) | dict(metrics.observed)
    return {name: value if value is None or isfinite(value) else None for name, value in named.items()}


def read_metrics(line: str) -> Metrics:
    """Returns the metrics of a line of `metrics.jsonl`, with NaN for a loss or norm that was not finite."""
    values: dict[str, Any] = json.loads(line)
    values |= {name: nan for name in ("loss", "grad_norm") if values[name] is None}
    spent = take_time_spent(values)
    own = {each.name: values.pop(each.name) for each in fields(Metrics) if each.name in values}
    observed = {name: values.pop(name) for name in list(values) if name.startswith("processes/")}
    return Metrics(**own, spent=spent, auxiliary=values, observed=observed)


NOTHING = TimeSpent(0, dict.fromkeys(KINDS, 0.0))
