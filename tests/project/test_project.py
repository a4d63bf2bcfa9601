"""The repository keeps its own promises."""

import ast
import inspect
import re
import shlex
import sys
import tomllib
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import meshloom
from conftest import spec_of
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.data_spec import Source, TokenizerSpec
from meshloom.compiler.declare.user_code import DeclaredRun
from meshloom.compiler.driver import plan_run
from meshloom.compiler.parallel.registry import OPERATIONS
from meshloom.compiler.spec.sharding_spec import Rule, ShardingRules, ShardingSpec
from meshloom.compiler.spec.step_spec import MatmulPrecision
from meshloom.models.config import Config
from meshloom.runtime.train.loop import TrainingLoop
from meshloom.runtime.train.train import plan_and_check
from support.published import write_published

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
OPTIONS = [(path.parent.relative_to(CONF).as_posix(), path.stem)
           for path in sorted(CONF.glob("*/**/*.yaml")) if path.stem[0] != "_"]  # fmt: skip
# A few models; tests/models/test_models.py plans each that is published.
_NAMED = [each for each in OPTIONS if each[0] == "model" and each[1] != "from_hf"]
MODELS = [*_NAMED[::4], *(pytest.param(*each, marks=pytest.mark.release) for each in _NAMED if each not in _NAMED[::4])]
TARGETS = [("target", path.stem) for path in sorted(CONF.glob("target/_*.yaml"))]


def test_ci_runs_the_two_commands_of_the_readme():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^    (pip install .*)$", readme, re.M)
    assert commands == ["pip install -e . && meshloom train", "pip install -e '.[test]' && pytest"]
    lines = [line.strip().removesuffix(" || return") for line in ci.splitlines()]
    first, then = "pip install -e .", "meshloom train"  # `set -e` wants each on its own line
    assert lines.index(then) == lines.index(first) + 1
    # The extra `dev` has `test`, and the plain tier is what `pytest` runs; both with more, so that it is done once.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "meshloom[test]" in project["optional-dependencies"]["dev"]
    assert lines.index("uv pip install -q -e '.[dev]'") < lines.index('pytest --tier=plain,ci "$@"')


@pytest.mark.ci
def test_every_command_of_the_readme_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_published(tmp_path / "DIR", spec_of().model)
    readme = (ROOT / "README.md").read_text()
    found = re.findall(r"(?:^    |`)meshloom (?:train|explain|compile|launch|tune) ([^`\n]*)", readme, re.M)
    lines = [line.split("  ")[0] for line in found]
    assert len(lines) >= 8
    for line in lines:
        words = [word for word in shlex.split(line) if not word.startswith("-")]
        if "-m" in line:
            words = [re.sub(r"=([^,]*),.*", r"=\1", word) for word in words]
        if "seed=x" in words:
            with pytest.raises(ValueError, match="three"):
                _count_problems(words)
            continue
        read_spec(Request(tuple(words)), then=plan_run)


def _count_problems(words: list[str]) -> None:
    try:
        read_spec(Request(tuple(words)), then=plan_and_check)
    except Exception as error:
        raise ValueError({1: "one", 2: "two", 3: "three"}.get(str(error).count("error: "), "many")) from error


@pytest.mark.ci
@pytest.mark.parametrize(("group", "option"), [each for each in OPTIONS if each[0] != "model"] + MODELS)
def test_every_option_of_every_group_makes_a_run(group, option):
    """All but the model of a published folder, which tests/compiler/declare/test_published_model.py has."""
    overrides = {
        ("target", "local"): ("mesh.fsdp=8",),
        ("mesh", "ddp"): ("sharding=ddp",),
        ("mesh", "tensor"): ("sharding=tensor",),
        ("mesh", "fsdp_tensor"): ("sharding=fsdp_tensor",),
        ("mesh", "fsdp_context"): ("sharding=fsdp_context",),
        ("mesh", "hsdp"): ("sharding=hsdp",),
        ("mesh", "fsdp_expert"): ("sharding=fsdp_expert", "model=tiny_moe"),
        ("sharding", "fsdp_expert"): ("model=tiny_moe",),
        ("adapter", "qlora"): ("adapter.base.block=8",),  # of a small model over eight devices
        ("precision", "fp8"): ("precision.emulate=true",),  # as processors do
        ("precision", "int8"): ("precision.emulate=true",),
        ("precision", "mxfp8"): ("precision.emulate=true",),
        ("precision", "nvfp4"): ("precision.emulate=true",),
        ("precision", "fp8_blockwise"): ("precision.emulate=true", "model.num_kv_heads=8"),
        ("mesh", "zero1"): ("sharding=zero1",),
        ("mesh", "zero2"): ("sharding=zero2",),
        ("data", "text_files"): ("data.source.paths=[x]",),
        ("data", "jsonl"): ("data.source.paths=[x]",),
        ("data", "chats"): ("data.source.paths=[x]", "data.tokenizer.path=x"),
        ("data", "preferences"): ("data.source.paths=[x]", "data.tokenizer.path=x", "objective=simpo"),
        ("data", "parquet"): ("data.source.paths=[x]",),
        ("data", "array_record"): ("data.source.paths=[x]",),
        ("data", "tokens"): ("data.source.directory=x",),
        ("data", "python"): ("data.source.object=a:b",),
        ("data", "mixture"): ("data.source.parts={a:{weight:1,source:{kind:synthetic}}}",),
        ("data/tokenizer", "huggingface"): ("data.tokenizer.path=x",),
        ("data/tokenizer", "sentencepiece"): ("data.tokenizer.path=x",),
    }.get((group, option), ())
    plan = read_spec(Request((f"{group}={option}", *overrides)), then=plan_run)
    assert plan.mesh.num_devices == plan.target.num_devices
    assert plan.target.num_devices == 8 or group == "experiment"


