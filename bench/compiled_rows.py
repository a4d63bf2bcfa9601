"""Tables whose rows take long: each row is kept as a line of JSON, so that none is made twice.

A script (rows.py) has its rows, what it keeps of each (`facts_of`) and how a table is made of what is kept.
`results.py` prints all of these tables.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshloom.compiler.core.errors import DOES_NOT_FIT

Overrides = tuple[str, ...]
Facts = dict[str, Any]
Rows = dict[Overrides, Facts]
NOT_COMPILED = "not compiled"


def parser_of(description: str | None, kept: Path) -> argparse.ArgumentParser:
    """Returns the parser of a script with rows: the file that keeps them, and which of them are made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, kept)
    return parser


def add_options(parser: argparse.ArgumentParser, kept: Path | None) -> None:
    parser.add_argument("file", nargs="?", type=Path, default=kept)
    parser.add_argument("--rows", default="", metavar="TEXT", help="make only those with this text in their name")
    parser.add_argument("--show", action="store_true", help="print what is kept, make nothing")


def make_rows(
    given: argparse.Namespace,
    rows: Iterable[tuple[str, Overrides]],
    facts_of: Callable[[Facts], Facts],
    make: Callable[[Overrides], tuple[Facts, float | None]] | None = None,
) -> int:
    """Makes the requested rows that are not kept yet, and returns how many failed. make:
    returns a report, of which facts_of says what is kept, and its seconds; `compile_report` by default."""
    kept = read_kept(given.file)
    asked = [] if given.show else [row for row in rows if given.rows.lower() in row[0].lower()]
    todo = [(name, overrides) for name, overrides in asked if overrides not in kept]
    num_added = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not todo) as progress:
        task = progress.add_task("", total=len(todo))
        for name, overrides in todo:
            progress.update(task, description=name)
            num_added += add_row(given.file, name, overrides, facts_of, make or compile_report)
            progress.advance(task)
    return len(todo) - num_added


def compile_report(overrides: Overrides) -> tuple[Facts, float]:
    """Returns report.json of the command, and the seconds that it took. Raises CalledProcessError if there is none."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "compile", *overrides, f"hydra.run.dir={run_dir}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, DOES_NOT_FIT):
            done.check_returncode()
        report = json.loads(Path(run_dir, "report.json").read_text())
    return report, round(time.perf_counter() - start, 1)


def kept_rows(rows: Mapping[str, Overrides], kept: Rows) -> Iterator[tuple[str, Facts]]:
    """Yields the rows that are kept, with their names."""
    yield from ((name, kept[overrides]) for name, overrides in rows.items() if overrides in kept)


def read_lines(path: Path) -> list[Facts]:
    """Returns what a file keeps, a line each; nothing if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_kept(path: Path) -> Rows:
    """Returns the rows of a file by what they were compiled from."""
    return {tuple(row["overrides"]): row for row in read_lines(path)}


def keep(path: Path, name: str, overrides: Overrides, facts: Facts) -> None:
    """Keeps one more row."""
    with path.open("a") as file:
        file.write(json.dumps({"name": name, "overrides": overrides} | facts) + "\n")


def add_row(
    path: Path,
    name: str,
    overrides: Overrides,
    facts_of: Callable[[Facts], Facts],
    make: Callable[[Overrides], tuple[Facts, float | None]],
) -> bool:
    """Makes one more row and keeps what facts_of makes of its report. False, after a line that says so, if the
    command fails, which has said why."""
    try:
        report, seconds = make(overrides)
    except subprocess.CalledProcessError as error:
        print(f"{NOT_COMPILED}, exit code {error.returncode}: {name}: {' '.join(overrides)}", file=sys.stderr)
        return False
    keep(path, name, overrides, facts_of(report) | ({"seconds": seconds} if seconds else {}))
    return True


def versions_of(report: Facts) -> str:
    return f"jax {report['build']['jax']}, {report['build']['plugin']}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
