"""Reads recorded programs of tests/schedules."""

import lzma
from pathlib import Path

SCHEDULES = Path(__file__).parents[1] / "schedules"


def recorded_text(name: str) -> str:
    """A scheduled program as a compiler wrote it; README.md of the folder says what it is of."""
    return lzma.decompress((SCHEDULES / f"{name}.txt.xz").read_bytes()).decode()
