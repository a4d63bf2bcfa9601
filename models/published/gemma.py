"""Gemma 1, 2 and 3.

1 is a Llama with scaled embeddings. 2 has norms around attention and MLP, windows in every other layer, and soft caps
of scores and logits. 3 has norms of queries and keys instead of caps, windows in five of six layers, and a rotary base
of its own there.

Their norms hold scale - 1, in the files as here (rms_zero_centered). In 2 and 3, the norm that Llama has before the MLP
is named pre_feedforward_layernorm, and post_attention_layernorm stands after attention.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .contract import Row, same
from .family import Entry, Family, Reader, Table, changed, choice, fits_of, flag, key, ours, read_table, unread
from .llama import ACTIVATIONS, ATTENTION, ENDS, MLP, decoder, one_window, windows_by_layer
from .llama import NORMS as LLAMA_NORMS
from .rope import rope_by_layer

NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("attention_norm/scale_E",), same),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("attention_out_norm/scale_E",), same),
    Row("model.layers.{layer}.pre_feedforward_layernorm.weight", ("mlp_norm/scale_E",), same),
    Row("model.layers.{layer}.post_feedforward_layernorm.weight", ("mlp_out_norm/scale_E",), same),
)
TANH = "gelu_pytorch_tanh"


Kinds = Callable[[Reader, int], list[str]]
EMBEDDINGS = flag("tie_word_embeddings", "embeddings", "tied", "separate", missing=True)


def _gemma(*entries: Entry, kv_heads: int) -> Table:
    """Returns what all three have: tied tables, scaled embeddings, and norms that hold scale - 1."""
    tied = replace(EMBEDDINGS, fits={"embeddings": ("tied",)})
    own = ours(norm="rms_zero_centered", embedding_scale="sqrt_embed_dim")
    return changed(decoder(kv_heads=kv_heads, head_dim=256), tied, *own, *entries)


def _of_both(kinds: Kinds, caps: tuple[float | None, float | None], pattern: tuple[str, ...] = ()) -> Table:
    """Returns what 2 and 3 have beside Gemma 1. kinds: the layers with a window, which may be read from the keys
    `pattern`. caps: of scores and logits where the file names none."""
    return _gemma(
        *ours(norm_placement="before_and_after"),
        choice("hidden_activation", "mlp_activation", ACTIVATIONS, missing=TANH, also=("hidden_act",)),
        unread("sliding_window_size"),
        windows_by_layer(missing=4096, kinds=kinds, names=pattern),
        Entry(("query_pre_attn_scalar",), ("attention_scale",), _read_scale, _write_scale),
        key("attn_logit_softcapping", "attention_soft_cap", missing=caps[0], kind="optional"),
        key("final_logit_softcapping", "logit_soft_cap", missing=caps[1], kind="optional"),
        kv_heads=4,
    )


def _kinds(period: int, num_layers: int) -> list[str]:
    """Returns layer_types in which the last layer of each period has no window."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]


def _read_scale(reader: Reader, read: Any) -> dict[str, Any]:
    """Returns the factor of scores; None where it is 1 / sqrt(head_dim), as in all sizes but 27B."""
    scalar = reader.number("query_pre_attn_scalar", otherwise=256)
    return {"attention_scale": None if scalar == read["head_dim"] or not scalar else scalar**-0.5}


def _write_scale(config: Any) -> dict[str, Any]:
    scalar = config.attention_scale**-2 if config.attention_scale else config.head_dim
    return {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar}


PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
GEMMA1 = _gemma(
    # Its first files say gelu, and mean the approximation by tanh.
    choice("hidden_act", "mlp_activation", {TANH: "gelu_tanh", **ACTIVATIONS, "gelu": "gelu_tanh"}, missing=TANH),
    unread("hidden_activation"),
    kv_heads=16,
)
GEMMA2 = _of_both(lambda reader, num_layers: _kinds(2, num_layers), caps=(50.0, 30.0))
GEMMA3 = changed(
    _of_both(lambda reader, num: _kinds(reader.count(*PATTERN, otherwise=6), num), caps=(None, None), pattern=PATTERN),
    *ours(qk_norm="rms_zero_centered"),
    rope_by_layer(theta=1000000.0, window_theta=10000.0),
)
_GEMMA3_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


def _read_text_model(reader: Reader, _before: Any) -> dict[str, Any]:
    """Returns the keys of the text model of a Gemma 3 that also reads images. Published files leave out what is the
    default of transformers."""
    own = Reader({**_GEMMA3_SIZES, **reader.node("text_config", otherwise={})})
    found = read_table(GEMMA3, own)
    own.finish()
    return found


OF_IMAGES: Table = (
    Entry(("text_config",), (), _read_text_model, fits=fits_of(GEMMA3) | {"family": ()}),
    unread("vision_config", "mm_tokens_per_image", "initializer_range"),
    unread("boi_token_index", "eoi_token_index", "image_token_index"),
)

FAMILIES = (
    Family(
        "GemmaForCausalLM", "gemma", rows=lambda config: ENDS + LLAMA_NORMS + ATTENTION + MLP, table=GEMMA1,
    ),
    Family(
        "Gemma2ForCausalLM", "gemma2", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, table=GEMMA2,
        check=one_window,
    ),
    Family(
        "Gemma3ForCausalLM", "gemma3_text", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, table=GEMMA3,
        check=one_window, left_out=(r"(vision_tower|multi_modal_projector)\..*",), before="language_model.",
    ),
    Family(  # of images and text: only its text model is read
        "Gemma3ForConditionalGeneration", "gemma3", rows=lambda config: (), table=OF_IMAGES,
    ),
)  # fmt: skip
