"""Finds the line of Python that an instruction comes from, in the tables of frames after the header or its metadata."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .parse import Instruction, Module

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
