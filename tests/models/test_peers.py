"""Our decoder against the implementations that others use: transformers on torch, in float32, by their own files.

A model of ours becomes a config.json, from which transformers makes a model with random weights and saves it; our
tables read the folder, and write it again.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import spec_of
from meshloom.compiler.core.trees import leaves_by_path, nested_dict
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.sharding.arrays import build_model
from meshloom.models import ModelConfig
from meshloom.models.adapter import is_adapter
from meshloom.models.family_configs import DecoderBase
from meshloom.models.published import NotUnderstood, read_config, tensors, tensors_in, write_config
from meshloom.models.published.peft import write_peft
from meshloom.runtime.weights.write import write_peft_folder
from support.reference import forward

torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
safetensors = pytest.importorskip("safetensors.numpy", reason="pip install -e '.[peers]'")
pytestmark = [pytest.mark.peers, pytest.mark.ci, pytest.mark.filterwarnings("default")]

# Small, but with every part of the shape: several heads a kv_head, both kinds of windows, more tokens than a window.
SIZES = (
    "model.vocab_size=264", "model.embed_dim=32", "model.num_layers=4", "model.num_heads=8", "model.head_dim=8",
    "model.mlp_dim=48", "model.num_kv_heads=2", "sequence_length=24",
)  # fmt: skip
LATENT = (
    "model.num_kv_heads=8", "model.num_experts=16", "model.num_experts_per_token=4", "model.num_dense_layers=1",
    "model.dense_mlp_dim=40", "model.num_expert_groups=4", "model.num_groups_per_token=2",
    "model.latent_attention={query_dim:20,kv_dim:12,rope_head_dim:4,value_head_dim:6}",
    "model.router_bias_update_rate=0.0",
)  # fmt: skip
YARN = (
    "{kind:yarn,factor:4.0,original_length:64,beta_fast:8.0,beta_slow:1.0,truncate:true,mscale:1.0,mscale_all_dim:0.0}"
)
MISTRAL = ("model=llama3_8b", "model.attention_windows=[6]")
QWEN2 = ("model=qwen3_8b", "model.qk_norm=none", "model.biases=qkv")
MODELS: dict[str, tuple[str, ...]] = {
    "llama2_7b": ("model=llama2_7b", "model.num_kv_heads=8"),
    "llama3_8b": ("model=llama3_8b",),
    "llama3_405b": ("model=llama3_405b", "model.rope_scaling.original_length=64", "model.rope_theta=10000.0"),
    "llama_tied": ("model=llama3_8b", "model.embeddings=tied", "model.mlp_activation=gelu_tanh"),
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2_windows": (*QWEN2, "model.attention_windows=[null,null,null,5]"),
    "qwen3_0_6b": ("model=qwen3_0_6b",),
    "qwen3_8b": ("model=qwen3_8b",),
    "yarn": ("model=llama3_8b", f"model.rope_scaling={YARN}", "model.rope_scaling.truncate=false"),
    "yarn_by_factor": ("model=llama3_8b", f"model.rope_scaling={YARN}", "model.rope_scaling.mscale=0.5"),
    "linear": ("model=llama3_8b", "model.rope_scaling={kind:linear,factor:4.0}"),
    "gemma_7b": ("model=gemma_7b", "model.num_kv_heads=1"),
    "gemma2_9b": ("model=gemma2_9b", "model.attention_windows=[6,null]"),
    "gemma2_27b": ("model=gemma2_9b", "model.attention_windows=[6,null]", "model.attention_scale=0.2"),
    # Two rounds of the windows, and two layers more; fewer layers than windows.
    "gemma3_4b": ("model=gemma3_4b", "model.num_layers=8", "model.attention_windows=[6,6,null]"),
    "gemma3_1b": ("model=gemma3_1b", "model.num_layers=8", "model.attention_windows=[6,6,6,6,6,null]"),
    "mixtral_8x7b": ("model=mixtral_8x7b",),
    "mixtral_windows": ("model=mixtral_8x7b", "model.attention_windows=[6]"),
    "qwen3_30b_a3b": ("model=qwen3_30b_a3b", "model.num_experts=16", "model.num_experts_per_token=4"),
    "qwen3_moe_dense": (
        "model=qwen3_30b_a3b", "model.num_experts=16", "model.num_experts_per_token=4", "model.router_weights=scores",
        "model.num_dense_layers=1", "model.dense_mlp_dim=40", "model.attention_windows=[5]",
    ),
    "deepseek_v2_lite": (
        "model=deepseek_v2_lite", *LATENT, "model.router_bias_update_rate=null", "model.num_expert_groups=1",
        "model.num_groups_per_token=1", "model.rope_scaling.original_length=64", "model.rope_scaling.mscale=1.5",
        "model.latent_attention={query_dim:null,kv_dim:12,rope_head_dim:12,value_head_dim:6}",
    ),
    "deepseek_v2": (
        "model=deepseek_v2", *LATENT, "model.router_bias_update_rate=null", "model.rope_scaling.original_length=64",
    ),
    "deepseek_v3": ("model=deepseek_v3", *LATENT, f"model.rope_scaling={YARN}"),
    "gpt_oss": (
        "model=gpt_oss_20b", "model.num_experts=8", "model.num_experts_per_token=3", "model.num_layers=5",
        "model.attention_windows=[6,null]", "model.rope_scaling.original_length=64",
    ),
    "gpt2_124m": ("model=gpt2_124m", "model.num_kv_heads=8", "model.head_dim=4", "model.num_positions=32"),
    "phi3": ("model=llama2_7b", "model.head_dim=4", "model.attention_windows=[6]"),
}  # fmt: skip
# Keys of ours that a mistake in reading config.json would leave as they are here; the logits have to show it.
MISTAKES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama3_405b": ({"rope_scaling": None}, {"rope_theta": 20000.0}, {"norm_epsilon": 0.01}),
    "mistral": ({"attention_windows": [None]}, {"attention_windows": [7]}),
    "qwen2_windows": ({"attention_windows": [None, None, None, 6]}, {"attention_windows": [None, None, 5, None]}),
    "gemma2_9b": (
        {"attention_soft_cap": None}, {"logit_soft_cap": None}, {"attention_windows": [None, 6]},
        {"embedding_scale": "one"}, {"attention_scale": 0.2}, {"mlp_activation": "silu"},
    ),
    "gemma3_4b": (
        {"window_rope_theta": None}, {"window_rope_theta": 1e6}, {"rope_scaling": None}, {"qk_norm": "rms"},
        {"attention_windows": [7, 7, None]},
    ),
    "deepseek_v2": ({"group_scores": "best_two"}, {"rope_scaling": None}, {"num_groups_per_token": 4}),
    "qwen3_30b_a3b": ({"router_weights": "scores"}, {"num_experts_per_token": 5}),
    "deepseek_v3": (
        {"router_scale": 1.0}, {"num_groups_per_token": 4}, {"router_weights": "scores"}, {"attention_scale": 8**-0.5},
    ),
    "gpt_oss": (
        {"mlp_activation": "silu"}, {"rope_scaling": None}, {"attention_windows": [None, 6]},
        {"router_weights": "scores"},
    ),
    "gpt2_124m": ({"mlp_activation": "gelu"}, {"norm_epsilon": 0.01}),
}  # fmt: skip
OF_TRAINING = {
    "dropout_rate",
    "load_balancing_counts",
    "load_balancing_weight",
    "router_jitter",
    "router_z_loss_weight",
}
# Families that compute as one before them in the registry, under other names.
BASES = {"phi3": {"model_type": "phi3", "max_position_embeddings": 64, "pad_token_id": None}}
TOKENS = np.random.default_rng(1).integers(0, 264, (2, 24))


def changed(config: ModelConfig, **values: Any) -> ModelConfig:
    return type(config).model_validate_json(json.dumps(config.model_dump(mode="json") | values))


def saved_by_transformers(config: ModelConfig, folder: Path, base: dict[str, Any] | None = None) -> None:
    """Saves a model with large random weights, also scales and biases: with transformers' own, of 0.02, the logits
    hardly depend on soft caps."""
    written = write_config(config, dtype="float32", max_length=64, base=base)
    peer_config = transformers.AutoConfig.for_model(**written)
    peer = transformers.AutoModelForCausalLM.from_config(peer_config, attn_implementation="eager")
    torch.manual_seed(0)
    for name, x in (*peer.named_parameters(), *peer.named_buffers()):
        if "rotary" not in name and not name.endswith("attn.bias"):
            x.data = 0.3 * torch.randn_like(x)
    peer.save_pretrained(folder)


def logits_of_transformers(folder: Path) -> np.ndarray:
    peer, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        return peer.eval()(torch.tensor(TOKENS)).logits.numpy()


def params_of(folder: Path, config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """Returns the parameters of a folder: every tensor in its slots."""
    params = {
        path: np.full(x.shape, np.nan, np.float32) for path, x in leaves_by_path(config.build().abstract()).items()
    }
    held = safetensors.load_file(folder / "model.safetensors")
    found = tensors_in(config, held.keys(), model_type)
    assert {tensor.name for tensor in found.tensors} == held.keys() - found.unread - found.copies.keys()
    for tensor in found.tensors:
        assert held[tensor.name].shape == tensor.shape, tensor.name
        for slot, x in zip(tensor.slots, tensor.to_ours(held[tensor.name]), strict=True):
            params[slot.path][slot.index] = x
    assert not any(np.isnan(x).any() for x in params.values())
    return params


def logits_of(config: ModelConfig, params: dict[str, Any]) -> np.ndarray:
    return np.asarray(
        forward(config.build(), nested_dict({k: jnp.asarray(x) for k, x in params.items()}), jnp.asarray(TOKENS))
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_transformers_is_read_and_written(name, tmp_path):
    config = spec_of(*SIZES, *MODELS[name]).model
    theirs, again = tmp_path / "theirs", tmp_path / "again"
    base = BASES.get(name, {})
    saved_by_transformers(config, theirs, base)
    read = read_config(json.loads((theirs / "config.json").read_text()))
    assert read.keys() | OF_TRAINING >= type(config).model_fields.keys()
    assert changed(config, **read) == config
    kind = base.get("model_type")
    params, logits = params_of(theirs, config, kind), logits_of_transformers(theirs)
    assert np.abs(logits).max() > 0.5
    tolerance = 1e-5 * np.abs(logits).max()
    np.testing.assert_allclose(logits_of(config, params), logits, atol=tolerance, rtol=0)
    for mistake in MISTAKES.get(name, ()):
        difference = np.abs(logits_of(changed(config, **mistake), params) - logits).max()
        assert difference > 5 * tolerance, mistake

    again.mkdir()
    out = {
        x.name: x.to_published(tuple(params[slot.path][slot.index] for slot in x.slots)) for x in tensors(config, kind)
    }
    out = {path: np.ascontiguousarray(x) for path, x in out.items()}
    safetensors.save_file(out, again / "model.safetensors", metadata={"format": "pt"})
    written = write_config(config, dtype="float32", max_length=64, base=base)
    (again / "config.json").write_text(json.dumps(written))
    first, second = (safetensors.load_file(folder / "model.safetensors") for folder in (theirs, again))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    np.testing.assert_array_equal(logits_of_transformers(again), logits)


PUBLISHED = (
    "llama2_7b", "llama3_8b", "llama3_405b", "gpt2_124m", "qwen3_0_6b", "qwen3_8b", "gemma2_9b", "mixtral_8x7b",
    "qwen3_30b_a3b", "deepseek_v3", "llama2_70b", "llama3_70b", "mixtral_8x22b", "qwen3_235b_a22b", "gemma_2b",
    "gemma3_1b", "gemma3_27b", "deepseek_v2_lite", "deepseek_v2", "gpt_oss_20b", "qwen2_5_7b", "llama3_2_1b",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_in_transformers(name):
    model = read_spec(Request((f"model={name}",)), then=lambda spec: spec.model)
    assert isinstance(model, DecoderBase)
    with torch.device("meta"):
        peer_config = transformers.AutoConfig.for_model(**write_config(model, dtype="bfloat16", max_length=4096))
        peer = transformers.AutoModelForCausalLM.from_config(peer_config)
    biases = [x for path, x in peer.named_buffers() if path.endswith("e_score_correction_bias")]
    num_parameters = sum(x.size for x in leaves_by_path(model.build().abstract()).values())
    assert num_parameters == sum(p.numel() for p in (*peer.parameters(), *biases))


SHAPE = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "n_embd", "n_layer",
    "n_head", "n_positions", "architectures", "model_type",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_a_config_json_leaves_out_is_what_transformers_takes(name):
    written = write_config(spec_of(*SIZES, *MODELS[name]).model, dtype="float32", max_length=64, base=BASES.get(name))
    needed = SHAPE | {"num_experts_per_tok"} if name.startswith("deepseek_v2") else SHAPE
    least = {key: value for key, value in written.items() if key in needed}
    in_full = json.loads(transformers.AutoConfig.for_model(**least).to_json_string(use_diff=False))
    assert read_config(least) == read_config(in_full | {"architectures": least["architectures"]})


PEFT = {
    "lora, llama": ("llama3_8b", "adapter=lora", "adapter.targets=['layers/*',head/kernel_EV]"),
    "rslora, some of gpt2's joined matrices": (
        "gpt2_124m", "adapter=rslora", "adapter.targets=[layers/attention/query_EHD,layers/attention/value_EKD]",
    ),
    "dora, gpt2": ("gpt2_124m", "adapter=dora"),
    "dora, gemma's groups of layers": (
        "gemma2_9b", "adapter=dora", "adapter.targets=[layers/layer_0/mlp/*,layers/layer_1/attention/out_HDE]",
    ),
    "lora, deepseek's turned pairs": (
        "deepseek_v2_lite", "adapter=lora", "adapter.targets=['*/attention/*']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEFT)
def test_peft_computes_what_our_adapter_does(name, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    model, *adapter = PEFT[name]
    spec = spec_of(*SIZES, *MODELS[model], *adapter, "adapter.rank=3", "adapter.alpha=5.0")
    adapted, config, theirs, folder = build_model(spec), spec.model, tmp_path / "theirs", tmp_path / "adapter"
    saved_by_transformers(config, theirs)
    rng = np.random.default_rng(2)
    params = params_of(theirs, config) | {
        path: rng.normal(0, 0.2, x.shape).astype(np.float32)
        for path, x in leaves_by_path(adapted.abstract()).items()
        if is_adapter(path)
    }
    tensors, written = write_peft(config, adapted, params, base=str(theirs))
    write_peft_folder(folder, tensors, written)
    peer = transformers.AutoModelForCausalLM.from_pretrained(theirs, attn_implementation="eager", dtype=torch.float32)
    before = peer.eval()(torch.tensor(TOKENS)).logits.detach().numpy()
    peer = peft.PeftModel.from_pretrained(peer, folder).eval()
    of_peer = set(peft.get_peft_model_state_dict(peer, save_embedding_layers=False))
    assert of_peer == tensors.keys()
    expected = peer(torch.tensor(TOKENS)).logits.detach().numpy()
    tree = nested_dict({path: jnp.asarray(x) for path, x in params.items()})
    ours = np.asarray(forward(adapted, tree, jnp.asarray(TOKENS)))
    assert np.abs(ours - before).max() > 0.05 * np.abs(before).max()
    np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def test_experts_have_no_module_of_peft():
    chosen = (*MODELS["qwen3_30b_a3b"], "adapter=lora", "adapter.targets=[layers/mlp/up_XEM]")
    spec = spec_of(*SIZES, *chosen)
    with pytest.raises(NotUnderstood, match="merged"):
        write_peft(spec.model, build_model(spec), {}, base=None)
