"""Tables of published checkpoints: every parameter once, and back; config.json both ways, or an error that names the
key."""

import contextlib
import itertools
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from meshloom.compiler.core.trees import leaves_by_path
from meshloom.models import ModelConfig
from meshloom.models.family_configs import DecoderConfig, LinearStackConfig, MoeConfig
from meshloom.models.published import FAMILIES, NotUnderstood, family_of, read_config, tensors, tensors_in, write_config

CONF = Path(__file__).parents[2] / "conf" / "model"
CONFIGS = TypeAdapter(DecoderConfig | MoeConfig)
SMALL = {"embed_dim": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "mlp_dim": 48}
LATENT = {"query_dim": 20, "kv_dim": 12, "rope_head_dim": 4, "value_head_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "llama2_7b": {}, "llama3_8b": {}, "llama3_405b": {}, "qwen3_0_6b": {}, "qwen3_8b": {}, "gemma2_9b": {},
    "mixtral_8x7b": {}, "qwen3_30b_a3b": {"num_experts": 4, "num_experts_per_token": 2},
    "deepseek_v3": {"num_kv_heads": 8, "num_experts": 16, "latent_attention": LATENT},
    "gpt2_124m": {"num_kv_heads": 8, "num_positions": 32}, "gemma_7b": {},
    "gemma3_4b": {"num_layers": 8, "attention_windows": [6, 6, None]},
    "deepseek_v2_lite": {"num_kv_heads": 8, "num_experts": 16, "latent_attention": LATENT | {"query_dim": None}},
    "gpt_oss_20b": {"num_experts": 4, "num_experts_per_token": 2, "attention_windows": [6, None]},
    "deepseek_v2": {"num_kv_heads": 8, "num_experts": 16, "latent_attention": LATENT},
}  # fmt: skip


def keys_of(name: str) -> dict[str, Any]:
    """Returns the keys of a file of conf/model, with those of the files that it names."""
    keys = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    for base in reversed([name for name in keys.pop("defaults", []) if name != "_self_"]):
        keys = keys_of(base) | keys
    return keys


def config_of(name: str, **values: Any) -> Any:
    """Returns a model of conf/model with other values."""
    return CONFIGS.validate_json(json.dumps(keys_of(name) | values))


def small(name: str, **values: Any) -> Any:
    return config_of(name, **(SMALL | MODELS[name] | values))


def everything() -> dict[str, ModelConfig]:
    """Returns models of all families and their variants."""
    found = {name: small(name) for name in MODELS}
    return found | {
        "mistral": small("llama3_8b", attention_windows=[6]),
        "tied": small("llama3_8b", embeddings="tied"),
        "qwen2": small("qwen3_8b", qk_norm="none", biases="qkv"),
        "windows": small("qwen3_8b", attention_windows=[None, None, None, 6]),
        "dense_first": small("qwen3_30b_a3b", num_dense_layers=1, dense_mlp_dim=40, router_weights="scores"),
        "gemma2_27b": small("gemma2_9b", attention_scale=144**-0.5),
    }


ALL = everything()


@pytest.mark.cases(plain=6)
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("llama2_7b", "llama3_405b", "gemma2_27b")])
def test_every_parameter_is_in_one_tensor_and_comes_back_bit_by_bit(name):
    config = ALL[name]
    shapes = {path: x.shape for path, x in leaves_by_path(config.build().abstract()).items()}
    found = tensors(config)
    assert max(Counter(tensor.name for tensor in found).values()) == 1
    slots = [slot for tensor in found for slot in tensor.slots]
    assert len(slots) == len(set(slots))
    indices = defaultdict(set)
    for slot in slots:
        indices[slot.path].add(slot.index)
    assert indices.keys() == shapes.keys()
    for path, of_path in indices.items():
        dims = shapes[path][: len(next(iter(of_path)))]
        assert of_path == set(itertools.product(*map(range, dims))), path
    assert sum(math.prod(tensor.shape) for tensor in found) == sum(map(math.prod, shapes.values()))

    kinds = {tensor.to_ours: tensor for tensor in found}  # shared: a jit over them compiles once for each
    assert len(kinds) <= len({(tensor.shape, tuple(slot.path for slot in tensor.slots)) for tensor in found})
    for tensor in kinds.values():
        x: Any = np.arange(math.prod(tensor.shape), dtype=np.uint16).reshape(tensor.shape).view(ml_dtypes.bfloat16)
        ours = tensor.to_ours(x)
        assert [part.shape for part in ours] == [shapes[slot.path][len(slot.index) :] for slot in tensor.slots]
        np.testing.assert_array_equal(np.asarray(tensor.to_published(ours)).view(np.uint16), x.view(np.uint16))


