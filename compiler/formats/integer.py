"""Whole numbers of 8 and 4 bits, symmetric: the lowest code, which has no positive counterpart, is not used. Those
without a sign are for scales that are quantized in turn."""

from jax import Array

from .element import ElementFormat, register_element, rounded


class _Integer(ElementFormat):
    def encode(self, scaled: Array, key: Array | None = None) -> Array:
        return self.clipped(rounded(self.clipped(scaled), key)).astype(self.dtype)


@register_element
class Int8(_Integer):
    name, dtype, bits, largest = "int8", "int8", 8, 127.0


@register_element
class Int4(_Integer):
    name, dtype, bits, largest = "int4", "int4", 4, 7.0


@register_element
class UInt8(_Integer):
    name, dtype, bits, largest, is_signed = "uint8", "uint8", 8, 255.0, False
