"""A model in which no token sees another: embedding, gated residual layers that know positions, and a head. Layers and
head return an auxiliary loss and statistics. Shapes: B batch, T length, E embed, M mlp, V vocab."""

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import PositiveFloat, PositiveInt

from meshloom.models import Aux, Context, Model, ModelConfig, Stack, build_piece
from meshloom.models.parts import matrix


class PointwiseConfig(ModelConfig):
    embed_dim: PositiveInt
    mlp_dim: PositiveInt
    num_layers: PositiveInt
    penalty: PositiveFloat  # weight of the squares of hidden activations, and of log(z), in the objective

    def build(self) -> Model:
        return Model(
            build_piece(lambda rngs: Embed(self, rngs)),
            (Stack("layers", build_piece(lambda rngs: Layer(self, rngs)), self.num_layers),),
            build_piece(lambda rngs: Head(self, rngs)),
        )


class Embed(nnx.Module):
    def __init__(self, config: PointwiseConfig, rngs: nnx.Rngs):
        self.table_VE = matrix(rngs, ("vocab", "embed"), (config.vocab_size, config.embed_dim), stddev=1.0)

    def __call__(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
        x_BTE = context.embedding_lookup("table_VE", self.table_VE[...], tokens_BT)
        return context.activation("embedded", x_BTE, "batch", "length", "embed")


class Layer(nnx.Module):
    def __init__(self, config: PointwiseConfig, rngs: nnx.Rngs):
        sizes, self.penalty = (config.embed_dim, config.mlp_dim), config.penalty
        self.scale_E = nnx.Param(jnp.linspace(0.5, 1.5, config.embed_dim), out_sharding=("embed",))
        self.up_EM = matrix(rngs, ("embed", "mlp"), sizes, stddev=config.embed_dim**-0.5)
        self.down_ME = matrix(rngs, ("mlp", "embed"), sizes[::-1], stddev=config.mlp_dim**-0.5)

    def __call__(self, x_BTE: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
        turned_BTE = x_BTE * self.scale_E[...] + jnp.cos(context.positions_BT)[..., None].astype(x_BTE.dtype)
        hidden_BTM = context.activation("hidden", jnp.tanh(turned_BTE @ self.up_EM[...]), "batch", "length", "mlp")
        squares_BTM = jnp.square(hidden_BTM.astype(jnp.float32))
        aux = Aux({"penalty": self.penalty * jnp.sum(squares_BTM)}, {"squares": jnp.sum(squares_BTM, (0, 1))})
        x_BTE += hidden_BTM @ self.down_ME[...]
        return context.activation("residual", x_BTE, "batch", "length", "embed"), aux


class Head(nnx.Module):
    def __init__(self, config: PointwiseConfig, rngs: nnx.Rngs):
        self.penalty = config.penalty
        sizes = (config.embed_dim, config.vocab_size)
        self.kernel_EV = matrix(rngs, ("embed", "vocab"), sizes, stddev=config.embed_dim**-0.5)

    def __call__(self, x_BTE: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
        logits_BTV = context.activation("logits", x_BTE @ self.kernel_EV[...], "batch", "length", "vocab")
        log_z_BT = jax.nn.logsumexp(logits_BTV.astype(jnp.float32), axis=-1)
        aux = Aux({"log_z_penalty": self.penalty * jnp.sum(jnp.square(log_z_BT))}, {"log_z": jnp.sum(log_z_BT)})
        return logits_BTV, aux
