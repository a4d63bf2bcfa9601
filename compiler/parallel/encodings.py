"""How a weight is stored, how it crosses the network, and how a model takes it.

    stored -> encode -> what each device gathers -> decode -> what a layer multiplies with

`WeightPlan.encoding` has the encoding of each weight; the step encodes once, and decodes what it gathered
(weights.py). Most are casts: a weight is stored in one type, and gathered and used in another. One with a `format` is a
tree from the state to the layer, of elements in few bits and of their scales (compiler/formats): both are gathered, and
the layer decodes them, so that nothing but one layer is ever whole in the type of use. A trained weight, which is
stored in one type, may be made such a tree for its gather alone (`sent`); its gradient is that of what it stands for.
Sites that multiply in its type take what was gathered as it is (`GatheredWeight`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from ..core.partition_spec import Axes
from ..formats.block import ELEMENTS, SCALES, BlockFormat, EncodedArray, as_bits, from_bits
from ..formats.layout import abstract_encoded, constant_dimensions, encode_layers


@partial(register_dataclass, data_fields=["decoded", "bits", "scales"], meta_fields=["element"])
@dataclass(frozen=True)
class GatheredWeight:
    """A weight that was gathered in few bits, with its decoded values. decoded: in the compute type. bits: the
    elements, as `as_bits` makes them. element: their type."""

    decoded: Array
    bits: Array
    scales: Any
    element: str

    @property
    def encoded(self) -> EncodedArray:
        """Returns the elements and scales."""
        return {ELEMENTS: from_bits(self.bits, self.element), SCALES: self.scales}


def _is_gathered(x: Any) -> bool:
    return isinstance(x, GatheredWeight)


def decoded_weights(weights: Any) -> Any:
    """Returns a tree of weights as a model takes them."""
    return jax.tree.map(decoded_weight, weights, is_leaf=_is_gathered)


def decoded_weight(weight: Any) -> Array:
    """Returns a weight as a model takes it."""
    return weight.decoded if isinstance(weight, GatheredWeight) else weight


def encoded_weight(weight: Any) -> EncodedArray | None:
    """Returns the elements and scales of a weight that was gathered in few bits; None for any other."""
    return weight.encoded if isinstance(weight, GatheredWeight) else None


def with_encoded(operation: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """Returns a `Context.operation` that takes the weights of a tree with their elements and scales. A model hands over
    the arrays that it was given, so they are recognised as such."""
    leaves = jax.tree.leaves(weights, is_leaf=_is_gathered)
    known = {id(each.decoded): each for each in leaves if _is_gathered(each)}

    def run(kind: str, name: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        return operation(kind, name, plain, *(known.get(id(each), each) for each in operands), **options)

    return run if known else operation


def float32_params(weights: Any, params: Any) -> Any:
    """Returns stored parameters in float32, and those that are encoded as what they stand for. weights: their plans, as
    a tree."""
    return jax.tree.map(lambda weight, x: weight.encoding.float32(x), weights, params)


@dataclass(frozen=True)
class Encoding:
    """The types of one weight, by NumPy's names. store: in the state. travel: as it is gathered. use: as a model takes
    it, and its operations. format: of elements, whose type is `store`, and scales; None: it is one array. shape: of the
    whole parameter; only formats need it. sent: how a weight that is stored as one array is written for its gather,
    while it is a shard; None: it is cast. shared: the mesh axes whose devices have parts of what shares a scale of
    `sent`. is_multiplied: its sites multiply what was sent, as it is."""

    store: str
    travel: str
    use: str
    format: BlockFormat | None = None
    shape: tuple[int, ...] = ()
    sent: BlockFormat | None = None
    shared: Axes = ()
    is_multiplied: bool = False

    def store_of(self, weight: Array) -> Any:
        """Returns what the state holds of a whole weight, of all layers."""
        return weight.astype(self.store) if self.format is None else encode_layers(self.format, weight)

    def encode(self, stored: Any) -> Any:
        """Returns what is gathered for a stored weight: an array, or a tree of arrays."""
        if self.sent is not None:
            over = (lambda amax: jax.lax.pmax(amax, self.shared)) if self.shared else (lambda amax: amax)
            return self.sent.encode(stored, over_devices=over)
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
        if (format := self.sent or self.format) is None:
            return gathered.astype(self.use)
        return format.decode(gathered, jnp.dtype(self.use))

    def taken(self, gathered: Any) -> Any:
        """Returns the weight that a layer takes: with its elements and scales where sites multiply these."""
        weight = self.decode(gathered)
        if not self.is_multiplied:
            return weight
        return GatheredWeight(weight, as_bits(gathered[ELEMENTS]), gathered[SCALES], self.travel)

    def constant(self) -> Any:
        """Returns, for each array that is gathered, the dimensions, counted from the end, along which it has one entry
        for all of the weight's: those of scales that whole columns share."""
        format = self.sent or self.format
        return frozenset() if format is None else constant_dimensions(format, self.shape)

    @property
    def is_held(self) -> bool:
        """Returns True where what was gathered for all layers is held as it came, until a layer takes it."""
        return self.format is not None or self.is_multiplied

    @property
    def decoded(self) -> "Encoding":
        """Returns the encoding of a weight that was decoded already."""
        return replace(self, travel=self.use, format=None, sent=None, is_multiplied=False)

    @property
    def as_stored(self) -> "Encoding":
        """Returns the encoding of a weight that no gather rounds."""
        return replace(self, sent=None, is_multiplied=False)
