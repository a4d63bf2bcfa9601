"""Parts that decoders are made of: matrices, norms, rotary positions.

Shapes: B batch, T length, E embed (or whatever dimension is last), H heads, D head_dim.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .family_configs import CLAMPED_SWIGLU, LinearScaling, Llama3Scaling, NormKind, RopeScaling, YarnScaling

# The activation functions of MLPs and of experts, by the names that configs give them.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def gated(activation: str, gate: Array, up: Array) -> Array:
    """Returns f(gate) * up. clamped_swiglu: of gpt-oss (arXiv:2508.10925), f(x) = x sigmoid(1.702 x) and 1 more than
    up, with both no further from 0 than 7, but for a negative gate."""
    if activation == CLAMPED_SWIGLU:
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer. theta: the base of wavelengths. scaling: how they are stretched for longer
    contexts."""

    theta: float
    scaling: RopeScaling | None = None

    @property
    def factor_of_scores(self) -> float:
        """Returns the factor of attention's scores that belongs to the stretch."""
        return self.scaling.factor_of_scores if isinstance(self.scaling, YarnScaling) else 1.0


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


def rotate(x_BTHD: Array, positions_BT: Array, rope: Rope) -> Array:
    """Returns heads turned by rotary positions (Su et al. 2021, arXiv:2104.09864): dimension i turns with dimension i +
    D/2, in float32."""
    half, scaling = x_BTHD.shape[-1] // 2, rope.scaling
    frequencies_D = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies_D = stretched(frequencies_D, scaling, rope.theta)
    angles_BT1D = positions_BT[:, :, None, None] * frequencies_D
    cos, sin = jnp.cos(angles_BT1D), jnp.sin(angles_BT1D)
    if isinstance(scaling, YarnScaling) and scaling.factor_of_turned != 1:
        cos, sin = scaling.factor_of_turned * cos, scaling.factor_of_turned * sin
    left, right = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BTHD.dtype)


def stretched(frequencies: Array, scaling: RopeScaling, theta: float) -> Array:
    """Returns the frequencies of stretched wavelengths."""
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            turns = scaling.original_length * frequencies / (2 * math.pi)  # the turns over the original length
            span = scaling.high_frequency_factor - scaling.low_frequency_factor
            kept = jnp.clip((turns - scaling.low_frequency_factor) / span, 0, 1)
            return frequencies * (kept + (1 - kept) / scaling.factor)
        case YarnScaling():
            half = frequencies.shape[0]
            first, last = (_dimension(turns, half, scaling, theta) for turns in (scaling.beta_fast, scaling.beta_slow))
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * half - 1)
            span = last - first or 0.001
            stretch = jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / span, 0, 1)
            return frequencies * (1 - stretch + stretch / scaling.factor)


def _dimension(turns: float, half: int, scaling: YarnScaling, theta: float) -> float:
    """Returns the dimension, maybe between two, that turns so many times over the original length."""
    return half * math.log(scaling.original_length / (2 * math.pi * turns)) / math.log(theta)
