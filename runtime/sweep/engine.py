"""Runs a sweep: keeps its directory, writes the rows of its points, and shows its progress, table and page.

This process alone writes the rows, one line for each point that has ended, at once and to the disk. Whatever ends a
sweep, the same command finds the rows and goes on with the points that have none.
"""

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.declare.compose import hydra_sweep_dir, hydra_sweep_subdir
from meshloom.compiler.declare.hydra_settings import (
    JOB_NUMBER,
    SWEEP_DIR,
    one_directory,
)
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.sweep_request import SweepRequest, value_of

from ..core.exclusive import locked
from ..core.files import replace_json, replace_text
from ..rundir.find_runs import ROWS_FILE, SWEEP_FILE
from ..rundir.run_dir import as_typed
from .figures import find_figure
from .page import PAGE, render_sweep
from .pool import Pool
from .read import Sweep, as_glob, find_unfinished, identity_of, num_left, read_sweep, versions
from .rows import (
    INTERRUPTED,
    SCHEMA_VERSION,
    Outcome,
    Point,
    Row,
    Status,
    SweepCommand,
    SweepFile,
    Task,
    directory_name,
    row_of,
    swept_of,
)
from .settings import ClusterSettings, PoolSettings
from .submitted import JobSets, SlurmArrays, SubmittedPoints
from .table import SweepProgress, show_table

OBJECTIVES: dict[SweepCommand, str] = {"explain": "step_seconds", "compile": "step_seconds", "train": "final_loss"}
PROCESSES = ".processes"  # rows of all processes but the first, if several run each point together
JOBS = ".jobs"  # scripts for a cluster, and what its jobs leave
SECONDS_BETWEEN_PAGES, PAUSE = 5.0, 20  # while a sweep runs; PAUSE: times the time that the last page took
WORKERS = ".workers"  # output of workers; removed at the end


