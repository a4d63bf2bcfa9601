"""The arrays that hold an encoded array: their shapes, how they lie over a mesh, and how a stack of layers is encoded.

elements P(None, 'fsdp', 'tensor') of (32, 4096, 14336)
scales   P(None, 'fsdp', 'tensor') of (32, 64, 14336); with a scale per column P(None, None, 'tensor') of (32, 1, 14336)
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ..core.float_types import num_bits
from ..core.partition_spec import without
from .block import BlockFormat, EncodedArray, cut_blocks


@lru_cache(maxsize=4096)  # a search plans many layouts of a model
def _shapes(format: BlockFormat, shape: tuple[int, ...]) -> Any:
    return jax.eval_shape(format.encode, jax.ShapeDtypeStruct(shape, jnp.float32))


def abstract_encoded(format: BlockFormat, shape: Sequence[int]) -> Any:
    """Returns the tree of an encoded array of this shape, of `jax.ShapeDtypeStruct`."""
    return _shapes(format, tuple(shape))


def constant_dimensions(format: BlockFormat, shape: Sequence[int]) -> Any:
    """Returns, for each array of the tree, the dimensions along which it has one entry where the encoded array has
    several; counted from the end, so that it holds for one layer of a stack."""

    def of_part(part: Any) -> frozenset[int]:  # a leaf, where a tuple would be a tree
        return frozenset(at - len(shape) for at, size in enumerate(shape) if part.shape[at] == 1 < size)

    return jax.tree.map(of_part, _shapes(format, tuple(shape)))


def encoded_specs(format: BlockFormat, shape: Sequence[int], spec: PartitionSpec) -> Any:
    """Returns the layout of each array of the tree of an encoded array that lies by `spec`."""

    return jax.tree.map(lambda constant: without(spec, constant), constant_dimensions(format, shape))


def encoded_shard_bytes(format: BlockFormat, shape: Sequence[int], shards: Sequence[int]) -> int:
    """Returns the bytes of a device's part of an encoded array. shards: how many devices split each dimension."""

    def of_part(part: Any) -> int:
        own = (size // count if size > 1 else 1 for size, count in zip(part.shape, shards, strict=True))
        return math.prod(own) * num_bits(part.dtype) // 8

    return sum(map(of_part, jax.tree.leaves(_shapes(format, tuple(shape)))))


def cut_at(format: BlockFormat, shape: Sequence[int], shards: Sequence[int]) -> list[str]:
    """Returns, in words, where shards would cut blocks of an array, or blocks of its scales. shards: how many devices
    split each dimension."""
    found = cut_blocks(format, shape, shards)
    if format.scales_format is None or found:
        return found
    scales = format.scales_shape(shape)
    own = [count if size > 1 else 1 for size, count in zip(scales, shards, strict=True)]
    return [f"of its scales {each}" for each in cut_at(format.scales_format, scales, own)]


def of_part(format: BlockFormat, num_dimensions: int) -> BlockFormat:
    """Returns the format of a part of an array that has its last dimensions: one expert of a layer. Its blocks have a
    length of 1 along the others."""
    own = None if format.scales_format is None else of_part(format.scales_format, num_dimensions)
    return replace(format, block=format.block[-num_dimensions:], scales_format=own)


def encode_layers(format: BlockFormat, x: Array) -> EncodedArray:
    """Returns an encoded stack of layers, one layer after the other, so that one at a time is in float32."""
    if x.ndim <= len(format.block):
        return format.encode(x)
    return jax.lax.map(format.encode, x)
