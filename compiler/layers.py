"""The loop over the layers of a stack. The compiler owns it, so one model serves every way to run it."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from .remat import Policy

# (parameters of one layer as stored, x) -> x: gathers its weights and computes
LayerFn = Callable[[Any, Array], Array]


def scan_layers(layer: LayerFn, stacked: Any, x: Array, *, policy: Policy) -> Array:
    """One layer's program, run once per layer. stacked: parameters with a first dimension `layers`. policy: what of a
    layer is kept for the backward pass (remat.py)."""
    # prevent_cse guards against the compiler merging both passes; in a loop they cannot be merged.
    kept = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return jax.lax.scan(lambda x, params: (kept(params, x), None), x, stacked)[0]
