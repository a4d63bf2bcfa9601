"""What opcodes do is in one table, which every walk over a program asks."""

import ast
from pathlib import Path

import meshloom.compiler
from meshloom.compiler.xla.hlo.opcodes import COLLECTIVES, Does, all_that

COMPILER = Path(meshloom.compiler.__file__).resolve().parent
VIEWS = all_that(Does.VIEW) | all_that(Does.CAST)


def test_no_other_file_lists_opcodes_that_look_at_a_value_differently():
    """Two walks with two lists would not agree on which arrays are one."""
    assert listing(VIEWS, "xla", "analysis", "profile") == {"xla/hlo/opcodes.py"}


def test_no_other_file_lists_the_collectives():
    assert listing({"all-reduce", "collective-permute", "ragged-all-to-all"}, "xla") == {"xla/hlo/opcodes.py"}


def test_opcodes_that_name_memory_give_no_work():
    """All but those that end or go on with something asynchronous, which the reader of a schedule asks first."""
    named = all_that(Does.NAME) - all_that(Does.FREE)
    assert all(each.endswith(("-done", "-update")) for each in named)
    assert not COLLECTIVES.keys() & all_that(Does.FREE)


def listing(opcodes: set[str] | frozenset[str], *folders: str) -> set[str]:
    """Files with a set, a tuple or a table that has three of these opcodes or more."""
    found = set()
    for file in (file for folder in folders for file in (COMPILER / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            elements = node.elts if isinstance(node, ast.Set | ast.Tuple | ast.List) else ()
            elements = node.keys if isinstance(node, ast.Dict) else elements
            if len({each.value for each in elements if isinstance(each, ast.Constant)} & opcodes) > 2:
                found.add(str(file.relative_to(COMPILER)))
    return found
