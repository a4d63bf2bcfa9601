"""A folder of PEFT is read as a start of training, or merged into its base; what it holds besides is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.models.adapter import is_adapter
from meshloom.models.published.peft import write_peft
from meshloom.runtime.weights.find import PublishedWeights, find_weights
from meshloom.runtime.weights.load import load_params
from meshloom.runtime.weights.write import write_peft_folder
from support.published import write_published

MODELS = {
    "llama": ("model.num_layers=2", "model.num_kv_heads=4", "model.mlp_dim=40"),
    "gpt2": (
        "model=gpt2_124m", "model.embed_dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4",
        "model.head_dim=8", "model.mlp_dim=40", "model.num_positions=32", "model.vocab_size=264",
    ),
}  # fmt: skip
ADAPTER = ("adapter=lora", "adapter.rank=3", "adapter.alpha=5")
ONE = ("target=cpu-1", "logging=quiet")


def _words(family: str, *more: str) -> tuple[str, ...]:
    return (*MODELS[family], *ONE, *more)


def _spec(*words: str) -> Any:
    return read_spec(Request(words), then=lambda spec: spec)


def _written(folder: Path, family: str, *adapter: str) -> dict[str, np.ndarray]:
    """Writes a base and an adapter with random entries. Returns the adapter's parameters by path."""
    plan = plan_run(spec_of(*_words(family, *(adapter or ADAPTER))))
    write_published(folder / "base", plan.spec.model, dtype="float32")
    rng = np.random.default_rng(1)
    shapes = {path: x.shape for path, x in leaves_by_path(plan.model.abstract()).items() if is_adapter(path)}
    params = {path: rng.normal(0, 0.3, shape).astype(np.float32) for path, shape in shapes.items()}
    tensors, config = write_peft(plan.spec.model, plan.model, params, base=str(folder / "base"))
    write_peft_folder(folder / "peft", tensors, config)
    return params


def _read(folder: Path, *words: str) -> tuple[PublishedWeights, dict[str, np.ndarray]]:
    plan = plan_run(spec_of(*words, f"checkpoint.weights_from=hf:{folder / 'peft'}"))
    weights = find_weights(plan)
    assert isinstance(weights, PublishedWeights)
    params = load_params(plan, plan.mesh.of_devices(jax.devices()[:1]), weights, Console(is_quiet=True))
    return weights, {path: np.asarray(x, np.float32) for path, x in leaves_by_path(params).items()}


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("family", MODELS)
def test_an_adapter_goes_on_where_it_is_declared_and_is_merged_where_it_is_not(family, tmp_path):
    written = _written(tmp_path, family)
    weights, params = _read(tmp_path, *_words(family, *ADAPTER, "precision.frozen=float32"))
    assert weights.fresh == ()
    assert weights.base == f"hf:{tmp_path / 'base'}"
    assert written.keys() == {path for path in params if is_adapter(path)}
    for path, x in written.items():
        np.testing.assert_allclose(params[path], x, rtol=1e-6, err_msg=path)
    _, merged = _read(tmp_path, *_words(family))
    changed = {path for path in merged if not np.array_equal(merged[path], params[path])}
    assert changed == {path.replace("adapter/", "").rpartition("/")[0] for path in written}
    path = "layers/mlp/up_EM"  # the formula of LoRA, in float64
    a, b = (written[f"layers/adapter/mlp/up_EM/lora_{side}"].astype(np.float64) for side in "AB")
    np.testing.assert_allclose(merged[path], params[path] + 5 / 3 * (a @ b), atol=1e-5)


