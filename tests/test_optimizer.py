"""The schedule at its corners. (Ten steps of AdamW are held to NumPy in test_equivalence.)"""

import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.optimizer import build_schedule


@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 1), (0, 10), (2, 10), (9, 10), (10, 10), (100, 10)])
def test_learning_rate_rises_then_falls_to_its_fraction(warmup, num_steps):
    spec = spec_of(f"optimizer.num_warmup_steps={warmup}", "optimizer.learning_rate=0.5").optimizer
    rates = np.array([build_schedule(spec, num_steps)(step) for step in range(num_steps + 1)])
    rise = min(warmup, num_steps)
    np.testing.assert_allclose(
        rates[: rise + 1], 0.5 * np.arange(rise + 1) / max(warmup, 1) if warmup else 0.5, rtol=1e-6
    )
    assert np.all(np.diff(rates[rise:]) <= 0)
    if warmup < num_steps:
        assert rates[-1] == pytest.approx(0.5 * spec.final_learning_rate_fraction)
