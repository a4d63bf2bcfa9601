"""Computes the metrics of each step, once for `metrics.jsonl`, trackers and the display."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite, nan
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from meshloom.compiler.core.known import known
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan

from .time_spent import TimeSpent, take_time_spent


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
    some steps, by names such as processes/3/input_seconds (stragglers.py).
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