@dataclass
class Engine:
    """A sweep, from its checked request to its table. directory: as typed. rows: by index. settings: None if another
    launcher than ours runs the points."""

    command: SweepCommand
    asked: SweepRequest
    allowed: tuple[str, ...]
    directory: Path
    file: SweepFile
    settings: PoolSettings | ClusterSettings | None
    console: Console
    rows: dict[int, Row]
    progress: SweepProgress = field(init=False)
    pool: Pool | SubmittedPoints | None = field(default=None, init=False)
    first_index: int = field(default=0, init=False)  # a sweeper that chooses as it goes goes on after earlier points
    _earlier: dict[tuple[str, ...], Row] = field(default_factory=dict, init=False)
    _names: dict[str, int] = field(default_factory=dict, init=False)
    _next_page: float = field(default=0.0, init=False)
    _fingerprints: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        num_points, objective = self.file.num_points, self.file.objective
        self.progress = SweepProgress(self.console, num_points=num_points, objective=objective, rows=self.rows.values())
        if isinstance(self.settings, ClusterSettings):
            submitted = {"slurm": SlurmArrays, "jobset": JobSets}[self.settings.engine]
            scratch = self.directory.absolute() / JOBS
            self.pool = submitted(self.settings, self.task_of, scratch, self.record, self._update)
        elif self.settings:
            is_own = self.command == "train"
            scratch = self.directory.absolute() / WORKERS
            self.pool = Pool(self.settings, self.task_of, scratch, self.record, self._update, is_own=is_own)
        if not self.asked.is_grid:
            self.first_index = max(self.rows, default=-1) + 1
            self._earlier = {row.overrides: row for row in self.rows.values()}
        for row in self.rows.values():
            if row.fingerprint:
                self._fingerprints.setdefault(row.fingerprint, row.index)

    def run_batch(self, jobs: Sequence[Sequence[str]], first_index: int) -> list[Row | None]:
        """Runs the jobs of Hydra's sweeper in our own workers. Returns their rows; None for a point that was only shown
        (launch.dry_run=true)."""
        points = [
            self.point_of(overrides, self.first_index + first_index + number) for number, overrides in enumerate(jobs)
        ]
        left = []
        for point in points:
            if self.row_of(point.index, point.overrides):
                continue
            if self._names[point.directory] != point.index:
                why = str(one_directory(point.directory).what)
                self.record(point, Outcome(status="refused", exit_code=MISTAKE, why=why))
                continue
            left.append(point)
        assert self.pool is not None
        with self.progress:
            self.pool.run(left)
        return [self.row_of(point.index, point.overrides) for point in points]

    def row_of(self, index: int, overrides: tuple[str, ...]) -> Row | None:
        """Returns the row of a point; None if it has not ended. A sweeper that chooses points as it goes may ask again
        for one that an earlier start has run."""
        if index in self.rows or self.asked.is_grid:
            return self.rows.get(index)
        return self._earlier.get(overrides)

    def point_of(self, overrides: Sequence[str], index: int) -> Point:
        """Returns the point of one of Hydra's jobs. Its overrides name its directory, unless the user has set another
        name."""
        swept = tuple(swept_of(overrides, list(self.asked.axes)))
        if self.is_named_by_user:
            declared = replace(self.asked.request, overrides=(*self.asked.settled, *swept))
            name = hydra_sweep_subdir(declared, index)
        else:
            name = directory_name(swept)
        if self._names.setdefault(name, index) != index and not self.is_named_by_user:
            name = f"{name}-{index}"  # the user typed the same value twice
            self._names.setdefault(name, index)
        return Point(index, swept, {text.partition("=")[0]: value_of(text) for text in swept}, name)

    def point_at(self, overrides: Sequence[str], index: int, directory: Path) -> Point:
        """Returns the point of a job whose directory Hydra has named."""
        swept = tuple(swept_of(overrides, list(self.asked.axes)))
        name = os.path.relpath(directory, self.directory)
        return Point(index, swept, {text.partition("=")[0]: value_of(text) for text in swept}, name)

    @property
    def is_complete(self) -> bool:
        """Returns True if every point has a row."""
        return self.file.num_points is not None and len(self.rows) >= self.file.num_points

    @property
    def is_named_by_user(self) -> bool:
        """Returns True if the user has set `hydra.sweep.subdir`."""
        return self.asked.subdirectory != JOB_NUMBER

    def template(self) -> Task:
        """Returns the task without what differs between points."""
        return Task(
            self.command,
            replace(self.asked.request, overrides=self.asked.fixed),
            self.allowed,
            self.directory.absolute(),
        )

    def task_of(self, point: Point) -> Task:
        """Returns what a worker needs to run a point."""
        request = replace(self.asked.request, overrides=(*self.asked.fixed, *point.overrides))
        return replace(self.template(), request=request, directory=(self.directory / point.directory).absolute())

    def record(self, point: Point, outcome: Outcome) -> Row:
        """Writes and shows the row of a point that has ended."""
        row = row_of(point, outcome, has_directory=(self.directory / point.directory).is_dir())
        if row.fingerprint:
            same = self._fingerprints.setdefault(row.fingerprint, row.index)
            row = row.model_copy(update={"same_as": same if same != row.index else None})
        append_row(self.directory / ROWS_FILE, row)
        self.rows[row.index] = row
        self.progress.ended(row)
        return row

    def _update(self, num_running: int) -> None:
        """Shows the progress of the sweep on the terminal, and from time to time in its page."""
        self.progress.update(num_running)
        begun = time.monotonic()
        if begun >= self._next_page:
            with suppress(OSError):  # a fault of the disk is reported when the page is written at the end
                self._write_page(is_running=True)
            self._next_page = time.monotonic() + max(SECONDS_BETWEEN_PAGES, PAUSE * (time.monotonic() - begun))

    def _write_page(self, *, is_running: bool) -> None:
        rows = [self.rows[index] for index in sorted(self.rows)]
        notes = (f"the sweep is running, {counted(len(rows), 'point')} ended: load this page again for more",)
        sweep = Sweep(self.directory, self.file, tuple(rows), is_running, notes if is_running else ())
        replace_text(self.directory / PAGE, render_sweep(sweep, self.directory / PAGE))

    def end(self, *, is_interrupted: bool) -> int:
        """Shows the table, and how many points are left. Returns the exit code of the worst point."""
        rows = [self.rows[index] for index in sorted(self.rows)]
        show_table(self.console, self.file, rows, directory=self.directory)
        self._write_page(is_running=False)
        if is_interrupted:
            total = "" if self.file.num_points is None else f" of {self.file.num_points:,}"
            again = f"the same command goes on with the others, in {self.directory}"
            self.console.line(f"interrupted: {len(rows):,}{total} points have a row; {again}")
            return INTERRUPTED
        self.console.line(f"in {self.directory}: {PAGE} shows all of it")
        return max((row.exit_code or 0 for row in rows), default=0)


