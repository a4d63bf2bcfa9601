"""GPT-2: matrices lie as ours do, (inputs, outputs); queries, keys and values are one matrix, side by side."""

from typing import Any

from .config_json import Reader
from .contract import Family, Mistake, Row
from .layouts import columns, same
from .llama import ACTIVATIONS, LLAMA

ROWS = (
    Row("transformer.wte.weight", ("embed/table_VE",), same),
    Row("transformer.wpe.weight", ("embed/positions_PE",), same),
    Row("transformer.ln_f.weight", ("head/norm/scale_E",), same),
    Row("transformer.ln_f.bias", ("head/norm/bias_E",), same),
    Row("transformer.h.{layer}.ln_1.weight", ("attention_norm/scale_E",), same),
    Row("transformer.h.{layer}.ln_1.bias", ("attention_norm/bias_E",), same),
    Row("transformer.h.{layer}.ln_2.weight", ("mlp_norm/scale_E",), same),
    Row("transformer.h.{layer}.ln_2.bias", ("mlp_norm/bias_E",), same),
    Row("transformer.h.{layer}.attn.c_attn.weight",
        ("attention/query_EHD", "attention/key_EKD", "attention/value_EKD"), columns()),
    Row("transformer.h.{layer}.attn.c_attn.bias",
        ("attention/query_bias_HD", "attention/key_bias_KD", "attention/value_bias_KD"), columns(0)),
    Row("transformer.h.{layer}.attn.c_proj.weight", ("attention/out_HDE",), columns(2)),
    Row("transformer.h.{layer}.attn.c_proj.bias", ("attention/out_bias_E",), same),
    Row("transformer.h.{layer}.mlp.c_fc.weight", ("mlp/up_EM",), columns()),
    Row("transformer.h.{layer}.mlp.c_fc.bias", ("mlp/up_bias_M",), same),
    Row("transformer.h.{layer}.mlp.c_proj.weight", ("mlp/down_ME",), columns()),
    Row("transformer.h.{layer}.mlp.c_proj.bias", ("mlp/down_bias_E",), same),
)  # fmt: skip
GPT2 = LLAMA | {
    "mlp": ("plain",), "positions": ("learned",), "norm": ("layer",), "biases": ("all",), "embeddings": ("tied",),
    "rope_theta": (None,), "rope_scaling": (None,),
}  # fmt: skip
del GPT2["num_positions"]
PUBLISHED_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def read_gpt2(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for GPT-2. attn_pdrop is not read: attention weights are not dropped here."""
    width, heads = reader.number("n_embd"), reader.number("n_head")
    named = reader.text("activation_function", otherwise="gelu_new")
    if named not in ACTIVATIONS:
        reader.refuse("activation_function", f"'{named}' is not implemented", f"use one of {', '.join(ACTIVATIONS)}")
    rate = reader.number("resid_pdrop", otherwise=0.1)
    reader.only("embd_pdrop", rate, otherwise=0.1, fix="give both the same rate: there is one model.dropout_rate")
    reader.asked |= {"attn_pdrop", "n_ctx"}
    reader.only("scale_attn_weights", True, otherwise=True)
    reader.only("scale_attn_by_inverse_layer_idx", False, otherwise=False)
    reader.only("reorder_and_upcast_attn", False, True, otherwise=False)  # float32 scores, which ours always are
    reader.only("tie_word_embeddings", True, otherwise=True)
    return {key: values[0] for key, values in GPT2.items()} | {
        "attention_windows": [None],
        "vocab_size": reader.number("vocab_size"),
        "embed_dim": width,
        "num_layers": reader.count("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width // heads if heads else 1,
        "mlp_dim": reader.number("n_inner", otherwise=4 * width),
        "mlp_activation": ACTIVATIONS.get(named),
        "num_positions": reader.number("n_positions"),
        "norm_epsilon": reader.number("layer_norm_epsilon", otherwise=1e-5),
        "dropout_rate": rate,
        "initializer_stddev": reader.number("initializer_range", otherwise=0.02),
    }


def write_gpt2(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for GPT-2."""
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "n_positions": config.num_positions,
        "n_ctx": config.num_positions,
        "activation_function": PUBLISHED_ACTIVATIONS[config.mlp_activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": 0.0,
        "initializer_range": config.initializer_stddev,
        "tie_word_embeddings": True,
    }


def _check(config: Any) -> tuple[Mistake, ...]:
    if config.num_heads * config.head_dim == config.embed_dim and config.num_heads == config.num_kv_heads:
        return ()
    what = f"num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads}, head_dim={config.head_dim}"
    fix = f"GPT2LMHeadModel has num_kv_heads=num_heads, and num_heads x head_dim = {config.embed_dim}"
    return (Mistake("model.num_heads", f"{what} cannot be written", fix),)


FAMILIES = (
    Family(
        "GPT2LMHeadModel", "gpt2", rows=lambda config: ROWS, read=read_gpt2, write=write_gpt2, fits=GPT2, check=_check,
        prefix="transformer.", unused=(r"h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask
    ),
)  # fmt: skip
