"""Reads the words after a command that Hydra does not read: paths, flags with or without a value, perhaps overrides."""

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshloom.compiler.core.errors import COMMAND_LINE, ConfigError, Problem, use_one_of
from meshloom.compiler.core.format import be
from meshloom.compiler.core.visible import write_out, write_problems

from .commands import Command

HELP = ("-h", "--help")
WIDTH = 80
_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_][\w./@]*=|~[A-Za-z_])")


@dataclass(frozen=True)
class Words:
    """flags: the given flags with their values; the value is "" for a flag that takes none. overrides: as typed. texts:
    all but the flags as typed, of a command that takes any words."""

    paths: tuple[Path, ...]
    flags: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def run_words(command: Command, args: Sequence[str]) -> int:
    """Runs a command that Hydra does not read. Returns the exit code: the command's own, 0 if it has none, or that of
    its error, which is printed."""
    if set(args) & set(HELP):
        _show_help(command)
        return 0
    try:
        return command.load()(parse_words(command, args)) or 0
    except ConfigError as error:
        write_problems(str(error))
        return error.exit_code


def no_flag(name: str, fix: str) -> Problem:
    """Returns the Problem of a flag that does not exist."""
    return Problem(COMMAND_LINE, f"there is no flag '{name}'", fix)


def _show_help(command: Command) -> None:
    flags = [str(flag) if flag.is_required else f"[{flag}]" for flag in command.flags]
    usage = f"usage: meshloom {command.name} {command.paths} {' '.join(flags)}"
    write_out("\n".join(textwrap.wrap(usage, WIDTH, subsequent_indent=" " * 16, break_on_hyphens=False)))
    write_out(f"\n{command.about}")
    width = max(len(str(flag)) for flag in command.flags) + 5
    for flag in command.flags:
        text = f"  {flag!s:<{width - 2}}{flag.does}"
        write_out("\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=" " * width, break_on_hyphens=False)))


def parse_words(command: Command, args: Sequence[str]) -> Words:
    """Returns paths, flags and overrides. Raises ConfigError with all problems."""
    flags = {flag.name: flag.value for flag in command.flags}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, value in flags.items():  # a missing value becomes "", and is reported below with all other problems
        takes: dict[str, Any] = {"nargs": "?"} if value else {"action": "store_const"}
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
    for word in rest:
        if word.startswith("-") and not command.takes_any_words:
            name = word.partition("=")[0]
            problems.append(no_flag(name, f"{use_one_of(name, [*flags, *HELP])}, or ./{word} for a path"))
    for flag in command.flags:
        if flag.value and given.get(flag.name) == "":
            problems.append(Problem(COMMAND_LINE, f"{flag.name} lacks its value", f"type {flag}"))
        if flag.is_required and flag.name not in given:
            problems.append(Problem(COMMAND_LINE, f"{flag.name} is missing: {flag.does}", f"type: {command.line}"))
    names = [name for name in command.paths.split() if "=" not in name and name != "...]"]
    takes_overrides = "=" in command.paths
    overrides = tuple(word for word in rest if takes_overrides and _OVERRIDE.match(word) and not Path(word).exists())
    paths = tuple(Path(word) for word in rest if not word.startswith("-") and word not in overrides)
    is_list = any(name.rstrip("]").endswith("...") for name in names)
    num_required = sum(not name.startswith("[") for name in names)
    missing = names[len(paths) : num_required]
    if missing or (len(paths) > len(names) and not is_list):
        more = " ".join(map(str, paths[len(names) :]))
        what = f"{' and '.join(missing).rstrip('.')} {be(len(missing))} missing" if missing else f"'{more}' is too much"
        fix = f"type: {command.line}"
        problems.append(Problem(COMMAND_LINE, what, f"{fix} (`meshloom {command.name} --help` says what that is)"))
    if problems:
        raise ConfigError(problems)
    return Words(paths, given, overrides, tuple(rest))
