"""DeepSeek-V2 and V3: latent attention, the first layers dense, shared experts; in V3 a bias by which tokens choose
experts.

transformers turns pairs of neighbours by rotary positions, and we turn halves: the turned columns of q_b_proj and of
kv_a_proj_with_mqa are put in our order.
"""

from typing import Any

from .config_json import Reader
from .contract import SOME, Family, Mistake, Row
from .layouts import linear, neighbours_turned, same
from .llama import ENDS, MLP, NORMS, UNUSED, read_llama, write_llama
from .qwen import EXPERTS, ROUTED, WINDOWED

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


def _read_both(reader: Reader, *, num_dense: int, mlp_dim: int, num_experts: int, num_shared: int) -> dict[str, Any]:
    """Returns what V2 and V3 have in common. The numbers are what transformers takes where the file names none."""
    read = read_llama(reader)
    num_dense = reader.number("first_k_dense_replace", otherwise=num_dense)
    nope, rope = (reader.number(f"qk_{part}_head_dim", otherwise=n) for part, n in (("nope", 128), ("rope", 64)))
    reader.only("head_dim", None, rope, otherwise=None)
    reader.only("qk_head_dim", None, nope + rope, otherwise=None)
    reader.only("moe_layer_freq", 1, otherwise=1)
    return read | {key: values[0] for key, values in ROUTED.items()} | {
        "num_kv_heads": read["num_heads"],
        "head_dim": nope,
        "mlp_dim": reader.number("moe_intermediate_size", otherwise=mlp_dim),
        "num_experts": reader.number("n_routed_experts", "num_local_experts", "num_experts", otherwise=num_experts),
        "num_shared_experts": reader.number("n_shared_experts", otherwise=num_shared),
        "num_dense_layers": num_dense,
        "dense_mlp_dim": read["mlp_dim"] if num_dense else None,
        "latent_attention": {
            "query_dim": reader.optional("q_lora_rank", 1536),
            "kv_dim": reader.number("kv_lora_rank", otherwise=512),
            "rope_head_dim": rope,
            "value_head_dim": reader.number("v_head_dim", otherwise=128),
        },
    }  # fmt: skip


def read_deepseek(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for DeepSeek-V3."""
    read = _read_both(reader, num_dense=3, mlp_dim=2048, num_experts=256, num_shared=1)
    reader.only("rope_interleave", True, otherwise=True)
    reader.only("scoring_func", "sigmoid", otherwise="sigmoid")
    reader.only("topk_method", "noaux_tc", otherwise="noaux_tc")
    reader.asked |= {"num_nextn_predict_layers", "num_mtp_layers"}  # layers after the last one, which are not read
    return read | {
        "num_experts_per_token": reader.number("num_experts_per_tok", otherwise=8),
        "router_scores": "sigmoid",
        "router_weights": "normalized" if reader.flag("norm_topk_prob", otherwise=True) else "scores",
        "router_scale": reader.number("routed_scaling_factor", otherwise=2.5),
        "num_expert_groups": reader.number("n_group", otherwise=8),
        "num_groups_per_token": reader.number("topk_group", otherwise=4),
        # The bias stays as it was published, as in the last 500 B tokens of pretraining (arXiv:2412.19437, 4.2).
        "router_bias_update_rate": 0.0,
    }


def read_deepseek2(reader: Reader) -> dict[str, Any]:
    """Returns the keys of our config for DeepSeek-V2."""
    read = _read_both(reader, num_dense=0, mlp_dim=1407, num_experts=64, num_shared=2)
    reader.only("scoring_func", "softmax", otherwise="softmax")
    reader.only("norm_topk_prob", False, otherwise=False)
    method = reader.only("topk_method", "greedy", "group_limited_greedy", otherwise="greedy")
    groups = {"num_expert_groups": reader.number("n_group", otherwise=1),
              "num_groups_per_token": reader.number("topk_group", otherwise=1), "group_scores": "best"}  # fmt: skip
    return read | {
        "num_experts_per_token": reader.number("num_experts_per_tok"),
        "router_weights": "scores",
        "router_scale": reader.number("routed_scaling_factor", otherwise=1.0),
        **(groups if method == "group_limited_greedy" else {}),
    }


def _write_both(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json that V2 and V3 have in common."""
    latent = config.latent_attention
    return write_llama(config) | {
        "attention_bias": False,
        "head_dim": latent.rope_head_dim,
        "intermediate_size": config.dense_mlp_dim or config.mlp_dim,
        "moe_intermediate_size": config.mlp_dim,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": 1,
        "norm_topk_prob": config.router_weights == "normalized",
        "routed_scaling_factor": config.router_scale,
        "n_group": config.num_expert_groups,
        "topk_group": config.num_groups_per_token,
        "q_lora_rank": latent.query_dim,
        "kv_lora_rank": latent.kv_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "qk_nope_head_dim": config.head_dim,
        "v_head_dim": latent.value_head_dim,
    }


def write_deepseek(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for DeepSeek-V3, without layers that predict more tokens."""
    own = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True}
    return _write_both(config) | own | {"num_nextn_predict_layers": 0}


def write_deepseek2(config: Any) -> dict[str, Any]:
    """Returns the keys of config.json for DeepSeek-V2."""
    method = "greedy" if config.num_expert_groups == 1 else "group_limited_greedy"
    return _write_both(config) | {"scoring_func": "softmax", "topk_method": method}


def _one_way_of_groups(config: Any) -> tuple[Mistake, ...]:
    """Returns what keeps groups from DeepSeek-V2, whose groups are as good as their best expert."""
    if config.group_scores == "best" or config.num_expert_groups == 1:
        return ()
    return (Mistake("model.group_scores", "is best_two", "DeepseekV2ForCausalLM has best"),)


FITS = WINDOWED | ROUTED | {
    "attention_windows": ((None,),), "latent_attention": (SOME,), "num_shared_experts": (SOME,),
    "num_dense_layers": (SOME,), "dense_mlp_dim": (None, SOME), "router_scores": ("sigmoid",),
    "router_weights": ("normalized", "scores"), "router_scale": (SOME,), "num_expert_groups": (SOME,),
    "num_groups_per_token": (SOME,), "router_bias_update_rate": (SOME,),
}  # fmt: skip
FITS2 = FITS | {
    "router_scores": ("softmax",), "router_weights": ("scores",), "router_bias_update_rate": (None,),
    "group_scores": ("best", "best_two"),
}  # fmt: skip

FAMILIES = (
    Family(
        "DeepseekV2ForCausalLM", "deepseek_v2", read=read_deepseek2, write=write_deepseek2, fits=FITS2,
        rows=lambda config: ENDS + NORMS + latent_rows(config) + MLP + EXPERTS + SHARED, unused=UNUSED,
        check=_one_way_of_groups,
    ),
    Family(
        "DeepseekV3ForCausalLM", "deepseek_v3", read=read_deepseek, write=write_deepseek, fits=FITS,
        rows=lambda config: ENDS + NORMS + latent_rows(config) + MLP + EXPERTS + SHARED,
        unused=(*UNUSED, r"layers\.{num_layers}\..*"),  # the layer that predicts one more token
    ),
)  # fmt: skip
