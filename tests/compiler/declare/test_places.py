"""Places that a declaration names: `~` is a home directory in each of them, and a URL works or is refused at once."""

from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.key_paths import value_at
from meshloom.compiler.declare.compose import Request, hydra_arguments, hydra_run_dir, hydra_sweep_dir, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.runtime.checkpoint.find import parse_place
from meshloom.runtime.compile.artifact import cached_compilation
from meshloom.runtime.core.files import folder_at
from meshloom.runtime.rundir.run_dir import only_run_that_saves_in

FOLDERS = ("shards.directory", "checkpoint.restore_from", "artifact", "compilation_cache", "data.source.directory",
           "data.tokenizer.path", "checkpoint.directory")  # fmt: skip
CHOICES = ("data=tokens", "data/tokenizer=huggingface")


def _spec(*overrides):
    """Reads a declaration anew, as the environment is another one."""
    return read_spec(Request(overrides), then=lambda spec: spec)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("typed", ["~/a b", "file://HOME/a%20b", "file://localhostHOME/a%20b"])
def test_home_and_file_are_paths_in_every_key(typed, home):
    values = _spec(*CHOICES, *(f"{key}='{typed.replace('HOME', str(home))}'" for key in FOLDERS)).model_dump()
    assert {key: value_at(values, key) for key in FOLDERS} == dict.fromkeys(FOLDERS, f"{home}/a b")


def test_home_is_expanded_in_lists_without_quotes(home):
    spec = _spec("data=text_files", "data.source.paths=[~/*.txt,b.txt,~/c.txt]")
    assert spec.data.source.model_dump()["paths"] == (f"{home}/*.txt", "b.txt", f"{home}/c.txt")


def test_home_is_expanded_in_the_directories_that_hydra_makes(home):
    year = "${now:%Y}"
    request = Request((f"hydra.run.dir=~/runs/{year}", f"hydra.sweep.dir=file://{home}/sweeps"))
    assert hydra_run_dir(request).parent == home / "runs"
    assert hydra_run_dir(request).name.isdecimal()
    assert hydra_sweep_dir(request) == home / "sweeps"
    assert f"hydra.run.dir='{home}/runs/{year}'" in hydra_arguments(request)  # what Hydra itself is told


@pytest.mark.parametrize("place", ["hdfs://bucket/run", "~nosuchuser/x", "file://other/x"])
@pytest.mark.parametrize("keys", [FOLDERS, ("hydra.run.dir", "hydra.sweep.dir")])
def test_other_places_are_errors_before_anything_starts(keys, place):
    wrong = {*keys} - ({"data.source.directory"} if place.startswith("hdfs:") else set())  # which fsspec may open
    with pytest.raises(ConfigError) as error:
        read_spec(Request((*CHOICES, *(f"{key}={place}" for key in keys))), then=lambda spec: spec)
    assert sorted(problem.where for problem in error.value.problems) == sorted(wrong)
    assert place.partition("/")[0] in str(error.value)


def test_a_config_file_with_a_home_is_told_how_to_write_it(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nhydra: {run: {dir: ~/runs}}\nartifact: null\n"
    )
    request = Request((f"hydra.searchpath=[file://{tmp_path},meshloom://targets]", "experiment=mine"))
    with pytest.raises(ConfigError, match=r"oc\.env:HOME"):
        read_spec(request, then=lambda spec: spec)


def test_a_link_to_itself_is_a_path_like_others(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert hydra_run_dir(Request((f"hydra.run.dir={tmp_path}/loop",))) == tmp_path / "loop"
    with pytest.raises(ConfigError, match=r"checkpoint\.directory"), only_run_that_saves_in(f"{tmp_path}/loop"):
        pass


def test_a_folder_of_configs_may_be_below_home(home):
    (home / "configs").mkdir()
    (override,) = search_path_override([], "~/configs")
    assert f"file://{home}/configs" in override
    with pytest.raises(ConfigError, match="--config-dir"):
        search_path_override([], "gs://bucket/configs")


def test_array_records_are_not_read_behind_urls():
    with pytest.raises(ConfigError) as error:
        _spec("data=array_record", "data.source.paths=['gs://b/*']")
    assert [problem.where for problem in error.value.problems] == ["data.source.paths[0]"]


def test_shards_are_read_behind_urls_and_written_on_a_disk():
    spec = _spec("data=tokens", "data.source.directory=gs://b/tokens/")
    assert spec.data.source.model_dump()["directory"] == "gs://b/tokens"
    with pytest.raises(ConfigError) as error:
        _spec("data=tokens", "data.source.directory=s3://", "shards.directory=s3://b/tokens")
    problems = {problem.where: problem for problem in error.value.problems}
    assert problems.keys() == {"data.source.directory", "shards.directory"}
    assert problems["shards.directory"].fix.endswith("aws s3 sync tokens s3://b/tokens")


def test_jax_is_given_the_url_of_a_cache_and_a_warning_says_where_it_cannot_be_used():
    """No bucket can be reached here: that its address arrives unchanged is shown by what refuses it."""
    assert _spec("compilation_cache=gs://bucket/xla").compilation_cache == "gs://bucket/xla"
    with cached_compilation("gs://bucket/xla") as use:
        pass
    (warning,) = use.warnings
    assert warning.startswith("gs://bucket/xla cannot be used as compilation_cache")
    assert not Path("gs:").exists()


@pytest.mark.parametrize("place", ["az://bucket/run", "memory://run", "s3://", "gs:///"])
def test_checkpoints_are_behind_the_urls_that_tensorstore_opens(place):
    assert _spec("checkpoint.directory=gs://bucket/run/").checkpoint.directory == "gs://bucket/run"
    assert _spec("checkpoint.restore_from=s3://bucket/run").checkpoint.restore_from == "s3://bucket/run"
    with pytest.raises(ConfigError) as error:
        _spec(f"checkpoint.directory={place}")
    assert [problem.where for problem in error.value.problems] == ["checkpoint.directory"]


def test_a_checkpoint_is_named_by_its_run_or_its_own_folder(tmp_path):
    assert parse_place("gs://b/a/checkpoints/20") == (folder_at("gs://b/a/checkpoints"), 20)
    (tmp_path / "saved" / "20").mkdir(parents=True)
    assert parse_place(f"{tmp_path}/saved") == (tmp_path / "saved", None)
    assert parse_place("runs/a") == (Path("runs/a/checkpoints"), None)
    assert parse_place("runs/a/checkpoints/20") == (Path("runs/a/checkpoints"), 20)
