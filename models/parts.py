"""Parts that decoders are made of: matrices, norms, rotary positions.

Shapes: B batch, T length, E embed (or whatever dimension is last), H heads, D head_dim.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from .config import Config, mistake

# The activation functions of MLPs and of experts, by the names that configs give them.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
CLAMPED_SWIGLU = "clamped_swiglu"  # of gated MLPs alone


def gated(activation: str, gate: Array, up: Array) -> Array:
    """Returns f(gate) * up. clamped_swiglu: of gpt-oss (arXiv:2508.10925), f(x) = x sigmoid(1.702 x) and 1 more than
    up, with both no further from 0 than 7, but for a negative gate."""
    if activation == CLAMPED_SWIGLU:
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


NormKind = Literal["rms", "rms_zero_centered", "layer"]


class Llama3Scaling(Config):
    """Llama 3.1's stretch of rotary wavelengths for longer contexts (arXiv:2407.21783; the constants are from Meta's
    release).

    Wavelengths shorter than original_length / high_frequency_factor stay, those longer than original_length /
    low_frequency_factor are `factor` times as long, with a smooth passage between; with equal factors, there is none.
    """

    kind: Literal["llama3"]
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

    def stretched(self, frequencies: Array, theta: float) -> Array:
        """Returns the frequencies of the stretched wavelengths."""
        del theta
        turns = self.original_length * frequencies / (2 * math.pi)  # the turns over the original length
        span = self.high_frequency_factor - self.low_frequency_factor
        kept = jnp.clip((turns - self.low_frequency_factor) / span, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class LinearScaling(Config):
    """All rotary wavelengths are `factor` times as long (Chen et al. 2023, arXiv:2306.15595)."""

    kind: Literal["linear"]
    factor: PositiveFloat

    def stretched(self, frequencies: Array, theta: float) -> Array:
        """Returns the frequencies of the stretched wavelengths."""
        del theta
        return frequencies / self.factor


class YarnScaling(Config):
    """YaRN (Peng et al. 2023, arXiv:2309.00071), with the two factors of DeepSeek-V2 (arXiv:2405.04434).

    Dimensions that turn more than `beta_fast` times over original_length stay, those that turn less than `beta_slow`
    times have wavelengths `factor` times as long, and the stretch is linear in the number of the dimension between.
    truncate: both bounds are whole dimensions.

    With m(x) = 0.1 x ln(factor) + 1, turned heads are multiplied by m(mscale) / m(mscale_all_dim), and scores by
    m(mscale_all_dim)^2. The paper has 1 and 0.
    """

    kind: Literal["yarn"]
    factor: Annotated[float, Field(gt=1)]
    original_length: PositiveInt
    beta_fast: PositiveFloat
    beta_slow: PositiveFloat
    truncate: bool
    mscale: NonNegativeFloat
    mscale_all_dim: NonNegativeFloat

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_slow <= self.beta_fast:
            return self
        raise mistake(f"{self.beta_slow} is more than beta_fast={self.beta_fast}", "exchange them", "beta_slow")

    def stretched(self, frequencies: Array, theta: float) -> Array:
        """Returns the frequencies of the stretched wavelengths."""
        half = frequencies.shape[0]
        first, last = (self._dimension(turns, half, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        span = last - first or 0.001
        stretch = jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / span, 0, 1)
        return frequencies * (1 - stretch + stretch / self.factor)

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """Returns the dimension, maybe between two, that turns so many times over the original length."""
        return half * math.log(self.original_length / (2 * math.pi * turns)) / math.log(theta)

    @property
    def factor_of_turned(self) -> float:
        return self._m(self.mscale) / self._m(self.mscale_all_dim)

    @property
    def factor_of_scores(self) -> float:
        return self._m(self.mscale_all_dim) ** 2

    def _m(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1


RopeScaling = Annotated[Llama3Scaling | LinearScaling | YarnScaling, Field(discriminator="kind")]


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer. theta: the base of wavelengths. scaling: how they are stretched for longer
    contexts."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None

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
        frequencies_D = scaling.stretched(frequencies_D, rope.theta)
    angles_BT1D = positions_BT[:, :, None, None] * frequencies_D
    cos, sin = jnp.cos(angles_BT1D), jnp.sin(angles_BT1D)
    if isinstance(scaling, YarnScaling) and scaling.factor_of_turned != 1:
        cos, sin = scaling.factor_of_turned * cos, scaling.factor_of_turned * sin
    left, right = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BTHD.dtype)
