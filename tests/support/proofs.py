"""Keeps proofs in tests/proofs.txt: a test whose programs, inputs and judges are those of a recorded run that passed
need not compile and run them again. docs/testing.md says what that rests on."""

import ast
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TABLE = "tests/proofs.txt"
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax")
_PROPERTY = "proof"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove-again", action="store_true", help="compile and run also what tests/proofs.txt has")


@cache
def code_of(path: Path) -> bytes:
    """Returns what a module does: its syntax tree, without comments, layout and docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree).encode()


@cache
def judges(test_file: Path, root: Path = ROOT) -> str:
    """Returns a hash of what decides whether a test passes, apart from its programs and their inputs: the code of the
    test, of conftest.py, of the parts of tests/support that they name, of the models' layers, and of what finds the
    leaves that are compared; versions, and flags."""
    named, sources = [test_file, root / "tests/conftest.py"], dict[str, bytes]()
    while named:
        path = named.pop()
        if path.relative_to(root).as_posix() not in sources:
            sources[path.relative_to(root).as_posix()] = code_of(path)
            parts = {part.decode() for part in re.findall(rb"\bsupport(?:[./]| import )(\w+)", path.read_bytes())}
            named += [path for part in sorted(parts) if (path := root / f"tests/support/{part}.py").is_file()]
    # A module without JAX declares: the declared model is in the key, and so is the text of what it makes.
    layers = [path for path in root.glob("models/*.py") if b"import jax" in path.read_bytes()]
    ours = [*layers, *root.glob("compiler/core/trees.py")]
    sources |= {path.relative_to(root).as_posix(): code_of(path) for path in ours}
    flags = dict.fromkeys(os.environ.get("XLA_FLAGS", "").split())  # workers of pytest-xdist have them twice
    found = hashlib.sha256(repr([*flags, *map(metadata.version, PACKAGES)]).encode())
    for name, source in sorted(sources.items()):
        found.update(f"{name} {len(source)} ".encode() + source)
    return found.hexdigest()


def key_of(test: str, parts: Any) -> str:
    """Returns the key of a proof. test: its id, and what judges. parts: a tree of lowered programs, NumPy arrays and
    texts. The text of a program does not say which operands are its arguments: unused ones are left out."""
    found = hashlib.sha256(test.encode())
    for path, part in jax.tree_util.tree_leaves_with_path(parts):
        if isinstance(part, np.ndarray):
            text, data = f"{part.dtype} {part.shape}", part.tobytes()
        else:
            text, data = part if isinstance(part, str) else _text_of(part), b""
        found.update(f"{jax.tree_util.keystr(path)} {len(text)} {len(data)} {text}".encode() + data)
    return found.hexdigest()[:20]


def _text_of(program: Any) -> str:
    used = sorted(program._lowering.compile_args["kept_var_idx"])  # JAX has no public name for it
    return f"{program.in_tree} {used} {program.as_text()}"


def read_table(text: str) -> dict[str, str]:
    """Returns the key of each proven test, by its id."""
    return {test: key for key, _, test in (line.partition(" ") for line in text.splitlines())}


def write_table(proofs: Mapping[str, str]) -> str:
    return "".join(f"{key} {test}\n" for test, key in sorted(proofs.items()))


def updated(
    before: Mapping[str, str],
    proven: Mapping[str, str],
    failed: Collection[str],
    *,
    run_files: Collection[str],
    is_whole: bool,
) -> dict[str, str]:
    """Returns a table with new proofs. What it says of tests that failed or of files that are gone is left out, and so
    is what it says of other tests in files that were run as a whole. failed: ids of tests, or of files."""
    gone = set(run_files) if is_whole else set[str]()
    files = {test: test.partition("::")[0] for test in before}
    lost = gone.union(failed)
    kept = {test: before[test] for test, file in files.items() if not {test, file} & lost and (ROOT / file).is_file()}
    return kept | dict(proven)


def ran_whole_files(config: pytest.Config, exit_status: int) -> bool:
    """Returns True if a session ran all tests of the plain and the ci tier that its files have."""
    limits = ("keyword", "markexpr", "deselect", "lf", "stepwise", "maxfail")
    chosen = [config.getoption(name, None) for name in limits] + ["::" in each for each in config.args]
    tiers, ended = config.getoption("tier") or (), (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return not any(chosen) and {"plain", "ci"} <= set(tiers) and exit_status in ended


class Computation:
    """A function of arrays with its operands: lowered, and compiled when it is run. parts: what a proof is about."""

    def __init__(self, function: Callable[..., Any], *operands: Any) -> None:
        self._operands, self._lowered = operands, jax.jit(function).lower(*operands)
        self.parts = (self._lowered, jax.tree.map(np.asarray, operands))

    def run(self) -> Any:
        """Returns what the function returns."""
        return self._lowered.compile()(*self._operands)


@cache
def _table() -> dict[str, str]:
    path = ROOT / TABLE
    return read_table(path.read_text()) if path.exists() else {}


class Proof:
    """The proof of one test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def is_known(self, *parts: Any) -> bool:
        """Returns True if the test has passed with these lowered programs, arrays and texts. Once in a test, before
        anything is compiled; `parts` has all that the rest of the test takes from our code."""
        key = key_of(f"{judges(self._item.path)} {self._item.nodeid}", parts)
        is_known = _table().get(self._item.nodeid) == key and not self._item.config.getoption("prove_again")
        assert _PROPERTY not in dict(self._item.user_properties), "a test has one proof"
        self._item.user_properties.append((_PROPERTY, [key, is_known]))
        return is_known


@pytest.fixture
def proof(request: pytest.FixtureRequest) -> Proof:
    """Returns what is known of the test that asks for it."""
    return Proof(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Says how many tests were known, and with MESHLOOM_UPDATE records those that passed."""
    stats = terminalreporter.stats
    ended = [report for kind in ("passed", "failed") for report in stats.get(kind, ()) if report.when == "call"]
    properties = [(report, dict(report.user_properties)) for report in ended]
    found = {report: each[_PROPERTY] for report, each in properties if _PROPERTY in each}
    if found:
        num_known = sum(is_known for _, is_known in found.values())
        terminalreporter.line(f"proofs: {num_known} tests known, {len(found) - num_known} compiled and run")
    # A test has failed, too, whose fixtures did, or whose module could not be imported.
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())}
    if os.environ.get("MESHLOOM_UPDATE") and (found or failed):
        table = updated(
            _table(),
            {report.nodeid: key for report, (key, _) in found.items() if report.nodeid not in failed},
            failed,
            run_files={report.nodeid.partition("::")[0] for report in ended},
            is_whole=ran_whole_files(config, exitstatus),
        )
        (ROOT / TABLE).write_text(write_table(table))
