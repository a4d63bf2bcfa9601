"""Values variants by the best that each can do on any mesh, by prices alone."""

from collections.abc import Sequence

import numpy as np

from .answer import Runner, limit_of, merit
from .families import find_families, group_candidates
from .price import Prices, price_candidates
from .space import Variant, find_candidates

# Values of variants of which nothing can run, above any step: what needs less memory is nearer to fitting.
TOO_LARGE, REFUSED = 1e15, 1e18


def value_of_variants(variants: Sequence[Variant], run: Runner) -> list[float]:
    """Returns the least of each variant's objective: seconds or bytes. Raises ConfigError if the target's memory is
    not known."""
    limit = limit_of(variants[0])
    candidates, _ = find_candidates(variants)
    prices = price_candidates(candidates, find_families(group_candidates(candidates), run.trace))
    return [_value(variant, prices, limit) for variant in variants]


def _value(variant: Variant, prices: Prices, limit: int) -> float:
    own = np.array([one.variant is variant for one in prices.candidates], dtype=bool)
    if not own.any():
        return REFUSED
    peak = prices.peak_bytes[own]
    fits = peak <= limit
    if not fits.any():
        return TOO_LARGE * float(peak.min() / limit)
    return float(merit(prices, variant.spec.tune.objective)[own][fits].min())
