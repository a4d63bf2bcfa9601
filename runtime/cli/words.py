"""Reads the words after a command that Hydra does not read: paths, flags with or without a value, perhaps overrides."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import COMMAND_LINE, MISTAKE, ConfigError, Problem, use_one_of
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.visible import write_error, write_out

HELP = ("-h", "--help")

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


@dataclass(frozen=True)
class Syntax:
    """The words that a command takes.

    line: the command on one line, for the fix of a mistake. usage: the text that `--help` prints. flags: each flag with
    the name of its value, "" if it takes none: {"--csv": "FILE", "--json": ""}. num_paths: the allowed numbers of
    paths. has_overrides: words such as `target=v5p-128` are overrides.
    """

    line: str
    usage: str
    flags: Mapping[str, str]
    num_paths: range
    has_overrides: bool = False


@dataclass(frozen=True)
class Words:
    """flags: the given flags with their values; the value is "" for a flag that takes none. overrides: as typed."""

    paths: tuple[Path, ...]
    flags: Mapping[str, str]
    overrides: tuple[str, ...] = ()


def run_words(args: Sequence[str], run: Callable[[Words], object], syntax: Syntax) -> int:
    """Runs a command that Hydra does not read. Returns the exit code: 0, or that of a mistake, which is printed."""
    if set(args) & set(HELP):
        write_out(syntax.usage, end="")
        return 0
    try:
        run(_parse(args, syntax))
    except ConfigError as error:
        write_error(str(error))
        return MISTAKE
    return 0


def _parse(args: Sequence[str], syntax: Syntax) -> Words:
    """Returns paths, flags and overrides. Raises ConfigError with all problems."""
    flags = syntax.flags
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in flags:  # a missing value becomes "", and is reported below with all other problems
        takes: dict[str, Any] = {"nargs": "?"} if flags[name] else {"action": "store_const"}
        parser.add_argument(name, dest=name, const="", **takes)
    problems: list[Problem] = []
    words: list[str] = []
    for word in args:
        name, has_value, _ = word.partition("=")
        if has_value and flags.get(name) == "":
            problems.append(Problem(COMMAND_LINE, f"{name} takes no value", f"type {name} alone"))
        else:
            words.append(word)
    parsed, rest = parser.parse_known_args(words)
    given = vars(parsed)
    problems += [_unknown_flag(word, flags) for word in rest if word.startswith("-")]
    for name in given:
        if flags[name] and not given[name]:
            problems.append(Problem(COMMAND_LINE, f"{name} lacks its value", f"type {name} {flags[name]}"))
    overrides = tuple(word for word in rest if syntax.has_overrides and _OVERRIDE.match(word))
    paths = tuple(Path(word) for word in rest if not word.startswith("-") and word not in overrides)
    if len(paths) not in syntax.num_paths:
        what = f"{counted(len(paths), 'path')} {be(len(paths))} given"
        problems.append(Problem(COMMAND_LINE, what, f"type: {syntax.line}"))
    if problems:
        raise ConfigError(problems)
    return Words(paths, given, overrides)


def _unknown_flag(word: str, flags: Mapping[str, str]) -> Problem:
    name = word.partition("=")[0]
    fix = f"{use_one_of(name, [*flags, *HELP])}, or ./{word} for a path"
    return Problem(COMMAND_LINE, f"there is no flag '{name}'", fix)
