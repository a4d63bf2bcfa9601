"""DeepSeek-V2 and V3: latent attention, the first layers dense, shared experts; in V3 a bias by which tokens choose
experts.

transformers turns pairs of neighbours by rotary positions, and we turn halves: the turned columns of q_b_proj and of
kv_a_proj_with_mqa are put in our order.
"""

from typing import Any

from .contract import SOME, Mistake, Row, linear, neighbours_turned, same
from .family import Entry, Family, Reader, Table, changed, flag, key, only, ours, unread
from .llama import ENDS, MLP, NORMS, decoder
from .qwen import DENSE_MLP, EXPERTS, ROUTED

SHARED = (
    Row("model.layers.{layer}.mlp.shared_experts.gate_proj.weight", ("mlp/shared/gate_EM",), linear()),
    Row("model.layers.{layer}.mlp.shared_experts.up_proj.weight", ("mlp/shared/up_EM",), linear()),
    Row("model.layers.{layer}.mlp.shared_experts.down_proj.weight", ("mlp/shared/down_ME",), linear()),
    Row("model.layers.{layer}.mlp.gate.e_score_correction_bias", ("mlp/router_bias_X",), same),
)


def latent_rows(config: Any) -> tuple[Row, ...]:
    """Returns the rows of latent attention."""
    turned = neighbours_turned(config.latent_attention.rope_head_dim)
    attention = "model.layers.{layer}.self_attn."
    return (
        Row(attention + "q_proj.weight", ("attention/query_EHD",), turned),
        Row(attention + "q_a_proj.weight", ("attention/query_down_EQ",), linear()),
        Row(attention + "q_a_layernorm.weight", ("attention/query_norm/scale_E",), same),
        Row(attention + "q_b_proj.weight", ("attention/query_up_QHD",), turned),
        Row(attention + "kv_a_proj_with_mqa.weight", ("attention/kv_down_EL",), turned),
        Row(attention + "kv_a_layernorm.weight", ("attention/kv_norm/scale_E",), same),
        Row(attention + "kv_b_proj.weight", ("attention/kv_up_LHD",), linear()),
        Row(attention + "o_proj.weight", ("attention/out_HVE",), linear(2)),
    )


def _read_head_dims(reader: Reader, read: Any) -> dict[str, Any]:
    turned = read["latent_attention"]["rope_head_dim"]
    reader.only("head_dim", None, turned, otherwise=None)
    reader.only("qk_head_dim", None, read["head_dim"] + turned, otherwise=None)
    return {}


def _both(*entries: Entry, num_dense: int, mlp_dim: int, num_experts: int, num_shared: int, scale: float) -> Table:
    """Returns what V2 and V3 have in common. The numbers are what transformers takes where the file names none."""
    latent = changed(
        changed(decoder(), *ROUTED),
        key(
            "num_key_value_heads",
            "num_kv_heads",
            missing=None,
            kind="optional",
            to_ours=lambda num, read: read["num_heads"],
        ),
        key("qk_nope_head_dim", "head_dim", missing=128),
        key("qk_rope_head_dim", "latent_attention.rope_head_dim", missing=64),
        key("q_lora_rank", "latent_attention.query_dim", missing=1536, kind="optional"),
        key("kv_lora_rank", "latent_attention.kv_dim", missing=512),
        key("v_head_dim", "latent_attention.value_head_dim", missing=128),
        Entry(
            ("head_dim", "qk_head_dim"),
            (),
            _read_head_dims,
            lambda config: {"head_dim": config.latent_attention.rope_head_dim},
        ),
        only("moe_layer_freq", 1, is_written=True),
        key("first_k_dense_replace", "num_dense_layers", missing=num_dense),
        DENSE_MLP,
        key("moe_intermediate_size", "mlp_dim", missing=mlp_dim),
        key("n_routed_experts", "num_experts", missing=num_experts, aliases=("num_local_experts", "num_experts")),
        key("n_shared_experts", "num_shared_experts", missing=num_shared),
        key("routed_scaling_factor", "router_scale", missing=scale),
    )
    return changed(latent, *entries)


# The bias stays as it was published, as in the last 500 B tokens of pretraining (arXiv:2412.19437, 4.2).
RATE = "router_bias_update_rate"
FROZEN_BIAS = Entry((), (RATE,), lambda reader, read: {RATE: 0.0}, fits={RATE: (SOME,)})
DEEPSEEK3 = _both(
    key("num_experts_per_tok", "num_experts_per_token", missing=8),
    only("rope_interleave", True, is_written=True),
    only("scoring_func", "sigmoid", is_written=True),
    *ours(router_scores="sigmoid"),
    only("topk_method", "noaux_tc", is_written=True),
    flag("norm_topk_prob", "router_weights", "normalized", "scores", missing=True),
    key("n_group", "num_expert_groups", missing=8),
    key("topk_group", "num_groups_per_token", missing=4),
    FROZEN_BIAS,
    # layers after the last one, which are neither read nor written
    unread("num_nextn_predict_layers", "num_mtp_layers", written=lambda config: {"num_nextn_predict_layers": 0}),
    num_dense=3, mlp_dim=2048, num_experts=256, num_shared=1, scale=2.5,
)  # fmt: skip


GROUPS = ("num_expert_groups", "num_groups_per_token", "group_scores")


def _read_groups(reader: Reader, _before: Any) -> dict[str, Any]:
    """Returns the groups of V2, which has some only by one of its methods: as good as their best expert."""
    groups = (reader.number("n_group", otherwise=1), reader.number("topk_group", otherwise=1), "best")
    method = reader.only("topk_method", "greedy", "group_limited_greedy", otherwise="greedy")
    return dict(zip(GROUPS, groups if method == "group_limited_greedy" else (1, 1, "best_two"), strict=True))


def _write_groups(config: Any) -> dict[str, Any]:
    return {
        "topk_method": "greedy" if config.num_expert_groups == 1 else "group_limited_greedy",
        "n_group": config.num_expert_groups,
        "topk_group": config.num_groups_per_token,
    }


DEEPSEEK2 = _both(
    key("num_experts_per_tok", "num_experts_per_token"),
    only("scoring_func", "softmax", is_written=True),
    only("norm_topk_prob", False, is_written=True),
    *ours(router_weights="scores"),
    Entry(("topk_method", "n_group", "topk_group"), GROUPS, _read_groups, _write_groups),
    num_dense=0, mlp_dim=1407, num_experts=64, num_shared=2, scale=1.0,
)  # fmt: skip


def _one_way_of_groups(config: Any) -> tuple[Mistake, ...]:
    """Returns what keeps groups from DeepSeek-V2, whose groups are as good as their best expert."""
    if config.group_scores == "best" or config.num_expert_groups == 1:
        return ()
    return (Mistake("model.group_scores", "is best_two", "DeepseekV2ForCausalLM has best"),)


FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM", "deepseek_v2", table=DEEPSEEK2,
        rows=lambda config: ENDS + NORMS + latent_rows(config) + MLP + EXPERTS + SHARED,
        check=_one_way_of_groups,
    ),
    Family(
        "DeepseekV3ForCausalLM", "deepseek_v3", table=DEEPSEEK3,
        rows=lambda config: ENDS + NORMS + latent_rows(config) + MLP + EXPERTS + SHARED,
        left_out=(r"layers\.{num_layers}\..*",),  # the layer that predicts one more token
    ),
)  # fmt: skip
