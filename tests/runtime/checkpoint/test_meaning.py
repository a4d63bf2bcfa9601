"""What the weights of a checkpoint mean: by its own record, and of an older one by the declaration of its run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import SMALL, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.pinned import Pinned
from meshloom.runtime.checkpoint.meaning import RECORD, meaning_of, meaning_record, said_of_weights
from meshloom.runtime.core.files import write_manifest
from meshloom.runtime.inference.run_request import request_of_run
from meshloom.runtime.rundir.folders import recorded_run

CHATS = ("data=chats", "data.source.paths=[a.jsonl]", "data/tokenizer=huggingface", "data.tokenizer.path=tok")
SHA = {"data.tokenizer.sha256": "1"}


def _saved(run_dir: Path, step: Any = 3, **data: Any) -> Path:
    path = run_dir / f"checkpoints/{step}"
    (path / "data").mkdir(parents=True)
    (path / "data/data.json").write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(("words", "identity", "says"), [
    ((), SHA, None),
    (("data.tokenizer.path=elsewhere",), SHA, None),  # the same file
    (("model.dropout_rate=0.3", "optimizer=sgd", "data.source.paths=[b.jsonl]"), SHA, None),
    (("model.norm_epsilon=0.1",), SHA, "model.norm_epsilon 1e-05 there, 0.1 here"),
    (("adapter=lora",), SHA, "adapter None there, lora here"),
    ((), {"data.tokenizer.sha256": "2"}, "data.tokenizer.sha256 1 there, 2 here"),
    (("data.source.template=t.jinja",), SHA, "data.source.template None there, t.jinja here"),
])  # fmt: skip
def test_what_changes_the_meaning_of_weights_is_said_and_nothing_else(words, identity, says, tmp_path):
    base = (*SMALL[:-2], *CHATS)
    data = {"identity": SHA, RECORD: meaning_record(spec_of(*base).as_written(), None)}
    lines = meaning_of(_saved(tmp_path, **data)).differences(spec_of(*base, *words).as_written(), identity)
    assert len(lines) == (1 if says else 0)
    assert (says or "") in "".join(lines)


def test_an_older_checkpoint_is_opened_by_its_run_and_says_so(tmp_path):
    path, spec = _saved(tmp_path, identity={}), spec_of(*SMALL, "model.rope_theta=7.0")
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec.as_written()))
    meaning = meaning_of(path)
    assumed = "checkpoint 3 does not say what its weights mean: its run directory is assumed to say it"
    assert meaning.differences(spec.as_written()) == [assumed]
    warned, last = meaning.differences(spec_of(*SMALL).as_written())
    assert "model.rope_theta 7.0 there" in warned
    assert last == assumed


@pytest.mark.parametrize(("damage", "what"), [
    (lambda file: file.unlink(), "cannot be read"),
    (lambda file: file.write_text(file.read_text()[:-9]), "is not valid JSON"),
    (lambda file: file.write_text("[]"), "is not a JSON object"),
    (lambda file: file.write_text(file.read_text().replace("10000.0", "10.0")), "is not as it was saved"),
    (lambda file: _resaved(file, RECORD, {}), "does not say what its weights mean"),
    (lambda file: _resaved(file, RECORD, {"values": {"model": "?", "adapter": None, "data.tokenizer": None}}), "mean"),
    (lambda file: _resaved(file, RECORD, {"request": {"overrides": 3}}), "which words declared its weights"),
])  # fmt: skip
def test_a_damaged_record_is_an_error_that_names_its_file_and_no_other_words_are_taken(damage, what, tmp_path):
    """run.json says what was typed last, which may be something else."""
    record = meaning_record(spec_of(*SMALL).as_written(), None)
    with recorded_run(tmp_path, "train", Request((*SMALL, "model.rope_theta=3.0"))):
        path = _saved(tmp_path, identity={}, **{RECORD: record})
        write_manifest(path, step=3)
        assert request_of_run(str(tmp_path), ()).pinned == Pinned.of(record["values"], ())
        damage(path / "data/data.json")
        for place in (tmp_path, path):
            with pytest.raises(ConfigError) as caught:
                request_of_run(str(place), ())
            (problem,) = caught.value.problems
            assert problem.where == str(path / "data/data.json")
            assert what in problem.what
        write_manifest(
            _saved(tmp_path, 2, identity={}, **{RECORD: record}), step=2
        )  # is opened where a newer one is damaged
        assert request_of_run(str(tmp_path), ()).pinned == Pinned.of(record["values"], ())


def _resaved(file: Path, key: str, value: Any) -> None:
    """Changes a part of a record, in a checkpoint that is whole."""
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {key: (data[key] | value if value else value)}))
    (file.parents[1] / "manifest.json").unlink()
    write_manifest(file.parents[1], step=3)


@pytest.mark.parametrize("typed", [(), ("model.rope_theta=3.0",), ("model.num_layers=5", "adapter=rslora")])
def test_pinned_values_hold_but_where_the_user_types(typed):
    trained = spec_of(*SMALL, "model.rope_theta=7.0", "adapter=lora", "adapter.alpha=3")
    pinned = Pinned.of(said_of_weights(trained.as_written()), [each.split("=")[0] for each in typed])
    stale = ("model=gpt2_124m", "adapter.alpha=99")
    found = read_spec(Request(("model=tiny", *SMALL, "adapter=lora", *stale[1:], *typed), pinned=pinned), lambda s: s)
    own = {key: value for key, value in (("rope_theta", 3.0), ("num_layers", 5)) if f"model.{key}={value}" in typed}
    assert found.model == trained.model.model_copy(update=own)
    if "adapter=rslora" in typed:
        assert found.adapter is not None
        assert found.adapter.kind == "rslora"
    else:
        assert found.adapter == trained.adapter
    if not typed:
        assert read_spec(Request((*SMALL[6:], *stale[:1]), pinned=pinned), lambda s: s).model == trained.model
