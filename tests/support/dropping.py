"""A model that shows its dropout: a layer adds ones of which half are dropped, the head tells how many stayed once."""

import jax.numpy as jnp
from flax import nnx
from pydantic import PositiveInt

from meshloom.models import Context, Model, ModelConfig, Stack, build_piece


class DroppingConfig(ModelConfig):
    num_layers: PositiveInt

    def build(self) -> Model:
        return Model(build_piece(Embed), (Stack("layers", build_piece(Layer), self.num_layers),), build_piece(Head))


class Piece(nnx.Module):
    def __init__(self, _: nnx.Rngs):
        self.nothing_E = nnx.Param(jnp.zeros(32), out_sharding=("embed",))


class Embed(Piece):
    def __call__(self, tokens_BT, context: Context):
        x_BTE = jnp.zeros((*tokens_BT.shape, 32)) + self.nothing_E[...]
        return context.activation("embedded", x_BTE, "batch", "length", "embed")


class Layer(Piece):
    def __call__(self, x_BTE, context: Context):
        x_BTE += context.dropout(jnp.ones_like(x_BTE), 0.5, site=0) + self.nothing_E[...]
        return context.activation("residual", x_BTE, "batch", "length", "embed")


class Head(Piece):
    def __call__(self, x_BTE, context: Context):
        once_BT = jnp.mean(x_BTE + self.nothing_E[...] == 2, axis=-1)  # kept ones count double
        logits_BTV = jnp.zeros((*x_BTE.shape[:2], 264)).at[..., 0].set(100 * once_BT)
        return context.activation("logits", logits_BTV, "batch", "length", "vocab")
