"""Parts that decoders are made of: matrices, norms, rotary positions, and experts on one device.

    scores     of each token for each expert, in float32
    route      the best experts of each token, and the weight of each
    apply_experts    sum over a token's experts of weight * (f(x gate) * (x up)) down, maybe with biases

Shapes: B batch, T length, E embed (or whatever dimension is last), H heads, D head_dim, X experts, K experts of a
token, M mlp, N tokens (B T), R rows (N K), G groups.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: str, gate: Array, up: Array) -> Array:
    """Returns f(gate) * up. clamped_swiglu: of gpt-oss (arXiv:2508.10925), f(x) = x sigmoid(1.702 x) and 1 more than
    up, with both no further from 0 than 7, but for a negative gate. The derivative saves gate and up alone, and no
    product on the way."""
    return _gated(activation, gate, up)


def _gated(activation: str, gate: Array, up: Array) -> Array:
    if activation == CLAMPED_SWIGLU:
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def _gated_gradient(activation: str, operands: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    return jax.vjp(partial(_gated, activation), *operands)[1](gradient)


gated.defvjp(lambda activation, gate, up: (_gated(activation, gate, up), (gate, up)), _gated_gradient)


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


NO_EXPERT = 2**31 - 1  # instead of an expert's number: the token goes to none, as padding does


def route(
    scores_BTX: Array, bias_X: Array | None = None,
    *, num_chosen: int, num_groups: int, num_groups_chosen: int, is_normalized: bool, scale: float, num_best: int = 2,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns (weights, ids of experts), each (B, T, K), the best expert first.

    bias_X: is added to the scores by which a token chooses, and not to those that are its weights (arXiv:2408.15664).

    With groups, a token chooses among the experts of its best groups alone; a group's score is the sum of its num_best
    best: 2 (DeepSeek-V3, arXiv:2412.19437) or 1 (DeepSeek-V2, arXiv:2405.04434). is_normalized: a token's weights sum
    to `scale`; else they are its scores * scale.
    """
    eligible_BTX = scores_BTX if bias_X is None else scores_BTX + bias_X
    if num_groups_chosen < num_groups:
        eligible_BTX = _of_best_groups(eligible_BTX, num_groups, num_groups_chosen, num_best)
    _, ids_BTK = jax.lax.top_k(jax.lax.stop_gradient(eligible_BTX), num_chosen)
    # A sum over all experts, not a gather, whose derivative would be a scatter.
    is_chosen_BTKX = ids_BTK[..., None] == jnp.arange(scores_BTX.shape[-1])
    weights_BTK = jnp.sum(jnp.where(is_chosen_BTKX, scores_BTX[..., None, :], 0), axis=-1)
    if is_normalized:
        weights_BTK /= jnp.sum(weights_BTK, axis=-1, keepdims=True) + 1e-20
    return weights_BTK * scale, ids_BTK


def balanced_bias(bias_X: Array, tokens_X: Array, *, rate: float) -> Array:
    """Returns the router's bias after a step in which each expert had so many tokens: `rate` more for those that had
    less than the mean, `rate` less for those that had more (loss-free balancing, arXiv:2408.15664)."""
    return bias_X + rate * jnp.sign(jnp.mean(tokens_X) - tokens_X)


def counted_shares(shares_X: Array, tokens_X: Array) -> Array:
    """Returns each expert's share of the tokens of a global batch; those before where it has none."""
    return jnp.where(jnp.sum(tokens_X) > 0, shares(tokens_X), shares_X)


def expert_load(tokens_X: Array) -> Array:
    """Returns the most tokens that an expert has, over the mean."""
    return jnp.max(tokens_X) / jnp.maximum(jnp.mean(tokens_X), 1e-20)


def expert_entropy(tokens_X: Array) -> Array:
    """Returns the entropy of the experts' shares of the tokens, over that of an even spread."""
    shares_X = shares(tokens_X)
    return -jnp.sum(shares_X * jnp.log(jnp.maximum(shares_X, 1e-20))) / jnp.log(tokens_X.size)


def shares(tokens_X: Array) -> Array:
    """Returns each expert's share of the tokens; zeros where there are none."""
    return tokens_X / jnp.maximum(jnp.sum(tokens_X), 1)


def _of_best_groups(scores_BTX: Array, num_groups: int, num_chosen: int, num_best: int) -> Array:
    """Returns the scores, -infinity for experts of other groups: with 0, one of them might beat a score below 0."""
    scores_BTGX = scores_BTX.reshape(*scores_BTX.shape[:2], num_groups, -1)
    best_BTGN, _ = jax.lax.top_k(scores_BTGX, min(num_best, scores_BTGX.shape[-1]))
    _, groups_BTK = jax.lax.top_k(jnp.sum(best_BTGN, axis=-1), num_chosen)
    is_chosen_BTG = jnp.any(groups_BTK[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_chosen_BTG[..., None], scores_BTGX, -jnp.inf).reshape(scores_BTX.shape)


def added(x: Array, more: Array | None) -> Array:
    """Returns the sum, or x where there is nothing to add."""
    return x if more is None else x + more


class ExpertGroups(NamedTuple):
    """Equal groups of experts, one after another, and of how many of these a token chooses its experts."""

    num: int
    num_chosen: int


ONE_GROUP = ExpertGroups(1, 1)  # a token chooses among all


def apply_experts(
    x_BTE: Array, weights_BTK: Array, ids_BTK: Array, gate_XEM: Array, up_XEM: Array, down_XME: Array,
    *biases: Array, activation: str, groups: ExpertGroups = ONE_GROUP,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns (the weighted sum of what each token's experts make of it, like x; choices of a token that were dropped,
    a count: 0). Tokens are sorted by expert, so that each expert multiplies with its own alone; those of NO_EXPERT go
    last, and come to 0. groups: those of which the choices are, which do not matter on one device."""
    del groups
    B, T, E = x_BTE.shape
    is_sent_BT1 = ids_BTK[..., :1] != NO_EXPERT
    x_BTE, weights_BTK = (jnp.where(is_sent_BT1, each, 0) for each in (x_BTE, weights_BTK))
    order_R = jnp.argsort(ids_BTK.reshape(-1), stable=True)
    num_chosen = ids_BTK.shape[-1]
    sizes_X = jnp.sum(ids_BTK.reshape(-1, 1) == jnp.arange(gate_XEM.shape[0]), axis=0, dtype=jnp.int32)
    x_RE = x_BTE.reshape(-1, E)[order_R // num_chosen]
    ids_R = ids_BTK.reshape(-1)[order_R]
    biases_RM = [jnp.take(each, ids_R, axis=0, mode="fill", fill_value=0) for each in biases] or [None] * 3

    def multiplied(x: Array, w_XEM: Array, bias_RM: Array | None) -> Array:
        return added(jax.lax.ragged_dot(x, w_XEM, sizes_X), bias_RM)

    gate_RM, up_RM = (multiplied(x_RE, *each) for each in ((gate_XEM, biases_RM[0]), (up_XEM, biases_RM[1])))
    y_RE = multiplied(gated(activation, gate_RM, up_RM), down_XME, biases_RM[2])
    y_BTKE = y_RE[jnp.argsort(order_R)].reshape(B, T, num_chosen, E)
    y_BTE = jnp.einsum("btke,btk->bte", y_BTKE.astype(jnp.float32), weights_BTK)
    return jnp.where(is_sent_BT1, y_BTE, 0).astype(x_BTE.dtype), jnp.zeros(())
