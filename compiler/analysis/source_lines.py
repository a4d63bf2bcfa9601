"""Finds the line of a user's code that an instruction comes from, in the program's metadata.

    jax/_src/..., flax/nnx/..., my_project/train.py:42   ->   my_project/train.py:42

JAX records the frames that led to an operation. Frames of libraries say how it is written; the innermost frame of the
user's own says why it is there.
"""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from ..core.scopes import OperationName
from ..core.user_code import LIBRARIES
from ..xla.hlo import Instruction, Module
from ..xla.hlo.sources import SourceLine, source_finder
from ..xla.schedule.steps import Collective

NUM_PARTS = 2  # shown of a path outside of installed packages

_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<inner>(?P<library>[^/]+).*)")
_STANDARD = re.compile(r"/lib/python3[.\d]*/")


def line_finder(module: Module) -> Callable[[Collective], str]:
    """Returns a function from a collective to its line, "train.py:42", preferring an inner instruction with its name.
    If only libraries have lines, it returns the scope that the program gives; if there is neither, an empty text."""
    find = source_finder(module)

    def line_of(collective: Collective) -> str:
        outer = module.computations[collective.computation].by_name.get(collective.name)
        if outer is None:
            return ""
        candidates = (outer, *(each for name in outer.called for each in _within(module, name)))
        named = (each for each in candidates if each.op_name == collective.op_name)
        return next((shown(lines, collective.op_name) for each in (*named, *candidates) if (lines := find(each))), "")

    return line_of


def shown(lines: tuple[SourceLine, ...], op_name: str = "") -> str:
    """Returns the innermost line that is not a library's; if there is none, the scope of the operation, or else the
    innermost line. lines: the innermost first."""
    own = next((each for each in lines if not _is_of_library(each.file)), None)
    if own is None:
        scope = OperationName(op_name).separated[0].own.rpartition("/")[0].rpartition("/")[2]
        if scope:
            return scope
        own = lines[0]
    if installed := _INSTALLED.search(own.file):
        return f"{installed['inner']}:{own.line}"
    return f"{'/'.join(PurePosixPath(own.file).parts[-NUM_PARTS:]).lstrip('/')}:{own.line}"


def _is_of_library(file: str) -> bool:
    installed = _INSTALLED.search(file)
    if installed:
        return installed["library"].removesuffix(".py") in LIBRARIES
    return file.startswith("<") or _STANDARD.search(file) is not None


def _within(module: Module, name: str) -> tuple[Instruction, ...]:
    return tuple(module.all_within(name)) if name in module.computations else ()
