"""A Llama-style decoder: grouped-query attention, rotary positions, RMSNorm, gated MLP, untied head.

Shapes end in their dimensions:
B batch, T length, E embed, H heads, K kv_heads, D head_dim, M mlp, V vocab.
"""

from typing import Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from .config import Config
from .contract import Context, Model, Stack, build_piece


class DecoderConfig(Config):
    family: Literal["decoder"]
    vocab_size: PositiveInt
    embed_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt  # heads that share one key and value: num_heads / num_kv_heads
    head_dim: PositiveInt
    mlp_dim: PositiveInt
    rope_theta: PositiveFloat  # base of the rotary wavelengths
    norm_epsilon: PositiveFloat
    initializer_stddev: PositiveFloat  # of every matrix; the two that write to the residual stream: / sqrt(2 layers)

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise PydanticCustomError(
                "heads",
                "num_heads={heads} is no multiple of num_kv_heads={kv_heads}",
                {"heads": self.num_heads, "kv_heads": self.num_kv_heads, "key": "num_kv_heads",
                 "fix": f"use one of {_divisors(self.num_heads)}"},
            )  # fmt: skip
        if self.head_dim % 2:
            raise PydanticCustomError(
                "head_dim",
                "head_dim={head_dim} is odd, and rotary positions turn pairs of dimensions",
                {"head_dim": self.head_dim, "key": "head_dim", "fix": f"use {self.head_dim + 1}"},
            )
        return self


def build_decoder(config: DecoderConfig) -> Model:
    """The three pieces of the decoder that `config` describes."""
    return Model(
        embed=build_piece(lambda rngs: Embed(config, rngs)),
        stacks=(Stack("layers", build_piece(lambda rngs: Layer(config, rngs)), config.num_layers),),
        head=build_piece(lambda rngs: Head(config, rngs)),
    )


class Embed(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.table_VE = _matrix(config, rngs, ("vocab", "embed"), (config.vocab_size, config.embed_dim))

    def __call__(self, tokens_BT: Array, context: Context) -> Array:
        return context.activation("embedded", self.table_VE[tokens_BT], "batch", "length", "embed")


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        x_BTE = x_BTE + self.attention(self.attention_norm(x_BTE), context)
        x_BTE = context.activation("attention_residual", x_BTE, "batch", "length", "embed")
        x_BTE = x_BTE + self.mlp(self.mlp_norm(x_BTE), context)
        return context.activation("residual", x_BTE, "batch", "length", "embed")


class Head(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config)
        self.kernel_EV = _matrix(config, rngs, ("embed", "vocab"), (config.embed_dim, config.vocab_size))

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        logits_BTV = jnp.einsum("bte,ev->btv", self.norm(x_BTE), self.kernel_EV[...])
        return context.activation("logits", logits_BTV, "batch", "length", "vocab")


class Attention(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        E, H, K, D = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_theta = config.rope_theta
        self.query_EHD = _matrix(config, rngs, ("embed", "heads", "head_dim"), (E, H, D))
        self.key_EKD = _matrix(config, rngs, ("embed", "kv_heads", "head_dim"), (E, K, D))
        self.value_EKD = _matrix(config, rngs, ("embed", "kv_heads", "head_dim"), (E, K, D))
        self.out_HDE = _matrix(config, rngs, ("heads", "head_dim", "embed"), (H, D, E), writes_residual=True)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        q_BTHD = jnp.einsum("bte,ehd->bthd", x_BTE, self.query_EHD[...])
        k_BTKD = jnp.einsum("bte,ekd->btkd", x_BTE, self.key_EKD[...])
        v_BTKD = jnp.einsum("bte,ekd->btkd", x_BTE, self.value_EKD[...])
        q_BTHD = context.activation("queries", q_BTHD, "batch", "length", "heads", "head_dim")
        k_BTKD = context.activation("keys", k_BTKD, "batch", "length", "kv_heads", "head_dim")
        v_BTKD = context.activation("values", v_BTKD, "batch", "length", "kv_heads", "head_dim")
        q_BTHD = rotate(q_BTHD, context.positions_T, self.rope_theta)
        k_BTKD = rotate(k_BTKD, context.positions_T, self.rope_theta)
        a_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BTKD, v_BTKD, is_causal=True, implementation="xla")
        a_BTHD = context.activation("attended", a_BTHD, "batch", "length", "heads", "head_dim")
        return jnp.einsum("bthd,hde->bte", a_BTHD, self.out_HDE[...])


class GatedMLP(nnx.Module):
    """SwiGLU: (silu(x gate) * (x up)) down. Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        E, M = config.embed_dim, config.mlp_dim
        self.gate_EM = _matrix(config, rngs, ("embed", "mlp"), (E, M))
        self.up_EM = _matrix(config, rngs, ("embed", "mlp"), (E, M))
        self.down_ME = _matrix(config, rngs, ("mlp", "embed"), (M, E), writes_residual=True)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        hidden_BTM = jax.nn.silu(x_BTE @ self.gate_EM[...]) * (x_BTE @ self.up_EM[...])
        return context.activation("hidden", hidden_BTM, "batch", "length", "mlp") @ self.down_ME[...]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32. Zhang and Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, config: DecoderConfig):
        self.epsilon = config.norm_epsilon
        self.scale_E = nnx.Param(jnp.ones(config.embed_dim), out_sharding=("embed",))

    def __call__(self, x_BTE: Array) -> Array:
        x32_BTE = x_BTE.astype(jnp.float32)
        mean_square_BT1 = jnp.mean(jnp.square(x32_BTE), axis=-1, keepdims=True)
        normed_BTE = x32_BTE * jax.lax.rsqrt(mean_square_BT1 + self.epsilon) * self.scale_E[...].astype(jnp.float32)
        return normed_BTE.astype(x_BTE.dtype)


def rotate(x_BTHD: Array, positions_T: Array, theta: float) -> Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): dimension i turns with dimension i + D/2, in float32."""
    half = x_BTHD.shape[-1] // 2
    wavelengths_D = theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles_T1D = positions_T[:, None, None] / wavelengths_D
    cos, sin = jnp.cos(angles_T1D), jnp.sin(angles_T1D)
    left, right = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x_BTHD.dtype)


def _matrix(
    config: DecoderConfig,
    rngs: nnx.Rngs,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    writes_residual: bool = False,
) -> nnx.Param[Array]:
    # Layers that write to the residual stream start smaller, so that its variance does not grow with depth (GPT-2).
    scale = (2 * config.num_layers) ** -0.5 if writes_residual else 1.0
    value = config.initializer_stddev * scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, out_sharding=axes)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
