"""The worst of what can be typed, or lie in a config file: each is one clear error, at once, and never a traceback."""

import time
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.declare.sweep_request import read_sweep_request
from meshloom.runtime.cli.app import parse_flags, request_of_flags
from meshloom.runtime.cli.commands import COMMANDS

NINES = "9" * 5000
ALIASES = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
FILES = {
    "aliases": ALIASES.encode(),
    "own_alias": b"a: &a [*a]\n",
    "deep": b"a: " + b"[" * 3000 + b"]" * 3000 + b"\n",
    "digits": f"num_layers: {NINES}\n".encode(),
    "bytes": b"defaults: [tiny, _self_]\nnum_layers: !!binary aGVsbG8=\n",
    "latin": b"# one\nnum_layers: 5 # gr\xf6\xdfe\n",
    "nul": b"num_layers: 5\0\n",
    "circle": b"defaults: [other, _self_]\n",
    "other": b"defaults: [circle, _self_]\n",
    "scalar": b"5\n",
    "many": b"".join(b"k%d: 0\n" % i for i in range(1_000_000)),
}

# What is typed, where the error lies, and words of it.
TYPED = {
    ("model=aliases",): ("aliases.yaml", "more than 10,000 values"),
    ("model=many",): ("many.yaml", "more than 10,000 values"),
    ("model=own_alias",): ("own_alias.yaml:1", "refers to a node that contains it"),
    ("model=deep",): ("deep.yaml:1", "nested deeper"),
    ("model=digits",): ("digits.yaml", "4300 digits"),
    ("model=bytes",): ("model.num_layers", "bytes"),
    ("model=latin",): ("latin.yaml:2", "not UTF-8"),
    ("model=nul",): ("nul.yaml", "#x0000"),
    ("model=circle",): ("configs", "form a cycle"),
    ("model=scalar",): ("command line", "Invalid loaded object type: int"),
    ("+a0=[1,1,1,1,1,1,1,1,1,1]", *(f"+a{i}=[{','.join([f'${{a{i - 1}}}'] * 10)}]" for i in range(1, 10))): (
        "a4.0", "more than 10,000 values",
    ),
    ("+a0=xxxxxxxxxx", *(f"+a{i}=${{a{i - 1}}}${{a{i - 1}}}" for i in range(1, 40))): ("", "more than 10,000 values"),
    ("seed=${num_steps}", "num_steps=${seed}"): ("seed", "refers to itself: seed -> num_steps -> seed"),
    ("data.source.paths=[${data}]",): ("data", "refers to itself"),
    (f"num_steps={NINES}",): ("command line", "4300 digits"),
    (f"model={'[' * 3000}{']' * 3000}",): ("command line", "nested too deeply"),
    (f"num_steps={'[' * 200}{']' * 200}",): ("", "nested"),
    ("num_steps=\x1b[31m",): ("command line", "control character"),
    ("num_steps='\udcff'",): ("command line", "not UTF-8"),
    ("num_steps='${'",): ("num_steps", "cannot be set"),
    ("run.extra=[1]",): ("run.extra", "cannot be set"),
    ("~nobody/x",): ("nobody/x", "does not exist"),
    ("hydra.run.dir=''",): ("hydra.run.dir", "is empty"),
    ("hydra.run.dir=${nobody}",): ("hydra.run.dir", "nobody"),
    ("hydra.job.chdir=true",): ("hydra.job.chdir", "resolved in the run directory"),
    ("hydra.searchpath=nope",): ("hydra.searchpath", "is not a list"),
    ("hydra.searchpath=[nope]",): ("hydra.searchpath", "there is no file://nope"),
    ("-m", "num_steps=range(1,0)"): ("num_steps", "names no value"),
    ("-m", "num_steps=range(1,9,0)"): ("num_steps", "never ends"),
    ("-m", "num_steps=range(0,1000000000)"): ("num_steps", "more than 100,000 values"),
    ("-m", "seed=range(0,1000)", "num_steps=range(1,1000)"): ("command line", "999,000 points"),
    ("-m", "seed=1,2", "hydra.sweep.subdir=''"): ("hydra.sweep.subdir", "share the directory ''"),
    ("-m", "seed=1,2", "hydra.sweep.subdir=all"): ("hydra.sweep.subdir", "share the directory 'all'"),
    ("-m", "seed=interval(0,1)"): ("seed", "cannot be swept over"),
}  # fmt: skip


