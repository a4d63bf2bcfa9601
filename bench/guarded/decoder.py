"""The model of the repository that guard_regressions.py makes: a decoder with grouped queries, as a user writes one.

Shapes: B batch, T length, E embed, H heads, K kv_heads, D head_dim, M mlp, V vocab.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import PositiveInt

from meshloom.models import Context, Mask, Model, ModelConfig, Stack, build_piece

SPLIT = ("batch", "sequence_parallel_length", "embed")  # what each token does for itself
WHOLE = ("batch", "length", "embed")  # what matmuls read


class GuardedConfig(ModelConfig):
    embed_dim: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    mlp_dim: PositiveInt

    def build(self) -> Model:
        return Model(
            embed=build_piece(lambda rngs: Embed(self, rngs)),
            stacks=(Stack("layers", build_piece(lambda rngs: Layer(self, rngs)), self.num_layers),),
            head=build_piece(lambda rngs: Head(self, rngs)),
        )


def parameter(rngs: nnx.Rngs, axes: tuple[str | None, ...], *shape: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5, out_sharding=axes)


def normed(x: Array) -> Array:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


class Embed(nnx.Module):
    def __init__(self, config: GuardedConfig, rngs: nnx.Rngs):
        self.table_VE = parameter(rngs, ("vocab", "embed"), config.vocab_size, config.embed_dim)

    def __call__(self, tokens_BT: Array, context: Context) -> Array:
        x_BTE = context.embedding_lookup("table_VE", self.table_VE[...], tokens_BT)
        return context.activation("residual", context.activation("embedded", x_BTE, *WHOLE), *SPLIT)


class Layer(nnx.Module):
    def __init__(self, config: GuardedConfig, rngs: nnx.Rngs):
        self.config, E = config, config.embed_dim
        H, K, D, M = config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_dim
        self.query_EHD = parameter(rngs, ("embed", "heads", "head_dim"), E, H, D)
        self.key_EKD = parameter(rngs, ("embed", "kv_heads", "head_dim"), E, K, D)
        self.value_EKD = parameter(rngs, ("embed", "kv_heads", "head_dim"), E, K, D)
        self.out_HDE = parameter(rngs, ("heads", "head_dim", "embed"), H, D, E)
        self.gate_EM = parameter(rngs, ("embed", "mlp"), E, M)
        self.up_EM = parameter(rngs, ("embed", "mlp"), E, M)
        self.down_ME = parameter(rngs, ("mlp", "embed"), M, E)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        y_BTE = context.activation("attention_input", normed(x_BTE), *WHOLE, gradient=SPLIT)
        x_BTE = context.activation("attention_residual", x_BTE + self.attention(y_BTE, context), *SPLIT)
        y_BTE = context.activation("mlp_input", normed(x_BTE), *WHOLE, gradient=SPLIT)
        return context.activation("residual", x_BTE + self.mlp(y_BTE, context), *SPLIT)

    def attention(self, x_BTE: Array, context: Context) -> Array:
        q_BTHD = context.matmul("queries", "bte,ehd->bthd", x_BTE, self.query_EHD[...])
        k_BTKD = context.matmul("keys", "bte,ekd->btkd", x_BTE, self.key_EKD[...])
        v_BTKD = context.matmul("values", "bte,ekd->btkd", x_BTE, self.value_EKD[...])
        q_BTHD = context.activation("queries", q_BTHD, "batch", "length", "heads", "head_dim")
        k_BTKD = context.activation("keys", k_BTKD, "batch", "length", "kv_heads", "head_dim")
        v_BTKD = context.activation("values", v_BTKD, "batch", "length", "kv_heads", "head_dim")
        a_BTHD = attend(q_BTHD, k_BTKD, v_BTKD, context)
        a_BTHD = context.activation("attended", a_BTHD, "batch", "length", "heads", "head_dim")
        out_BTE = context.matmul("attention_output", "bthd,hde->bte", a_BTHD, self.out_HDE[...])
        return context.activation("attention_output", out_BTE, *SPLIT)

    def mlp(self, x_BTE: Array, context: Context) -> Array:
        gate_BTM = context.matmul("mlp_gate", "bte,em->btm", x_BTE, self.gate_EM[...])
        up_BTM = context.matmul("mlp_up", "bte,em->btm", x_BTE, self.up_EM[...])
        h_BTM = context.activation("mlp_hidden", jax.nn.silu(gate_BTM) * up_BTM, "batch", "length", "mlp")
        out_BTE = context.matmul("mlp_output", "btm,me->bte", h_BTM, self.down_ME[...])
        return context.activation("mlp_output", out_BTE, *SPLIT)


def attend(q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, context: Context) -> Array:
    """Returns causal attention; the keys of a head are those of its group."""
    return context.attend(q_BTHD, k_BTKD, v_BTKD, scale=q_BTHD.shape[-1] ** -0.5, mask=Mask())


class Head(nnx.Module):
    def __init__(self, config: GuardedConfig, rngs: nnx.Rngs):
        self.kernel_EV = parameter(rngs, ("embed", "vocab"), config.embed_dim, config.vocab_size)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        y_BTE = context.activation("head_input", normed(x_BTE), *WHOLE, gradient=SPLIT)
        logits_BTV = context.matmul("logits", "bte,ev->btv", y_BTE, self.kernel_EV[...])
        return context.activation("logits", logits_BTV, "batch", "length", "vocab")
