"""Magnitudes of 8 bits whose fourth root is linear: for second moments, which span many powers of ten.

The smallest level but zero is 255^-4 = 2.4e-10 of the largest. A linear type of 8 bits has 1/255, below which second
moments become zero and Adam diverges (docs/optimizers.md).
"""

import jax.numpy as jnp
from jax import Array

from .element import ElementFormat, register_element, rounded


@register_element
class Root4(ElementFormat):
    name, dtype, bits, largest, is_signed = "root4", "uint8", 8, 1.0, False

    def encode(self, scaled: Array, key: Array | None = None) -> Array:
        root = jnp.sqrt(jnp.sqrt(self.clipped(scaled)))
        return jnp.clip(rounded(255.0 * root, key), 0, 255).astype(self.dtype)

    def decode(self, elements: Array) -> Array:
        return jnp.square(jnp.square(elements.astype(jnp.float32) / 255.0))
