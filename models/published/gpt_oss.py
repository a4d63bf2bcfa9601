"""gpt-oss: sinks of attention, windows in every other layer, and experts with biases, whose gate and way up take turns
in one tensor. As published, experts are quantised (MXFP4); files in bfloat16 are read."""

from dataclasses import replace
from typing import Any

from .contract import Row, flat, interleaved, linear, same
from .family import Family, Reader, changed, key, only, ours, unread
from .llama import ATTENTION, ENDS, NORMS, decoder, one_window, windows_by_layer
from .qwen import ROUTED
from .rope import read_rope, rope

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
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
THETA = 150000.0


def _read_rope(reader: Reader, before: Any) -> dict[str, Any]:
    """Returns rotary positions. transformers takes YaRN where the file names nothing."""
    if not (reader.values.get("rope_parameters") or reader.values.get("rope_scaling")):
        reader.values = {**reader.values, "rope_parameters": YARN}
    return read_rope(reader, before, theta=THETA)


GPT_OSS = changed(
    decoder(epsilon=1e-5, kv_heads=8, head_dim=64),
    *ROUTED, *ours(mlp_activation="clamped_swiglu", biases="all", attention_sinks=True),
    only("attention_bias", True, is_written=True),
    only("hidden_act", "silu", is_written=True),
    only("swiglu_alpha", 1.702, is_written=True),
    only("swiglu_limit", 7.0, is_written=True),
    unread("experts_per_token", "initial_context_length"),  # in published files
    windows_by_layer(
        missing=128,
        kinds=lambda reader, num: ["full_attention" if i % 2 else "sliding_attention" for i in range(num)],
    ),
    key("num_local_experts", "num_experts", missing=128, aliases=("num_experts",)),
    key("num_experts_per_tok", "num_experts_per_token", missing=4),
    replace(rope(theta=THETA), read=_read_rope),
)  # fmt: skip

FAMILIES = (
    Family(
        "GptOssForCausalLM", "gpt_oss", rows=lambda config: ENDS + NORMS + ATTENTION + EXPERTS, table=GPT_OSS,
        check=one_window,
    ),
)  # fmt: skip
