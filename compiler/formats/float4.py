"""Floating point of 4 bits, E2M1: the element of MXFP4 and NVFP4 (OCP Microscaling Formats 1.0, 2023)."""

import jax.numpy as jnp
from jax import Array

from .element import ElementFormat, register_element


@register_element
class Float4E2M1(ElementFormat):
    name, dtype, bits, largest = "float4_e2m1fn", "float4_e2m1fn", 4, 6.0

    def encode(self, scaled: Array, key: Array | None = None) -> Array:  # noqa: ARG002 - to the nearest, ties to even
        # XLA's own cast goes by way of a type of fewer digits, and rounds twice: 1.2502 becomes 1.0 (jaxlib 0.10.2).
        scaled = self.clipped(scaled)
        magnitude = jnp.abs(scaled)
        step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
        return (jnp.round(scaled / step) * step).astype(self.dtype)
