"""What stands for a value that is not known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unavailable:
    """The reason why something is not known, instead of its value."""

    why: str
