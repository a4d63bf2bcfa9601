"""Trains a small decoder with moments of each type, over four seeds, and compares the loss with float32 moments'.

    python bench/moments.py [--rows TEXT] [--minutes N]

A row is a run of 2,000 steps on one simulated device: its mean training loss over the last 100, and its processor
seconds. Rows are kept in bench/moments.jsonl, so a command that was stopped goes on; `results` prints their table. Two
rows have types that declarations refuse, as the reason why they do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from small_runs import SEEDS, Row, compared, median_seconds, names_in_order, programs_of, run_command, train_small

from meshloom.compiler.optim import moments
from meshloom.compiler.optim.configs import LionConfig

KEPT = Path(__file__).with_suffix(".jsonl")
ROWS: dict[str, tuple[str, ...]] = {
    "adamw float32": (),
    "adamw int8": ("optimizer.moment_dtype=int8",),
    "lion float32": ("optimizer=lion",),
    "lion float8": ("optimizer=lion", "optimizer.moment_dtype=float8"),
    "adamw float8, first alone": ("optimizer.first_moment_dtype=float8",),
    "adamw int8, second linear (refused)": ("optimizer.moment_dtype=int8",),
    "lion int8 (refused)": ("optimizer=lion", "optimizer.moment_dtype=int8"),
}


FIRST, LATER = [*ROWS][:4], [*ROWS][4:]  # those that are proposed, then those that are compared with them


@contextmanager
def accepted(name: str) -> Iterator[None]:
    """Lets the types of a row be declared that are refused."""
    is_linear = "linear" in name
    place, attribute, instead = (
        (moments, "SECOND", {"int8": "int8"}) if is_linear else (LionConfig, "refused_moments", {})
    )
    with mock.patch.object(place, attribute, instead):
        yield


@cache
def _programs(name: str) -> Any:
    with accepted(name):
        return programs_of(ROWS[name])


def run(name: str, seed: int) -> Row:
    """Returns a row: the loss at the end, and what the run took."""
    programs = _programs(name)
    with accepted(name):
        return train_small(programs, ROWS[name], seed)


def table(rows: list[Row]) -> str:
    """Returns a row for each optimizer and type: the loss against float32 moments of the same seed."""
    lines = ["| moments | bytes per parameter | loss against float32, seeds 0 to 3 | mean | processor seconds |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name in names_in_order(rows, ROWS):
        shown, mean = compared(rows, name, f"{name.split()[0]} float32")
        first = next(row for row in rows if row["name"] == name)
        per = first["bytes"] / first["parameters"]
        lines.append(f"| {name} | {per:.2f} | {shown} | {mean} | {median_seconds(rows, name):.0f} |")
    return "\n".join(lines)


def main() -> None:
    asked = [(name, seed) for group in (FIRST, LATER) for seed in SEEDS for name in group]
    run_command(__doc__, KEPT, asked, run, table)


if __name__ == "__main__":
    main()
