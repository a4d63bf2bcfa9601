"""An array in blocks that share a scale.

    x  ->  encode  ->  {"elements": elements, "scales": one for each block}  ->  decode  ->  nearly x

Scales have as many dimensions as the array: (4096, 11008) in blocks of 64 along the first dimension has scales of
(64, 11008); with a scale for each column (1, 11008); with one for all (1, 1). So whatever cuts the array between
blocks (a mesh axis, a layer of a stack) cuts its scales along the same dimension.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.float_types import ScaleType
from .element import element_formats

ELEMENTS, SCALES = "elements", "scales"
_POWER_OF_TWO = "float8_e8m0fnu"  # an exponent of 8 bits, no sign and no digits
OverDevices = Callable[[Array], Array]  # largest magnitudes of this device -> of all that have parts of the same
EncodedArray = dict[str, Any]  # ELEMENTS: an array. SCALES: an array, or, quantized twice, an EncodedArray


@dataclass(frozen=True)
class BlockFormat:
    """How an array is encoded.

    element: the name of the type of its elements (element.py). block: the length of a block along each of the last
    dimensions of the array; None: the whole dimension. Dimensions before these, such as `layers`, have a scale for each
    entry. scale: the type of the scales; power_of_two: as OCP's Microscaling Formats have them, one byte each, by which
    the largest elements may be clipped; power_of_two_above: the least one by which none is, one byte each.
    scales_format: how the scales are encoded in turn (double quantization); None: they are not.
    """

    element: str
    block: tuple[int | None, ...]
    scale: ScaleType = "float32"
    scales_format: "BlockFormat | None" = None

    @property
    def has_powers_of_two(self) -> bool:
        """Returns True where each scale is an exponent, of one byte."""
        return self.scale in ("power_of_two", "power_of_two_above")

    def block_sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the length of a block along each dimension of an array: 1 for dimensions before those of `block`."""
        whole = (1,) * (len(shape) - len(self.block)) + self.block
        return tuple(size if length is None else length for size, length in zip(shape, whole, strict=True))

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the scales of an array. Raises a ValueError if a block does not divide it."""
        sizes = self.block_sizes(shape)
        if any(size % length for size, length in zip(shape, sizes, strict=True)):
            raise ValueError(f"blocks of {list(sizes)} do not divide an array of {list(shape)}")
        return tuple(size // length for size, length in zip(shape, sizes, strict=True))

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Returns the bytes of an encoded array, with its scales."""
        scales = self.scales_shape(shape)
        itemsize = jnp.dtype(self._scale_dtype).itemsize
        of_scales = self.scales_format.num_bytes(scales) if self.scales_format else math.prod(scales) * itemsize
        return math.prod(shape) * element_formats()[self.element].bits // 8 + of_scales

    def encode(
        self, x: Array, *, key: Array | None = None, scales: Any = None,
        over_devices: OverDevices = lambda amax: amax, scales_over_devices: OverDevices = lambda amax: amax,
    ) -> EncodedArray:  # fmt: skip
        """Returns an array as elements and scales.

        key: of a stochastic rounding. over_devices: makes of the largest magnitudes of this device's blocks those of
        blocks that several devices have parts of (`pmax`). scales_over_devices: the same, of what scales share that are
        quantized in turn. scales: as an earlier encoding of the array stored them; None: they are made. A block that
        holds a number which is not finite is decoded as NaN.
        """
        element, blocks = element_formats()[self.element], self._in_blocks(x.astype(jnp.float32))
        within = tuple(range(1, blocks.ndim, 2))
        stored = scales
        if scales is None:
            stored = self._stored(self._scales(over_devices(largest_magnitude(blocks, within))), scales_over_devices)
        scales = self._read(stored)  # values are made with the scales that they are read with
        divisor = jnp.where(scales > 0, scales, 1.0)
        values = element.encode(blocks / jnp.expand_dims(divisor, within), key)
        return {ELEMENTS: values.reshape(x.shape), SCALES: stored}

    def decode(self, encoded: EncodedArray, dtype: Any = jnp.float32) -> Array:
        """Returns the array that an encoded one stands for."""
        element, values, scales = element_formats()[self.element], encoded[ELEMENTS], encoded[SCALES]
        scales = self._read(scales)
        blocks = self._in_blocks(element.decode(values))
        within = tuple(range(1, blocks.ndim, 2))
        return (blocks * jnp.expand_dims(scales, within)).astype(dtype).reshape(values.shape)

    def _in_blocks(self, x: Array) -> Array:
        """Returns (n, N) as (n / a, a, N / b, b) for blocks of (a, b)."""
        pairs = zip(self.scales_shape(x.shape), self.block_sizes(x.shape), strict=True)
        return x.reshape([size for pair in pairs for size in pair])

    def _scales(self, amax: Array) -> Array:
        largest = element_formats()[self.element].largest
        if self.scale == "power_of_two":  # OCP Microscaling Formats 1.0, section 6.3
            exponent = jnp.frexp(amax)[1] - 1 - math.floor(math.log2(largest))
            return _power_of_two(amax, exponent)
        if self.scale == "power_of_two_above":
            mantissa, exponent = jnp.frexp(amax / largest)
            return _power_of_two(amax, jnp.where(mantissa == 0.5, exponent - 1, exponent))
        return amax / largest

    @property
    def _scale_dtype(self) -> str:
        return _POWER_OF_TWO if self.has_powers_of_two else self.scale

    def _stored(self, scales: Array, over_devices: OverDevices) -> Any:
        if self.scales_format:
            return self.scales_format.encode(scales, over_devices=over_devices)
        return scales.astype(self._scale_dtype)

    def _read(self, stored: Any) -> Array:
        return self.scales_format.decode(stored) if self.scales_format else stored.astype(jnp.float32)


