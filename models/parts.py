"""Parts that decoders are made of: matrices, norms, rotary positions.

Shapes: B batch, T length, E embed (or whatever dimension is last), H heads, D head_dim.
"""

import math
from typing import Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import PositiveFloat, PositiveInt, model_validator

from .config import Config, mistake

# The activation functions of MLPs and of experts, by the names that configs give them.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
NormKind = Literal["rms", "rms_zero_centered", "layer"]


class RopeScaling(Config):
    """Llama 3.1's stretch of rotary wavelengths for longer contexts (arXiv:2407.21783; the constants are from Meta's
    release).

    Wavelengths shorter than original_length / high_frequency_factor stay, those longer than original_length /
    low_frequency_factor are `factor` times as long, with a smooth passage between; with equal factors, there is none.
    """

    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_length: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor <= self.high_frequency_factor:
            return self
        what = f"{self.low_frequency_factor} is more than high_frequency_factor={self.high_frequency_factor}"
        raise mistake(what, "exchange them: Llama 3.1 has 1 and 4", "low_frequency_factor")


def matrix(
    rngs: nnx.Rngs, axes: tuple[str | None, ...], shape: tuple[int, ...], *, stddev: float, in_float32: bool = False
) -> nnx.Param[Array]:
    """Returns a normal random parameter with these logical axes. in_float32: in any precision."""
    drawn = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(drawn, out_sharding=axes, in_float32=in_float32)


def bias(axes: tuple[str, ...], shape: tuple[int, ...]) -> nnx.Param[Array]:
    """Returns zeros, to be added to activations."""
    return nnx.Param(jnp.zeros(shape), out_sharding=axes)


class Norm(nnx.Module):
    """Normalises the last dimension, in float32.

    rms: x / sqrt(mean(x^2) + epsilon) scale (Zhang and Sennrich 2019, arXiv:1910.07467). rms_zero_centered: the same
    with 1 + scale (Gemma). layer: (x - mean) / sqrt(variance + epsilon) scale + bias (Ba et al., arXiv:1607.06450).
    """

    def __init__(self, kind: NormKind, size: int, *, axis: str, epsilon: float):
        self.kind, self.epsilon = kind, epsilon
        scale = jnp.zeros(size) if kind == "rms_zero_centered" else jnp.ones(size)
        self.scale_E = nnx.Param(scale, out_sharding=(axis,))
        if kind == "layer":
            self.bias_E = bias((axis,), (size,))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        if self.kind == "layer":
            x32 -= jnp.mean(x32, axis=-1, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale_E[...].astype(jnp.float32)
        normed *= 1 + scale if self.kind == "rms_zero_centered" else scale
        if self.kind == "layer":
            normed += self.bias_E[...].astype(jnp.float32)
        return normed.astype(x.dtype)


def rotate(x_BTHD: Array, positions_BT: Array, *, theta: float, scaling: RopeScaling | None) -> Array:
    """Returns heads turned by rotary positions (Su et al. 2021, arXiv:2104.09864): dimension i turns with dimension i +
    D/2, in float32."""
    half = x_BTHD.shape[-1] // 2
    frequencies_D = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies_D = _stretched(frequencies_D, scaling)
    angles_BT1D = positions_BT[:, :, None, None] * frequencies_D
    cos, sin = jnp.cos(angles_BT1D), jnp.sin(angles_BT1D)
    left, right = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BTHD.dtype)


def _stretched(frequencies: Array, scaling: RopeScaling) -> Array:
    turns = scaling.original_length * frequencies / (2 * math.pi)  # the turns over the original length
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = jnp.clip((turns - scaling.low_frequency_factor) / span, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
