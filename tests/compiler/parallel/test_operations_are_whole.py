"""Knowledge of single operations is in their own files: what others need of them is a hook of `ParallelOp`."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import meshloom.compiler
from meshloom.compiler.parallel.registry import OPERATIONS

COMPILER = Path(meshloom.compiler.__file__).resolve().parent
KINDS = {op.kind for op in OPERATIONS}
FILES = {type(op).__module__.rpartition(".")[2] for op in OPERATIONS}

ASKED = (".operation", ".operations_of", "parallel.get")


def test_no_other_file_names_the_kind_of_an_operation():
    assert _found(_named) == {}


def test_no_other_file_imports_from_the_file_of_an_operation():
    assert _found(_imported) == {}


def _found(names) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(COMPILER.rglob("*.py")):
        if COMPILER / "parallel" not in file.parents:
            for name in names(ast.parse(file.read_text())):
                found[name].add(str(file.relative_to(COMPILER)))
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        folder, _, file = (node.module or "").rpartition(".") if isinstance(node, ast.ImportFrom) else ("", "", "")
        if folder.split(".")[0] == "parallel" and file in FILES:
            yield file


def _named(tree: ast.Module) -> Iterator[str]:
    """Kinds that are asked for, or compared with the kind of an operation or a site; the kinds of instructions and of
    work have some of the same names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(ASKED):
            yield from _constants(node.args)
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(("site.kind", "op.kind")):
            yield from _constants(node.comparators)
        elif isinstance(node, ast.FunctionDef) and {"kind", "plain"} <= {each.arg for each in node.args.args}:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Compare) and ast.unparse(inner.left) == "kind":
                    yield from _constants(inner.comparators)


def _constants(nodes) -> Iterator[str]:
    inner = (each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Constant))
    yield from (each.value for each in inner if each.value in KINDS)
