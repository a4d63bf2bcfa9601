"""Our decoder against the implementations that others use: transformers on torch, in float32, with the same weights."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.models.decoder import DecoderBase
from meshloom.models.moe import MoeConfig
from support.reference import forward

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

# Small, but with every part of the shape: several heads a kv_head, both kinds of windows, more tokens than a window.
SIZES = (
    "model.vocab_size=264", "model.embed_dim=32", "model.num_layers=4", "model.num_heads=8", "model.head_dim=8",
    "model.mlp_dim=48", "sequence_length=24", "model.dropout_rate=0.0",
)  # fmt: skip
SHAPES = {
    "llama2_7b": ("model.num_kv_heads=8",),
    "llama3_8b": ("model.num_kv_heads=2",),
    "llama3_405b": ("model.num_kv_heads=2", "model.rope_scaling.original_length=64", "model.rope_theta=10000.0"),
    "gpt2_124m": ("model.num_kv_heads=8", "model.head_dim=4", "model.num_positions=32"),
    "qwen3_0_6b": ("model.num_kv_heads=2",),
    "qwen3_8b": ("model.num_kv_heads=2",),
    "gemma2_9b": ("model.num_kv_heads=2", "model.attention_windows=[6,null]"),
    "mixtral_8x7b": ("model.num_kv_heads=2",),
    "qwen3_30b_a3b": ("model.num_kv_heads=2", "model.num_experts=16", "model.num_experts_per_token=4"),
    "deepseek_v3": (
        "model.num_kv_heads=8",
        "model.num_experts=16",
        "model.num_experts_per_token=4",
        "model.num_dense_layers=1",
        "model.dense_mlp_dim=40",
        "model.num_expert_groups=4",
        "model.num_groups_per_token=2",
        "model.latent_attention={query_dim:20,kv_dim:12,rope_head_dim:4,value_head_dim:6}",
    ),
}


def shared_settings(c: DecoderBase) -> dict:
    rope = {"rope_theta": c.rope_theta, "rope_type": "default"}
    if c.rope_scaling:
        s = c.rope_scaling
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_frequency_factor,
                 "high_freq_factor": s.high_frequency_factor,
                 "original_max_position_embeddings": s.original_length}  # fmt: skip
    return {
        "vocab_size": c.vocab_size, "hidden_size": c.embed_dim, "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim, "rms_norm_eps": c.norm_epsilon, "rope_parameters": rope,
        "tie_word_embeddings": c.embeddings == "tied", "attn_implementation": "eager",
    }  # fmt: skip


def peer_config(name: str, c: DecoderBase):
    if name.startswith("gpt2"):
        return transformers.GPT2Config(
            vocab_size=c.vocab_size, n_embd=c.embed_dim, n_layer=c.num_layers, n_head=c.num_heads, n_inner=c.mlp_dim,
            n_positions=c.num_positions, attn_implementation="eager",
        )  # fmt: skip
    if isinstance(c, MoeConfig):
        return peer_moe_config(name, c)
    if name.startswith("llama"):
        return transformers.LlamaConfig(**shared_settings(c))
    if name.startswith("qwen3"):
        return transformers.Qwen3Config(**shared_settings(c))
    return transformers.Gemma2Config(**shared_settings(c), sliding_window=c.attention_windows[0], query_pre_attn_scalar=c.head_dim)  # fmt: skip  # noqa: E501


def peer_moe_config(name: str, c: MoeConfig):
    shared = shared_settings(c) | {"num_experts_per_tok": c.num_experts_per_token}
    if name.startswith("mixtral"):
        return transformers.MixtralConfig(**shared, num_local_experts=c.num_experts)
    assert c.router_weights == "normalized"
    if (latent := c.latent_attention) is not None:
        return transformers.DeepseekV3Config(
            **(shared | {"head_dim": latent.rope_head_dim, "intermediate_size": c.dense_mlp_dim}),
            n_routed_experts=c.num_experts, n_shared_experts=c.num_shared_experts, moe_intermediate_size=c.mlp_dim,
            first_k_dense_replace=c.num_dense_layers, n_group=c.num_expert_groups, topk_group=c.num_groups_per_token,
            routed_scaling_factor=c.router_scale, norm_topk_prob=True, q_lora_rank=latent.query_dim,
            kv_lora_rank=latent.kv_dim, qk_rope_head_dim=latent.rope_head_dim, qk_nope_head_dim=c.head_dim,
            v_head_dim=latent.value_head_dim, rope_interleave=True,
        )  # fmt: skip
    return transformers.Qwen3MoeConfig(
        **shared, num_experts=c.num_experts, moe_intermediate_size=c.mlp_dim, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def peer_weights(name: str, params: dict, c: DecoderBase) -> dict:
    """Our parameters under the names and in the shapes of transformers."""
    ours = {path: np.asarray(x) for path, x in leaves_by_path(params).items()}
    E, windows = c.embed_dim, len(c.attention_windows)

    def layer(path: str, i: int) -> np.ndarray:
        where = "layers" if windows == 1 else f"layers/layer_{i % windows}"
        if isinstance(c, MoeConfig):
            num_dense = c.num_dense_layers
            where, i = ("dense_layers", i) if i < num_dense else ("layers", i - num_dense)
        return ours[f"{where}/{path}"][i // windows]

    if name.startswith("gpt2"):
        return gpt2_weights(ours, layer, c)
    weights = {"model.embed_tokens.weight": ours["embed/table_VE"], "model.norm.weight": ours["head/norm/scale_E"]}
    weights["lm_head.weight"] = ours["embed/table_VE"] if c.embeddings == "tied" else ours["head/kernel_EV"].T
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if name.startswith("gemma2"):
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "attention_out_norm",
                 "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_out_norm"}  # fmt: skip
    if c.qk_norm == "rms":
        norms |= {"self_attn.q_norm": "attention/query_norm", "self_attn.k_norm": "attention/key_norm"}
    for i in range(c.num_layers):
        there = f"model.layers.{i}"
        if isinstance(c, MoeConfig) and c.latent_attention is not None:
            weights |= peer_latent_attention(f"{there}.self_attn", partial(layer, i=i), c)
        else:
            for theirs, mine in {"q": "query_EHD", "k": "key_EKD", "v": "value_EKD"}.items():
                weights[f"{there}.self_attn.{theirs}_proj.weight"] = layer(f"attention/{mine}", i).reshape(E, -1).T
            weights[f"{there}.self_attn.o_proj.weight"] = layer("attention/out_HDE", i).reshape(-1, E).T
        if isinstance(c, MoeConfig) and i >= c.num_dense_layers:
            weights |= peer_experts(f"{there}.mlp", partial(layer, i=i), c)
        else:
            for theirs, mine in {"gate": "gate_EM", "up": "up_EM", "down": "down_ME"}.items():
                weights[f"{there}.mlp.{theirs}_proj.weight"] = layer(f"mlp/{mine}", i).T
        for theirs, mine in norms.items():
            weights[f"{there}.{theirs}.weight"] = layer(f"{mine}/scale_E", i)
    return weights


def peer_latent_attention(there: str, layer, c: MoeConfig) -> dict:
    """transformers turns pairs of neighbours (2i, 2i + 1), where we turn i and i + R/2."""
    assert c.latent_attention is not None
    R = c.latent_attention.rope_head_dim
    pairs = np.arange(R).reshape(2, -1).T.reshape(-1)  # ours at each of their places
    up, down = layer("attention/query_up_QHD"), layer("attention/kv_down_EL")
    up = np.concatenate([up[..., :-R], up[..., -R:][..., pairs]], axis=-1)
    down = np.concatenate([down[:, :-R], down[:, -R:][:, pairs]], axis=-1)
    into = layer("attention/kv_up_LHD")
    return {
        f"{there}.q_a_proj.weight": layer("attention/query_down_EQ").T,
        f"{there}.q_a_layernorm.weight": layer("attention/query_norm/scale_E"),
        f"{there}.q_b_proj.weight": up.reshape(up.shape[0], -1).T,
        f"{there}.kv_a_proj_with_mqa.weight": down.T,
        f"{there}.kv_a_layernorm.weight": layer("attention/kv_norm/scale_E"),
        f"{there}.kv_b_proj.weight": into.reshape(into.shape[0], -1).T,
        f"{there}.o_proj.weight": layer("attention/out_HVE").reshape(-1, c.embed_dim).T,
    }


def peer_experts(there: str, layer, c: MoeConfig) -> dict:
    """transformers 5 keeps the experts of a layer in one array, gate and up side by side."""
    into = np.concatenate([layer("mlp/gate_XEM"), layer("mlp/up_XEM")], axis=2)
    shared = {"gate": "gate_EM", "up": "up_EM", "down": "down_ME"} if c.num_shared_experts else {}
    bias = {f"{there}.gate.e_score_correction_bias": layer("mlp/router_bias_X")} if c.num_shared_experts else {}
    return bias | {
        **{f"{there}.shared_experts.{t}_proj.weight": layer(f"mlp/shared/{mine}").T for t, mine in shared.items()},
        f"{there}.gate.weight": layer("mlp/router_EX").T,
        f"{there}.experts.gate_up_proj": into.swapaxes(1, 2),
        f"{there}.experts.down_proj": layer("mlp/down_XME").swapaxes(1, 2),
    }


def gpt2_weights(ours: dict, layer, c: DecoderBase) -> dict:
    E = c.embed_dim
    weights = {
        "transformer.wte.weight": ours["embed/table_VE"], "transformer.wpe.weight": ours["embed/positions_PE"],
        "transformer.ln_f.weight": ours["head/norm/scale_E"], "transformer.ln_f.bias": ours["head/norm/bias_E"],
        "lm_head.weight": ours["embed/table_VE"],
    }  # fmt: skip
    for i in range(c.num_layers):
        there = f"transformer.h.{i}"
        qkv = [layer(f"attention/{name}", i).reshape(E, -1) for name in ("query_EHD", "key_EKD", "value_EKD")]
        biases = [
            layer(f"attention/{name}", i).reshape(-1) for name in ("query_bias_HD", "key_bias_KD", "value_bias_KD")
        ]
        weights |= {
            f"{there}.attn.c_attn.weight": np.concatenate(qkv, 1), f"{there}.attn.c_attn.bias": np.concatenate(biases),
            f"{there}.attn.c_proj.weight": layer("attention/out_HDE", i).reshape(-1, E),
            f"{there}.attn.c_proj.bias": layer("attention/out_bias_E", i),
            f"{there}.mlp.c_fc.weight": layer("mlp/up_EM", i), f"{there}.mlp.c_fc.bias": layer("mlp/up_bias_M", i),
            f"{there}.mlp.c_proj.weight": layer("mlp/down_ME", i),
            f"{there}.mlp.c_proj.bias": layer("mlp/down_bias_E", i),
        }  # fmt: skip
        for theirs, mine in {"ln_1": "attention_norm", "ln_2": "mlp_norm"}.items():
            weights[f"{there}.{theirs}.weight"] = layer(f"{mine}/scale_E", i)
            weights[f"{there}.{theirs}.bias"] = layer(f"{mine}/bias_E", i)
    return weights


def random_params(plan) -> dict:
    """Every parameter random, also scales and biases, which start at ones and zeros."""
    leaves, tree = jax.tree.flatten(plan.abstract["params"])
    chance = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [chance.normal(0, 0.3, x.shape).astype(np.float32) for x in leaves])


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_transformers(name):
    plan = plan_of(f"model={name}", *SIZES, *SHAPES[name], "mesh.fsdp=1", "target=cpu-1")
    config, params = plan.spec.model, random_params(plan)
    assert isinstance(config, DecoderBase)
    peer = transformers.AutoModelForCausalLM.from_config(peer_config(name, config)).eval()
    weights = {path: torch.tensor(np.ascontiguousarray(x)) for path, x in peer_weights(name, params, config).items()}
    missing = peer.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(re.search(r"rotary|attn\.(bias|masked_bias)", key) for key in missing.missing_keys)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 24))
    with torch.no_grad():
        theirs = peer(torch.tensor(tokens)).logits.numpy()
    ours = forward(plan.model, jax.tree.map(jnp.asarray, params), jnp.asarray(tokens))
    np.testing.assert_allclose(ours, theirs, atol=2e-4 * np.abs(theirs).max())
    assert np.abs(theirs).max() > 0.5


@pytest.mark.parametrize("name", [*SHAPES, "llama2_70b", "llama3_70b", "mixtral_8x22b", "qwen3_235b_a22b"])
def test_parameters_are_as_many_as_in_transformers(name):
    plan = read_spec(Request((f"model={name}",)), then=plan_run)
    assert isinstance(plan.spec.model, DecoderBase)
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(peer_config(name, plan.spec.model))
    biases = [x for path, x in peer.named_buffers() if path.endswith("e_score_correction_bias")]
    assert plan.num_parameters == sum(p.numel() for p in (*peer.parameters(), *biases))
