"""One word, one thing: whoever looks for a name finds one definition."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["compiler"]
NOT_NAMES = {"__all__", "T", "R"}  # type variables mean nothing by themselves


def _names(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
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
        for name, value in _names(ast.parse(text)):
            is_constant = value is not None and not re.match("[A-Z][a-z]", name)
            if not name.startswith("_") and name not in NOT_NAMES:
                found[name, value if is_constant else None].add(path)
    return [f"{folder}: {name} in {', '.join(sorted(paths))}" for (name, _), paths in found.items() if len(paths) > 1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_public_name_is_defined_twice(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 100
    assert _twice(folder, {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}) == []


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