def test_an_adapter_of_joined_matrices_that_peft_trained_starts_as_one_for_each(tmp_path):
    _written(tmp_path, "gpt2", *ADAPTER, "adapter.targets=[layers/attention/*]")
    rng, file = np.random.default_rng(3), tmp_path / "peft/adapter_model.safetensors"
    own = {  # of one rank, as PEFT makes it for c_attn
        name: rng.normal(0, 0.3, (3, x.shape[1]) if "lora_A" in name else (x.shape[0], 3)).astype(np.float32)
        for name, x in load_file(file).items()
    }
    save_file(own, file)
    said = json.loads((tmp_path / "peft/adapter_config.json").read_text()) | {"rank_pattern": {}, "alpha_pattern": {}}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(said))
    words = (*_words("gpt2", *ADAPTER), "adapter.targets=[layers/attention/*]", "precision.frozen=float32")
    _, params = _read(tmp_path, *words)
    _, merged = _read(tmp_path, *_words("gpt2"))
    for part in ("query_EHD", "key_EKD", "value_EKD", "out_HDE"):
        a, b = (params[f"layers/adapter/attention/{part}/lora_{side}"].astype(np.float64) for side in "AB")
        product = np.stack([x.reshape(-1, 3) @ y.reshape(3, -1) for x, y in zip(a, b, strict=True)])
        base = params[f"layers/attention/{part}"]
        expected = base + 5 / 3 * product.reshape(base.shape)
        np.testing.assert_allclose(merged[f"layers/attention/{part}"], expected, atol=1e-5)


def test_rows_are_added_for_tokens_beyond_the_tables(tmp_path):
    write_published(tmp_path / "peft", spec_of(*_words("llama")).model, dtype="float32")
    there = load_file(tmp_path / "peft/model.safetensors")
    weights, params = _read(tmp_path, *_words("llama", "model.vocab_size=270"))
    assert any(line.startswith("6 rows are added to the tables") for line in weights.differs)
    for path, name in (("embed/table_VE", "model.embed_tokens.weight"), ("head/kernel_EV", "lm_head.weight")):
        table = params[path] if "embed" in path else params[path].T
        np.testing.assert_array_equal(table[:264], there[name])
        np.testing.assert_allclose(table[264:], np.tile(there[name].mean(axis=0), (6, 1)), atol=1e-6)
    tokens = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 271, "content": "b"}]}
    (tmp_path / "peft/tokenizer.json").write_text(json.dumps(tokens))
    words = ("model=from_hf", f"model.path={tmp_path / 'peft'}", "model.vocab_size=auto", *ONE)
    assert _spec(*words).model.vocab_size == 272


@pytest.mark.parametrize(("said", "words", "what"), [
    ({"use_dora": True}, (), "has no lengths of DoRA, and use_dora is True"),
    ({"modules_to_save": ["lm_head"]}, (), "modules_to_save: names 'lm_head', and the folder does not hold it"),
    ({"peft_type": "IA3"}, (), "peft_type: is IA3, and LORA is read"),
    ({"lora_bias": True}, (), "lora_bias: is True: this is not read"),
    ({"init_lora_weights": "pissa_niter_4"}, (), "by which the base has other weights"),
    ({"base_model_name_or_path": "meta-llama/Llama-3-8B"}, (), "names 'meta-llama/Llama-3-8B' as its base"),
    ({}, ("adapter=lora", "adapter.rank=4", "adapter.alpha=5"), "adapter=lora adapter.rank=3 adapter.alpha=5"),
    ({}, (*ADAPTER, "adapter.targets=[layers/mlp/*]"), "adapter.targets=[layers/attention/key_EKD,"),
    ({}, ("model.mlp_dim=48",), "holds adapters of matrices that the base"),
])  # fmt: skip
def test_what_is_not_read_is_named_with_what_to_do(said, words, what, tmp_path):
    _written(tmp_path, "llama")
    file = tmp_path / "peft/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    if "model.mlp_dim=48" in words:
        write_published(tmp_path / "base", spec_of(*_words("llama", *words)).model, dtype="float32")
    with pytest.raises(ConfigError) as raised:
        _read(tmp_path, *_words("llama", *words))
    assert what in str(raised.value)


def test_a_folder_of_peft_declares_the_model_and_the_tokenizer_of_its_base(tmp_path):
    _written(tmp_path, "llama")
    (tmp_path / "base/tokenizer.json").write_text("{}")
    spec: Any = _spec("model=from_hf", f"model.path={tmp_path / 'peft'}", *ONE)
    assert spec.model.mlp_dim == 40
    assert spec.data.tokenizer.path == str(tmp_path / "base")
    assert spec.checkpoint.weights_from == f"hf:{tmp_path / 'peft'}"
    (tmp_path / "base").rename(tmp_path / "moved")
    words = ("model=from_hf", f"model.path={tmp_path / 'moved'}", f"checkpoint.weights_from=hf:{tmp_path / 'peft'}")
    assert _spec(*words, *ONE).checkpoint.base_from == f"hf:{tmp_path / 'moved'}"
