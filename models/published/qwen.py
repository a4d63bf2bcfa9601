"""Qwen 2 and 2.5, with biases of queries, keys and values; Qwen 3, with norms of queries and keys, and its experts."""

from typing import Any

from .contract import Row, linear
from .family import Entry, Family, Reader, Table, changed, flag, key, layer_types, only, ours, unread, windows
from .llama import ATTENTION, ENDS, MLP, NORMS, decoder, one_window, same_window

EXPERTS = (
    Row("model.layers.{layer}.mlp.gate.weight", ("mlp/router_EX",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", ("mlp/gate_XEM",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", ("mlp/up_XEM",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", ("mlp/down_XME",), linear()),
)
# What all models with experts share with Mixtral, unless their family says otherwise.
ROUTED: Table = ours(
    family="moe", num_shared_experts=0, num_dense_layers=0, dense_mlp_dim=None, router_scores="softmax",
    router_weights="normalized", router_scale=1.0, num_expert_groups=1, num_groups_per_token=1, group_scores="best_two",
    latent_attention=None, router_bias_update_rate=None,
)  # fmt: skip


def _read_windows(reader: Reader, read: Any) -> dict[str, Any]:
    num_layers = read["num_layers"]
    window = reader.optional("sliding_window", 4096)
    is_sliding = reader.flag("use_sliding_window", otherwise=False)
    first = reader.count("max_window_layers", otherwise=28)
    before = first if is_sliding else num_layers
    kinds = ["full_attention" if i < before else "sliding_attention" for i in range(num_layers)]
    kinds = reader.items("layer_types", otherwise=kinds)
    return {"attention_windows": windows(reader, num_layers, kinds, window if is_sliding else None)}


def _write_windows(config: Any) -> dict[str, Any]:
    """Returns the keys of windows. Older releases of transformers do not read layer_types: they take the layers from
    max_window_layers on as the ones that have a window."""
    kinds = layer_types(config.attention_windows, config.num_layers)
    window = next((window for window in config.attention_windows if window), None)
    first = kinds.index("sliding_attention") if window else config.num_layers
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": kinds,
    }


WINDOW = ("sliding_window", "use_sliding_window")
WINDOWS = Entry((*WINDOW, "max_window_layers", "layer_types"), ("attention_windows",), _read_windows, _write_windows)


def _read_window(reader: Reader, _before: Any) -> dict[str, Any]:
    window = reader.optional("sliding_window", 4096)
    return {"attention_windows": [window if reader.flag("use_sliding_window", otherwise=False) else None]}


def _write_window(config: Any) -> dict[str, Any]:
    window = config.attention_windows[0]
    return {"use_sliding_window": window is not None, "sliding_window": window}


def _read_dense_layers(reader: Reader, _before: Any) -> dict[str, Any]:
    dense = reader.items("mlp_only_layers", otherwise=[])
    if dense != list(range(len(dense))):
        what = f"{dense} are not the first layers"
        reader.refuse("mlp_only_layers", what, "use a model whose dense layers are its first ones")
    return {"num_dense_layers": len(dense)}


DENSE_MLP = key(
    "intermediate_size",
    "dense_mlp_dim",
    to_ours=lambda width, read: width if read["num_dense_layers"] else None,
    to_published=lambda config: config.dense_mlp_dim or config.mlp_dim,
)
QWEN3_MOE = changed(
    changed(decoder(kv_heads=4), *ROUTED, *ours(qk_norm="rms")),
    Entry(WINDOW, ("attention_windows",), _read_window, _write_window),
    unread("max_window_layers"),
    only("decoder_sparse_step", 1, is_written=True),
    # transformers 5 writes num_local_experts
    key("num_experts", "num_experts", missing=128, aliases=("num_local_experts",), also=("num_local_experts",)),
    key("num_experts_per_tok", "num_experts_per_token", missing=8),
    Entry(
        ("mlp_only_layers",),
        ("num_dense_layers",),
        _read_dense_layers,
        lambda config: {"mlp_only_layers": list(range(config.num_dense_layers))},
    ),
    DENSE_MLP,
    key("moe_intermediate_size", "mlp_dim", missing=768),
    flag("norm_topk_prob", "router_weights", "normalized", "scores", missing=False),
)

FAMILIES = (
    Family(
        "Qwen2ForCausalLM", "qwen2", rows=lambda config: ENDS + NORMS + ATTENTION + MLP,
        table=changed(decoder(kv_heads=32, writes_bias=False), *ours(biases="qkv"), WINDOWS),
        check=one_window,
    ),
    Family(
        "Qwen3ForCausalLM", "qwen3", rows=lambda config: ENDS + NORMS + ATTENTION + MLP,
        table=changed(decoder(kv_heads=32, head_dim=128), *ours(qk_norm="rms"), WINDOWS),
        check=one_window,
    ),
    Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", rows=lambda config: ENDS + NORMS + ATTENTION + MLP + EXPERTS,
        table=QWEN3_MOE, check=same_window,
    ),
)  # fmt: skip