@pytest.fixture(scope="module")
def own_configs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "model").mkdir()
    for name, content in FILES.items():
        (folder / "model" / f"{name}.yaml").write_bytes(content)
    return folder


def _judge(words: list[str]) -> None:
    """Does what every command does before anything else."""
    flags, _ = parse_flags(COMMANDS["train"], words)
    request = request_of_flags(flags)
    if flags.multirun:
        read_sweep_request(request)
    else:
        read_spec(request, then=lambda spec: spec)


@pytest.mark.cases(plain=12)
@pytest.mark.parametrize("typed", TYPED, ids=lambda typed: typed[-1][:40].encode("unicode_escape").decode())
def test_a_mistake_is_one_clear_error_at_once(typed, own_configs):
    where, words = TYPED[typed]
    places = [f"--config-dir={own_configs}"] if typed[0].removeprefix("model=") in FILES else []
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        _judge([*places, *typed])
    first = caught.value.problems[0]
    assert first.where.endswith(where)
    assert words in first.what
    assert len(str(caught.value)) < 2000
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(("override", "is_escaped"), [("num_steps='${'", True), ("run.extra=[1]", False)])
def test_only_an_interpolation_is_told_to_be_escaped(override, is_escaped):
    with pytest.raises(ConfigError) as caught:
        _judge([override])
    assert ("${" in caught.value.problems[0].fix) == is_escaped


def test_a_sharding_of_ones_own_has_a_mesh_along_an_axis_that_its_rules_name(tmp_path):
    (tmp_path / "sharding").mkdir()
    (tmp_path / "sharding" / "mine.yaml").write_text("defaults: [_base, _self_]\n")
    words = tuple(search_path_override(("sharding=mine",), str(tmp_path)))
    assert read_spec(Request(words), then=lambda spec: spec).mesh.fsdp == -1
    chosen = read_spec(Request((*words, "mesh=ddp")), then=lambda spec: spec).mesh
    assert (chosen.fsdp, chosen.data) == (1, -1)


def test_a_file_that_chooses_a_sharding_without_a_mesh_is_told_which_mesh_to_add(tmp_path):
    for folder in ("sharding", "experiment"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sharding" / "mine.yaml").write_text("defaults: [_base, _self_]\n")
    choice = "# @package _global_\ndefaults:\n  - override /sharding: mine\n"
    (tmp_path / "experiment" / "first.yaml").write_text(choice)
    words = tuple(search_path_override(("experiment=first",), str(tmp_path)))
    with pytest.raises(ConfigError) as error:
        read_spec(Request(words), then=lambda spec: spec)
    (problem,) = error.value.problems
    assert (problem.where, problem.what) == ("mesh", "has no value: the sharding names no mesh")
    assert problem.fix.startswith("add mesh=..., such as mesh=fsdp, or ")
    assert read_spec(Request((*words, "mesh=fsdp")), then=lambda spec: spec).sharding.parameters


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("precision.matmuls[0].gather=fp8", "give the whole list: 'precision.matmuls=[...]'"),
        ("precision.matmuls=[{match: null, forward: fp8}]", "add gradients: ... to precision.matmuls[0]"),
    ],
)
def test_what_is_in_a_list_is_set_with_the_whole_list(typed, fix):
    with pytest.raises(ConfigError) as caught:
        _judge([typed])
    assert [problem.fix for problem in caught.value.problems] == [fix]
