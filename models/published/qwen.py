"""Qwen 2 and 2.5, with biases of queries, keys and values; Qwen 3, with norms of queries and keys, and its experts."""

from typing import Any

from .config_json import Reader, layer_types, windows
from .contract import SOME, Family, Mistake, Row
from .layouts import linear
from .llama import ATTENTION, ENDS, LLAMA, MLP, NORMS, UNUSED, read_llama, write_llama

EXPERTS = (
    Row("model.layers.{layer}.mlp.gate.weight", ("mlp/router_EX",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", ("mlp/gate_XEM",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", ("mlp/up_XEM",), linear()),
    Row("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", ("mlp/down_XME",), linear()),
)
# What all models with experts share with Mixtral: the keys of our config with the only values that are written.
ROUTED: dict[str, tuple[Any, ...]] = {
    "family": ("moe",), "num_shared_experts": (0,), "num_dense_layers": (0,), "dense_mlp_dim": (None,),
    "router_scores": ("softmax",), "router_weights": ("normalized",), "router_scale": (1.0,), "num_expert_groups": (1,),
    "num_groups_per_token": (1,), "group_scores": ("best_two",), "latent_attention": (None,),
    "router_bias_update_rate": (None,),
}  # fmt: skip


def _read_dense(reader: Reader) -> dict[str, Any]:
    """Returns the keys of a Qwen with one MLP in a layer."""
    read = read_llama(reader, kv_heads=32)
    num_layers = read["num_layers"]
    window = reader.optional("sliding_window", 4096)
    is_sliding = reader.flag("use_sliding_window", otherwise=False)
    first = reader.count("max_window_layers", otherwise=28)
    before = first if is_sliding else num_layers
    kinds = ["full_attention" if i < before else "sliding_attention" for i in range(num_layers)]
    kinds = reader.items("layer_types", otherwise=kinds)
    return read | {"attention_windows": windows(reader, num_layers, kinds, window if is_sliding else None)}


def _read_qwen2(reader: Reader) -> dict[str, Any]:
    return _read_dense(reader) | {"biases": "qkv"}


def _read_qwen3(reader: Reader) -> dict[str, Any]:
    return _read_dense(reader) | {"qk_norm": "rms", "head_dim": reader.number("head_dim", otherwise=128)}


def _read_qwen3_moe(reader: Reader) -> dict[str, Any]:
    read = read_llama(reader, kv_heads=4)
    window = reader.optional("sliding_window", 4096)
    reader.only("decoder_sparse_step", 1, otherwise=1)
    dense = reader.items("mlp_only_layers", otherwise=[])
    if dense != list(range(len(dense))):
        what = f"{dense} are not the first layers"
        reader.refuse("mlp_only_layers", what, "use a model whose dense layers are its first ones")
    is_sliding = reader.flag("use_sliding_window", otherwise=False)
    reader.asked.add("max_window_layers")  # transformers does not read it here
    return read | {key: values[0] for key, values in ROUTED.items()} | {
        "qk_norm": "rms",
        "attention_windows": [window if is_sliding else None],
        "num_experts": reader.number("num_experts", "num_local_experts", otherwise=128),
        "num_experts_per_token": reader.number("num_experts_per_tok", otherwise=8),
        "mlp_dim": reader.number("moe_intermediate_size", otherwise=768),
        "num_dense_layers": len(dense),
        "dense_mlp_dim": read["mlp_dim"] if dense else None,
        "router_weights": "normalized" if reader.flag("norm_topk_prob", otherwise=False) else "scores",
    }  # fmt: skip


def _write_dense(config: Any) -> dict[str, Any]:
    """Returns the keys of a dense Qwen. Older releases of transformers do not read layer_types: they take the layers
    from max_window_layers on as the ones that have a window."""
    kinds = layer_types(config.attention_windows, config.num_layers)
    window = next((window for window in config.attention_windows if window), None)
    first = kinds.index("sliding_attention") if window else config.num_layers
    return write_llama(config) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": kinds,
    }


def _write_qwen3_moe(config: Any) -> dict[str, Any]:
    window = config.attention_windows[0]
    return write_llama(config) | {
        "attention_bias": False,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,  # the name that transformers 5 writes
        "num_experts_per_tok": config.num_experts_per_token,
        "moe_intermediate_size": config.mlp_dim,
        "intermediate_size": config.dense_mlp_dim or config.mlp_dim,
        "norm_topk_prob": config.router_weights == "normalized",
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
    }


def one_window(config: Any) -> tuple[Mistake, ...]:
    """Returns what keeps windows that differ between layers from a config.json that has one `sliding_window`."""
    if len({window for window in config.attention_windows if window}) < 2:
        return ()
    windows = ", ".join(map(str, config.attention_windows))
    return (Mistake("model.attention_windows", f"[{windows}] are several windows", "use one window, and null"),)


WINDOWED = {key: values for key, values in LLAMA.items() if key != "attention_windows"}

FAMILIES = (
    Family(
        "Qwen2ForCausalLM", "qwen2", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=_read_qwen2,
        write=_write_dense, fits=WINDOWED | {"biases": ("qkv",)}, check=one_window, unused=UNUSED,
    ),
    Family(
        "Qwen3ForCausalLM", "qwen3", rows=lambda config: ENDS + NORMS + ATTENTION + MLP, read=_read_qwen3,
        write=lambda config: _write_dense(config) | {"attention_bias": False}, fits=WINDOWED | {"qk_norm": ("rms",)},
        check=one_window, unused=UNUSED,
    ),
    Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", rows=lambda config: ENDS + NORMS + ATTENTION + MLP + EXPERTS,
        read=_read_qwen3_moe, write=_write_qwen3_moe, unused=UNUSED,
        fits=WINDOWED | ROUTED | {
            "qk_norm": ("rms",), "router_weights": ("normalized", "scores"), "num_dense_layers": (SOME,),
            "dense_mlp_dim": (None, SOME),
        },
    ),
)  # fmt: skip
