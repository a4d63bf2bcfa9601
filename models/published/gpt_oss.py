"""gpt-oss: sinks of attention, windows in every other layer, and experts with biases, whose gate and way up take turns
in one tensor. As published, experts are quantised (MXFP4); files in bfloat16 are read."""

from typing import Any

from .config_json import Reader, layer_types, windows
from .contract import Family, Row
from .layouts import flat, interleaved, linear, same
from .llama import ATTENTION, ENDS, NORMS, UNUSED, read_llama, write_llama
from .qwen import ROUTED, WINDOWED, one_window
from .rope import read_rope

EXPERTS = (
    Row("model.layers.{layer}.self_attn.o_proj.bias", ("attention/out_bias_E",), flat),
    Row("model.layers.{layer}.self_attn.sinks", ("attention/sinks_H",), same),
    Row("model.layers.{layer}.mlp.router.weight", ("mlp/router_EX",), linear()),
    Row("model.layers.{layer}.mlp.router.bias", ("mlp/router_logits_bias_X",), same),
    Row("model.layers.{layer}.mlp.experts.gate_up_proj", ("mlp/gate_XEM", "mlp/up_XEM"), interleaved),
    Row("model.layers.{layer}.mlp.experts.gate_up_proj_bias", ("mlp/gate_bias_XM", "mlp/up_bias_XM"), interleaved),
    Row("model.layers.{layer}.mlp.experts.down_proj", ("mlp/down_XME",), same),
    Row("model.layers.{layer}.mlp.experts.down_proj_bias", ("mlp/down_bias_XE",), same),
)
GPT_OSS = WINDOWED | ROUTED | {
    "biases": ("all",), "attention_sinks": (True,), "mlp_activation": ("clamped_swiglu",),
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def _read_rope(reader: Reader) -> dict[str, Any]:
    """Returns rotary positions. transformers takes YaRN where the file names nothing."""
    if not (reader.values.get("rope_parameters") or reader.values.get("rope_scaling")):
        reader.values = {**reader.values, "rope_parameters": YARN}
    return read_rope(reader, theta=150000.0)


def read_gpt_oss(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for gpt-oss."""
    read = read_llama(reader, epsilon=1e-5, kv_heads=8, rope=_read_rope, biases=True)
    reader.only("hidden_act", "silu", otherwise="silu")
    reader.only("swiglu_alpha", 1.702, otherwise=1.702)
    reader.only("swiglu_limit", 7.0, otherwise=7.0)
    # In published files; transformers does not read them.
    reader.asked |= {"experts_per_token", "initial_context_length", "head_dim"}
    num_layers = read["num_layers"]
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = reader.optional("sliding_window", 128)
    return read | {key: values[0] for key, values in ROUTED.items()} | {
        "head_dim": reader.number("head_dim", otherwise=64),
        "mlp_activation": "clamped_swiglu",
        "biases": "all",
        "attention_sinks": True,
        "attention_windows": windows(reader, num_layers, reader.items("layer_types", otherwise=kinds), window),
        "num_experts": reader.number("num_local_experts", "num_experts", otherwise=128),
        "num_experts_per_token": reader.number("num_experts_per_tok", otherwise=4),
    }  # fmt: skip


def write_gpt_oss(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for gpt-oss."""
    return write_llama(config) | {
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": next((window for window in config.attention_windows if window), None),
        "layer_types": layer_types(config.attention_windows, config.num_layers),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
    }


FAMILIES = (
    Family(
        "GptOssForCausalLM", "gpt_oss", rows=lambda config: ENDS + NORMS + ATTENTION + EXPERTS, read=read_gpt_oss,
        write=write_gpt_oss, fits=GPT_OSS, check=one_window, unused=UNUSED,
    ),
)  # fmt: skip
