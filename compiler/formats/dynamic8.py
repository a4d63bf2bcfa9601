"""The dynamic type of 8 bits: Dettmers 2015, arXiv:1511.04561, as 8-bit optimizers and double quantization use it.

A byte has a sign, some zeros that stand for a power of ten, and a fraction that gets the bits which are left: numbers
near the largest have most digits, and small ones reach down to 1e-7.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array

from .element import ElementFormat, nearest_level, register_element

_NUM_EXPONENTS = 7


@cache
def dynamic8_levels() -> tuple[float, ...]:
    """Returns the 256 levels, ascending: for each power of ten the middles of equal parts of [0.1, 1], both signs, and
    0 and 1."""
    magnitudes: list[float] = []
    for exponent in range(_NUM_EXPONENTS):
        bounds = np.linspace(0.1, 1, 2**exponent + 1)
        magnitudes += list(10.0 ** (exponent - _NUM_EXPONENTS + 1) * (bounds[1:] + bounds[:-1]) / 2)
    return tuple(float(np.float32(level)) for level in sorted([*magnitudes, *(-m for m in magnitudes), 0.0, 1.0]))


@register_element
class Dynamic8(ElementFormat):
    """Elements are indices of the levels."""

    name, dtype, bits, largest = "dynamic8", "uint8", 8, 1.0

    def encode(self, scaled: Array, key: Array | None = None) -> Array:  # noqa: ARG002 - levels are not equidistant
        return nearest_level(self.clipped(scaled), jnp.asarray(dynamic8_levels(), jnp.float32)).astype(self.dtype)

    def decode(self, elements: Array) -> Array:
        return jnp.asarray(dynamic8_levels(), jnp.float32)[elements.astype(jnp.int32)]
