"""How a weight is stored, how it crosses the network, and how a model takes it.

    stored -> encode -> what each device gathers -> decode -> what a layer multiplies with

`WeightPlan.encoding` has the encoding of each weight; the step encodes once, and decodes what it gathered
(weights.py). Most are casts: a weight is stored in one type, and gathered and used in another. One with a `format` is a
tree from the state to the layer, of elements in few bits and of their scales (compiler/formats): both are gathered, and
the layer decodes them, so that nothing but one layer is ever whole in the type of use.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..formats.block import BlockFormat
from ..formats.layout import abstract_encoded, constant_dimensions, encode_layers


def float32_params(weights: Any, params: Any) -> Any:
    """Returns stored parameters in float32, and those that are encoded as what they stand for. weights: their plans, as
    a tree."""
    return jax.tree.map(lambda weight, x: weight.encoding.float32(x), weights, params)


@dataclass(frozen=True)
class Encoding:
    """The types of one weight, by NumPy's names. store: in the state. travel: as it is gathered. use: as a model takes
    it, and its operations. format: of elements, whose type is `store`, and scales; None: it is one array. shape: of the
    whole parameter; only a format needs it."""

    store: str
    travel: str
    use: str
    format: BlockFormat | None = None
    shape: tuple[int, ...] = ()

    def store_of(self, weight: Array) -> Any:
        """Returns what the state holds of a whole weight, of all layers."""
        return weight.astype(self.store) if self.format is None else encode_layers(self.format, weight)

    def encode(self, stored: Any) -> Any:
        """Returns what is gathered for a stored weight: an array, or a tree of arrays."""
        return stored.astype(self.travel) if self.format is None else stored

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Returns zeros in the form of the state, in whose place a weight is read."""
        like = jax.ShapeDtypeStruct(shape, self.store) if self.format is None else abstract_encoded(self.format, shape)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    def float32(self, stored: Any) -> Array:
        """Returns the weight that a stored one stands for, in float32."""
        return stored.astype(jnp.float32) if self.format is None else self.format.decode(stored)

    def decode(self, gathered: Any) -> Array:
        """Returns the weight that a model takes."""
        if self.format is None:
            return gathered.astype(self.use)
        return self.format.decode(gathered, jnp.dtype(self.use))

    def constant(self) -> Any:
        """Returns, for each array that is gathered, the dimensions, counted from the end, along which it has one entry
        for all of the weight's: those of scales that whole columns share."""
        return frozenset() if self.format is None else constant_dimensions(self.format, self.shape)

    @property
    def decoded(self) -> "Encoding":
        """Returns the encoding of a weight that was decoded already."""
        return replace(self, travel=self.use, format=None)
