"""Mixtral: Llama with experts. In files, w1 is the gate of an expert, w3 its way up and w2 its way down."""

from typing import Any

from .config_json import Reader
from .contract import Family, Row
from .layouts import linear
from .llama import ATTENTION, ENDS, NORMS, UNUSED, read_llama, write_llama
from .qwen import ROUTED, WINDOWED

EXPERTS = (
    Row("model.layers.{layer}.block_sparse_moe.gate.weight", ("mlp/router_EX",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight", ("mlp/gate_XEM",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight", ("mlp/up_XEM",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight", ("mlp/down_XME",), linear()),
)


def read_mixtral(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for Mixtral."""
    reader.only("router_jitter_noise", 0, 0.0, None, otherwise=0.0, fix="set it to 0, and model.router_jitter instead")
    read = read_llama(reader, theta=1000000.0, epsilon=1e-5, kv_heads=8)
    return read | {key: values[0] for key, values in ROUTED.items()} | {
        "attention_windows": [reader.number("sliding_window", otherwise=None)],
        "num_experts": reader.number("num_local_experts", "num_experts", otherwise=8),
        "num_experts_per_token": reader.number("num_experts_per_tok", otherwise=2),
    }  # fmt: skip


def write_mixtral(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for Mixtral."""
    return write_llama(config) | {
        "sliding_window": config.attention_windows[0],
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
    }


FAMILIES = (
    Family(
        "MixtralForCausalLM", "mixtral", rows=lambda config: ENDS + NORMS + ATTENTION + EXPERTS, read=read_mixtral,
        write=write_mixtral, fits=WINDOWED | ROUTED, unused=UNUSED,
    ),
)  # fmt: skip
