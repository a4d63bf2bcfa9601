"""Compares trees of arrays leaf by leaf, and says how large rounding alone makes a difference.

How much rounding a result takes cannot be known from its type alone: a sum of terms that cancel loses more. So it is
measured. The one-device program runs again with each parameter moved by a part of its last digit, in float32 or in the
type in which the declaration computes; what that changes is what rounding changes. The mesh rounds in more places, and
in another order: `ROUNDINGS` of them are tolerated, fewer in a narrow type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.trees import leaves_by_path, like

ROUNDINGS = 16  # so many changes of this size are tolerated: sums in another order
ROUNDINGS_TO_NARROW = 4  # where each result is rounded to a narrow type, of which the parameters are the first
GRADIENTS_TO_UPDATE = 4  # of what a gradient may differ by: optimizers such as Adam give its small entries more weight
LEAST = 64  # of the last digit of float32: what sums in another order may differ by where the parameters move nothing

Deviations = dict[str, float]  # by path, relative to the norm


def deviations(found: Any, expected: Any) -> Deviations:
    """Returns by path how far an array is from what is expected, as a share of the norm of that. A path that one of
    them lacks, and a number that is not finite in either, is infinitely far."""
    ours, theirs = leaves_by_path(found), leaves_by_path(expected)
    return {path: deviation(ours.get(path), theirs.get(path)) for path in dict.fromkeys([*theirs, *ours])}


def deviation(found: Any, expected: Any) -> float:
    """Returns how far an array is from what is expected, as a share of the norm of that; 0 where both are 0."""
    if found is None or expected is None:
        return float("inf")
    ours, theirs = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if ours.shape != theirs.shape or not (np.isfinite(ours) & np.isfinite(theirs)).all():
        return float("inf")
    norm, off = float(np.linalg.norm(theirs)), float(np.linalg.norm(ours - theirs))
    return off / norm if norm else (float("inf") if off else 0.0)


def nudged(params: Any, dtype: str, seed: int) -> Any:
    """Returns parameters that rounding to a type may have changed: each number by up to half of its last digit."""
    rng, half = np.random.default_rng(seed), float(jnp.finfo(dtype).eps) / 2

    def one(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float32)
        return (x * (1 + half * rng.choice([-1.0, 1.0], x.shape))).astype(np.float32)

    return like(params, {path: one(x) for path, x in leaves_by_path(params).items()})


@dataclass(frozen=True)
class Deviation:
    """The difference that exceeds its tolerance by most. path: of the array."""

    path: str
    measured: float
    tolerance: float

    @property
    def is_within(self) -> bool:
        return self.measured <= self.tolerance and self.measured < float("inf")


def tolerances(rounding: Mapping[str, float], roundings: int = ROUNDINGS) -> Deviations:
    """Returns what is tolerated, from what rounding the parameters changes."""
    least = LEAST * float(np.finfo(np.float32).eps)
    return {path: max(least, roundings * value) for path, value in rounding.items()}


def worst(found: Mapping[str, float], tolerated: Mapping[str, float]) -> Deviation:
    """Returns the difference that is the largest beside its tolerance; one that is not within it, if there is one."""
    each = (Deviation(path, value, tolerated.get(path, 0.0)) for path, value in found.items())

    def excess(one: Deviation) -> tuple[bool, float]:
        return not one.is_within, one.measured / one.tolerance if one.tolerance else one.measured

    return max(each, key=excess)
