"""Folds lines at the width of a terminal: at blanks alone, and so that a command in them can be copied and run."""

import os
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TextIO

CONTINUED = " \\"  # at the end of a line in a command
LEAST_WIDTH = 20  # columns of a line on the narrowest terminal
_OVERRIDE = re.compile(r"[`'\"]*[+~]*[A-Za-z_][\w./@]*=")
# What may follow a subcommand: flags, NAMES, paths, overrides.
_OF_COMMAND = re.compile(r"-|\[|\.\.\.|[A-Z][A-Z_|.]+$|.*[=/|]|\w+\.\w+")
PROGRAMS = ("meshloom", "srun", "pip", "python", "python3", "torchrun")
_ENDS = (",", ";", ")", ":")


def breaks(text: str, width: int, length: Callable[[str], int] = len) -> list[tuple[int, bool]]:
    """Returns where the lines of a text begin, but the first, and whether each goes on with a command: that is broken
    only where it is wider than a line. A word that is wider than a line has its own, whole."""
    found, used = list[tuple[int, bool]](), 0
    for first, *others in _parts(text):
        end = others[-1].end() if others else first.end()
        is_broken = bool(others) and length(text[first.start(1) : end]) > width
        needed = length(first[0] + CONTINUED) if is_broken else length(text[first.start() : end])
        if used and used + needed > width:
            found.append((first.start(1), False))
            used = length(first[1])
        else:
            used += length(first[0])
        for number, word in enumerate(others, 1):
            size, is_last = length(word[0]), number == len(others)
            if used + size > width - (0 if is_last else len(CONTINUED)):
                found.append((word.start(1), True))
                size, used = length(word[1]), 0
            used += size
    return found


def _parts(text: str) -> Iterator[list[re.Match[str]]]:
    """Yields the words of a text, and those of a command together: within backticks, after the name of a program, or
    overrides that follow one another."""
    words = list(re.finditer(r"\s*(\S+)", text))
    part, is_code, place = list[re.Match[str]](), False, 0  # place: 1 after a program's name, 2 after its subcommand
    for match, following in zip_longest(words, words[1:]):
        word, then = match[1], following[1] if following else ""
        part.append(match)
        is_code ^= word.count("`") % 2 == 1
        place = 1 if word.strip("`('") in PROGRAMS else min(place + 1, 2) if place else 0
        if word.endswith(_ENDS) or (place == 2 and not _OF_COMMAND.match(then)):
            place = 0
        are_overrides = _OVERRIDE.match(word) and _OVERRIDE.match(then) and not word.endswith(_ENDS)
        if not then or not (is_code or place or are_overrides):
            yield part
            part = []


def folded(text: str, width: int, indent: int) -> str:
    """Returns a line in several of at most this width; those after the first are indented."""
    lines, start, is_command = [], 0, False
    for place, is_command in breaks(text, max(width - indent, LEAST_WIDTH)):
        lines.append(text[start:place].rstrip() + (CONTINUED if is_command else ""))
        start = place
    return ("\n" + " " * indent).join([*lines, text[start:]])


def folded_problems(text: str, width: int | None) -> str:
    """Returns the lines of problems, folded; what follows `fix:` begins in one column. width: None folds nothing."""
    if width is None:
        return text

    lines = []
    for line in text.split("\n"):
        _, is_fix, rest = line.partition("  fix: ")
        indent = len(line) - len(rest if is_fix else line.lstrip()) + (0 if is_fix else 2)
        lines.append(line if len(line) <= width else folded(line, width, indent))
    return "\n".join(lines)


def width_of(stream: TextIO) -> int | None:
    """Returns the columns of a terminal; None for anything else."""
    try:
        if not stream.isatty():
            return None
        columns = os.environ.get("COLUMNS", "")
        return int(columns) if columns.isdecimal() and int(columns) else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # it is closed, or has no file
        return None
