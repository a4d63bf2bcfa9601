"""Reads a part of a compiled program's text, or says why it cannot be read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..xla.hlo import HloError

T = TypeVar("T")


@dataclass(frozen=True)
class Unavailable:
    """The reason why something is not known, instead of its value."""

    why: str


def read_part(part: Callable[[], T]) -> T | Unavailable:
    """Returns a part of what a text says, or why it cannot be read. Unsupported forms raise HloError, missing pieces
    the other errors."""
    try:
        return part()
    except RecursionError:
        return Unavailable("the program's text cannot be read: its computations call each other without an end")
    except (LookupError, ValueError) as error:
        said = str(error) if isinstance(error, HloError) else repr(error)
        return Unavailable(f"the program's text cannot be read: {said}")
