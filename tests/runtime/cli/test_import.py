"""`meshloom import` as it is typed: what it prints and writes, and that this composes."""

import json
import shlex

import pytest

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.runtime.cli.main import run

WORDS = ["import", "maxtext", "model_name=llama2-7b", "per_device_batch_size=2", "sa_block_q=512",
         "remat_policy=custom", "decoder_layer_input=offload", "key_proj=device",
         "compile_xla_flags=--xla_enable_async_all_gather=true", "steps=100", "target=v5e-16"]  # fmt: skip


def spec_of(*overrides: str, config_dir: str | None = None):
    words = search_path_override(overrides, config_dir)
    return read_spec(Request(tuple(words)), lambda spec: spec.model_dump(mode="json"))


def test_what_is_printed_and_written_declares_the_same(tmp_path, capsys):
    config, script = tmp_path / "experiment/theirs.yaml", tmp_path / "theirs.sh"
    assert run([*WORDS, "--write", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "kernel tiles: sa_block_q" in shown
    assert "compiler_options={1 option of XLA}" in shown
    assert run([*WORDS, "--write", str(script), "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    expected = spec_of(*(each["override"] for each in given["overrides"]))
    command = shlex.split(script.read_text(), comments=True)
    assert command[:2] == ["meshloom", "explain"]
    assert spec_of(*command[2:]) == expected
    assert spec_of("experiment=theirs", config_dir=str(tmp_path)) == expected
    assert given["without_effect"] == {"kernel tiles": ["sa_block_q"]}


def test_mistake_of_the_plan_names_the_key_it_comes_from(capsys):
    assert run([*WORDS, "num_vocab_tiling=7"]) == 2
    shown = capsys.readouterr().err
    assert "loss.num_chunks" in shown
    assert "(from num_vocab_tiling=7)" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import"], "type: meshloom import TRAINER"),
        (["import", "maxtex", "a=1"], "there is no trainer 'maxtex' to import from"),
        (["import", "maxtext", "no_such_file.yml"], "no_such_file.yml"),
        ([*WORDS, "--write", "theirs.yaml"], "name experiment/theirs.yaml"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_error(words, said, capsys):
    assert run(words) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("error:") == 1
