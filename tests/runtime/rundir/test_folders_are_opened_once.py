"""spec.yaml of a run and config.json of a published model are opened by one file each, so they have one set of errors.
Others ask for `RunFolder.spec` and `PublishedFolder.config`."""

import ast
from pathlib import Path

import pytest

import meshloom.compiler

TOP = Path(meshloom.compiler.__file__).resolve().parent.parent
HOMES = {
    "spec.yaml": ("SPEC", "runtime/rundir/folders.py"),
    "config.json": ("CONFIG", "compiler/declare/published_folder.py"),
}
LOOKED_AT = {"exists", "is_file"}  # what others do with the path of such a file, beside writing it
WRITTEN = {"replace_text", "replace_json", "str"}


@pytest.mark.parametrize("file", HOMES)
def test_a_file_is_opened_in_one_place(file):
    name, home = HOMES[file]
    trees = {
        path: ast.parse(path.read_text())
        for top in ("compiler", "runtime", "models")
        for path in (TOP / top).rglob("*.py")
    }
    named = {str(path.relative_to(TOP)) for path, tree in trees.items() if file in _constants(tree)}
    assert named == {home}
    importing = {path: tree for path, tree in trees.items() if _imports(tree, name, Path(home).stem)}
    assert importing
    assert {str(path.relative_to(TOP)): uses for path, tree in importing.items() if (uses := _opened(tree, name))} == {}


def _constants(tree: ast.AST) -> set[object]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def _imports(tree: ast.AST, name: str, module: str) -> bool:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return any((node.module or "").endswith(module) and name in {each.name for each in node.names} for node in found)


def _opened(tree: ast.AST, name: str) -> list[str]:
    """Returns the expressions that use FOLDER / NAME for anything but a look at it or a write."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    paths = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and ast.unparse(node.right) == name]
    uses = [parents[node] for node in paths]
    return [ast.unparse(use) for use in uses if not (
        (isinstance(use, ast.Attribute) and use.attr in LOOKED_AT)
        or (isinstance(use, ast.Call) and ast.unparse(use.func) in WRITTEN)
    )]  # fmt: skip
