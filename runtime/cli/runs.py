"""Runs `meshloom runs [DIR]`: lists the runs and sweeps of this machine, the newest first."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted, human_seconds
from meshloom.compiler.core.visible import write_out

from ..rundir.folders import (
    METRICS,
    RECORD_FILE,
    ROWS_FILE,
    SPEC,
    SWEEP_FILE,
    check_directory,
    find_directories,
    read_run,
)
from ..sweep.read import read_sweep
from ..sweep.rows import FIGURES, Status, best_of, value_of
from ..sweep.table import came_to
from .words import Words

MARKERS = (SWEEP_FILE, RECORD_FILE, METRICS, SPEC)
NUM_SHOWN = 30
PLACES = ("outputs", "multirun")  # where Hydra puts runs and sweeps, in the working directory
STYLES = {"running": "bold cyan", "done": "green", "stopped": "yellow", "failed": "bold red", "killed": "bold red"}


def runs_command(words: Words) -> None:
    """Lists runs. Raises ConfigError if a path is not a directory."""
    runs = find_runs(words.paths)
    if "--json" in words.flags:
        write_out(json.dumps(runs, indent=1))
    else:
        show_runs(runs, words.paths, Console(off_terminal_width=240), is_whole="--all" in words.flags)


def find_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns runs and sweeps as JSON, the newest first. Raises ConfigError if a path is not a directory."""
    for path in paths:
        check_directory(path, "name a directory with runs, or leave it out")
    tops = [each for path in paths for each in (_folders(path) if _is_sweep(path) else [path])]
    if not paths:
        # In other folders only what Meshloom has marked counts: a spec.yaml can belong to another program.
        below = [path for path in _folders(Path()) if path.name not in PLACES]
        own = [each for top in below for each in ([top] if _is_marked(top) else filter(_is_marked, _folders(top)))]
        tops = [*(Path(name) for name in PLACES if Path(name).is_dir()), *own]
    found = [directory for top in tops for directory in find_directories(top, *MARKERS)]
    runs = [_sweep(path) if _is_sweep(path) else read_run(path).as_json(path) for path in found]
    return sorted(runs, key=lambda run: (run["state"] == "running", run["changed"]), reverse=True)


def _is_sweep(directory: Path) -> bool:
    return (directory / SWEEP_FILE).is_file()


def _is_marked(directory: Path) -> bool:
    return _is_sweep(directory) or (directory / RECORD_FILE).is_file()


def _folders(top: Path) -> list[Path]:
    try:
        found = [path for path in sorted(top.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError:  # it may not be read
        return []
    return [path for path in found if not path.name.startswith(".")]


def _sweep(directory: Path) -> dict[str, Any]:
    """Returns how far a sweep is, and its best point; `meshloom sweep DIR` shows its figures."""
    newest = max(path.stat().st_mtime for path in (directory / SWEEP_FILE, directory / ROWS_FILE) if path.exists())
    changed = datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
    run: dict[str, Any] = {"directory": str(directory), "command": "sweep", "changed": changed}
    try:
        sweep = read_sweep(directory)
    except ConfigError as error:
        first = error.problems[0]
        return run | {"state": "failed", "why": f"{first.where}: {first.what}"}
    statuses: Counter[Status] = Counter(row.status for row in sweep.rows)
    figure, num_points = FIGURES[sweep.file.objective], sweep.file.num_points
    best = best_of(sweep.rows, figure)
    num_left = (num_points or 0) - len(sweep.rows)
    is_stopped = num_left > 0 and not sweep.is_running
    others = [f"{number:,} {came_to(status, number)}" for status, number in statuses.most_common() if status != "done"]
    left = [f"{counted(num_left, 'point')} left: the same command goes on"] if is_stopped else []
    return run | {
        "command": sweep.file.command if sweep.file.command == "tune" else f"{sweep.file.command} -m",
        "state": "running" if sweep.is_running else "stopped" if is_stopped else "done",
        "why": "; ".join([*left, *([", ".join(others)] if others else [])]) or None, "num_points": num_points,
        "statuses": statuses, "objective": figure.name, "best": value_of(best, figure) if best else None,
    }  # fmt: skip


def show_runs(runs: Sequence[dict[str, Any]], paths: Sequence[Path], console: Console, *, is_whole: bool) -> None:
    """Shows the newest of these runs and sweeps. paths: the directories that were searched."""
    if not runs:
        where = str(paths[0]) if paths else " and ".join(f"{name}/" for name in PLACES)
        console.wrapped(f"no run and no sweep in {where}; `meshloom runs DIR` looks elsewhere")
        return
    shown = runs if is_whole else runs[:NUM_SHOWN]
    columns = [*map(Column, ("state", "command", "when", "last", "result")), Column("directory", overflow="fold")]
    console.table(Table(columns, [_cells(run) for run in shown]))
    for run in shown:
        if run["why"]:
            console.wrapped((run["state"], STYLES[run["state"]]), f" {run['directory']}: {run['why']}")
    if len(shown) < len(runs):
        line = " ".join(["meshloom runs", *map(str, paths), "--all"])
        console.wrapped(f"... {counted(len(runs) - len(shown), 'older one')}: `{line}` shows them")


def _cells(run: dict[str, Any]) -> list[Part]:
    when = datetime.fromisoformat(run["changed"]).astimezone().strftime("%Y-%m-%d %H:%M")
    last = result = ""
    if (statuses := run.get("statuses")) is not None:
        last = f"{statuses['done']:,} of {counted(run['num_points'] or statuses.total(), 'point')}"
    elif (step := run.get("step")) is not None:
        total = "?" if run["num_steps"] is None else format(run["num_steps"], ",")
        last = f"step {step:,} of {total}"
    if run.get("best") is not None:
        figure = FIGURES[run["objective"]]
        result = f"best {figure.heading} {figure.human(run['best'])}"
    elif run.get("predicted_seconds") is not None and run["command"] == "compile":
        result = f"step {human_seconds(run['predicted_seconds'])}"
    elif run.get("loss") is not None:
        result = f"loss {run['loss']:.4f}"
    return [(run["state"], STYLES[run["state"]]), run["command"], (when, "dim"), last, result, run["directory"]]
