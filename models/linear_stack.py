"""One matmul per layer: the smallest model whose communication and arithmetic one can do by hand.

Shapes: B batch, T length, E embed, M mlp (as wide as embed), V vocab.
"""

from functools import lru_cache

import jax
from flax import nnx
from jax import Array

from .contract import Context, Model, Stack, build_piece
from .family_configs import LinearStackConfig


@lru_cache(maxsize=32)
def build_linear_stack(config: LinearStackConfig) -> Model:
    """Returns tokens -> table -> x W ... W -> logits, without nonlinearity, so that gradients can be checked by
    hand."""
    return Model(
        embed=build_piece(lambda rngs: Embed(config, rngs)),
        stacks=(Stack("layers", build_piece(lambda rngs: Layer(config, rngs)), config.num_layers),),
        head=build_piece(lambda rngs: Head(config, rngs)),
    )


class Embed(nnx.Module):
    def __init__(self, config: LinearStackConfig, rngs: nnx.Rngs):
        table_VE = jax.random.normal(rngs.params(), (config.vocab_size, config.embed_dim))
        self.table_VE = nnx.Param(table_VE, out_sharding=("vocab", "embed"))

    def __call__(self, tokens_BT: Array, context: Context) -> Array:
        x_BTE = context.embedding_lookup("table_VE", self.table_VE[...], tokens_BT)
        return context.activation("embedded", x_BTE, "batch", "length", "embed")


class Layer(nnx.Module):
    def __init__(self, config: LinearStackConfig, rngs: nnx.Rngs):
        # Unit gain: E inputs of variance 1/E each.
        kernel_EM = jax.random.normal(rngs.params(), (config.embed_dim, config.embed_dim)) * config.embed_dim**-0.5
        self.kernel_EM = nnx.Param(kernel_EM, out_sharding=("embed", "mlp"))

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        x_BTM = context.matmul("residual", "bte,em->btm", x_BTE, self.kernel_EM[...])
        return context.activation("residual", x_BTM, "batch", "length", "embed")


class Head(nnx.Module):
    def __init__(self, config: LinearStackConfig, rngs: nnx.Rngs):
        kernel_EV = jax.random.normal(rngs.params(), (config.embed_dim, config.vocab_size)) * config.embed_dim**-0.5
        self.kernel_EV = nnx.Param(kernel_EV, out_sharding=("embed", "vocab"))

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        logits_BTV = context.matmul("logits", "bte,ev->btv", x_BTE, self.kernel_EV[...])
        return context.activation("logits", logits_BTV, "batch", "length", "vocab")
