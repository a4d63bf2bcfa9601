"""A GGUF file is read as transformers reads it: the same model, and the same values under the same names."""

from typing import Any

import numpy as np
import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
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


def _write(path, architecture: str, dtype: str, **more) -> None:
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
    blocks = np.zeros((4, 2 * 18), np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    with pytest.raises(ConfigError, match=r"type Q4_0 \(token_embd.weight\); read are F32, F16, BF16, Q8_0"):
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
