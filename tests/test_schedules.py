"""Learning rates at chosen steps, against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.optimizer import build_schedule

PEAK, N, W, D, FINAL = 0.5, 40, 8, 10, 0.1


def _expected(kind: str, shape: str, step: int) -> float:
    if step < W:
        return PEAK * step / W
    done = (step - W) / (N - W)
    if kind == "constant":
        return PEAK
    if kind == "cosine":
        return PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2)
    if kind == "linear":
        return PEAK - (PEAK - PEAK * FINAL) * done
    late = max(0.0, (step - (N - D)) / D)
    return PEAK * (1 - (1 - FINAL) * (late if shape == "linear" else math.sqrt(late)))


@pytest.mark.parametrize(
    ("kind", "shape"), [("constant", ""), ("cosine", ""), ("linear", ""), ("wsd", "linear"), ("wsd", "sqrt")]
)
def test_each_kind_follows_its_formula(kind, shape):
    keys = [f"schedule.num_warmup_steps={W}"]
    keys += [] if kind == "constant" else [f"schedule.final_learning_rate_fraction={FINAL}"]
    keys += [f"schedule.num_decay_steps={D}", f"schedule.decay_shape={shape}"] if kind == "wsd" else []
    schedule = build_schedule(spec_of(f"schedule={kind}", *keys, f"optimizer.learning_rate={PEAK}", f"num_steps={N}"))
    for step in (0, 1, W - 1, W, W + 1, 20, N - D - 1, N - D, N - D + 1, N - 1, N):
        assert float(jnp.asarray(schedule(step))) == pytest.approx(_expected(kind, shape, step), rel=1e-5), step


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (0, 10), (2, 10), (9, 10), (10, 10), (100, 10)])
def test_a_rate_rises_then_never_rises_again(kind, warmup, num_steps):
    spec = spec_of(f"schedule={kind}", f"schedule.num_warmup_steps={warmup}", f"num_steps={num_steps}")
    schedule, peak = build_schedule(spec), spec.optimizer.learning_rate
    rates = np.array([schedule(step) for step in range(num_steps + 1)])
    rise = min(warmup, num_steps)
    expected = peak * np.arange(rise + 1) / warmup if warmup else peak
    np.testing.assert_allclose(rates[: rise + 1], expected, rtol=1e-6)
    assert np.all(np.diff(rates[rise:]) <= 0)
    if warmup < num_steps and kind == "cosine":
        assert rates[-1] == pytest.approx(0.1 * peak)
