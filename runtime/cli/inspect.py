"""Runs `meshloom inspect PROGRAM target=...`: reports on any compiled JAX program, or judges a profile of one."""

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem, all_of
from meshloom.compiler.core.visible import write_error, write_out
from meshloom.compiler.declare.hydra_settings import search_path_override
from meshloom.compiler.xla.schedule.steps import Choices

from ..api.inspected import ProgramRequest
from ..api.judged import inspect_or_judge
from ..core.inputs import on_disk
from .words import Words

T = TypeVar("T", int, float)


def inspect_command(words: Words) -> None:
    """Reports on a program. Raises ConfigError if there is none for the target."""
    overrides = search_path_override(words.overrides, words.flags.get("--config-dir"))
    with ExitStack() as opened:
        path, *texts = (opened.enter_context(on_disk(place)) for place in words.texts if place not in words.overrides)
        text = texts[0] if texts else None
        asked = ProgramRequest(tuple(overrides), words.flags.get("--module"), _choices(words.flags))
        found = inspect_or_judge(path, asked, text)
    directory = Path(words.flags["--to"]) if "--to" in words.flags else _new_directory(datetime.now())
    try:
        files = found.write(directory)
    except OSError as error:
        what = f"{directory} cannot be written: {error.strerror}"
        raise ConfigError([Problem("--to", what, "name another directory")]) from None
    if found.note:
        write_error(f"{found.source}: {found.note}")
    if "--json" in words.flags:
        write_out(json.dumps(found.json, indent=1))
    else:
        found.show(Console(), files=files)


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
    """Returns a new directory in the place of runs."""
    first = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}"
    names = (first if not number else first.with_name(f"{first.name}-{number}") for number in itertools.count())
    return next(path for path in names if not path.exists())