def _power_of_two(amax: Array, exponent: Array) -> Array:
    """Returns 2 to the power of an exponent that a byte holds; 1 for blocks of zeros, and infinity, whose byte is NaN,
    for those that are not finite."""
    power = jnp.ldexp(jnp.float32(1.0), jnp.clip(exponent, -127, 127))
    return jnp.where(jnp.isfinite(amax), jnp.where(amax > 0, power, 1.0), jnp.inf)


def as_bits(elements: Array) -> Array:
    """Returns elements of 8 bits as whole numbers. `jax.checkpoint` puts floating-point values that it saves through a
    `reduce_precision` with the digits of their type, which has infinities: 448 in float8_e4m3fn would become NaN."""
    return jax.lax.bitcast_convert_type(elements, jnp.int8)


def from_bits(bits: Array, dtype: Any) -> Array:
    """Returns the elements of a type that `as_bits` made whole numbers of."""
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


def largest_magnitude(blocks: Array, within: tuple[int, ...] | None = None) -> Array:
    """Returns the largest magnitude of each block: infinity where it holds NaN, which maxima over devices may lose.
    within: the dimensions of a block; None: all."""
    magnitudes = jnp.abs(blocks)
    return jnp.max(jnp.where(jnp.isnan(magnitudes), jnp.inf, magnitudes), axis=within)


def per_tensor(element: str, num_dimensions: int = 2) -> BlockFormat:
    """Returns a format with one scale for all of an array, or of each layer of a stack."""
    return BlockFormat(element, (None,) * num_dimensions)


def per_channel(element: str, contracted: Sequence[int], num_dimensions: int) -> BlockFormat:
    """Returns a format with one scale for each entry of the dimensions that a matmul does not contract: constant along
    what is summed, it is taken out of the sum. contracted: dimensions of an array of so many."""
    return BlockFormat(element, tuple(None if at in contracted else 1 for at in range(num_dimensions)))


def cut_blocks(format: BlockFormat, shape: Sequence[int], shards: Sequence[int]) -> list[str]:
    """Returns, in words, the dimensions of an array where shards would cut blocks. shards: how many devices split each
    dimension."""
    sizes = format.block_sizes(shape)
    return [
        f"dimension {at} of {size} over {count} devices leaves {size // count}, and a block has {block}"
        for at, (size, count, block) in enumerate(zip(shape, shards, sizes, strict=True))
        if count > 1 and (size // count) % block and block != size
    ]
