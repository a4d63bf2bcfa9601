"""Takes all compiled rows of docs/results again with the prices of today.

    python bench/again.py DIR [--rows TEXT] [--minutes N] [--price]

A price says what a program takes, and does not change it. So the program of each row is compiled into a run directory
of DIR, those that took least first, and then every row with a program is priced from its text, in seconds, and written
into bench/*.jsonl. After a stop the command goes on: what DIR has is not compiled again. --price compiles nothing more.
A row that took over ten minutes stays as it is, and the command names it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import published
import rows
import tune
from compiled_rows import NOT_COMPILED, Facts, Overrides, compile_into, compiled, priced_again, read_kept, read_lines
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

    def run_dir(self, runs: Path) -> Path:
        """Returns where the program of these overrides is kept."""
        return runs / hashlib.sha256("\n".join(self.overrides).encode()).hexdigest()[:16]


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
    """Returns 1 if a row could not be taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="DIR", help="where programs are kept")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this text in their name or file")
    parser.add_argument("--minutes", type=float, help="start no more compiles after this long")
    parser.add_argument("--price", action="store_true", help="price what is compiled, and compile nothing more")
    given = parser.parse_args()
    asked = [row for row in all_rows() if given.rows.lower() in f"{row.file.stem} {row.name}".lower()]
    wanted = sorted((row for row in asked if row.seconds <= MOST_SECONDS), key=lambda row: row.seconds)
    end = time.monotonic() + 60 * given.minutes if given.minutes else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    failed = list[str]()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=0 if given.price else len(wanted))
        for row in () if given.price else wanted:
            run_dir = row.run_dir(given.runs)
            progress.update(task, description=f"{row.file.stem}: {row.name}")
            if not (run_dir / "report.json").exists() and (end is None or time.monotonic() < end):
                try:
                    compile_into(run_dir, row.overrides)
                except subprocess.CalledProcessError as error:  # the command has said why
                    failed.append(
                        f"{NOT_COMPILED}, exit code {error.returncode}: {row.name}: {' '.join(row.overrides)}"
                    )
            progress.advance(task)
        having = [row for row in wanted if (row.run_dir(given.runs) / "report.json").exists()]
        task = progress.add_task("prices", total=len(having))
        for row in having:
            replace_row(row, row.facts_of(priced_again(row.run_dir(given.runs), row.overrides)))
            progress.advance(task)
    missing = [f"as it was: {row.file.stem}: {row.name}, {row.seconds:.0f} s" for row in asked if row not in having]
    print(*failed, *missing, f"{len(having)} of {len(asked)} rows are priced as now", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
