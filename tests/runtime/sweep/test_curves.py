"""Loss curves of a sweep's runs: thinned out, with their spikes and gaps."""

import json

from hypothesis import given
from hypothesis import strategies as st

from meshloom.runtime.sweep.read import MOST, read_curves, thinned
from support.sweeps import point


@given(st.integers(0, 900), st.integers(24, 60), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_thinned_curve_has_the_same_extremes_ends_and_gaps(length, most, num_gaps, random):
    values: list[float | None] = [random.uniform(-5, 5) for _ in range(length)]
    for gap in random.sample(range(length), min(num_gaps, length)):
        values[gap] = None
    kept = thinned(values, most)
    known = [value for value in values if value is not None]
    seen = [value for n in kept if (value := values[n]) is not None]
    assert len(kept) <= most
    assert kept == sorted(set(kept))
    assert (min(seen, default=None), max(seen, default=None)) == (min(known, default=None), max(known, default=None))
    assert any(values[n] is None for n in kept) == any(value is None for value in values)
    assert not values or (kept[0], kept[-1]) == (0, len(values) - 1)


def test_a_run_that_goes_on_shows_what_it_has_and_one_without_metrics_nothing(tmp_path):
    rows = [point(n, {"a": n}) for n in range(2)]
    lines = [json.dumps({"step": n, "loss": None if n == 7 else 9.0 - n, "eval_loss": 3.5 if n == 5 else None})
             for n in range(1, 1001)]  # fmt: skip
    (tmp_path / "a=0").mkdir()
    (tmp_path / "a=0" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 10')
    (curve,) = read_curves(tmp_path, rows)
    assert len(curve.steps) <= MOST
    assert (curve.index, curve.tokens_per_step, curve.held_out) == (0, 65536, ((5, 3.5),))
    assert (curve.steps[0], curve.losses[0], curve.steps[-1], curve.losses[-1]) == (1, 8.0, 1000, -991.0)
    assert None in curve.losses
