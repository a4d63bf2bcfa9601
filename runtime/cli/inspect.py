"""Runs `meshloom inspect PROGRAM target=...`: reports on any compiled JAX program, ours or not."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.visible import write_error, write_out
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.report.views.summary import show_summary
from meshloom.compiler.xla.schedule.steps import Choices

from ..api.inspected import Inspection, inspect_path
from .words import Syntax, Words, run_words

T = TypeVar("T", int, float)
LINE = "meshloom inspect PROGRAM target=v5p-128"
USAGE = """\
usage: meshloom inspect PROGRAM target=NAME [--module NAME] [--trips N]
                [--taken P] [--to DIR] [--json] [--config-dir DIR]

Reports what a compiled step does, whoever wrote and compiled it: memory,
collectives with their links, hidden and exposed time, the predicted step,
findings. PROGRAM is one of

  FILE   the text that `compiled.as_text()` returns
  DIR    a dump of XLA (--xla_dump_to=DIR); its largest program is read
  RUN    a directory of `meshloom compile`, or its artifact; it has its target

target=NAME names the chips that it was compiled for, such as v5p-128 or
h100-64; target.num_slices=2 and calibration=NAME work too. Writes report.json,
timeline.json and report.html; `meshloom diff` compares two such directories.

  --module NAME      the program to read, if there are several; without it, the
                     largest
  --trips [LOOP=]N   iterations of a loop, or of all loops whose number the
                     program does not state; without it, 1
  --taken [NAME=]P   share of executions, 0 to 1, in which a conditional takes
                     the branch that ends last; without it, 1
  --to DIR           where the files go; without it, a new directory in outputs/
  --json             print report.json instead of the summary
  --config-dir DIR   your own configs: targets, calibrations
"""
SYNTAX = Syntax(
    LINE,
    USAGE,
    {"--module": "NAME", "--trips": "N", "--taken": "P", "--to": "DIR", "--json": "", "--config-dir": "DIR"},
    num_paths=range(1, 2),
    has_overrides=True,
)


def inspect_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if there is no program for the target."""
    return run_words(args, _inspect, SYNTAX)


def _inspect(words: Words) -> None:
    overrides = search_path_override(words.overrides, words.flags.get("--config-dir"))
    found = inspect_path(words.paths[0], overrides, words.flags.get("--module"), _choices(words.flags))
    files = _write(found, Path(words.flags["--to"]) if "--to" in words.flags else _new_directory(datetime.now()))
    if found.note:
        write_error(f"{found.source}: {found.note}")
    if "--json" in words.flags:
        write_out(found.report.model_dump_json(indent=1))
    else:
        show_summary(found.report, Console(), files=files)


def _choices(flags: Mapping[str, str]) -> Choices | None:
    """Returns the numbers of iterations and shares of branches from the flags; None without such flags. Raises
    ConfigError with all of their problems."""
    if not flags.keys() & {"--trips", "--taken"}:
        return None
    trips, shares = all_of(
        lambda: _numbers(flags, "--trips", int, "a number of iterations from 0, as 40 or while.3=40", lambda n: n >= 0),
        lambda: _numbers(flags, "--taken", float, "a share from 0 to 1, as 0.1 or cond.2=0.1", lambda p: 0 <= p <= 1),
    )
    return Choices(trips, shares)


def _numbers(
    flags: Mapping[str, str], flag: str, kind: Callable[[str], T], wanted: str, is_allowed: Callable[[T], bool]
) -> dict[str, T]:
    """Returns the numbers of a flag by name: "while.3=40,while.7=2"; the name of "40" is "", for all."""
    found: dict[str, T] = {}
    for word in flags[flag].split(",") if flag in flags else ():
        name, _, number = word.rpartition("=")
        try:
            found[name.strip()] = kind(number)
        except ValueError:
            raise ConfigError([Problem(flag, f"{word} is not {wanted.partition(',')[0]}", f"give {wanted}")]) from None
        if not is_allowed(found[name.strip()]):
            raise ConfigError([Problem(flag, f"{word} is not {wanted.partition(',')[0]}", f"give {wanted}")])
    return found


def _new_directory(now: datetime) -> Path:
    """Returns a new directory beside those of runs."""
    first = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}"
    names = (first if not number else first.with_name(f"{first.name}-{number}") for number in itertools.count())
    return next(path for path in names if not path.exists())


def _write(found: Inspection, directory: Path) -> tuple[Path, ...]:
    try:
        return found.write(directory)
    except OSError as error:
        what = f"{directory} cannot be written: {error.strerror}"
        raise ConfigError([Problem("--to", what, "name another directory")]) from None
