"""Errors of a declaration: where, what, what to do. A user's mistake is reported this way, never as a traceback."""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from .visible import visible

# Exit codes of all commands, besides 0 and 128 + signal; runtime/core/failures.py has 5 and 6, which only runs use.
MISTAKE = 2
DOES_NOT_FIT = 3  # the compiled program needs more memory than a chip has
EXPOSED = 4  # more communication is exposed, or a pipeline waits longer, than the declaration allows
WORSE = 10  # `meshloom guard`: the step is worse than its base, by more than is tolerated
WRONG = 11  # `meshloom check`: the program does not compute what one device computes

COMMAND_LINE = "command line"  # the place of a problem that no key has

MOST_LISTED = 9  # values of a closed choice that a fix lists; of more, it lists the nearest
NUM_NEAREST = 5

FOLDERS = tuple(Path(__file__).parents[2] / name for name in ("compiler", "runtime", "models"))


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake. where: a config key, a file or an override. what: one sentence with the value. fix: what to type
    instead. kind: of a value of another type than its key has, the name that pydantic gives the error; else empty."""

    where: str
    what: str
    fix: str
    kind: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"error: {self.where}: {self.what}\n  fix: {self.fix}"

    def as_warning(self) -> str:
        """Returns the same text as a warning, for a declaration that can run."""
        return str(self).replace("error:", "warning:", 1)


class ConfigError(Exception):
    """Raised for a declaration that cannot be run; has all of its problems."""

    exit_code = MISTAKE

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(map(str, self.problems)))

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows in place of a traceback: the caller's, and the problems. The frames
        inside of Meshloom tell a user nothing about their mistake."""

        def is_theirs(frame: traceback.FrameSummary) -> bool:
            return not any(Path(frame.filename).is_relative_to(folder) for folder in FOLDERS)

        frames = takewhile(is_theirs, traceback.extract_tb(self.__traceback__))
        called = [f"line {frame.lineno}: {frame.line}" for frame in frames if "IPython" not in frame.filename]
        return [*called, f"{type(self).__name__}:", *visible(str(self)).splitlines()]


def all_of(*steps: Callable[[], Any]) -> tuple[Any, ...]:
    """Runs independent steps and returns their results. If any fail, raises ConfigError with the problems of all."""
    results: list[Any] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            results.append(step())
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)
    return tuple(results)


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raises ConfigError if there is a problem."""
    if found := tuple(problems):
        raise ConfigError(found)


def use_one_of(value: object, allowed: Iterable[str]) -> str:
    """Returns the fix for a value outside a closed choice: the nearest match, then the allowed values, or the nearest
    of many."""
    options = list(allowed)
    meant = meant_by(value, options)
    if len(options) > MOST_LISTED:
        options = [*get_close_matches(str(value), options, n=NUM_NEAREST, cutoff=0), ".."]
    return (f"did you mean '{meant}'? " if meant else "") + f"use one of {', '.join(options)}"


def meant_by(value: object, allowed: Iterable[str]) -> str | None:
    """Returns the allowed value that is like another value; None if none is."""
    return next(iter(get_close_matches(str(value), list(allowed), n=1, cutoff=0.5)), None)
