"""Runs `meshloom runs [DIR]`: lists the runs and sweeps of this machine, the newest first."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.format import counted, human_seconds
from meshloom.compiler.core.visible import write_out

from ..core.exclusive import is_held
from ..core.files import parse_json
from ..rundir.find_runs import ROWS_FILE, SWEEP_FILE, SWEEP_SCHEMA_VERSION, check_directory, find_directories, read_run
from ..rundir.folders import METRICS, SPEC
from ..rundir.run_record import RECORD_FILE
from .words import Syntax, Words, run_words

MARKERS = (SWEEP_FILE, RECORD_FILE, METRICS, SPEC)
NUM_SHOWN = 30
PLACES = ("outputs", "multirun")  # where Hydra puts runs and sweeps, in the working directory
LINE = "meshloom runs [DIR]"
USAGE = """\
usage: meshloom runs [DIR] [--all] [--json]

Lists the runs and sweeps at and below DIR, the newest first: whether they are
running, done, stopped, failed or killed, and why; the last step, the loss, the
directory. If DIR is itself a sweep, its points are listed. Without DIR, those
in outputs/ and multirun/ of the working directory are listed, and others up to
two levels below it, such as hydra.run.dir=my-run or runs/first.

  --all    list every run; without it, the newest 30
  --json   print a JSON list
"""
SYNTAX = Syntax(LINE, USAGE, {"--all": "", "--json": ""}, num_paths=range(2))
STYLES = {"running": "bold cyan", "done": "green", "stopped": "yellow", "failed": "bold red", "killed": "bold red"}


def runs_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if DIR is not a directory."""
    return run_words(args, _show_runs, SYNTAX)


def _show_runs(words: Words) -> None:
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
    runs = [_sweep(path) if _is_sweep(path) else asdict(read_run(path)) | {"directory": str(path)} for path in found]
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
    """Returns how far a sweep is; `meshloom sweep DIR` shows its figures."""
    file, rows = directory / SWEEP_FILE, directory / ROWS_FILE
    newest = max(path.stat().st_mtime for path in (file, rows) if path.exists())
    changed = datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
    run: dict[str, Any] = {"directory": str(directory), "command": "sweep", "changed": changed}
    try:
        declared = parse_json(file.read_bytes())
        lines = rows.read_bytes().splitlines(keepends=True) if rows.exists() else []
        # The last line may be cut off: it is being written.
        status_of = {row["index"]: row["status"] for row in map(parse_json, filter(_is_whole, lines))}
        command, num_points = declared["command"], declared["num_points"]
        if declared["schema_version"] != SWEEP_SCHEMA_VERSION:
            raise ValueError(f"schema_version is {declared['schema_version']}, not {SWEEP_SCHEMA_VERSION}")
        texts, counts = [command, *status_of.values()], [*status_of, *([] if num_points is None else [num_points])]
        if not all(type(each) is str for each in texts) or not all(type(each) is int for each in counts):
            raise ValueError("a value has another type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return run | {"state": "failed", "why": f"its files are damaged: {error}"}
    statuses = Counter(status_of.values())
    total = len(status_of) if num_points is None else num_points
    others = {status.replace("does_not", "did_not").replace("_", " "): n for status, n in statuses.items()}
    why = [f"{n:,} {status}" for status, n in others.items() if status != "done"]
    is_running, num_left = is_held(directory), total - len(status_of)
    if num_left and not is_running:
        why = [f"{counted(num_left, 'point')} left: the same command goes on", *why]
    return run | {
        "command": command if command == "tune" else f"{command} -m",
        "state": "running" if is_running else "stopped" if num_left else "done",
        "why": "; ".join(why) or None, "num_points": num_points, "statuses": statuses,
    }  # fmt: skip


def _is_whole(line: bytes) -> bool:
    return line.endswith(b"\n")


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
        console.wrapped(f"... {counted(len(runs) - len(shown), 'older one')}: `{LINE} --all` shows them")


def _cells(run: dict[str, Any]) -> list[Part]:
    when = datetime.fromisoformat(run["changed"]).astimezone().strftime("%Y-%m-%d %H:%M")
    last = result = ""
    if (statuses := run.get("statuses")) is not None:
        last = f"{statuses['done']:,} of {counted(run['num_points'] or statuses.total(), 'point')}"
    elif (step := run.get("step")) is not None:
        total = "?" if run["num_steps"] is None else format(run["num_steps"], ",")
        last = f"step {step:,} of {total}"
    if run.get("predicted_seconds") is not None and run["command"] == "compile":
        result = f"step {human_seconds(run['predicted_seconds'])}"
    elif run.get("loss") is not None:
        result = f"loss {run['loss']:.4f}"
    return [(run["state"], STYLES[run["state"]]), run["command"], (when, "dim"), last, result, run["directory"]]
