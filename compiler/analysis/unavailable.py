"""The reason why a value is not known, which takes its place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unavailable:
    """The reason why something is not known, instead of its value."""

    why: str
