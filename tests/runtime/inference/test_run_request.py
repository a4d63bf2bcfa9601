"""A run directory, or a folder of published weights, as the request that opens its weights."""

import json
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request
from meshloom.runtime.cli.app import parse_flags
from meshloom.runtime.cli.commands import Command
from meshloom.runtime.inference.run_request import request_of_run
from meshloom.runtime.rundir.folders import recorded_run

OF_ITS_WEIGHTS = (
    "sharding=fsdp_tensor", "mesh.tensor=2", "data=text_files", "data.source.paths=[a.txt]", "model.num_layers=3",
)  # fmt: skip
DECLARED = (
    *OF_ITS_WEIGHTS, "hydra.run.dir=runs/a", "artifact=x", "checkpoint.every_num_steps=9", "compilation_cache=c",
    "evaluation.tasks_path=tasks", "compiler_options.xla_dump_to=there",
)  # fmt: skip
OPENS = Command("evaluate", "", "", opens_weights=True)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run_a"
    folder.mkdir()
    with recorded_run(folder, "train", Request(DECLARED)):
        return folder


def _error(place: Path | str) -> str:
    with pytest.raises(ConfigError) as raised:
        request_of_run(str(place), ())
    return str(raised.value)


def test_a_run_is_opened_by_its_own_words_less_those_of_its_files_processes_and_code(run_dir):
    request = request_of_run(str(run_dir), ("num_microbatches=2",))
    weights = f"checkpoint.weights_from={run_dir}/checkpoints"
    assert request.overrides == (*OF_ITS_WEIGHTS, "num_microbatches=2", weights)
    assert request_of_run(f"{run_dir}/checkpoints/20", ()).overrides[-1] == f"{weights}/20"
    assert request_of_run(f"{run_dir}/checkpoints", ()).overrides[-1] == weights


@pytest.mark.parametrize(("typed", "left"), [
    ("sharding=ddp", OF_ITS_WEIGHTS[2:]),  # which brings its own mesh
    ("data=jsonl", (*OF_ITS_WEIGHTS[:2], OF_ITS_WEIGHTS[4])),
    ("data.source.paths=[b.txt]", OF_ITS_WEIGHTS),
])  # fmt: skip
def test_a_group_that_is_chosen_anew_takes_none_of_the_old_keys(run_dir, typed, left):
    assert request_of_run(str(run_dir), (typed,)).overrides[:-1] == (*left, typed)


def test_checkpoints_are_read_where_the_run_put_them(run_dir):
    (run_dir / "spec.yaml").write_text("checkpoint: {directory: s3://bucket/run}\n")
    assert request_of_run(f"{run_dir}/checkpoints/7", ()).overrides[-1] == "checkpoint.weights_from='s3://bucket/run/7'"


def test_a_folder_of_published_weights_declares_its_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    declared = ("model=from_hf", "seed=1", f"model.path={tmp_path}", f"checkpoint.weights_from='hf:{tmp_path}'")
    for place in (f"{tmp_path}", f"hf:{tmp_path}"):
        assert request_of_run(place, ("seed=1",)).overrides == declared


def test_what_is_no_folder_of_weights_is_one_error_that_says_what_to_name(run_dir, tmp_path):
    name = "name a run directory (`meshloom runs` lists them), RUN/checkpoints/STEP, or a folder of published weights"
    assert _error(tmp_path / "run_b") == (
        f"error: {tmp_path}/run_b: there is no such directory\n  fix: {name} (did you mean '{run_dir}'?)"
    )
    neither = "is neither the directory of a trained run nor a folder of published weights"
    assert _error(tmp_path) == f"error: {tmp_path}: {neither}\n  fix: {name}, such as {run_dir}"
    assert "holds no config.json with safetensors files" in _error(f"hf:{run_dir}")
    assert "is a URL" in _error("gs://bucket/run")
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | {"request": None}))
    assert "records no overrides" in _error(run_dir)


def test_a_run_of_somebody_else_sends_no_value_of_this_machine(tmp_path):
    paths = "data.source.paths=['https://host/${oc.env:TOKEN}']"
    with recorded_run(tmp_path, "train", Request(("data=text_files", paths))):
        assert "records a URL with a value in it" in _error(tmp_path)


@pytest.mark.parametrize(("words", "what"), [
    ((), "the line names no folder of weights"),
    (("a", "b"), "the line names 2 folders (a, b)"),
    (("-m", "a", "seed=1,2"), "opens one folder, and -m asks for several"),
])  # fmt: skip
def test_a_line_names_one_folder(words, what):
    _, problems = parse_flags(OPENS, words)
    assert [what in problem.what for problem in problems] == [True]


def test_the_folder_may_stand_anywhere_and_be_named_like_a_point_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("seed=1,sharding=ddp").mkdir()
    for place in ("runs/a", "seed=1,sharding=ddp"):
        flags, problems = parse_flags(OPENS, (place, "seed=1"))
        assert (flags.place, flags.overrides, problems) == (place, ["seed=1"], [])
    assert parse_flags(OPENS, ("seed=1", "runs/a"))[0].place == "runs/a"
