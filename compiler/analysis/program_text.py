"""Reads a part of a compiled program's text, or says why it cannot be read; and how much a finding on it says."""

from collections.abc import Callable
from typing import TypeVar

from ..core.known import Unknown
from ..xla.hlo import HloError

T = TypeVar("T")

LEAST_BYTES = 2**20  # per execution; a smaller collective costs only latency
NUM_PLACES = 3  # places that one finding names


def read_part(part: Callable[[], T]) -> T | Unknown:
    """Returns a part of what a text says, or why it cannot be read. Unsupported forms raise HloError, missing pieces
    the other errors."""
    try:
        return part()
    except RecursionError:
        return Unknown("the program's text cannot be read: its computations call each other without an end")
    except (LookupError, ValueError) as error:
        said = str(error) if isinstance(error, HloError) else repr(error)
        return Unknown(f"the program's text cannot be read: {said}")
