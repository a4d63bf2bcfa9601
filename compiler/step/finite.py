"""Is a state fit to be saved? The question is asked before each save, on the devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def is_finite(state: Any) -> Array:
    """A boolean: no array of the state holds NaN or infinity."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))
