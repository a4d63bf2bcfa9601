"""Runs `meshloom sweep DIR`: shows the table and the page of a sweep again, and exports its rows."""

import json
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error, write_out

from ..sweep.figures import best_first, find_figure
from ..sweep.page import PAGE, render_sweep
from ..sweep.read import Sweep, read_sweep
from ..sweep.table import show_table, write_csv, write_file, write_parquet
from .words import Syntax, Words, run_words

LINE = "meshloom sweep DIR"
USAGE = """\
usage: meshloom sweep DIR [--sort FIGURE] [--all] [--csv FILE] [--parquet FILE]
                [--json] [--page FILE] [--open]

Shows the table of a sweep, the best point first, and writes a page with heat
map, parallel coordinates, Pareto front and, for runs, loss curves. DIR is what
`meshloom explain -m`, `compile -m`, `train -m` or `meshloom tune` wrote; the
sweep may still be running.

  --sort FIGURE    sort by a figure other than the sweep's objective:
                   step_seconds, mfu, peak_bytes, ...
  --all            show every point; without it, the best 20
  --csv FILE       write the rows as CSV, with a column for each field
  --parquet FILE   write the rows as Parquet
  --json           print sweep and rows as one JSON object; no table, no page
  --page FILE      write the page to FILE; without it, to DIR/sweep.html
  --open           open the page in a browser
"""
SYNTAX = Syntax(
    LINE,
    USAGE,
    {
        "--sort": "FIGURE",
        "--all": "",
        "--csv": "FILE",
        "--parquet": "FILE",
        "--json": "",
        "--page": "FILE",
        "--open": "",
    },
    num_paths=range(1, 2),
)


def sweep_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if there is no sweep, or a file cannot be written."""
    return run_words(args, _show_sweep, SYNTAX)


def _show_sweep(words: Words) -> None:
    if "--sort" in words.flags:
        find_figure(words.flags["--sort"], where="--sort")
    _show(read_sweep(words.paths[0]), words)


def _show(sweep: Sweep, words: Words) -> None:
    flags = words.flags
    if "--json" in flags:
        write_out(json.dumps(sweep_as_json(sweep, sort=flags.get("--sort")), indent=1))
    else:
        _show_on_terminal(sweep, flags.get("--sort"), is_whole="--all" in flags)
    for flag, write in (("--csv", write_csv), ("--parquet", write_parquet)):
        if flag in flags:
            write(sweep.rows, Path(flags[flag]))
            write_error(f"{len(sweep.rows):,} rows: {flags[flag]}")
    if "--json" not in flags or "--page" in flags or "--open" in flags:
        _write_page(sweep, Path(flags.get("--page", sweep.directory / PAGE)), flags)


def sweep_as_json(sweep: Sweep, *, sort: str | None) -> dict[str, object]:
    """Returns the sweep with its rows, the best first."""
    rows = best_first(sweep.rows, find_figure(sort or sweep.file.objective, where="--sort"))
    return {
        "sweep": sweep.file.model_dump(mode="json"),
        "is_running": sweep.is_running,
        "notes": sweep.notes,
        "rows": [row.model_dump(mode="json") for row in rows],
    }


def _show_on_terminal(sweep: Sweep, sort: str | None, *, is_whole: bool) -> None:
    console = Console(off_terminal_width=200)
    show_table(console, sweep.file, sweep.rows, sort=sort, is_whole=is_whole, directory=sweep.directory)
    for note in sweep.notes:
        console.line(f"note: {note}")


def _write_page(sweep: Sweep, page: Path, flags: Mapping[str, str]) -> None:
    """Writes the page, and its path to standard error; standard output has the table, or JSON."""
    write_file(page, render_sweep(sweep, page, sort=flags.get("--sort")).encode(), flag="--page")
    write_error(f"page: {page}")
    if "--open" in flags and not webbrowser.open(page.resolve().as_uri()):
        raise ConfigError([Problem("--open", "no browser was found", f"open {page.resolve()} in one")])
