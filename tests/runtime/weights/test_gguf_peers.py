"""A GGUF file is read as transformers reads it: the same model, and the same values under the same names."""

import json
import re
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.gguf_file import gguf_values, read_gguf
from meshloom.models.published import tensors_in
from meshloom.runtime.weights.folder import match_folder, open_folder

gguf = pytest.importorskip("gguf", reason="pip install -e '.[peers]'")
torch = pytest.importorskip("torch", reason="pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[peers]'")
reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

E, M, V, HEADS, KV, D = 64, 96, 64, 4, 2, 16
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2")
TYPES = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8}


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    ends = {"token_embd.weight": (V, E), "output_norm.weight": (E,)}
    layer = {"attn_norm.weight": (E,), "ffn_norm.weight": (E,), "attn_output.weight": (E, HEADS * D),
             "ffn_up.weight": (M, E), "ffn_down.weight": (E, M)}  # fmt: skip
    if architecture == "gpt2":
        ends |= {"position_embd.weight": (32, E), "output_norm.bias": (E,)}
        layer |= {"attn_qkv.weight": (3 * E, E), "attn_qkv.bias": (3 * E,), "attn_output.bias": (E,),
                  "ffn_up.bias": (M,), "ffn_down.bias": (E,), "attn_norm.bias": (E,)}  # fmt: skip
        layer |= {"ffn_norm.bias": (E,)}
    elif architecture == "phi3":
        layer |= {"attn_qkv.weight": ((HEADS + 2 * KV) * D, E), "ffn_up.weight": (2 * M, E)}
    else:
        layer |= {"attn_q.weight": (HEADS * D, E), "attn_k.weight": (KV * D, E), "attn_v.weight": (KV * D, E),
                  "ffn_gate.weight": (M, E)}  # fmt: skip
    if architecture == "qwen2":
        layer |= {"attn_q.bias": (HEADS * D,), "attn_k.bias": (KV * D,), "attn_v.bias": (KV * D,)}
    if architecture == "qwen3":
        layer |= {"attn_q_norm.weight": (D,), "attn_k_norm.weight": (D,)}
    if architecture == "gemma2":
        layer |= {"post_attention_norm.weight": (E,), "post_ffw_norm.weight": (E,)}
    if architecture in ("llama", "phi3", "qwen3"):
        ends |= {"output.weight": (V, E)}
    return ends | {f"blk.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}


def _write(path, architecture: str, dtype: str, also=None, **more) -> None:
    """Writes a file with random tensors by the library of the format."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_block_count(2)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(M)
    writer.add_head_count(HEADS)
    writer.add_context_length(32)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(KV)
        writer.add_key_length(D)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(5000.0)
    if architecture == "gemma2":
        writer.add_sliding_window(8)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(V)])
    writer.add_token_merges(["t 1"])
    for name, shape in _shapes(architecture).items():
        values, kind = rng.normal(0, 0.5, shape).astype(np.float32), TYPES[dtype] if len(shape) > 1 else 0
        of_type = gguf.GGMLQuantizationType(kind)
        if kind == 1:
            writer.add_tensor(name, values.astype(np.float16))
        elif kind:
            writer.add_tensor(name, gguf.quants.quantize(values, of_type), raw_dtype=of_type)
        else:
            writer.add_tensor(name, values)
    for name, values in more.items():
        writer.add_tensor(name, values)
    if also:
        also(writer)
    _finish(writer)


def _finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _model(path) -> Any:
    return read_spec(Request(("model=from_hf", f"model.path={path}")), then=lambda spec: spec.model)


@pytest.mark.parametrize(("architecture", "dtype"), [
    *((architecture, "F32") for architecture in ARCHITECTURES), ("llama", "F16"), ("qwen2", "BF16"), ("gpt2", "Q8_0"),
    ("llama", "Q8_0"),
])  # fmt: skip
def test_a_file_is_read_as_by_transformers(architecture, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    _write(path, architecture, dtype)
    parsed = reader.load_gguf_checkpoint(str(path), return_tensors=False)
    # It leaves the width of GPT-2's layers at its default, and knows no token for padding.
    width = {"n_inner": parsed["config"].pop("feed_forward_length")} if architecture == "gpt2" else {}
    config = transformers.AutoConfig.for_model(**parsed["config"] | width | {"pad_token_id": None})
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    loaded = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)
    folder, model = open_folder(path), _model(path)
    named = tensors_in(model, folder.tensors, folder.model_type)
    match_folder(folder, named, (), ())
    theirs = {name: x.float().numpy() for name, x in loaded["tensors"].items()}
    assert folder.tensors.keys() >= theirs.keys()
    for name, x in theirs.items():
        assert folder.tensors[name].shape == x.shape
        np.testing.assert_allclose(folder.tensors[name].values().astype(np.float32), x, rtol=1e-6, err_msg=name)
    assert model.num_layers == 2
    assert (model.rope_theta or 5000.0) == 5000.0
    again = _model_of_transformers(config, tmp_path / "again")
    ours, others = model.model_dump(), again.model_dump()
    others["norm_epsilon"] = pytest.approx(ours["norm_epsilon"], rel=1e-6)  # theirs is a float32
    # transformers leaves these at defaults, and ours are what the file says: a head's width, a length.
    assert (model.head_dim, model.num_positions or 32, model.attention_scale) == (D, 32, None)
    assert {key for key in ours if ours[key] != others[key]} <= {"head_dim", "num_positions", "attention_scale"}


def _model_of_transformers(config, folder):
    config.save_pretrained(folder)
    return read_spec(
        Request(("model=from_hf", f"model.path={folder}", "checkpoint.weights_from=null")), then=lambda spec: spec.model
    )


def test_other_types_and_broken_files_are_named_with_what_to_do(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.int8))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(ConfigError, match=r"type I8 \(token_embd.weight\), which the library gguf does not read"):
        open_folder(path)
    _write(path, "llama", "F32")
    content = path.read_bytes()
    for length in (3, 200, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"truncated|is not a GGUF file"):
            open_folder(path)
    _write(path, "mamba", "F32")
    with pytest.raises(ConfigError, match="'mamba' is not read from GGUF"):
        open_folder(path)


def test_the_stretch_of_llama_3_is_found_by_its_factors(tmp_path):
    path = tmp_path / "model.gguf"
    turns = 5000.0 ** -(np.arange(0, D, 2) / D)
    smooth = np.clip((8192 * turns / (2 * np.pi) - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    _write(path, "llama", "F32", **{"rope_freqs.weight": factors})
    assert _model(path).rope_scaling.factor == 8.0
    _write(path, "llama", "F32", **{"rope_freqs.weight": factors * 2})
    with pytest.raises(ConfigError, match="are the factors of no known stretch"):
        open_folder(path)


PLAIN = {"vocab_size": V, "hidden_size": E, "intermediate_size": M, "num_hidden_layers": 2,
         "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 32}  # fmt: skip
CONVERTED = {
    "llama": transformers.LlamaConfig(**PLAIN),
    "mistral": transformers.MistralConfig(**PLAIN, head_dim=D, sliding_window=8),
    "mixtral": transformers.MixtralConfig(**PLAIN, num_local_experts=4),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **PLAIN, head_dim=D, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma": transformers.GemmaConfig(**PLAIN, head_dim=D),
    "gemma2": transformers.Gemma2Config(**PLAIN, head_dim=D, sliding_window=8, query_pre_attn_scalar=D),
    "gemma3": transformers.Gemma3TextConfig(**PLAIN, head_dim=D, sliding_window=8, query_pre_attn_scalar=D),
    "phi3": transformers.Phi3Config(**PLAIN, pad_token_id=0),
}
LLAMA_CPP = {"mistral": "llama", "mixtral": "llama"}
STACKS = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}


def _convert(folder, path, kind: str, dtype: str = "F32", *, are_experts_apart: bool = False) -> None:
    """Writes a folder of transformers as the converter of llama.cpp does: by the names that the library knows, with
    rotary pairs of Llama as neighbours, and Gemma's norms as scales."""
    config, named = json.loads((folder / "config.json").read_text()), LLAMA_CPP.get(kind, kind)
    writer, of_type = gguf.GGUFWriter(path, named), gguf.GGMLQuantizationType[dtype]
    for add, value in (
        (writer.add_block_count, 2), (writer.add_embedding_length, E), (writer.add_feed_forward_length, M),
        (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV), (writer.add_context_length, 32),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]), (writer.add_vocab_size, V),
        (writer.add_rope_dimension_count, D), (writer.add_sliding_window, config.get("sliding_window")),
        (writer.add_expert_count, config.get("num_local_experts", config.get("num_experts"))),
        (writer.add_expert_used_count, config.get("num_experts_per_tok")),
        (writer.add_expert_feed_forward_length, config.get("moe_intermediate_size")),
        (writer.add_attn_logit_softcapping, config.get("attn_logit_softcapping")),
        (writer.add_final_logit_softcapping, config.get("final_logit_softcapping")),
    ):  # fmt: skip
        if value is not None:
            add(value)
    rope = config["rope_parameters"]
    writer.add_file_type({"F32": 0, "BF16": 32}.get(dtype, 7))
    writer.add_rope_freq_base((rope if "rope_theta" in rope else rope["full_attention"])["rope_theta"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == named)
    names, stacks = gguf.get_tensor_name_map(arch, 2), dict[str, dict[int, np.ndarray]]()
    for name, x in load_file(folder / "model.safetensors").items():
        if expert := re.fullmatch(r"model\.layers\.(\d)\..*experts\.(\d)\.(\w+)\.weight", name):
            stacks.setdefault(f"blk.{expert[1]}.ffn_{STACKS[expert[3]]}", {})[int(expert[2])] = x
            continue
        if named == "llama" and (side := re.search(r"\.([qk])_proj", name)):
            heads = HEADS if side[1] == "q" else KV
            x = x.reshape(heads, 2, D // 2, -1).swapaxes(1, 2).reshape(x.shape)
        if named.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        _add(writer, names.get_name(name, try_suffixes=(".weight",)), x, of_type)
    for name, found in stacks.items():
        if are_experts_apart:
            for number, x in found.items():
                _add(writer, f"{name}.{number}.weight", x, of_type)
        else:
            _add(writer, f"{name}_exps.weight", np.stack([found[n] for n in range(4)]), of_type)
    _finish(writer)


def _add(writer, name: str, x: np.ndarray, of_type) -> None:
    if x.ndim == 1 or of_type.name == "F32":
        writer.add_tensor(name, x.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quants.quantize(x, of_type), raw_dtype=of_type)


@pytest.mark.parametrize(("kind", "dtype", "are_experts_apart"), [
    *((kind, "F32", False) for kind in CONVERTED), ("mixtral", "F32", True), ("mixtral", "Q8_0", False),
    ("qwen3moe", "Q5_1", False), ("gemma3", "Q4_0", False), ("llama", "BF16", False),
])  # fmt: skip
def test_a_converted_folder_is_the_folder(kind, dtype, are_experts_apart, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONVERTED[kind])
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    model.save_pretrained(tmp_path / "hf")
    _convert(tmp_path / "hf", tmp_path / "model.gguf", kind, dtype, are_experts_apart=are_experts_apart)
    theirs, ours = open_folder(tmp_path / "hf"), open_folder(tmp_path / "model.gguf")
    config = _model(tmp_path / "model.gguf")
    assert config == _model(tmp_path / "hf")
    match_folder(ours, tensors_in(config, ours.tensors, ours.model_type), (), ())
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.dtype == {"F32": "float32", "BF16": "bfloat16"}.get(dtype)
    step = {"F32": 1e-6, "BF16": 0.01, "Q8_0": 0.01, "Q5_1": 0.06, "Q4_0": 0.14}[dtype]  # of the range of its block
    for name, tensor in theirs.tensors.items():
        np.testing.assert_allclose(ours.tensors[name].values(), tensor.values(), atol=step, err_msg=name)


def test_numbers_in_few_bits_are_what_the_library_says(tmp_path):
    path, rng = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    expected = {}
    for name, kind in (("token_embd.weight", "Q4_K"), ("output.weight", "Q6_K"), ("blk.0.ffn_up.weight", "IQ4_XS")):
        of_type = gguf.GGMLQuantizationType[kind]
        blocks = rng.integers(0, 60, (6, 2 * gguf.GGML_QUANT_SIZES[of_type][1]), np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=of_type)
        expected[name] = gguf.quants.dequantize(blocks, of_type)
    _finish(writer)
    header = read_gguf(path)
    for name, x in expected.items():
        assert header.tensors[name].shape == (6, 512)
        np.testing.assert_array_equal(gguf_values(path, header.tensors[name]), x)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("llama.attention.scale", 0.5, "llama.attention.scale: 0.5: this key is not known"),
    ("llama.rope.dimension_count", 8, "rope.dimension_count: is 8, and a head of queries and keys has 16"),
    ("general.type", "adapter", "is 'adapter', and the file of a whole model is read"),
    ("split.count", 3, "is 3: the model is in so many files"),
])  # fmt: skip
def test_keys_that_change_the_model_are_not_passed_over(key, value, says, tmp_path):
    def more(writer) -> None:
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.kv_data[0].pop(key, None)
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)

    _write(tmp_path / "model.gguf", "llama", "F32", also=more)
    with pytest.raises(ConfigError) as raised:
        _model(tmp_path / "model.gguf")
    assert says in str(raised.value)
