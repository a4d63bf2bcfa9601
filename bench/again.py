"""Takes all compiled rows of docs/results again with the prices of today.

    python bench/again.py [--rows TEXT] [--minutes N]

Those that took least come first, and each is written into its file in bench/ at once. `meshloom compile` keeps compiled
programs, so a program that is the same as before is priced from its text in seconds, and after a stop the command gets
soon to where it was. A row that took over ten minutes stays as it is, and the command names it.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import published
import rows
import tune
from compiled_rows import NOT_COMPILED, Facts, Overrides, compile_report, compiled, read_kept, read_lines
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MOST_SECONDS = 600.0
USUAL_SECONDS = 120.0  # of a row whose time is not kept


@dataclass(frozen=True)
class Row:
    """A compiled row that is kept in a file. facts_of: what is kept of its report. seconds: of its last compile."""

    file: Path
    name: str
    overrides: Overrides
    facts_of: Callable[[Facts], Facts]
    seconds: float


def all_rows() -> Iterator[Row]:
    """Yields all rows that a compiler made."""
    sources = [(published.KEPT, published.facts_of), (tune.KEPT, tune.facts_of)]
    sources += [(rows.kept_of(name), compiled) for name, one in rows.TABLES.items() if not one.is_estimated]
    for file, facts_of in sources:
        for overrides, kept in read_kept(file).items():
            if "predicted_seconds" in kept:
                yield Row(file, kept["name"], overrides, facts_of, kept.get("seconds", USUAL_SECONDS))


def replace_row(row: Row, facts: Facts) -> None:
    """Writes what is kept of a row, in its place in the file."""
    lines = [
        one | facts if tuple(one["overrides"]) == row.overrides and "predicted_seconds" in one else one
        for one in read_lines(row.file)
    ]
    new = row.file.with_suffix(".new")
    new.write_text("".join(json.dumps(one) + "\n" for one in lines))
    new.replace(row.file)


def main() -> int:
    """Returns 1 if a row could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this text in their name or file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after this long")
    given = parser.parse_args()
    asked = sorted(
        (row for row in all_rows() if given.rows.lower() in f"{row.file.stem} {row.name}".lower()),
        key=lambda row: row.seconds,
    )
    end, left, failed = time.monotonic() + 60 * given.minutes, list[str](), list[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(asked))
        for row in asked:
            title = f"{row.file.stem}: {row.name}"
            progress.update(task, description=title)
            if row.seconds > MOST_SECONDS or time.monotonic() > end:
                left.append(f"as it was: {title}, {row.seconds:.0f} s")
            else:
                try:
                    report, seconds = compile_report(row.overrides)
                    replace_row(row, row.facts_of(report) | {"seconds": max(seconds, row.seconds)})
                except subprocess.CalledProcessError as error:  # the command has said why
                    failed.append(f"{NOT_COMPILED}, exit code {error.returncode}: {title}: {' '.join(row.overrides)}")
            progress.advance(task)
    num_taken = len(asked) - len(left) - len(failed)
    print(*failed, *left, f"{num_taken} of {len(asked)} rows have the prices of today", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