@pytest.mark.parametrize("name", ALL)
def test_config_json_comes_back(name):
    config = ALL[name]
    written = json.loads(json.dumps(write_config(config, dtype="bfloat16", max_length=64)))
    again = CONFIGS.validate_json(json.dumps(config.model_dump(mode="json") | read_config(written)))
    rate = {"router_bias_update_rate": 0.0} if name == "deepseek_v3" else {}
    assert again == config.model_copy(update=rate)
    based = write_config(config, dtype="float16", max_length=1, base=written | {"eos_token_id": [7], "foreign": 1})
    expected = written | {"dtype": "float16", "torch_dtype": "float16", "eos_token_id": [7], "foreign": 1}
    assert based == expected


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "llama", "pretraining_tp": 1,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0", "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
# The shapes of published config.json files, in the form that transformers 4 wrote.
FACTS: dict[str, dict[str, Any]] = {
    "llama2_7b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_scaling": None, "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama2_70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_scaling": None, "vocab_size": 32000,
    },
    "llama3_8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 500000.0,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "llama3_405b": LLAMA | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
        "mlp_bias": False, "max_position_embeddings": 131072, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen3_8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3_30b_a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma2_9b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "torch_dtype": "float32", "use_cache": True, "vocab_size": 256000,
    },
    "mixtral_8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": 32000,
    },
    "smollm2_135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152,
    },
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32768,
    },
    "qwen2_5_7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "gemma3_1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
    },
    "deepseek_v2_lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
        "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt2_124m": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
}  # fmt: skip


OF_TRAINING = {"initializer_stddev", "router_bias_update_rate"}


@pytest.mark.parametrize("name", FACTS)
def test_published_models_are_those_of_conf(name):
    config = config_of(name)
    read = read_config(FACTS[name])
    if name == "deepseek_v3":  # conf has the model as it was pretrained, before its context was extended
        assert read.pop("rope_scaling") == keys_of("deepseek_v2_lite")["rope_scaling"] | {
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    read = {key: value for key, value in read.items() if key not in OF_TRAINING}
    assert CONFIGS.validate_json(json.dumps(config.model_dump(mode="json") | read)) == config


@pytest.mark.parametrize(
    ("name", "values", "refused"),
    [
        ("llama3_8b", {"attention_bias": True}, ["attention_bias"]),
        ("llama3_8b", {"mlp_bias": True, "hidden_act": "quick_gelu"}, ["hidden_act", "mlp_bias"]),
        ("llama3_8b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling.rope_type"]),
        ("llama3_8b", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ["rope_parameters.factor"]),
        ("llama3_8b", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama3_8b", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ("llama3_8b", {"attention_multiplier": 0.1, "vocab_sise": 3, "not_set": None},
         ["attention_multiplier", "vocab_sise"]),
        ("llama3_8b", {"hidden_size": None, "num_hidden_layers": "32"}, ["hidden_size", "num_hidden_layers"]),
        ("llama3_8b", {"attention_dropout": 0.1}, ["attention_dropout"]),
        ("llama3_8b", {"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        ("qwen3_8b", {"use_sliding_window": True, "max_window_layers": 5}, ["sliding_window"]),
        ("qwen3_8b", {"layer_types": ["linear_attention"] * 36}, ["layer_types"]),
        ("qwen3_8b", {"layer_types": ["full_attention"] * 3}, ["layer_types"]),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
         ["decoder_sparse_step", "mlp_only_layers"]),
        ("gemma2_9b", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("mixtral_8x7b", {"router_jitter_noise": 0.1}, ["router_jitter_noise"]),
        ("gpt2_124m", {"scale_attn_by_inverse_layer_idx": True, "embd_pdrop": 0.0},
         ["embd_pdrop", "scale_attn_by_inverse_layer_idx"]),
        ("gpt2_124m", {"tie_word_embeddings": False}, ["tie_word_embeddings"]),
    ],
)  # fmt: skip
def test_what_would_change_the_computation_is_refused_by_name(name, values, refused):
    with pytest.raises(NotUnderstood) as error:
        read_config(FACTS[name] | values)
    assert sorted(mistake.key for mistake in error.value.mistakes) == refused


@pytest.mark.parametrize(("name", "values", "key", "value"), [
    ("llama3_8b", {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0, "attention_factor": None}},
     "rope_scaling", {"kind": "linear", "factor": 2.0}),
    ("llama3_8b", {"_flash_attn_2_enabled": True, "_attn_implementation_internal": "sdpa"}, "rope_scaling", None),
    ("gpt2_124m", {"n_embd": None, "hidden_size": 768, "n_positions": None}, "embed_dim", 768),
    ("gpt2_124m", {"n_positions": None}, "num_positions", 1024),
    ("gpt2_124m", {"architectures": None, "model_type": None}, "num_layers", 12),
    ("gpt2_124m", {"architectures": ["GPT2Model"]}, "num_layers", 12),
])  # fmt: skip
def test_forms_of_old_releases_are_read(name, values, key, value):
    assert read_config(FACTS[name] | values)[key] == value


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.2])
def test_a_factor_of_yarn_comes_back_also_below_1(factor):
    scaling = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
               "attention_factor": factor}  # fmt: skip
    read = read_config(FACTS["llama3_8b"] | {"rope_scaling": scaling})
    config = config_of("llama3_8b", **{key: value for key, value in read.items() if key not in OF_TRAINING})
    assert config.rope_scaling.factor_of_turned == pytest.approx(factor, abs=1e-9)
    written = write_config(config, dtype="bfloat16", max_length=64)["rope_scaling"]
    assert written.get("attention_factor", 1.0) == pytest.approx(factor, abs=1e-9)


