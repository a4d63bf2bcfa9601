"""Keeps proofs in tests/proofs.txt: a test whose programs, inputs and judges are those of a recorded run that passed
need not compile and run them again. docs/testing.md says what that rests on."""

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
def judges(test_file: Path, root: Path = ROOT) -> str:
    """Returns a hash of what decides whether a test passes, apart from its programs and their inputs: the sources of
    the test, of conftest.py, of the parts of tests/support that they name, and of the models; versions, and flags."""
    named, sources = [test_file, root / "tests/conftest.py"], dict[str, bytes]()
    while named:
        path = named.pop()
        if path.relative_to(root).as_posix() not in sources:
            source = sources[path.relative_to(root).as_posix()] = path.read_bytes()
            parts = {part.decode() for part in re.findall(rb"\bsupport(?:[./]| import )(\w+)", source)}
            named += [path for part in sorted(parts) if (path := root / f"tests/support/{part}.py").is_file()]
    sources |= {path.relative_to(root).as_posix(): path.read_bytes() for path in (root / "models").rglob("*.py")}
    flags = dict.fromkeys(os.environ.get("XLA_FLAGS", "").split())  # workers of pytest-xdist have them twice
    found = hashlib.sha256(repr([*flags, *map(metadata.version, PACKAGES)]).encode())
    for name, source in sorted(sources.items()):
        found.update(f"{name} {len(source)} ".encode() + source)
    return found.hexdigest()


def key_of(test: str, parts: Any) -> str:
    """Returns the key of a proof. test: its id, and what judges. parts: a tree of lowered programs, NumPy arrays and
    texts."""
    found = hashlib.sha256(test.encode())
    for path, part in jax.tree_util.tree_leaves_with_path(parts):
        if isinstance(part, np.ndarray):
            text, data = f"{part.dtype} {part.shape}", part.tobytes()
        else:
            text, data = part if isinstance(part, str) else f"{part.in_tree} {part.as_text()}", b""
        found.update(f"{jax.tree_util.keystr(path)} {len(text)} {len(data)} {text}".encode() + data)
    return found.hexdigest()[:20]


def read_table(text: str) -> dict[str, str]:
    """Returns the key of each proven test, by its id."""
    return {test: key for key, _, test in (line.partition(" ") for line in text.splitlines())}


def write_table(proofs: Mapping[str, str]) -> str:
    return "".join(f"{key} {test}\n" for test, key in sorted(proofs.items()))


def updated(
    before: Mapping[str, str], proven: Mapping[str, str], *, run_files: Collection[str], is_whole: bool
) -> dict[str, str]:
    """Returns a table with new proofs. What it says of files that are gone is left out, and so is what it says of other
    tests in files that were run as a whole."""
    gone = set(run_files) if is_whole else set[str]()
    files = {test: test.partition("::")[0] for test in before}
    kept = {test: key for test, key in before.items() if files[test] not in gone and (ROOT / files[test]).is_file()}
    return kept | dict(proven)


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
    """What is known of the test that asks for it."""
    return Proof(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests were known, and with MESHLOOM_UPDATE records those that passed."""
    stats = terminalreporter.stats
    ended = [report for kind in ("passed", "failed") for report in stats.get(kind, ()) if report.when == "call"]
    properties = [(report, dict(report.user_properties)) for report in ended]
    found = {report: each[_PROPERTY] for report, each in properties if _PROPERTY in each}
    if found:
        num_known = sum(is_known for _, is_known in found.values())
        terminalreporter.line(f"proofs: {num_known} tests known, {len(found) - num_known} compiled and run")
    if os.environ.get("MESHLOOM_UPDATE") and found:
        chosen = (config.getoption("keyword"), config.getoption("markexpr"), *("::" in each for each in config.args))
        table = updated(
            _table(),
            {report.nodeid: key for report, (key, _) in found.items() if report.passed},
            run_files={report.nodeid.partition("::")[0] for report in ended},
            is_whole=not any(chosen) and {"plain", "ci"} <= set(config.getoption("tier") or ()),
        )
        (ROOT / TABLE).write_text(write_table(table))
