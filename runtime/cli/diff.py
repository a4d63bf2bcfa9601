"""Runs `meshloom diff RUN_A RUN_B`: shows what changed between two run directories, or two inspected programs."""

import json
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import all_of
from meshloom.compiler.core.visible import write_out
from meshloom.compiler.report.diff import Run, diff_runs
from meshloom.compiler.report.views.diff_text import show_diff

from ..rundir.folders import RunFolder, check_directory
from .words import Words


def diff_command(words: Words) -> None:
    """Compares two runs. Raises ConfigError if there is nothing to compare."""
    diff = diff_runs(*all_of(*(lambda path=path: read_run_for_diff(path) for path in words.paths)))
    if "--json" in words.flags:
        write_out(json.dumps(diff.as_json(), indent=1))
    else:
        show_diff(diff, Console(off_terminal_width=200))


def read_run_for_diff(run_dir: Path) -> Run:
    """Returns the run that a directory holds. Raises ConfigError if it holds none, or its files are damaged."""
    check_directory(run_dir, "name a run directory, one with spec.yaml and plan.json")
    run = RunFolder(run_dir)
    if not run.is_declared and run.report is not None and not run.report.build:  # inspected, not compiled here
        return Run(str(run_dir), {}, {}, run.report)
    return Run(str(run_dir), *all_of(lambda: run.spec, lambda: run.plan, lambda: run.report))
