"""The loop over layers that gathers a layer's weights where the layer begins."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..parallel.weights import Weights
from .schedule import StackFunctions


def scan_layers(stack: StackFunctions, weights: Weights, shared: Any, x: Any, *, unroll: int) -> tuple[Any, Any]:
    """Runs one layer's program once per layer. weights: arrays whose first dimension is `layers`. Returns x, and the
    auxiliary outputs of all layers, stacked."""

    def one(x: Any, accumulators: Any, before: Any, working: Any, index: Array) -> tuple[Any, Any]:
        of_layer = replace(weights, accumulators=accumulators, before=before, working=working)
        return stack.layer(of_layer.gathered(), shared, index, x)

    # prevent_cse guards against the compiler merging both passes; in a loop they cannot be merged.
    saved = jax.checkpoint(one, policy=stack.policy, prevent_cse=False)
    layers = (weights.accumulators, weights.before, weights.working, jnp.arange(stack.num_layers))
    return jax.lax.scan(lambda x, stored: saved(x, *stored), x, layers, unroll=unroll)
