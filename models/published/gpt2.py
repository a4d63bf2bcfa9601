"""GPT-2: matrices lie as ours do, (inputs, outputs); queries, keys and values are one matrix, side by side."""

from typing import Any

from .contract import Mistake, Row, columns, same
from .family import Entry, Family, Reader, changed, choice, key, only, ours, unread
from .llama import ACTIVATIONS, PLAIN, width_of_head

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


def _read_rates(reader: Reader, _before: Any) -> dict[str, Any]:
    rate = reader.number("resid_pdrop", otherwise=0.1)
    reader.only("embd_pdrop", rate, otherwise=0.1, fix="give both the same rate: there is one model.dropout_rate")
    return {"dropout_rate": rate}


def _read_heads(_reader: Reader, read: Any) -> dict[str, Any]:
    return {"num_kv_heads": read["num_heads"], "head_dim": width_of_head(read)}


GPT2 = changed(
    PLAIN,
    *ours(mlp="plain", positions="learned", norm="layer", biases="all", embeddings="tied", rope_theta=None,
          rope_scaling=None, window_rope_theta=None),
    key("vocab_size", "vocab_size"),
    key("n_embd", "embed_dim", aliases=("hidden_size",)),
    key("n_layer", "num_layers", kind="count", aliases=("num_hidden_layers",)),
    key("n_head", "num_heads", aliases=("num_attention_heads",)),
    Entry((), ("num_kv_heads", "head_dim"), _read_heads),
    key("n_inner", "mlp_dim", missing=lambda read: 4 * read["embed_dim"]),
    key("n_positions", "num_positions", missing=1024, aliases=("max_position_embeddings", "n_ctx")),
    choice("activation_function", "mlp_activation", {"gelu_new": "gelu_tanh", **ACTIVATIONS}, missing="gelu_new"),
    key("layer_norm_epsilon", "norm_epsilon", missing=1e-5),
    Entry(
        ("resid_pdrop", "embd_pdrop"), ("dropout_rate",), _read_rates,
        lambda config: dict.fromkeys(("resid_pdrop", "embd_pdrop"), config.dropout_rate),
    ),
    # Attention weights are not dropped here.
    unread("attn_pdrop", written=lambda config: {"attn_pdrop": 0.0, "n_ctx": config.num_positions}),
    key("initializer_range", "initializer_stddev", missing=0.02),
    only("tie_word_embeddings", True, is_written=True),
    only("scale_attn_weights", True),
    only("scale_attn_by_inverse_layer_idx", False),
    only("reorder_and_upcast_attn", False, True),  # float32 scores, which ours always are
)  # fmt: skip


def _check(config: Any) -> tuple[Mistake, ...]:
    if config.num_heads * config.head_dim == config.embed_dim and config.num_heads == config.num_kv_heads:
        return ()
    what = f"num_heads={config.num_heads}, num_kv_heads={config.num_kv_heads}, head_dim={config.head_dim}"
    fix = f"GPT2LMHeadModel has num_kv_heads=num_heads, and num_heads x head_dim = {config.embed_dim}"
    return (Mistake("model.num_heads", f"{what} cannot be written", fix),)


FAMILIES = (
    Family(
        "GPT2LMHeadModel", "gpt2", rows=lambda config: ROWS, table=GPT2, check=_check, prefix="transformer.",
        harmless=(r"h\.\d+\.attn\.bias",),  # the causal mask
    ),
)  # fmt: skip
