"""Reads a part of a compiled program's text, or says why it cannot be read; and finds the lines that it comes from.

    jax/_src/..., flax/nnx/..., my_project/train.py:42   ->   my_project/train.py:42

JAX records the frames that led to an operation. Frames of libraries say how it is written; the innermost frame of the
user's own says why it is there. The tables of frames follow the text's header; older programs name a line in metadata.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from ..core.known import Unknown
from ..core.scopes import OperationName
from ..core.user_code import LIBRARIES
from ..xla.hlo import HloError, Instruction, Module
from ..xla.schedule.steps import Collective

T = TypeVar("T")

LEAST_BYTES = 2**20  # per execution; a smaller collective costs only latency
LEAST_SHARE = 0.01  # the least share of the step that a finding on time costs
NUM_PLACES = 3  # places that one finding names


def read_part(part: Callable[[], T]) -> T | Unknown:
    """Returns a part of what a text says, or why it cannot be read. Unsupported forms raise HloError, missing pieces
    the other errors."""
    try:
        return part()
    except RecursionError:
        return Unknown("the program's text cannot be read: its computations call each other without an end")
    except (LookupError, ValueError) as error:
        said = str(error) if isinstance(error, HloError) else repr(error)
        return Unknown(f"the program's text cannot be read: {said}")


_NUMBERED = re.compile(r"(\d+) (.*)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?')


@dataclass(frozen=True)
class SourceLine:
    file: str
    line: int


def source_finder(module: Module) -> Callable[[Instruction], tuple[SourceLine, ...]]:
    """Returns a function of an instruction to the lines that led to it, the innermost first; empty where none is
    known."""
    tables = _tables(module.tables)
    files = {number: text.strip('"') for number, text in tables.get("FileNames", {}).items()}
    places = {number: _fields(text) for number, text in tables.get("FileLocations", {}).items()}
    frames = {number: _fields(text) for number, text in tables.get("StackFrames", {}).items()}

    def lines_of(frame: int) -> tuple[SourceLine, ...]:
        found: list[SourceLine] = []
        while frame in frames and len(found) < len(frames):
            place = places.get(frames[frame].get("file_location_id", 0), {})
            found.append(SourceLine(files.get(place.get("file_name_id", 0), ""), place.get("line", 0)))
            frame = frames[frame].get("parent_frame_id", 1) - 1  # XLA counts frames from 1, and parent 1 means none
        return tuple(found)

    def find(instruction: Instruction) -> tuple[SourceLine, ...]:
        if frame := _FRAME.search(instruction.attributes):
            return lines_of(int(frame[1]))
        if file := _FILE.search(instruction.attributes):
            return (SourceLine(file[1], int(file[2] or 0)),)
        return ()

    return find


def _tables(lines: Sequence[str]) -> dict[str, dict[int, str]]:
    """Returns the tables of the module: {"FileNames": {1: '"a.py"'}, ...}"""
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] = {}
    for line in lines:
        if entry := _NUMBERED.fullmatch(line.strip()):
            current[int(entry[1])] = entry[2]
        else:
            current = tables.setdefault(line.strip(), {})
    return tables


def _fields(text: str) -> Mapping[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(text)}


NUM_PARTS = 2  # shown of a path outside of installed packages

_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<inner>(?P<library>[^/]+).*)")
_STANDARD = re.compile(r"/lib/python3[.\d]*/")


def line_finder(module: Module) -> Callable[[Collective], str]:
    """Returns a function from a collective to its line, "train.py:42", preferring an inner instruction with its name.
    If only libraries have lines, it returns the scope that the program gives; if there is neither, an empty text."""
    find = source_finder(module)

    def line_of(collective: Collective) -> str:
        outer = module.computations[collective.computation].by_name.get(collective.instruction)
        if outer is None:
            return ""
        called = (name for name in outer.called if name in module.computations)
        candidates = (outer, *(each for name in called for each in module.all_within(name)))
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
