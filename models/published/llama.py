"""Llama 2 and 3, and Mistral, which is Llama with a window. Their names are those of most families since."""

from collections.abc import Callable
from typing import Any

from .config_json import Reader
from .contract import SOME, Family, Row
from .layouts import flat, linear, same
from .rope import read_rope, write_rope

# What a decoder shares with Llama: the keys of our config, each with the values that config.json of Llama can say.
LLAMA: dict[str, tuple[Any, ...]] = {
    "family": ("decoder",), "mlp": ("gated",), "mlp_activation": ("silu", "gelu", "gelu_tanh", "relu"),
    "positions": ("rope",), "num_positions": (None,), "window_rope_theta": (None,), "norm": ("rms",),
    "norm_placement": ("before",), "qk_norm": ("none",), "attention_scale": (None,), "attention_windows": ((None,),),
    "attention_soft_cap": (None,), "attention_sinks": (False,), "logit_soft_cap": (None,), "biases": ("none",),
    "embedding_scale": ("one",),
}  # fmt: skip
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
               "relu": "relu"}  # fmt: skip
PUBLISHED_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu",
                         "clamped_swiglu": "silu"}  # fmt: skip

ENDS = (
    Row("model.embed_tokens.weight", ("embed/table_VE",), same),
    Row("model.norm.weight", ("head/norm/scale_E",), same),
    Row("lm_head.weight", ("head/kernel_EV",), linear()),  # tied: not in the file, nor among our parameters
)
NORMS = (
    Row("model.layers.{layer}.input_layernorm.weight", ("attention_norm/scale_E",), same),
    Row("model.layers.{layer}.post_attention_layernorm.weight", ("mlp_norm/scale_E",), same),
)
ATTENTION = (
    Row("model.layers.{layer}.self_attn.q_proj.weight", ("attention/query_EHD",), linear()),
    Row("model.layers.{layer}.self_attn.k_proj.weight", ("attention/key_EKD",), linear()),
    Row("model.layers.{layer}.self_attn.v_proj.weight", ("attention/value_EKD",), linear()),
    Row("model.layers.{layer}.self_attn.o_proj.weight", ("attention/out_HDE",), linear(2)),
    Row("model.layers.{layer}.self_attn.q_proj.bias", ("attention/query_bias_HD",), flat),
    Row("model.layers.{layer}.self_attn.k_proj.bias", ("attention/key_bias_KD",), flat),
    Row("model.layers.{layer}.self_attn.v_proj.bias", ("attention/value_bias_KD",), flat),
    Row("model.layers.{layer}.self_attn.q_norm.weight", ("attention/query_norm/scale_E",), same),
    Row("model.layers.{layer}.self_attn.k_norm.weight", ("attention/key_norm/scale_E",), same),
)
MLP = (
    Row("model.layers.{layer}.mlp.gate_proj.weight", ("mlp/gate_EM",), linear()),
    Row("model.layers.{layer}.mlp.up_proj.weight", ("mlp/up_EM",), linear()),
    Row("model.layers.{layer}.mlp.down_proj.weight", ("mlp/down_ME",), linear()),
)
UNUSED = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)  # a buffer of old releases, computed from config.json


def read_llama(
    reader: Reader, *, tied: bool = False, activation: tuple[str, str] = ("hidden_act", "silu"), theta: float = 10000.0,
    epsilon: float = 1e-6, kv_heads: int | None = None, rope: Callable[[Reader], dict[str, Any]] | None = None,
    biases: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Returns the keys of our config that all decoders share. What transformers takes where a file does not say: tied,
    theta, epsilon, kv_heads (None: as many as heads); activation: the key, and its value. rope: reads rotary positions;
    None: those that are the same in all layers. biases: whether attention has them."""
    heads, width = reader.number("num_attention_heads"), reader.number("hidden_size")
    named = reader.text(activation[0], otherwise=activation[1])
    if named not in ACTIVATIONS:
        reader.refuse(activation[0], f"'{named}' is not implemented", f"use a model with {', '.join(ACTIVATIONS)}")
    reader.only(
        "attention_bias", biases, otherwise=biases, fix="use a model without biases, or Qwen 2's, of q, k and v"
    )
    reader.only("mlp_bias", False, otherwise=False)
    return {key: values[0] for key, values in LLAMA.items()} | {
        "attention_windows": [None],
        "vocab_size": reader.number("vocab_size"),
        "embed_dim": width,
        "num_layers": reader.count("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": reader.optional("num_key_value_heads", kv_heads) or heads,
        "head_dim": reader.number("head_dim", otherwise=width // heads if heads else 1),
        "mlp_dim": reader.number("intermediate_size"),
        "mlp_activation": ACTIVATIONS.get(named),
        "norm_epsilon": reader.number("rms_norm_eps", otherwise=epsilon),
        "embeddings": "tied" if reader.flag("tie_word_embeddings", otherwise=tied) else "separate",
        "initializer_stddev": reader.number("initializer_range", otherwise=0.02),
        **(rope(reader) if rope else read_rope(reader, theta=theta)),
    }


def write_llama(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json that all decoders share."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": PUBLISHED_ACTIVATIONS[config.mlp_activation],
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.embeddings == "tied",
        "initializer_range": config.initializer_stddev,
        **write_rope(config),
    }


def _read_mistral(reader: Reader) -> dict[str, Any]:
    window = reader.optional("sliding_window", 4096)
    return read_llama(reader, kv_heads=8) | {"attention_windows": [window]}


def _write_mistral(config: Any) -> dict[str, Any]:
    return write_llama(config) | {"sliding_window": config.attention_windows[0]}


FAMILIES = (
    Family(
        "LlamaForCausalLM", "llama", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=read_llama,
        write=lambda config: write_llama(config) | {"attention_bias": False, "mlp_bias": False}, fits=LLAMA,
        unused=UNUSED,
    ),
    Family(
        "MistralForCausalLM", "mistral", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=_read_mistral,
        write=_write_mistral, fits=LLAMA | {"attention_windows": (SOME,)}, unused=UNUSED,
    ),
)  # fmt: skip