@contextmanager
def open_sweep(
    command: SweepCommand,
    asked: SweepRequest,
    settings: PoolSettings | ClusterSettings | None,
    *,
    allowed: tuple[str, ...],
    console: Console,
    process: int = 0,
) -> Iterator[Engine]:
    """Yields the sweep that the request asks for: an unfinished one of the same command, or a new one. Raises
    ConfigError if the directory holds another sweep, or another process uses it.

    process: the index of this process, if several run each point together. The first one has the rows; the others go
    through the same points.
    """
    sweep_spec, identity = asked.spec.sweep, identity_of(command, asked)
    if command == "train":
        check_checkpoints_apart(asked)
    objective = sweep_spec.objective or OBJECTIVES[command]
    find_figure(objective, where="sweep.objective")
    file = _sweep_file(command, asked, objective, identity)
    directory, earlier = _find_directory(asked, identity, sweep_spec.retry)
    own = directory if process == 0 else directory / PROCESSES / str(process)
    own.mkdir(parents=True, exist_ok=True)
    fix = f"wait for its end, stop it, or choose another {SWEEP_DIR}"
    with locked(own, Problem(SWEEP_DIR, f"another sweep is in progress in {own}", fix)):
        rows = dict[int, Row]()
        if earlier:  # its rows that are not run again
            rows = {row.index: row for row in read_sweep(directory).rows if row.status not in sweep_spec.retry}
        if process == 0:
            _write_rows(directory, rows)
            replace_json(directory / SWEEP_FILE, file.model_dump(mode="json"))
        else:
            _write_rows(own, {})
        if earlier:
            _say_continued(console, directory, file, rows, earlier)
        engine = Engine(command, asked, allowed, own, file, settings, console, rows)
        with engine.pool or nullcontext():
            yield engine


def _sweep_file(command: SweepCommand, asked: SweepRequest, objective: str, identity: str) -> SweepFile:
    return SweepFile(
        schema_version=SCHEMA_VERSION,
        command=command,
        overrides=tuple(text for text in asked.fixed if not overridden_key(text).startswith("hydra.")),
        axes={key: [value_of(text) for text in values] for key, values in asked.axes.items()},
        num_points=asked.num_points,
        objective=objective,
        versions=versions(),
        identity=identity,
    )


def append_row(path: Path, row: Row) -> None:
    """Appends a row to a file, as a whole line, and flushes it to the disk."""
    line = (row.model_dump_json() + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def check_checkpoints_apart(asked: SweepRequest) -> None:
    """Raises ConfigError if all points would save in one folder: each would continue the one before it."""
    typed = [text for text in asked.fixed if overridden_key(text) == "checkpoint.directory"]
    if typed and asked.num_points != 1 and typed[-1].partition("=")[2] != "null":
        what = "all points would save in one folder, and go on from each other's checkpoints"
        fix = "leave it out, or sweep over it: a folder for each point"
        raise ConfigError([Problem("checkpoint.directory", what, fix)])


def _find_directory(asked: SweepRequest, identity: str, retry: Sequence[Status]) -> tuple[Path, Sweep | None]:
    """Returns the directory of the sweep, and the sweep that an earlier start has left there."""
    pattern, settled = asked.directory, replace(asked.request, overrides=asked.settled)
    if "*" in as_glob(pattern):
        earlier = find_unfinished(pattern, identity)
        if earlier and (num_left(earlier) or any(row.status in retry for row in earlier.rows)):
            return as_typed(earlier.directory.absolute()), earlier
        return as_typed(hydra_sweep_dir(settled)), None
    directory = as_typed(hydra_sweep_dir(settled))
    if not (directory / SWEEP_FILE).exists():
        return directory, None
    earlier = read_sweep(directory)
    if earlier.file.identity != identity:
        typed = shlex.join(["meshloom", earlier.file.command, "-m", *earlier.file.overrides, *earlier.file.axes])
        what = f"{directory} holds another sweep, or one by other versions: {typed} ..."
        raise ConfigError([Problem(SWEEP_DIR, what, "choose another directory, or remove this one")])
    return directory, earlier


def _write_rows(directory: Path, rows: dict[int, Row]) -> None:
    """Removes all lines but those of these rows from the file: a cut-off line, and rows that are made again."""
    path = directory / ROWS_FILE
    content = path.read_text() if path.exists() else ""
    whole = content[: content.rfind("\n") + 1].splitlines(keepends=True)
    kept = "".join(line for line in whole if json.loads(line)["index"] in rows)
    if content != kept:
        replace_text(path, kept)


def _say_continued(console: Console, directory: Path, file: SweepFile, rows: dict[int, Row], earlier: Sweep) -> None:
    for note in earlier.notes:
        if "cut off" in note:
            console.line(f"note: {note}")
    num_done = len(rows)
    if file.num_points is not None and num_done >= file.num_points:
        again = f"remove it, or choose another {SWEEP_DIR}, to run it again"
        console.line(f"all {counted(num_done, 'point')} of this sweep are there, in {directory}: {again}")
    else:
        total = "" if file.num_points is None else f" of {file.num_points:,}"
        console.line(f"continuing {directory}: {num_done:,}{total} points have a row")
