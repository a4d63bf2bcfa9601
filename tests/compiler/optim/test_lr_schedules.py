"""Learning rates at each step, against their formulas in plain Python."""

import math
from typing import Any

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.optim.configs import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleConfig,
    WsdSchedule,
)
from meshloom.compiler.optim.optimizers import learning_rates
from meshloom.compiler.sharding.state import build_schedule

PEAK, N, W, D, FINAL = 0.5, 40, 8, 10, 0.1
KINDS = [("constant", ""), ("cosine", ""), ("linear", ""), ("wsd", "linear"), ("wsd", "sqrt")]


def _schedule(kind: str, shape: str, *, warmup: int, final: float = FINAL) -> ScheduleConfig:
    keys: Any = {"kind": kind, "num_warmup_steps": warmup, "final_learning_rate_fraction": final}
    if kind == "constant":
        return ConstantSchedule(kind="constant", num_warmup_steps=warmup)
    if kind == "wsd":
        return WsdSchedule(**keys, num_decay_steps=D, decay_shape=shape)  # type: ignore[arg-type]
    return CosineSchedule(**keys) if kind == "cosine" else LinearSchedule(**keys)


def _rates(schedule: ScheduleConfig, num_steps: int, *, more: int = 0) -> np.ndarray:
    rate = learning_rates(schedule, PEAK, num_steps)
    return np.array([rate(step) for step in range(num_steps + more)], np.float64)


def _expected(kind: str, shape: str, step: int) -> float:
    if step < W:
        return PEAK * (step + 1) / W
    done = (step - W) / (N - 1 - W)  # 0 at the first step after the warm-up, 1 at the last of the run
    if kind == "constant":
        return PEAK
    if kind == "cosine":
        return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2)
    if kind == "linear":
        return PEAK - (PEAK - PEAK * FINAL) * done
    late = max(0, step - (N - 1 - D)) / D  # 0 at the last step before the decay, 1 at the last of the run
    return PEAK * (1 - (1 - FINAL) * (late if shape == "linear" else math.sqrt(late)))


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_each_kind_follows_its_formula(kind, shape):
    expected = [_expected(kind, shape, step) for step in range(N)]
    np.testing.assert_allclose(_rates(_schedule(kind, shape, warmup=W), N), expected, rtol=1e-5)


@pytest.mark.parametrize(("kind", "shape"), KINDS[1:])
@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 10), (20, 60), (8, 10)])
def test_the_last_step_has_the_declared_final_rate_and_the_rate_stays_there(kind, shape, warmup, num_steps):
    for final in (0.0, 0.1, 1.0):
        schedule = _schedule(kind, shape, warmup=warmup, final=final)
        if not schedule.problems(num_steps):
            late = _rates(schedule, num_steps, more=3)[num_steps - 1 :]
            np.testing.assert_allclose(late, [PEAK * final] * 4, rtol=1e-5, atol=1e-8)


def test_a_run_has_the_rates_that_its_schedule_declares():
    spec = spec_of("schedule=linear", "schedule.num_warmup_steps=2", "num_steps=6", "optimizer.learning_rate=0.5")
    rate = build_schedule(spec)
    assert np.array([rate(step) for step in range(6)]) == pytest.approx(
        [0.25, 0.5, 0.5, 0.5 * 2 / 3, 0.5 / 3, 0], abs=1e-7
    )


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (0, 10), (2, 10), (9, 10), (10, 10), (100, 10)])
def test_a_rate_rises_to_the_peak_then_never_rises_again(kind, warmup, num_steps):
    rates = _rates(_schedule(kind, "", warmup=warmup), num_steps)
    rise = min(warmup, num_steps)
    np.testing.assert_allclose(rates[:rise], PEAK * np.arange(1, rise + 1) / max(warmup, 1), rtol=1e-6)
    assert np.all(np.diff(rates[max(rise - 1, 0) :]) <= 0)
    assert rates[0] > 0


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (9, 10), (10, 10), (100, 10)])
def test_a_warm_up_that_ends_below_the_peak_is_warned_of(warmup, num_steps):
    schedule = _schedule("cosine", "", warmup=warmup)
    rates, warnings = _rates(schedule, num_steps), schedule.warnings(PEAK, num_steps)
    is_below = bool(max(rates) < 0.999 * PEAK)
    assert [warning.where for warning in warnings] == ["schedule.num_warmup_steps"] * is_below
    assert all(f"the learning rate ends at {rates[-1]:.3g}" in warning.what for warning in warnings)