def _with_base(group, values):
    """The keys of a file and of the files that it starts from."""
    bases = [name for name in values.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    files = [_with_base(group, yaml.safe_load((CONF / group / f"{base}.yaml").read_text())) for base in bases]
    return {k: v for keys in files for k, v in keys.items()} | values


@pytest.mark.parametrize(("group", "option"), [*OPTIONS, *TARGETS])
def test_every_option_says_what_it_is_and_holds_all_of_its_keys(group, option):
    """A default is written once, in its file: none is missing there and none is in the code."""
    text = (CONF / group / f"{option}.yaml").read_text()
    assert re.match(r"(# @package.*\n)?# \w", text)
    if group == "experiment" or (group, option) == ("model", "from_hf"):  # whose keys are those of a config.json
        return
    base, _, node = group.partition("/")
    values = _with_base(group, yaml.safe_load(text))
    if group == "data":
        source = values["source"]
        assert set(source) == set(_member_of(Source, source).model_fields)
    if group == "parallel":
        assert set(values) == {op.kind for op in OPERATIONS if op.is_declared}
        return
    kind = _member_of(TokenizerSpec, values) if node else _member_of(DeclaredRun.model_fields[base].annotation, values)
    assert set(values) == {name for name, field in kind.model_fields.items() if field.repr}  # those offered


def _member_of(kind: typing.Any, values: dict[str, typing.Any]) -> type[Config]:
    """A class itself; of a tagged union (`family: decoder`) the one whose tag is among the values."""
    if isinstance(kind, type):
        return kind
    members = typing.get_args(kind)
    while typing.get_origin(members[0]) in (typing.Annotated, types.UnionType, typing.Union):
        members = typing.get_args(members[0])
    tagged = [(m, key, typing.get_args(field.annotation)) for m in members for key, field in m.model_fields.items()]
    return next(m for m, key, allowed in tagged if len(allowed) == 1 and allowed[0] == values.get(key))


def test_no_spec_has_a_default_in_code():
    """Except for keys of a list's entries and of shardings of one's own, which no file of conf/ can complete, and for
    keys that are not offered."""

    def configs(node):
        for sub in node.__subclasses__():
            yield sub
            yield from configs(sub)

    assert len(list(configs(Config))) >= 14
    for config in configs(Config):
        optional = {name for name, field in config.model_fields.items() if field.repr and not field.is_required()}
        of_entries = {Rule: {"alternatives"}, MatmulPrecision: {"rounding", "gather", "history"}}
        of_own = {ShardingRules: {"mesh_axes"}, ShardingSpec: {"mesh_axes"}}
        assert optional == {**of_entries, **of_own}.get(config, set()), config


ADAPTERS = {  # the files that use private parts of a library, with the libraries
    "compiler/jax_private.py": {"jax"},
    "compiler/declare/hydra_private.py": {"hydra", "omegaconf"},
    "runtime/processes/jax_private.py": {"jax"},
    "runtime/checkpoint/s3.py": {"orbax"},
}
PRIVATE_MODULES = ("jax.interpreters", "jaxlib")  # without an underscore


def _private_names(tree: ast.AST) -> dict[str, str]:
    """Returns the private names of libraries in a module, imported or reached as attributes, with the library of each.
    `args_res` of `jax.vjp` has no underscore, and is in no documentation."""
    libraries, found = dict[str, str](), dict[str, str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = "" if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
        for alias in node.names:
            whole = f"{module}.{alias.name}".lstrip("." if not module.startswith(".") else "")
            library = whole.split(".")[0]
            if library in ("", "meshloom") or library in sys.stdlib_module_names:
                continue
            libraries[(alias.asname or alias.name).split(".")[0]] = library
            if re.search(r"\._[a-z]", whole) or whole.startswith(PRIVATE_MODULES):
                found[alias.asname or alias.name] = library
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = ast.unparse(node).split(".")[0].split("(")[0]
            if node.attr == "args_res":
                found[node.attr] = "jax"
            elif root in libraries and re.match(r"_[a-z]|__class__$", node.attr):
                found[node.attr] = libraries[root]
    return found


def test_private_parts_of_libraries_are_used_by_one_file_each_which_says_what_replaces_them():
    """What is private may go with any release. Before you add a name to an adapter, look for a public way."""
    files = [path for folder in ("compiler", "runtime", "models", "bench") for path in (ROOT / folder).rglob("*.py")]
    private = {path.relative_to(ROOT).as_posix(): _private_names(ast.parse(path.read_text())) for path in files}
    assert {path: {*names.values()} for path, names in private.items() if names} == ADAPTERS
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for path, libraries in ADAPTERS.items():
        told = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        assert not [name for name in private[path] if name not in told and name != "__class__"], path
        for library in libraries:
            assert re.search(rf"read in .*{library} \d+\.\d+\.\d+", told, re.IGNORECASE), path
    for library in ("jax", "hydra"):
        (bounded,) = [text for text in required if re.match(rf"{library}(-core)?[<>=]", text)]
        assert "<" in bounded, f"{library} needs an upper bound"


@pytest.mark.parametrize(
    ("line", "name"),
    [("from jax._src import core", "core"), ("import jax\njax._src.core", "_src"), ("import jaxlib.xla as x", "x"),
     ("from jax.interpreters import mlir", "mlir"), ("from hydra.core.singleton import S\nS._instances", "_instances"),
     ("from hydra.core.singleton import S\nS.instance().__class__ = 1", "__class__"), ("back.args_res[0]", "args_res")],
)  # fmt: skip
def test_a_private_name_is_found_however_it_is_reached(line, name):
    assert name in _private_names(ast.parse(line))


FOLDERS = ["compiler", "runtime"]  # in which a name has one definition
MOST_ON_BOTH_SIDES = 16  # public names of the compiler that the runtime defines again; lowered, never raised
NOT_NAMES = {"__all__", "T", "R", "LOG"}  # type variables mean nothing by themselves; a module asks for its logger


def _defined(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yields the names that a module defines: classes and functions, then aliases of types and constants with their
    values."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, None
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, ast.unparse(node.value)


def _twice(folder: str, texts: dict[str, str]) -> list[str]:
    """Returns what two files of a folder define: public classes, functions and aliases of one name, and constants of
    one name and one value."""
    found = defaultdict[tuple[str, str | None], set[str]](set)
    for path, text in texts.items():
        for name, value in _defined(ast.parse(text)):
            is_constant = value is not None and not re.match("[A-Z][a-z]", name)
            if not name.startswith("_") and name not in NOT_NAMES:
                found[name, value if is_constant else None].add(path)
    return [f"{folder}: {name} in {', '.join(sorted(paths))}" for (name, _), paths in found.items() if len(paths) > 1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_public_name_is_defined_twice(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 100
    assert _twice(folder, {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}) == []


def test_few_public_names_mean_two_things_in_the_compiler_and_the_runtime():
    sides = [sorted((ROOT / side).rglob("*.py")) for side in ("compiler", "runtime")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for side in sides for path in side}
    found = _twice("both", texts)
    assert len(found) <= MOST_ON_BOTH_SIDES, found


@pytest.mark.parametrize(
    ("first", "second", "is_twice"),
    [
        ("class Ring: pass", "def Ring(): pass", True),
        ("Axes = tuple[str, ...]", "class Axes: pass", True),
        ("LANES = 128", "LANES = 128", True),
        ("LANES = 128", "LANES = 64", False),
        ("def _row(): pass", "def _row(): pass", False),
        ("def row(): pass", "class A:\n    def row(self): pass", False),
    ],
)
def test_a_name_is_found_twice_where_it_is_one_word_for_two_things(first, second, is_twice):
    assert bool(_twice("x", {"a.py": first, "b.py": second})) is is_twice


def test_the_loop_is_short():
    assert len(inspect.getsource(TrainingLoop).splitlines()) < 100


def test_tracebacks_name_the_real_files():
    assert Path(inspect.getfile(plan_run)) == ROOT / "compiler" / "driver.py"
    assert meshloom.__version__


def test_links_of_the_readme_and_docs_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "bench" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_page_of_the_architecture_has_every_folder_with_its_charter_in_the_order_of_imports():
    page = (ROOT / "docs" / "architecture.md").read_text()
    layers = {
        contract["containers"][0].removeprefix("meshloom."): [*reversed(contract["layers"])]
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if "containers" in contract
    }
    assert list(layers) == ["compiler", "runtime"]
    for top, names in layers.items():
        folders = {name: ROOT / top / name for name in names}
        rows = [
            f"| `{name}/` | {_charter(folder / '__init__.py')} |" if folder.is_dir()
            else f"| `{name}.py` | {_charter(folder.with_suffix('.py'))} |"
            for name, folder in folders.items()
        ]  # fmt: skip
        assert "\n".join(rows) in page
        assert {path.stem for path in (ROOT / top).iterdir()} - {"__init__", "__pycache__"} == {*names}


def test_functions_that_the_page_of_the_architecture_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`?((?:compiler|runtime)/[\w/]+\.py): ([\w.]+)", page)
    assert len(named) >= 15
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert {*name.split(".")} <= defined, (path, name)


def test_tests_mirror_the_folders_and_import_no_other_test():
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests").as_posix()
        assert folder in ("models", "project") or (ROOT / folder).is_dir(), path
        modules = [
            node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        assert not [module for module in modules if module.split(".")[-1].startswith("test_")], path


def _charter(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
