"""Decoders with experts: Mixtral, Qwen 3 MoE, DeepSeek-V3, told apart by their configs alone.

A layer is a decoder's (decoder.py) with experts instead of its MLP: a router in float32 chooses some of them for each
token. The first layers may have one MLP, as wide as `dense_mlp_dim`. DeepSeek's have multi-head latent attention
(DeepSeek-V2, arXiv:2405.04434, section 2.1), heads made of short vectors:

    x -> query latent -> norm -> of each head: D without a position, R turned by it   (V2-Lite: of x itself)
    x -> kv latent    -> norm -> of each head: a key of D, and a value of its own width
      -> R more, turned, the same for all heads: the rest of each key

A cache of generation holds the kv latents and the turned rest of the keys, S of them (Context.remember).

Shapes: B batch, T length, S length of what is remembered, E embed, M mlp, X experts, K experts of a token, H heads,
D head_dim, R rope_head_dim, V value_head_dim, Q query latent, L kv latent.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .attention import Mask
from .contract import COUNTED, Aux, AuxOfTotals, Context, Measure, Model, Stack, UpdateRule, build_piece
from .decoder import (
    MLP,
    RESIDUAL,
    WHOLE,
    Embed,
    Head,
    Layer,
    Masks,
    attention_scale,
    build_layers,
    masks_of,
    residual_stddev,
    rope_of,
    rounds,
)
from .family_configs import DecoderBase, LatentAttentionConfig, MoeConfig
from .parts import (
    NO_EXPERT,
    ExpertGroups,
    Norm,
    balanced_bias,
    bias,
    counted_shares,
    expert_entropy,
    expert_load,
    matrix,
    rotate,
    route,
    shares,
)


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


TOKENS = "expert_tokens"  # the total of a layer: how many tokens chose each expert
MEASURES = {"expert_load": Measure(TOKENS, expert_load), "expert_entropy": Measure(TOKENS, expert_entropy)}


@lru_cache(maxsize=32)
def build_moe(config: MoeConfig) -> Model:
    """Returns the pieces of the model. Dense layers are a stack of their own, `dense_layers`."""
    num_dense = config.num_dense_layers
    stacks = [
        _stack(config, name, masks, num_layers)
        for name, masks, num_layers in rounds(masks_of(config), config.num_layers - num_dense)
    ]
    if num_dense:
        stacks.insert(0, Stack("dense_layers", build_piece(lambda rngs: _dense_layer(config, rngs)), num_dense))
    return Model(
        embed=build_piece(lambda rngs: Embed(config, rngs)),
        stacks=tuple(stacks),
        head=build_piece(lambda rngs: Head(config, rngs)),
        tied={"table_VE": "table_VE"} if config.embeddings == "tied" else {},
        max_length=config.num_positions,
        num_active_experts=config.num_experts_per_token,
    )


def _stack(config: MoeConfig, name: str, masks: Masks, num_layers: int) -> Stack:
    """Returns a stack of layers with experts, or of groups of them: then names begin with that of the layer."""
    rate, rules, measures = config.router_bias_update_rate, {}, {}
    for place in [""] if len(masks) == 1 else [f"layer_{i}" for i in range(len(masks))]:
        above, before = (f"{place}/", f"{place}_") if place else ("", "")
        if rate is not None:
            rules[f"{above}mlp/router_bias_X"] = UpdateRule(before + TOKENS, partial(balanced_bias, rate=rate))
        if config.load_balancing_counts == "global":
            rules[f"{above}mlp/{COUNTED}/shares_X"] = UpdateRule(before + TOKENS, counted_shares)
        measures |= {before + of: replace(each, total=before + TOKENS) for of, each in MEASURES.items()}
    return Stack(name, build_layers(masks, partial(_layer, config)), num_layers, rules, measures)


def _dense_layer(config: MoeConfig, rngs: nnx.Rngs) -> nnx.Module:
    assert config.dense_mlp_dim is not None
    mlp, mask = MLP(config, rngs, width=config.dense_mlp_dim), masks_of(config)[0]
    return Layer(config, rngs, 0, mask, mlp=mlp, attention=_attention(config, rngs, mask))


def _layer(config: MoeConfig, rngs: nnx.Rngs, index: int, mask: Mask) -> nnx.Module:
    mlp = Experts(config, rngs, index)
    return Layer(config, rngs, index, mask, mlp=mlp, attention=_attention(config, rngs, mask))


def _attention(config: MoeConfig, rngs: nnx.Rngs, mask: Mask) -> nnx.Module | None:
    if config.latent_attention is None:
        return None
    return LatentAttention(config, config.latent_attention, rngs, mask=mask)


class Counted(nnx.Module):
    """The share of the choices that each expert had in the global batch before; even before the first step."""

    def __init__(self, num_experts: int):
        even_X = jnp.full(num_experts, 1 / num_experts)
        self.shares_X = nnx.Param(even_X, out_sharding=(None,), in_float32=True)


class Experts(nnx.Module):
    """A router and its experts (Shazeer et al. 2017, arXiv:1701.06538), and those that all tokens share (DeepSeekMoE,
    arXiv:2401.06066). index: the place of the layer in its group."""

    def __init__(self, config: MoeConfig, rngs: nnx.Rngs, index: int):
        self.config, self.index = config, index
        X, E, M, stddev = config.num_experts, config.embed_dim, config.mlp_dim, config.initializer_stddev
        self.router_EX = matrix(rngs, ("embed", None), (E, X), stddev=stddev, in_float32=True)
        if config.router_bias_update_rate is not None:
            self.router_bias_X = nnx.Param(jnp.zeros(X), out_sharding=(None,), in_float32=True)
        if config.load_balancing_counts == "global":
            self.counted = Counted(X)
        self.gate_XEM = matrix(rngs, ("experts", "embed", "mlp"), (X, E, M), stddev=stddev)
        self.up_XEM = matrix(rngs, ("experts", "embed", "mlp"), (X, E, M), stddev=stddev)
        self.down_XME = matrix(rngs, ("experts", "mlp", "embed"), (X, M, E), stddev=residual_stddev(config))
        if config.biases == "all":
            self.router_logits_bias_X = nnx.Param(jnp.zeros(X), out_sharding=(None,), in_float32=True)
            self.gate_bias_XM = bias(("experts", "mlp"), (X, M))
            self.up_bias_XM = bias(("experts", "mlp"), (X, M))
            self.down_bias_XE = bias(("experts", "embed"), (X, E))
        if config.num_shared_experts:
            self.shared = MLP(config, rngs, width=config.num_shared_experts * M)

    def __call__(self, x_BTE: Array, context: Context) -> tuple[Array, AuxOfTotals]:
        config = self.config
        x_BTE = context.activation("experts_input", x_BTE, *RESIDUAL)
        logits_BTX = self._logits(x_BTE, context)
        scores_BTX = _SCORES[config.router_scores](logits_BTX)
        weights_BTK, ids_BTK = route(
            scores_BTX,
            None if config.router_bias_update_rate is None else self.router_bias_X[...],
            num_chosen=config.num_experts_per_token,
            num_groups=config.num_expert_groups,
            num_groups_chosen=config.num_groups_per_token,
            num_best=1 if config.group_scores == "best" else 2,
            is_normalized=config.router_weights == "normalized",
            scale=config.router_scale,
        )
        biases: tuple[Array, ...] = ()
        if config.biases == "all":
            biases = self.gate_bias_XM[...], self.up_bias_XM[...], self.down_bias_XE[...]
        y_BTE, num_dropped = context.apply_experts(
            "routed", x_BTE, weights_BTK, ids_BTK, self.gate_XEM[...], self.up_XEM[...], self.down_XME[...], *biases,
            activation=config.mlp_activation,
            groups=ExpertGroups(config.num_expert_groups, config.num_groups_per_token),
        )  # fmt: skip
        if config.num_shared_experts:
            y_BTE = y_BTE + self.shared(x_BTE, context)
        y_BTE = context.activation("experts_output", y_BTE, *RESIDUAL)
        return y_BTE, self._aux(logits_BTX, scores_BTX, ids_BTK, num_dropped, context)

    def _logits(self, x_BTE: Array, context: Context) -> Array:
        """Computes the logits in float32, products too: a TPU would take them in bfloat16."""
        x_BTE = context.jitter(x_BTE.astype(jnp.float32), self.config.router_jitter, site=3 + 1000 * self.index)
        router_EX = self.router_EX[...]
        logits_BTX = context.matmul("router_logits", "bte,ex->btx", x_BTE, router_EX, precision="highest")
        if self.config.biases == "all":
            logits_BTX = logits_BTX + self.router_logits_bias_X[...]
        return context.activation("router_logits", logits_BTX, "batch", "sequence_parallel_length", None)

    def _aux(
        self, logits_BTX: Array, scores_BTX: Array, ids_BTK: Array, num_dropped: Array, context: Context
    ) -> AuxOfTotals:
        """Returns the losses of the router, and what became of the choices of these tokens; padding counts nowhere.

        load_balancing: X sum f_i p_i, of the share f_i of choices that are expert i and its mean score p_i (Switch,
        arXiv:2101.03961). f_i is of the microbatch, or of the global batch before: a layer sees its microbatch before
        the others are counted, and a share of some of them would make the loss depend on their number. router_z: the
        mean of log(sum exp(logits))^2 (ST-MoE, arXiv:2202.08906).
        dropped: the share of choices that no expert had room for. expert_tokens: the tokens of each expert, which the
        router's bias and the measures of balance follow.
        """
        config = self.config
        ids_BTK = context.where_token(ids_BTK, NO_EXPERT)
        is_chosen_BTX = jnp.any(ids_BTK[..., None] == jnp.arange(config.num_experts), axis=-2)
        tokens_X = jnp.sum(is_chosen_BTX, axis=(0, 1), dtype=jnp.float32)
        p_BTX = context.where_token(scores_BTX / jnp.sum(scores_BTX, axis=-1, keepdims=True))
        z = jnp.sum(jnp.square(context.where_token(jax.nn.logsumexp(logits_BTX, axis=-1))))
        balancing, penalty = config.load_balancing_weight, config.router_z_loss_weight
        is_global = config.load_balancing_counts == "global"

        def make(of_microbatch: Mapping[str, Array]) -> Aux:
            losses = {"router_z": penalty * z} if penalty else {}
            if balancing:
                shares_X = self.counted.shares_X[...] if is_global else shares(of_microbatch[TOKENS])
                shares_X = jax.lax.stop_gradient(shares_X)
                balance = config.num_experts * jnp.sum(shares_X * jnp.sum(p_BTX, axis=(0, 1)))
                losses = {"load_balancing": balancing * balance} | losses
            return Aux(losses, {"dropped": num_dropped / config.num_experts_per_token}, {TOKENS: tokens_X})

        return AuxOfTotals({TOKENS: tokens_X} if balancing and not is_global else {}, make)


_SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}
