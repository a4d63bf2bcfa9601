"""The words after a command that Hydra does not read: paths, flags with or without a value, perhaps overrides."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem, use_one_of
from meshloom.compiler.core.format import be, counted
from meshloom.compiler.core.visible import write_error, write_out

COMMAND_LINE = "command line"
HELP = ("-h", "--help")

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


@dataclass(frozen=True)
class Words:
    """flags: those that were given, with their values; "" for one that takes none. overrides: as typed."""

    paths: tuple[Path, ...]
    flags: Mapping[str, str]
    overrides: tuple[str, ...] = ()


def run_words(
    args: Sequence[str],
    run: Callable[[Words], object],
    *,
    flags: Mapping[str, str],
    num_paths: range,
    usage: str,
    line: str,
    has_overrides: bool = False,
) -> int:
    """Runs a command that Hydra does not read, and returns its exit code: 0, or that of a mistake, which is told.

    usage: what `--help` prints. line: the command in a line, for the fix of a mistake. Others: as of `parse_words`.
    """
    if set(args) & set(HELP):
        write_out(usage, end="")
        return 0
    try:
        run(parse_words(args, flags, num_paths=num_paths, usage=line, has_overrides=has_overrides))
    except ConfigError as error:
        write_error(str(error))
        return MISTAKE
    return 0


def parse_words(
    args: Sequence[str], flags: Mapping[str, str], *, num_paths: range, usage: str, has_overrides: bool = False
) -> Words:
    """Returns paths, flags and overrides. Raises ConfigError with all that is wrong.

    flags: what each flag takes, as usage names it, "" for nothing: {"--csv": "FILE", "--json": ""}. num_paths: how many
    there may be. usage: of the command, for the fix. has_overrides: words such as `target=v5p-128` are overrides.
    """
    paths: list[Path] = []
    overrides: list[str] = []
    given: dict[str, str] = {}
    problems: list[Problem] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if has_overrides and _OVERRIDE.match(word):
            overrides.append(word)
        elif not word.startswith("-"):
            paths.append(Path(word))
        elif name not in flags:
            fix = f"{use_one_of(name, [*flags, *HELP])}, or ./{word} for a path"
            problems.append(Problem(COMMAND_LINE, f"there is no flag '{name}'", fix))
        elif not flags[name] and has_value:
            problems.append(Problem(COMMAND_LINE, f"{name} takes no value", f"type {name} alone"))
        else:
            if flags[name] and not has_value and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            if flags[name] and not value:
                problems.append(Problem(COMMAND_LINE, f"{name} lacks its value", f"type {name} {flags[name]}"))
            given[name] = value
    if len(paths) not in num_paths:
        what = f"{counted(len(paths), 'path')} {be(len(paths))} given"
        problems.append(Problem(COMMAND_LINE, what, f"type: {usage}"))
    if problems:
        raise ConfigError(problems)
    return Words(tuple(paths), given, tuple(overrides))
