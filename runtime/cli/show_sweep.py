"""Runs `meshloom sweep DIR`: shows the table and the page of a sweep again, and exports its rows."""

import json
import webbrowser
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.visible import write_error, write_out

from ..sweep.page import PAGE, render_sweep
from ..sweep.read import read_sweep, sweep_as_json
from ..sweep.rows import find_figure
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
        console, is_whole = Console(off_terminal_width=200), "--all" in flags
        show_table(
            console, sweep.file, sweep.rows, sort=flags.get("--sort"), is_whole=is_whole, directory=sweep.directory
        )
        for note in sweep.notes:
            console.line(f"note: {note}")
    for flag, write in (("--csv", write_csv), ("--parquet", write_parquet)):
        if flag in flags:
            write(sweep.rows, Path(flags[flag]))
            write_error(f"{len(sweep.rows):,} rows: {flags[flag]}")
    if "--json" not in flags or "--page" in flags or "--open" in flags:
        page = Path(flags.get("--page", sweep.directory / PAGE))
        write_file(page, render_sweep(sweep, page, sort=flags.get("--sort")).encode(), flag="--page")
        write_error(f"page: {page}")  # standard output has the table, or JSON
        if "--open" in flags and not webbrowser.open(page.resolve().as_uri()):
            raise ConfigError([Problem("--open", "no browser was found", f"open {page.resolve()} in one")])