WEIRD = (None, True, "x", [], ["x"], {}, {"a": {"b": 1}}, -1, 0, 0.5, 10**30, math.inf)


def test_whatever_a_key_holds_is_read_or_refused():
    """Each key in turn, also those of rotary positions: no other exception, and a result that JSON can hold."""
    of_family = {family_of(config).model_type: config for config in ALL.values()}
    for config in of_family.values():
        written = write_config(config, dtype="bfloat16", max_length=64)
        rope = [key for key in ("rope_parameters", "rope_scaling") if written.get(key)]
        for value in WEIRD:
            changes = [{key: value} for key in written]
            changes += [{at: written[at] | {key: value}} for at in rope for key in written[at]]
            for change in changes:
                with contextlib.suppress(NotUnderstood):
                    json.dumps(read_config(written | change))


def test_a_foreign_architecture_is_refused_with_the_nearest():
    with pytest.raises(NotUnderstood, match=r"'LamaForCausalLM' is not implemented.*did you mean 'LlamaForCausalLM'"):
        read_config({"architectures": ["LamaForCausalLM"], "model_type": "llama"})
    with pytest.raises(NotUnderstood, match=r"model_type: 't5' is not implemented; use one of llama"):
        read_config({"model_type": "t5"})
    with pytest.raises(NotUnderstood, match="architectures: is missing"):
        read_config({})


def test_a_model_that_no_family_has_is_refused_with_the_keys_that_differ():
    with pytest.raises(NotUnderstood) as error:
        tensors(small("llama3_8b", norm="layer"))
    assert [mistake.key for mistake in error.value.mistakes] == ["model.norm"]
    assert "rms" in error.value.mistakes[0].fix
    linear = LinearStackConfig(family="linear_stack", vocab_size=8, embed_dim=8, num_layers=1)
    with pytest.raises(
        NotUnderstood, match=r"^model\.family: linear_stack is not a family .*; use one of decoder, moe$"
    ):
        tensors(linear)


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_windows_of_some_layers_are_not_written_as_windows_of_all(name):
    base = write_config(small(name), dtype="bfloat16", max_length=64)
    with pytest.raises(NotUnderstood, match=r"model\.attention_windows"):
        write_config(small(name, attention_windows=[6, None]), dtype="bfloat16", max_length=64, base=base)


def test_names_without_the_first_part_are_found_and_what_is_not_needed_is_told_apart():
    config = ALL["gpt2_124m"]
    shorter = [tensor.name.removeprefix("transformer.") for tensor in tensors(config)]
    found = tensors_in(config, [*shorter, "h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight", "h.0.foreign"])
    assert [tensor.name for tensor in found.tensors] == shorter
    assert found.harmless == {"h.0.attn.bias", "h.0.attn.masked_bias"}
    assert found.copies == {"lm_head.weight": "wte.weight"}
    assert not found.may_differ
    config = ALL["deepseek_v3"]
    names = [tensor.name for tensor in tensors(config)]
    found = tensors_in(config, [*names, "model.layers.4.embed_tokens.weight", "model.layers.40.x"])
    assert [tensor.name for tensor in found.tensors] == names
    assert found.left_out == {"model.layers.4.embed_tokens.weight"}
    assert not found.harmless
    config = ALL["tied"]
    found = tensors_in(config, ["model.x", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.cos_cached"])
    assert found.copies == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.may_differ
    assert found.harmless == {"model.layers.0.self_attn.rotary_emb.cos_cached"}


def test_a_family_is_kept_where_two_can_say_the_same():
    config = small("llama3_8b")
    assert family_of(config).model_type == "llama"
    assert family_of(config, model_type="mistral").model_type == "mistral"
    assert family_of(small("llama3_8b", attention_windows=[6]), model_type="llama").model_type == "mistral"


def test_each_family_has_a_name_of_its_own():
    assert max(Counter(family.architecture for family in FAMILIES).values()) == 1
    assert max(Counter(family.model_type for family in FAMILIES).values()) == 1


def test_the_text_model_of_a_gemma_of_images_is_read():
    """The config.json of google/gemma-3-27b-pt, which leaves out what is transformers' default, and its names."""
    text = {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    file = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    config = config_of("gemma3_27b")
    assert config_of("gemma3_27b", **read_config(file)) == config
    names = [f"language_model.{tensor.name}" for tensor in tensors(config)]
    found = tensors_in(config, [*names, "vision_tower.a.weight", "multi_modal_projector.b", "foreign"])
    assert [tensor.name for tensor in found.tensors] == names
    assert found.left_out == {"vision_tower.a.weight", "multi_modal_projector.b"}
    with pytest.raises(NotUnderstood, match="final_logit_softcaping"):
        read_config(file | {"text_config": text | {"final_logit_softcaping": 30.0}})
