"""Mixtral: Llama with experts. In files, w1 is the gate of an expert, w3 its way up and w2 its way down."""

from .contract import Row, linear
from .family import Family, changed, key, only
from .llama import ATTENTION, ENDS, NORMS, decoder, same_window, window_of_all
from .qwen import ROUTED

EXPERTS = (
    Row("model.layers.{layer}.block_sparse_moe.gate.weight", ("mlp/router_EX",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight", ("mlp/gate_XEM",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight", ("mlp/up_XEM",), linear()),
    Row("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight", ("mlp/down_XME",), linear()),
)
MIXTRAL = changed(
    decoder(theta=1000000.0, epsilon=1e-5, kv_heads=8, writes_bias=False),
    *ROUTED,
    window_of_all(missing=None),
    key("num_local_experts", "num_experts", missing=8, aliases=("num_experts",)),
    key("num_experts_per_tok", "num_experts_per_token", missing=2),
    only("router_jitter_noise", 0, 0.0, None, fix="set it to 0, and model.router_jitter instead"),
)

FAMILIES = (
    Family(
        "MixtralForCausalLM", "mixtral", rows=lambda config: ENDS + NORMS + ATTENTION + EXPERTS, table=MIXTRAL,
        check=same_window,
    ),
)  # fmt: skip
