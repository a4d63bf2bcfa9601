"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): heads made of short vectors.

    x -> query latent -> norm -> of each head: D without a position, R turned by it   (V2-Lite: of x itself)
    x -> kv latent    -> norm -> of each head: a key of D, and a value of its own width
      -> R more, turned, the same for all heads: the rest of each key

A cache of generation holds the kv latents and the turned rest of the keys, S of them (Context.remember).

Shapes: B batch, T length, S length of what is remembered, E embed, H heads, D head_dim, R rope_head_dim,
V value_head_dim, Q query latent, L kv latent.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from .contract import Context
from .decoder import RESIDUAL, WHOLE, attention_scale, residual_stddev, rope_of
from .family_configs import DecoderBase, LatentAttentionConfig
from .mask import Mask
from .parts import Norm, matrix, rotate


class LatentAttention(nnx.Module):
    """Attention between heads made of latent vectors. The latent dimensions of parameters have the logical axis
    `embed`, so that they are sharded as other matrices are."""

    def __init__(self, config: DecoderBase, latent: LatentAttentionConfig, rngs: nnx.Rngs, *, mask: Mask):
        self.config, self.latent, self.mask, self.rope = config, latent, mask, rope_of(config, mask)
        E, H, D, stddev = config.embed_dim, config.num_heads, config.head_dim, config.initializer_stddev
        Q, L, R, V = latent.query_dim, latent.kv_dim, latent.rope_head_dim, latent.value_head_dim
        if Q is None:
            self.query_EHD = matrix(rngs, ("embed", "heads", "head_dim"), (E, H, D + R), stddev=stddev)
        else:
            self.query_down_EQ = matrix(rngs, ("embed", None), (E, Q), stddev=stddev)
            self.query_norm = Norm(config.norm, Q, axis="embed", epsilon=config.norm_epsilon)
            self.query_up_QHD = matrix(rngs, ("embed", "heads", "head_dim"), (Q, H, D + R), stddev=stddev)
        self.kv_down_EL = matrix(rngs, ("embed", None), (E, L + R), stddev=stddev)
        self.kv_norm = Norm(config.norm, L, axis="embed", epsilon=config.norm_epsilon)
        self.kv_up_LHD = matrix(rngs, ("embed", "heads", "head_dim"), (L, H, D + V), stddev=stddev)
        self.out_HVE = matrix(rngs, ("heads", "head_dim", "embed"), (H, V, E), stddev=residual_stddev(config))

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        q_BTHD, k_BSHD, v_BSHV = self._queries_keys_values(x_BTE, context)
        q_BTHD = context.activation("queries", q_BTHD, "batch", "length", "heads", "head_dim")
        k_BSHD = context.activation("keys", k_BSHD, "batch", "length", "heads", "head_dim")
        v_BSHV = context.activation("values", v_BSHV, "batch", "length", "heads", "head_dim")
        scale = attention_scale(self.config, q_BTHD.shape[-1], self.rope)
        soft_cap = self.config.attention_soft_cap
        a_BTHV = context.attend(q_BTHD, k_BSHD, v_BSHV, scale=scale, mask=self.mask, soft_cap=soft_cap)
        a_BTHV = context.activation("attended", a_BTHV, "batch", "length", "heads", "head_dim")
        out_BTE = context.matmul("attention_output", "bthv,hve->bte", a_BTHV, self.out_HVE[...])
        return context.activation("attention_output", out_BTE, *RESIDUAL, gradient=WHOLE)

    def _queries_keys_values(self, x_BTE: Array, context: Context) -> tuple[Array, Array, Array]:
        D, L = self.config.head_dim, self.latent.kv_dim
        q_BTHD = self._queries(x_BTE, context)
        latent_BTL = context.matmul("kv_latent", "bte,el->btl", x_BTE, self.kv_down_EL[...])
        latent_BTL = context.activation("kv_latent", latent_BTL, "batch", "length", None)
        normed_BSL = context.remember("kv_latent", self.kv_norm(latent_BTL[..., :L]), "batch", "length", None)
        kv_BSHD = context.matmul("keys_values", "btl,lhd->bthd", normed_BSL, self.kv_up_LHD[...])
        q_turned = self._turned(q_BTHD[..., D:], context)
        k_turned = self._turned(latent_BTL[:, :, None, L:], context)
        k_turned = context.remember("turned_keys", k_turned, "batch", "length", None, None)
        k_turned = jnp.broadcast_to(k_turned, (*kv_BSHD.shape[:3], k_turned.shape[-1]))
        q_BTHD = jnp.concatenate([q_BTHD[..., :D], q_turned], axis=-1)
        return q_BTHD, jnp.concatenate([kv_BSHD[..., :D], k_turned], axis=-1), kv_BSHD[..., D:]

    def _queries(self, x_BTE: Array, context: Context) -> Array:
        if self.latent.query_dim is None:
            return context.matmul("queries", "bte,ehd->bthd", x_BTE, self.query_EHD[...])
        latent_BTQ = context.matmul("query_latent", "bte,eq->btq", x_BTE, self.query_down_EQ[...])
        latent_BTQ = context.activation("query_latent", latent_BTQ, "batch", "length", None)
        return context.matmul("queries", "btq,qhd->bthd", self.query_norm(latent_BTQ), self.query_up_QHD[...])

    def _turned(self, x_BTHR: Array, context: Context) -> Array:
        assert self.rope is not None
        return rotate(x_BTHR, context.positions_BT, self.rope)
