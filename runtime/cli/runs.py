"""Runs `meshloom runs [DIR]`: lists the runs and sweeps of this machine, the newest first."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import counted, human_seconds
from meshloom.compiler.core.visible import write_out

from ..rundir.find_runs import FoundRun, check_directory, find_directories, read_run
from ..rundir.folders import METRICS, SPEC
from ..rundir.run_record import RECORD_FILE
from ..sweep.figures import FIGURES, best_of, value_of
from ..sweep.read import Sweep, read_sweep
from ..sweep.rows import ROWS_FILE, SWEEP_FILE, Status
from ..sweep.table import came_to
from .words import Syntax, Words, run_words

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


@dataclass(frozen=True)
class Line:
    """A line of the table. last: the last step, or the points done. result: the loss, step time or best point."""

    directory: Path
    command: str
    state: str
    why: str | None
    last: str
    result: str
    changed: str
    details: dict[str, object]


def runs_command(args: Sequence[str]) -> int:
    """Runs the command line. Returns the exit code: 0, or 2 if DIR is not a directory."""
    return run_words(args, _show_runs, SYNTAX)


def _show_runs(words: Words) -> None:
    lines = find_lines(words.paths)
    if "--json" in words.flags:
        write_out(json.dumps([_as_json(line) for line in lines], indent=1))
    else:
        console = Console(off_terminal_width=240)
        show_lines(lines, words.paths, console, is_whole="--all" in words.flags)


def find_lines(paths: Sequence[Path]) -> list[Line]:
    """Returns runs and sweeps, the newest first. Raises ConfigError if a path is not a directory."""
    for path in paths:
        check_directory(path, "name a directory with runs, or leave it out")
    tops = paths or [*(Path(name) for name in PLACES if Path(name).is_dir()), *_named_runs()]
    found = [directory for top in tops for directory in _directories(top)]
    lines = [_of_sweep(path) if (path / SWEEP_FILE).is_file() else _of_run(path) for path in found]
    return sorted(lines, key=lambda line: (line.state == "running", line.changed), reverse=True)


def _named_runs() -> list[Path]:
    """Returns runs and sweeps whose directory the user has named, up to two levels below the working directory. Only
    directories that Meshloom has marked count: a spec.yaml can belong to another program."""
    below = [each for each in _folders(Path()) if each.name not in PLACES]
    return [each for top in below for each in ([top] if _is_marked(top) else filter(_is_marked, _folders(top)))]


def _folders(top: Path) -> list[Path]:
    try:
        found = [path for path in sorted(top.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError:  # it may not be read
        return []
    return [path for path in found if not path.name.startswith(".")]


def _is_marked(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (RECORD_FILE, SWEEP_FILE))


def _directories(top: Path) -> list[Path]:
    """Returns the runs and sweeps below a directory; the points, if it is a sweep itself."""
    markers = (SWEEP_FILE, RECORD_FILE, METRICS, SPEC)
    if not (top / SWEEP_FILE).is_file():
        return list(find_directories(top, *markers))
    below = [path for path in sorted(top.iterdir()) if path.is_dir() and not path.is_symlink()]
    return [path for each in below for path in find_directories(each, *markers)]


def _of_run(directory: Path) -> Line:
    run: FoundRun = read_run(directory)
    of = f"{run.num_steps:,}" if run.num_steps is not None else "?"
    last = f"step {run.step:,} of {of}" if run.step is not None else ""
    if run.command == "compile":
        result = "" if run.predicted_seconds is None else f"step {human_seconds(run.predicted_seconds)}"
    else:
        result = "" if run.loss is None else f"loss {run.loss:.4f}"
    details = {name: value for name, value in asdict(run).items() if name not in Line.__dataclass_fields__}
    return Line(directory, run.command, run.state, run.why, last, result, run.changed, details)


def _of_sweep(directory: Path) -> Line:
    newest = max((directory / name).stat().st_mtime for name in (SWEEP_FILE, ROWS_FILE) if (directory / name).exists())
    changed = datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
    try:
        sweep = read_sweep(directory)
    except ConfigError as error:
        first = error.problems[0]
        return Line(directory, "sweep", "failed", f"{first.where}: {first.what}", "", "", changed, {})
    statuses = Counter(row.status for row in sweep.rows)
    total = sweep.file.num_points if sweep.file.num_points is not None else len(sweep.rows)
    figure = FIGURES[sweep.file.objective]
    best = best_of(sweep.rows, figure)
    value = value_of(best, figure) if best else None
    result = "" if value is None else f"best {figure.heading} {figure.human(value)}"
    details = {"num_points": sweep.file.num_points, "statuses": statuses, "objective": figure.name, "best": value}
    last = f"{statuses['done']:,} of {counted(total, 'point')}"
    state, why = _state(sweep, total)
    return Line(directory, f"{sweep.file.command} -m" if sweep.file.command != "tune" else "tune", state, why, last,
                result, changed, details)  # fmt: skip


def _state(sweep: Sweep, total: int) -> tuple[str, str | None]:
    statuses: Counter[Status] = Counter(row.status for row in sweep.rows if row.status != "done")
    others = ", ".join(f"{number:,} {came_to(status, number)}" for status, number in statuses.most_common()) or None
    if sweep.is_running:
        return "running", others
    if len(sweep.rows) < total:
        left = f"{counted(total - len(sweep.rows), 'point')} left: the same command goes on"
        return "stopped", f"{left}; {others}" if others else left
    return "done", others


def _as_json(line: Line) -> dict[str, object]:
    return {
        "directory": str(line.directory), "command": line.command, "state": line.state, "why": line.why,
        "changed": line.changed, **line.details,
    }  # fmt: skip


def show_lines(lines: Sequence[Line], paths: Sequence[Path], console: Console, *, is_whole: bool) -> None:
    """Shows the newest of these runs and sweeps. paths: the directories that were searched."""
    if not lines:
        where = str(paths[0]) if paths else " and ".join(f"{name}/" for name in PLACES)
        console.wrapped(f"no run and no sweep in {where}; `meshloom runs DIR` looks elsewhere")
        return
    shown = lines if is_whole else lines[:NUM_SHOWN]
    columns = [*map(Column, ("state", "command", "when", "last", "result")), Column("directory", overflow="fold")]
    console.table(Table(columns, [_cells(line) for line in shown]))
    for line in shown:
        if line.why:
            console.wrapped((line.state, STYLES[line.state]), f" {line.directory}: {line.why}")
    if len(shown) < len(lines):
        console.wrapped(f"... {counted(len(lines) - len(shown), 'older one')}: `{LINE} --all` shows them")


def _cells(line: Line) -> list[Part]:
    when = datetime.fromisoformat(line.changed).astimezone().strftime("%Y-%m-%d %H:%M")
    return [(line.state, STYLES[line.state]), line.command, (when, "dim"), line.last, line.result, str(line.directory)]
