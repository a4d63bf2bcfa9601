"""What is wrong with a declaration: where, what, what to do. A user's mistake ends here, never in a traceback."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

# Exit codes of all commands, beside 0 and 128 + signal; runtime/core/failures.py has those of runs, 5 and 6.
MISTAKE = 2
DOES_NOT_FIT = 3  # the compiled program needs more memory than a chip has
EXPOSED = 4  # more communication is exposed than the declaration allows


@dataclass(frozen=True, order=True)
class Problem:
    """where: a config key, a file or an override. what: one sentence with the value. fix: what to type instead."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"error: {self.where}: {self.what}\n  fix: {self.fix}"

    def as_warning(self) -> str:
        """The same words about something that runs all the same."""
        return str(self).replace("error:", "warning:", 1)


class ConfigError(Exception):
    """A declaration that cannot be run, with all that is wrong with it."""

    exit_code = MISTAKE

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(map(str, self.problems)))


def all_of(*steps: Callable[[], Any]) -> tuple[Any, ...]:
    """Run steps that do not need each other and return their results; if any fail, raise the problems of all."""
    results: list[Any] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            results.append(step())
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return tuple(results)


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raise ConfigError where there is a problem."""
    if found := tuple(problems):
        raise ConfigError(found)


def use_one_of(value: object, allowed: Iterable[str]) -> str:
    """The fix for a value outside a closed choice: all that is allowed, and the nearest match."""
    options = list(allowed)
    nearest = get_close_matches(str(value), options, n=1, cutoff=0.5)
    return f"use one of {', '.join(options)}" + (f" (did you mean '{nearest[0]}'?)" if nearest else "")
