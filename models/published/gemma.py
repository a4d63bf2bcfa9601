"""Gemma 2: norms around attention and MLP, windows in every other layer, soft caps of scores and logits.

Its norms hold scale - 1, in the files as here (rms_zero_centered). The norm that Llama has before the MLP is named
pre_feedforward_layernorm, and post_attention_layernorm stands after attention.
"""

from typing import Any

from .config_json import Reader, layer_types, windows
from .contract import Family, Row
from .layouts import same
from .llama import ATTENTION, ENDS, LLAMA, MLP, UNUSED, read_llama, write_llama
from .qwen import one_window

NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("attention_norm/scale_E",), same),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("attention_out_norm/scale_E",), same),
    Row("model.layers.{layer}.pre_feedforward_layernorm.weight", ("mlp_norm/scale_E",), same),
    Row("model.layers.{layer}.post_feedforward_layernorm.weight", ("mlp_out_norm/scale_E",), same),
)
GEMMA2 = {key: values for key, values in LLAMA.items() if key not in
          ("attention_windows", "attention_scale", "attention_soft_cap", "logit_soft_cap")} | {
    "norm": ("rms_zero_centered",), "norm_placement": ("before_and_after",), "embedding_scale": ("sqrt_embed_dim",),
    "embeddings": ("tied",),
}  # fmt: skip


def read_gemma2(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for Gemma 2."""
    read = read_llama(reader, tied=True, activation=("hidden_activation", "gelu_pytorch_tanh"), kv_heads=4)
    reader.asked |= {"hidden_act", "sliding_window_size"}  # in published files; transformers does not read them
    head_dim = reader.number("head_dim", otherwise=256)
    num_layers = read["num_layers"] or 0
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = reader.optional("sliding_window", 4096)
    return read | {
        "head_dim": head_dim,
        "norm": "rms_zero_centered",
        "norm_placement": "before_and_after",
        "embedding_scale": "sqrt_embed_dim",
        "attention_scale": read_scale(reader, head_dim),
        "attention_windows": windows(reader, num_layers, reader.get("layer_types", otherwise=kinds), window),
        "attention_soft_cap": reader.optional("attn_logit_softcapping", 50.0),
        "logit_soft_cap": reader.optional("final_logit_softcapping", 30.0),
    }


def read_scale(reader: Reader, head_dim: int) -> float | None:
    """Returns the factor of scores; None where it is 1 / sqrt(head_dim), as in all sizes but 27B."""
    scalar = reader.number("query_pre_attn_scalar", otherwise=256)
    return None if scalar == head_dim or not scalar else scalar**-0.5


def write_gemma2(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for Gemma 2."""
    written = write_llama(config)
    scalar = config.attention_scale**-2 if config.attention_scale else config.head_dim
    return written | {
        "attention_bias": False,
        "hidden_activation": written["hidden_act"],
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "sliding_window": next((window for window in config.attention_windows if window), None),
        "layer_types": layer_types(config.attention_windows, config.num_layers),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
    }


FAMILIES = (
    Family(
        "Gemma2ForCausalLM", "gemma2", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=read_gemma2,
        write=write_gemma2, fits=GEMMA2, check=one_window, unused=UNUSED,
    ),
)  # fmt: skip
