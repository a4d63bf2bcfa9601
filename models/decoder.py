"""The decoder family: Llama, GPT-2, Qwen 3, Gemma 2 and what lies between them, told apart by their configs alone.

Shapes end in their dimensions:
B batch, T length, S length of what is remembered, E embed, H heads, K kv_heads, D head_dim, M mlp, V vocab,
P positions.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from .attention import Mask
from .contract import Context, Model, Piece, Stack, build_piece, join_auxes, split_output
from .family_configs import DecoderBase, DecoderConfig
from .parts import ACTIVATIONS, Norm, Rope, bias, gated, matrix, rotate

RESIDUAL = ("batch", "sequence_parallel_length", "embed")  # the residual stream and its norms: each token for itself
WHOLE = ("batch", "length", "embed")  # the residual stream as matmuls read it
WITHIN_MLP = ("batch", "length", "mlp")


@lru_cache(maxsize=32)
def build_decoder(config: DecoderConfig) -> Model:
    """Returns the pieces of the decoder. A layer of its stack is one round through the masks."""
    return Model(
        embed=build_piece(lambda rngs: Embed(config, rngs)),
        stacks=tuple(
            Stack(name, build_layers(masks, lambda *place: Layer(config, *place)), num_layers)
            for name, masks, num_layers in rounds(masks_of(config), config.num_layers)
        ),
        head=build_piece(lambda rngs: Head(config, rngs)),
        tied={"table_VE": "table_VE"} if config.embeddings == "tied" else {},
        max_length=config.num_positions,
    )


Masks = tuple[Mask, ...]
MakeLayer = Callable[[nnx.Rngs, int, Mask], nnx.Module]  # of a place in a group, and a mask


def masks_of(config: DecoderBase) -> Masks:
    """Returns the masks of layers, which repeat."""
    return tuple(Mask(window) for window in config.attention_windows)


def rounds(masks: Masks, num_layers: int) -> list[tuple[str, Masks, int]]:
    """Returns the stacks of so many layers, whose masks repeat: for each its name, the masks of one of its layers or
    groups of layers, and how many of those it has. What is left after the last whole round is a stack of its own: of
    single layers where they are alike, else of one group.

    Of windows (5, 5, None), 8 layers -> layers: (5, 5, None), 2; rest_layers: (5,), 2.
    """
    num_rounds, num_left = divmod(num_layers, len(masks))
    left = masks[:num_left]
    rest = (left[:1], num_left) if len(set(left)) == 1 else (left, 1)
    stacks = [("layers", masks, num_rounds), ("rest_layers", *rest)]
    found = [stack for stack in stacks if stack[1] and stack[2]]
    return [("layers", *found[0][1:])] if len(found) == 1 else found


def build_layers(masks: Masks, make: MakeLayer) -> Piece:
    """Returns a layer with a mask, or a group of one for each of several masks."""
    if len(masks) == 1:
        return build_piece(lambda rngs: make(rngs, 0, masks[0]))
    return build_piece(lambda rngs: LayerGroup(masks, make, rngs))


class Embed(nnx.Module):
    def __init__(self, config: DecoderBase, rngs: nnx.Rngs):
        self.config, E = config, config.embed_dim
        self.table_VE = matrix(rngs, ("vocab", "embed"), (config.vocab_size, E), stddev=config.initializer_stddev)
        if config.num_positions is not None:
            shape = (config.num_positions, E)
            self.positions_PE = matrix(rngs, (None, "embed"), shape, stddev=config.initializer_stddev)

    def __call__(self, tokens_BT: Array, context: Context) -> Array:
        x_BTE = context.embedding_lookup("table_VE", self.table_VE[...], tokens_BT)
        if self.config.embedding_scale == "sqrt_embed_dim":
            x_BTE *= jnp.asarray(self.config.embed_dim**0.5, x_BTE.dtype)
        if self.config.num_positions is not None:
            x_BTE += context.embedding_lookup("positions_PE", self.positions_PE[...], context.positions_BT)
        x_BTE = context.dropout(x_BTE, self.config.dropout_rate, site=0)
        x_BTE = context.activation("embedded", x_BTE, *WHOLE)
        return context.activation("residual", x_BTE, *RESIDUAL)


class LayerGroup(nnx.Module):
    """Layers with different masks, one after the other: what repeats is all of them together."""

    def __init__(self, masks: Masks, make: MakeLayer, rngs: nnx.Rngs):
        self.num_layers = len(masks)
        for i, mask in enumerate(masks):
            setattr(self, f"layer_{i}", make(rngs, i, mask))

    def __call__(self, x_BTE: Array, context: Context) -> Any:
        auxes = {}
        for i in range(self.num_layers):
            output = context.run_layer(partial(getattr(self, f"layer_{i}"), context=context), x_BTE)
            x_BTE, aux = split_output(output)
            auxes |= {f"layer_{i}": aux} if isinstance(output, tuple) else {}
        return (x_BTE, join_auxes(auxes)) if auxes else x_BTE


class Layer(nnx.Module):
    """A layer of a decoder. index: its place in its group. mlp, attention: None for those of a decoder; the layer
    returns the auxiliary outputs of its MLP, if it has any."""

    def __init__(
        self, config: DecoderBase, rngs: nnx.Rngs, index: int, mask: Mask, *, mlp: nnx.Module | None = None,
        attention: nnx.Module | None = None,
    ):  # fmt: skip
        self.config, self.index = config, index
        self.attention_norm = _norm(config)
        self.attention = attention or Attention(config, rngs, mask=mask)
        self.mlp_norm = _norm(config)
        self.mlp = mlp or MLP(config, rngs, width=config.mlp_dim)
        if config.norm_placement == "before_and_after":
            self.attention_out_norm = _norm(config)
            self.mlp_out_norm = _norm(config)

    def __call__(self, x_BTE: Array, context: Context) -> Any:
        rate, is_normed = self.config.dropout_rate, self.config.norm_placement == "before_and_after"
        y_BTE = context.activation("attention_input", self.attention_norm(x_BTE), *WHOLE, gradient=RESIDUAL)
        y_BTE = self.attention(y_BTE, context)
        y_BTE = self.attention_out_norm(y_BTE) if is_normed else y_BTE
        x_BTE = x_BTE + context.dropout(y_BTE, rate, site=2 * self.index)
        x_BTE = context.activation("attention_residual", x_BTE, *RESIDUAL)
        output = self.mlp(self.mlp_norm(x_BTE), context)
        y_BTE, aux = output if isinstance(output, tuple) else (output, None)
        y_BTE = self.mlp_out_norm(y_BTE) if is_normed else y_BTE
        x_BTE = x_BTE + context.dropout(y_BTE, rate, site=2 * self.index + 1)
        x_BTE = context.activation("residual", x_BTE, *RESIDUAL)
        return x_BTE if aux is None else (x_BTE, aux)


class Head(nnx.Module):
    def __init__(self, config: DecoderBase, rngs: nnx.Rngs):
        self.config, E, V = config, config.embed_dim, config.vocab_size
        self.norm = _norm(config)
        if config.embeddings == "tied":
            self.table_VE = matrix(rngs, ("vocab", "embed"), (V, E), stddev=config.initializer_stddev)
        else:
            self.kernel_EV = matrix(rngs, ("embed", "vocab"), (E, V), stddev=config.initializer_stddev)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        x_BTE = context.activation("head_input", self.norm(x_BTE), *WHOLE, gradient=RESIDUAL)
        if self.config.embeddings == "tied":
            logits_BTV = context.matmul("logits", "bte,ve->btv", x_BTE, self.table_VE[...])
        else:
            logits_BTV = context.matmul("logits", "bte,ev->btv", x_BTE, self.kernel_EV[...])
        if (cap := self.config.logit_soft_cap) is not None:
            logits_BTV = cap * jnp.tanh(logits_BTV.astype(jnp.float32) / cap)
        return context.activation("logits", logits_BTV, "batch", "length", "vocab")


class Attention(nnx.Module):
    """Attention in which each head's queries meet the keys of its kv_head: num_kv_heads = num_heads is plain multi-head
    attention (Vaswani et al. 2017), 1 multi-query (Shazeer 2019), between them grouped-query (Ainslie et al. 2023)."""

    def __init__(self, config: DecoderBase, rngs: nnx.Rngs, *, mask: Mask):
        self.config, self.mask, self.rope = config, mask, rope_of(config, mask)
        E, H, K, D = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        stddev = config.initializer_stddev
        self.query_EHD = matrix(rngs, ("embed", "heads", "head_dim"), (E, H, D), stddev=stddev)
        self.key_EKD = matrix(rngs, ("embed", "kv_heads", "head_dim"), (E, K, D), stddev=stddev)
        self.value_EKD = matrix(rngs, ("embed", "kv_heads", "head_dim"), (E, K, D), stddev=stddev)
        self.out_HDE = matrix(rngs, ("heads", "head_dim", "embed"), (H, D, E), stddev=residual_stddev(config))
        if config.biases != "none":
            self.query_bias_HD = bias(("heads", "head_dim"), (H, D))
            self.key_bias_KD = bias(("kv_heads", "head_dim"), (K, D))
            self.value_bias_KD = bias(("kv_heads", "head_dim"), (K, D))
        if config.biases == "all":
            self.out_bias_E = bias(("embed",), (E,))
        if config.attention_sinks:
            self.sinks_H = bias(("heads",), (H,))
        if config.qk_norm != "none":
            self.query_norm = Norm(config.qk_norm, D, axis="head_dim", epsilon=config.norm_epsilon)
            self.key_norm = Norm(config.qk_norm, D, axis="head_dim", epsilon=config.norm_epsilon)

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        config = self.config
        q_BTHD, k_BTKD, v_BTKD = self._queries_keys_values(x_BTE, context)
        q_BTHD = context.activation("queries", q_BTHD, "batch", "length", "heads", "head_dim")
        k_BTKD = context.activation("keys", k_BTKD, "batch", "length", "kv_heads", "head_dim")
        v_BTKD = context.activation("values", v_BTKD, "batch", "length", "kv_heads", "head_dim")
        if config.qk_norm != "none":
            q_BTHD, k_BTKD = self.query_norm(q_BTHD), self.key_norm(k_BTKD)
        if self.rope is not None:
            q_BTHD, k_BTKD = (rotate(each, context.positions_BT, self.rope) for each in (q_BTHD, k_BTKD))
        k_BSKD = context.remember("keys", k_BTKD, "batch", "length", "kv_heads", "head_dim")
        v_BSKD = context.remember("values", v_BTKD, "batch", "length", "kv_heads", "head_dim")
        sinks_H = self.sinks_H[...] if config.attention_sinks else None
        scale, soft_cap = attention_scale(config, config.head_dim, self.rope), config.attention_soft_cap
        a_BTHD = context.attend(q_BTHD, k_BSKD, v_BSKD, sinks_H, scale=scale, mask=self.mask, soft_cap=soft_cap)
        a_BTHD = context.activation("attended", a_BTHD, "batch", "length", "heads", "head_dim")
        out_BTE = context.matmul("attention_output", "bthd,hde->bte", a_BTHD, self.out_HDE[...])
        out_BTE = context.activation("attention_output", out_BTE, *RESIDUAL, gradient=WHOLE)
        return out_BTE + self.out_bias_E[...] if config.biases == "all" else out_BTE

    def _queries_keys_values(self, x_BTE: Array, context: Context) -> tuple[Array, Array, Array]:
        q_BTHD = context.matmul("queries", "bte,ehd->bthd", x_BTE, self.query_EHD[...])
        k_BTKD = context.matmul("keys", "bte,ekd->btkd", x_BTE, self.key_EKD[...])
        v_BTKD = context.matmul("values", "bte,ekd->btkd", x_BTE, self.value_EKD[...])
        if self.config.biases == "none":
            return q_BTHD, k_BTKD, v_BTKD
        return q_BTHD + self.query_bias_HD[...], k_BTKD + self.key_bias_KD[...], v_BTKD + self.value_bias_KD[...]


class MLP(nnx.Module):
    """An MLP, plain or gated (Shazeer 2020, arXiv:2002.05202). Its input comes from a norm, each token for itself."""

    def __init__(self, config: DecoderBase, rngs: nnx.Rngs, *, width: int):
        self.config, E, M = config, config.embed_dim, width
        if config.mlp == "gated":
            self.gate_EM = matrix(rngs, ("embed", "mlp"), (E, M), stddev=config.initializer_stddev)
        self.up_EM = matrix(rngs, ("embed", "mlp"), (E, M), stddev=config.initializer_stddev)
        self.down_ME = matrix(rngs, ("mlp", "embed"), (M, E), stddev=residual_stddev(config))
        if config.biases == "all":
            if config.mlp == "gated":
                self.gate_bias_M = bias(("mlp",), (M,))
            self.up_bias_M = bias(("mlp",), (M,))
            self.down_bias_E = bias(("embed",), (E,))

    def __call__(self, x_BTE: Array, context: Context) -> Array:
        activation, has_bias = self.config.mlp_activation, self.config.biases == "all"
        x_BTE = context.activation("mlp_input", x_BTE, *WHOLE, gradient=RESIDUAL)
        hidden_BTM = context.matmul("mlp_up", "bte,em->btm", x_BTE, self.up_EM[...])
        hidden_BTM = hidden_BTM + self.up_bias_M[...] if has_bias else hidden_BTM
        hidden_BTM = context.activation("mlp_up", hidden_BTM, *WITHIN_MLP)
        if self.config.mlp == "gated":
            gate_BTM = context.matmul("mlp_gate", "bte,em->btm", x_BTE, self.gate_EM[...])
            gate_BTM = gate_BTM + self.gate_bias_M[...] if has_bias else gate_BTM
            gate_BTM = context.activation("mlp_gate", gate_BTM, *WITHIN_MLP)
            hidden_BTM = gated(activation, gate_BTM, hidden_BTM)
        else:
            hidden_BTM = ACTIVATIONS[activation](hidden_BTM)
        hidden_BTM = context.activation("hidden", hidden_BTM, *WITHIN_MLP)
        out_BTE = context.matmul("mlp_output", "btm,me->bte", hidden_BTM, self.down_ME[...])
        out_BTE = context.activation("mlp_output", out_BTE, *RESIDUAL, gradient=WHOLE)
        return out_BTE + self.down_bias_E[...] if has_bias else out_BTE


def _norm(config: DecoderBase) -> Norm:
    return Norm(config.norm, config.embed_dim, axis="embed", epsilon=config.norm_epsilon)


def residual_stddev(config: DecoderBase) -> float:
    """Returns the deviation of the matrices that write to the residual stream: they start smaller, so that its variance
    does not grow with depth (GPT-2)."""
    return config.initializer_stddev * (2 * config.num_layers) ** -0.5


def rope_of(config: DecoderBase, mask: Mask) -> Rope | None:
    """Returns the rotary positions of a layer with this mask; None where positions are learned."""
    if config.rope_theta is None:
        return None
    if not mask.sees_all_before and config.window_rope_theta is not None:
        return Rope(config.window_rope_theta)
    return Rope(config.rope_theta, config.rope_scaling)


def attention_scale(config: DecoderBase, head_dim: int, rope: Rope | None) -> float:
    """Returns the factor of a layer's scores. head_dim: the size of its queries and keys."""
    scale = config.attention_scale or head_dim**-0.5
    return scale if rope is None else scale * rope.factor_of_scores
