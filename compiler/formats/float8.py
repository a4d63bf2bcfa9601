"""Floating point of 8 bits: Micikevicius et al. 2022, arXiv:2209.05433."""

from jax import Array

from .element import ElementFormat, register_element


class _Float(ElementFormat):
    def encode(self, scaled: Array, key: Array | None = None) -> Array:  # noqa: ARG002 - to the nearest, ties to even
        return self.clipped(scaled).astype(self.dtype)


@register_element
class Float8E4M3(_Float):
    """For weights and activations."""

    name, dtype, bits, largest = "float8_e4m3fn", "float8_e4m3fn", 8, 448.0


@register_element
class Float8E5M2(_Float):
    """For gradients, which need range more than digits."""

    name, dtype, bits, largest = "float8_e5m2", "float8_e5m2", 8, 57344.0
