"""Finds run directories on this machine, and reads the state, the last step and the loss of each run."""

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from meshloom.compiler.core.errors import ConfigError, Problem

from ..core.files import is_held
from .folders import METRICS, REPORT, SPEC, RunFolder, steps_in
from .run_record import RECORD_FILE, RunRecord

SWEEP_FILE, ROWS_FILE = "sweep.json", "sweep.jsonl"  # of a sweep
TAIL_BYTES = 1 << 18  # read from the end of metrics.jsonl: some hundred steps
FIRST_LOG = "logs/process-0.log"

RunState = Literal["running", "done", "stopped", "failed", "killed"]


@dataclass(frozen=True)
class FoundRun:
    """A run, as its directory shows it.

    state: "killed" means that no end was recorded and no process holds the directory. why: the reason of the state;
    None if it is running or done. step, loss: the last ones in metrics.jsonl. changed: the time of its end or its last
    write, in UTC.
    """

    directory: Path
    command: str
    state: RunState
    why: str | None
    step: int | None
    num_steps: int | None
    loss: float | None
    eval_loss: float | None
    predicted_seconds: float | None
    began: str | None
    changed: str


def check_directory(path: Path, fix: str) -> None:
    """Raises ConfigError if a path is not a directory. fix: what to name instead; the nearest name is added to it."""
    if path.is_dir():
        return
    what = "this is a file" if path.exists() else "there is no such directory"
    names = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    raise ConfigError([Problem(str(path), what, fix + (f" (did you mean '{path.parent / near[0]}'?)" if near else ""))])


def find_directories(top: Path, *markers: str) -> Iterator[Path]:
    """Returns the directories at and below `top` that hold one of these files, without those below them: checkpoints,
    or the points of a sweep. Links are not followed."""
    if any((top / name).is_file() for name in markers):
        yield top
        return
    try:
        with os.scandir(top) as entries:
            below = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:  # a directory that may not be read
        return
    for name in below:
        if not name.startswith("."):
            yield from find_directories(top / name, *markers)


def read_run(directory: Path) -> FoundRun:
    """Returns the run of a directory, also while it is running."""
    run, is_running = RunFolder(directory), is_held(directory)
    record, num_steps = run.record, run.num_steps
    rows = [*steps_in(_tail(directory / METRICS))]
    step = rows[-1]["step"] if rows else None
    command = record.command if record else "compile" if (directory / REPORT).exists() else "train"
    is_done = (directory / REPORT).exists() if command == "compile" else step is not None and step == num_steps
    state, why = _state(directory, record, is_running=is_running, is_done=is_done)
    evaluated = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
    return FoundRun(
        directory, command, state, why, step, num_steps if command == "train" else None,
        rows[-1].get("loss") if rows else None, evaluated[-1] if evaluated else None,
        run.predicted_seconds, record.began if record else None, _changed(directory, record),
    )  # fmt: skip


def _state(
    directory: Path, record: RunRecord | None, *, is_running: bool, is_done: bool
) -> tuple[RunState, str | None]:
    if is_running:
        return "running", None
    if record is not None and record.state != "running":
        return record.state, record.why
    if record is None and is_done:  # by a version that recorded no end
        return "done", None
    no_end = "it recorded no end: its process was killed, or the machine went down"
    if record is not None and record.host != socket.gethostname():
        no_end = f"it recorded no end, on {record.host}: killed, or its lock is not seen from here"
    return "killed", _fatal_error(directory / FIRST_LOG) or no_end


def _fatal_error(log: Path) -> str | None:
    """Returns the fatal error that Python's faulthandler wrote when the process died; None if it wrote none."""
    found = re.findall(r"^Fatal Python error: (.+)$", _tail(log).decode(errors="replace"), re.MULTILINE)
    return f"{found[-1]} ({log} has its stacks)" if found else None


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _changed(directory: Path, record: RunRecord | None) -> str:
    if record is not None and record.ended is not None:
        return record.ended
    paths = [directory / name for name in (METRICS, FIRST_LOG, RECORD_FILE, SPEC)]
    newest = max((path.stat().st_mtime for path in paths if path.exists()), default=directory.stat().st_mtime)
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")
