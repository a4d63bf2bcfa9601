"""The types of the elements of encoded arrays, and their registry.

An element stands for a number between -largest and largest. A scale, which a block of an array shares (block.py),
brings the block into that range.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class ElementFormat(ABC):
    """One type of element.

    name: as declarations write it. dtype: JAX's type of the stored array, which has `bits` bits an element in memory
    and on a network. largest: the largest magnitude that it stands for. exponent: that of `largest`, rounded down,
    which blocks with power-of-two scales use. is_signed: False for magnitudes alone, such as second moments.
    """

    name: ClassVar[str]
    dtype: ClassVar[str]
    bits: ClassVar[int]
    largest: ClassVar[float]
    is_signed: ClassVar[bool] = True

    @abstractmethod
    def encode(self, scaled: Array, key: Array | None = None) -> Array:
        """Returns the elements nearest to float32 numbers, which are clipped to `largest`. key: of a stochastic
        rounding, unbiased, for the types that have it; None: to the nearest."""

    def decode(self, elements: Array) -> Array:
        """Returns the numbers that elements stand for, in float32: their own values, where a type has no other."""
        return elements.astype(jnp.float32)

    def clipped(self, scaled: Array) -> Array:
        """Returns float32 numbers within the range of the type. NaN stays NaN: a cast of a number above the largest
        would be NaN in float8_e4m3fn, and infinite in float8_e5m2."""
        return jnp.clip(scaled.astype(jnp.float32), -self.largest if self.is_signed else 0.0, self.largest)


_ELEMENTS: dict[str, ElementFormat] = {}


def register_element(element: type[ElementFormat]) -> type[ElementFormat]:
    """Registers a type of element under its name, as a decorator of its class."""
    if element.name in _ELEMENTS and type(_ELEMENTS[element.name]) is not element:
        raise ValueError(f"the element format {element.name!r} is registered already")
    _ELEMENTS[element.name] = element()
    return element


def element_formats() -> Mapping[str, ElementFormat]:
    """Returns all registered types of elements by name."""
    return _ELEMENTS


def nearest_level(scaled: Array, levels: Array) -> Array:
    """Returns the index of the level nearest to each number. levels: float32, ascending."""
    return jnp.searchsorted((levels[1:] + levels[:-1]) / 2, scaled, side="left", method="compare_all")


def rounded(scaled: Array, key: Array | None) -> Array:
    """Returns whole numbers: the nearest, or, with a key, up or down at random so that their mean is the number."""
    if key is None:
        return jnp.round(scaled)
    return jnp.floor(scaled + jax.random.uniform(key, scaled.shape, jnp.float32))
