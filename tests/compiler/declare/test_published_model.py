"""A model declared by the folder of a published one: its config.json, with what is set otherwise, and the folder's
weights and tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.choices import model_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.published_model import folder_name
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.models.published import write_config

MODEL = ("model=llama3_405b", "model.num_layers=3", "model.rope_scaling.original_length=64")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the config.json of a small Llama, and a tokenizer."""
    written = write_config(spec_of(*MODEL).model, dtype="bfloat16", max_length=64)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(written))
    (tmp_path / "mine" / "tokenizer.json").write_text("{}")
    return tmp_path / "mine"


def read(folder: Path | str, *overrides: str) -> RunSpec:
    return read_spec(Request(("model=from_hf", f"model.path={folder}", *overrides)), then=lambda spec: spec)


def refused(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        read_spec(Request(("model=from_hf", *overrides)), then=lambda spec: spec)
    return {problem.where: f"{problem.what}: {problem.fix}" for problem in error.value.problems}


def test_the_model_is_that_of_config_json_with_what_is_set_otherwise(folder):
    assert read(folder).model == spec_of(*MODEL).model
    changed = read(folder, "model.rope_scaling.factor=2.0", "model.embeddings=tied", "model.dropout_rate=0.1").model
    assert changed == spec_of(*MODEL, "model.rope_scaling.factor=2.0", "model.embeddings=tied",
                              "model.dropout_rate=0.1").model  # fmt: skip
    assert read(folder, "model.rope_scaling=null").model == spec_of(*MODEL, "model.rope_scaling=null").model


def test_weights_and_tokenizer_are_those_of_the_folder_unless_others_are_named(folder):
    run = read(folder)
    assert run.checkpoint.weights_from == f"hf:{folder}"
    assert run.data.tokenizer is not None
    assert run.data.tokenizer.kind == "huggingface"
    assert str(folder) in run.data.tokenizer.path
    run = read(folder, "data/tokenizer=bytes", "checkpoint.weights_from=elsewhere")
    assert run.checkpoint.weights_from == "elsewhere"
    assert run.data.tokenizer is not None
    assert run.data.tokenizer.kind == "bytes"
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    run = read(folder)
    assert run.data.tokenizer is not None
    assert run.data.tokenizer.kind == "sentencepiece"
    assert read(folder, "checkpoint.weights_from=null").checkpoint.weights_from is None
    assert read(folder, "checkpoint.restore_from=run").checkpoint.weights_from is None


def test_its_name_is_that_of_the_folder(folder):
    request = Request(("model=from_hf", f"model.path={folder}", "model.num_layers=2"))
    assert model_of(request) == "mine (num_layers=2)"
    assert folder_name("/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f") == "Llama-3.1-8B"


def test_every_mistake_is_reported_at_once(folder):
    found = refused(f"model.path={folder}", "model.rope_thta=3", "seed=x")
    assert found.keys() == {"model.rope_thta", "seed"}
    assert "did you mean 'rope_theta'" in found["model.rope_thta"]
    assert refused("seed=x").keys() == {"model.path", "seed"}


def test_a_folder_that_is_not_one_of_a_published_model(folder, tmp_path):
    assert "download it first: hf download meta/Llama" in refused("model.path=meta/Llama")["model.path"]
    assert f"give the folder that has it: {folder}" in refused(f"model.path={tmp_path}")["model.path"]
    assert f"give its folder: {folder}" in refused(f"model.path={folder}/config.json")["model.path"]
    assert "is a URL" in refused("model.path='gs://bucket/model'")["model.path"]
    assert "3 is not a path" in refused("model.path=3")["model.path"]


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("{", "", "is not valid JSON"),
        ("\xff", "", "is not valid JSON"),
        ('{"vocab_size": NaN}', "", "NaN is not a number of JSON"),
        ("[]", "", "is not a JSON object"),
        ({"architectures": ["LamaForCausalLM"]}, ": architectures", "did you mean 'LlamaForCausalLM'"),
        ({"rope_scaling": {"type": "spiral"}}, ": rope_scaling.rope_type", "'spiral' is not implemented"),
        ({"quantization_config": {"bits": 4}}, ": quantization_config", "convert the weights to bfloat16"),
    ],
)
def test_a_config_json_that_is_not_understood(folder, text, key, what):
    file = folder / "config.json"
    values: Any = text if isinstance(text, str) else json.dumps(json.loads(file.read_text()) | text)
    file.write_text(values, encoding="latin-1")
    found = refused(f"model.path={folder}", "seed=x")
    assert found.keys() == {f"{file}{key}", "seed"}
    assert what in found[f"{file}{key}"]
