"""Runs `meshloom sweep DIR`: shows the table and the page of a sweep again, and exports its rows."""

import json
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error, write_out

from ..sweep.figures import best_first, find_figure
from ..sweep.page import PAGE, render_sweep
from ..sweep.read import Sweep, read_sweep
from ..sweep.table import show_table, write_csv, write_file, write_parquet
from .words import Words


def sweep_command(words: Words) -> None:
    """Shows a sweep. Raises ConfigError if there is none, or a file cannot be written."""
    flags = words.flags
    if "--sort" in flags:
        find_figure(flags["--sort"], where="--sort")
    sweep = read_sweep(words.paths[0])
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
