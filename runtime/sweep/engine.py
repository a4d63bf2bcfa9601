"""Runs a sweep: keeps its directory, writes the rows of its points, and shows its progress, table and page.

This process alone writes the rows, one line for each point that has ended, at once and to the disk. Whatever ends a
sweep, the same command finds the rows and goes on with the points that have none.

Meshloom's own launcher hands its batch to the engine. Others call a task for each point, which may be pickled and
called in another process or on another machine. It runs the point in a process of its own and leaves the outcome in the
sweep's directory; the process of the sweep finds it there and writes the row.
"""

import json
import math
import os
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import MISTAKE, ConfigError, Problem
from meshloom.compiler.core.format import counted
from meshloom.compiler.core.known import known
from meshloom.compiler.declare.application import HydraJob, make_sources_portable
from meshloom.compiler.declare.compose import hydra_sweep_dir, hydra_sweep_subdir
from meshloom.compiler.declare.hydra_settings import JOB_NUMBER, SWEEP_DIR, one_directory
from meshloom.compiler.declare.overrides import overridden_key
from meshloom.compiler.declare.sweep_request import SweepRequest, value_of
from meshloom.models.record import Record

from ..core.files import locked, replace_json, replace_text
from ..rundir.folders import ROWS_FILE, SWEEP_FILE
from ..rundir.run_dir import as_typed
from .page import PAGE, render_sweep
from .pool import OwnProcess, Pool, PoolSettings
from .read import Sweep, as_glob, identity_of, read_sweep, sweeps_in, versions
from .rows import (
    INTERRUPTED,
    SWEEP_VERSION,
    Outcome,
    Point,
    Row,
    Status,
    SweepCommand,
    SweepFile,
    Task,
    directory_name,
    find_figure,
    swept_of,
)
from .submitted import ENGINES, ClusterSettings, SubmittedPoints
from .table import SweepProgress, show_table

OBJECTIVES: dict[SweepCommand, str] = {"explain": "step_seconds", "compile": "step_seconds", "train": "final_loss"}
PROCESSES = ".processes"  # rows of all processes but the first, if several run each point together
JOBS = ".jobs"  # scripts for a cluster, and what its jobs leave
SECONDS_BETWEEN_PAGES, PAUSE = 5.0, 20  # while a sweep runs; PAUSE: times the time that the last page took
WORKERS = ".workers"  # output of workers; removed at the end
SPOOL = ".ended"  # a folder of the sweep: outcomes of points that other processes ran
_POLL_SECONDS = 0.5

_engine: "Engine | None" = None  # Hydra makes a launcher itself, from a config alone: ours finds its sweep here


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
    # A sweeper that chooses as it goes goes on after earlier points, and may ask for one that an earlier start has run.
    first_index: int = field(default=0, init=False)
    _earlier: dict[tuple[str, ...], Row] = field(default_factory=dict, init=False)
    _names: dict[str, int] = field(default_factory=dict, init=False)
    _next_page: float = field(default=0.0, init=False)
    _fingerprints: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        num_points, objective = self.file.num_points, self.file.objective
        self.progress = SweepProgress(self.console, num_points=num_points, objective=objective, rows=self.rows.values())
        place = self.directory.absolute()
        if isinstance(self.settings, ClusterSettings):
            submitted = ENGINES[self.settings.engine]
            self.pool = submitted(self.settings, self.task_of, place / JOBS, self.record, self._update)
        elif self.settings:
            is_own = self.command == "train"
            self.pool = Pool(self.settings, self.task_of, place / WORKERS, self.record, self._update, is_own=is_own)
        if not self.asked.is_grid:
            self.first_index = max(self.rows, default=-1) + 1
            self._earlier = {row.overrides: row for row in self.rows.values()}
        for row in self.rows.values():
            if row.fingerprint:
                self._fingerprints.setdefault(row.fingerprint, row.index)

    def run_batch(self, jobs: Sequence[Sequence[str]], first_index: int) -> list[Row | None]:
        """Runs the jobs of Hydra's sweeper in our own workers. Returns their rows; None for a point that was only shown
        (launch.dry_run=true)."""
        assert self.pool is not None
        points = [self.point_of(job, index) for index, job in enumerate(jobs, start=self.first_index + first_index)]
        left = []
        for point in points:
            if point.index in self.rows or point.overrides in self._earlier:
                continue
            if self._names[point.directory] != point.index:
                why = str(one_directory(point.directory).what)
                self.record(point, Outcome(status="refused", exit_code=MISTAKE, why=why))
                continue
            left.append(point)
        with self.progress:
            self.pool.run(left)
        return [self.rows.get(point.index) or self._earlier.get(point.overrides) for point in points]

    def point_of(self, overrides: Sequence[str], index: int, directory: Path | None = None) -> Point:
        """Returns the point of one of Hydra's jobs. directory: as Hydra has named it; without it the overrides name it,
        unless the user has set another name."""
        swept = tuple(swept_of(overrides, list(self.asked.axes)))
        if directory:
            name = os.path.relpath(directory, self.directory)
        elif self.is_named_by_user:
            declared = replace(self.asked.request, overrides=(*self.asked.settled, *swept))
            name = hydra_sweep_subdir(declared, index)
            self._names.setdefault(name, index)
        else:
            name = directory_name(swept)
            if self._names.setdefault(name, index) != index:
                name = f"{name}-{index}"  # the user typed the same value twice
                self._names.setdefault(name, index)
        return Point(index, swept, {text.partition("=")[0]: value_of(text) for text in swept}, name)

    @property
    def is_complete(self) -> bool:
        """Returns True if every point has a row."""
        return self.file.num_points is not None and len(self.rows) >= self.file.num_points

    @property
    def is_named_by_user(self) -> bool:
        """Returns True if the user has set `hydra.sweep.subdir`."""
        return self.asked.subdirectory != JOB_NUMBER

    def task_of(self, point: Point | None) -> Task:
        """Returns what a worker needs to run a point; None: without what differs between points."""
        overrides, name = (point.overrides, point.directory) if point else ((), "")
        request = replace(self.asked.request, overrides=(*self.asked.fixed, *overrides))
        return Task(self.command, request, self.allowed, (self.directory / name).absolute())

    def record(self, point: Point, outcome: Outcome) -> Row:
        """Writes and shows the row of a point that has ended."""
        row = outcome.row(point, has_directory=(self.directory / point.directory).is_dir())
        if row.fingerprint:
            same = self._fingerprints.setdefault(row.fingerprint, row.index)
            row = row.model_copy(update={"same_as": same if same != row.index else None})
        file = os.open(self.directory / ROWS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:  # a whole line, on the disk
            os.write(file, (row.model_dump_json() + "\n").encode())
            os.fsync(file)
        finally:
            os.close(file)
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
        rows = tuple(self.rows[index] for index in sorted(self.rows))
        notes = (f"the sweep is running, {counted(len(rows), 'point')} ended: load this page again for more",)
        sweep = Sweep(self.directory, self.file, rows, is_running, notes if is_running else ())
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
    typed = [text for text in asked.fixed if overridden_key(text) == "checkpoint.directory"]
    if command == "train" and typed and asked.num_points != 1 and typed[-1].partition("=")[2] != "null":
        what = "all points would save in one folder, and go on from each other's checkpoints"
        fix = "leave it out, or sweep over it: a folder for each point"
        raise ConfigError([Problem("checkpoint.directory", what, fix)])
    objective, retry = asked.spec.sweep.objective or OBJECTIVES[command], asked.spec.sweep.retry
    find_figure(objective, where="sweep.objective")
    file = SweepFile(
        schema_version=SWEEP_VERSION,
        command=command,
        overrides=tuple(text for text in asked.fixed if not overridden_key(text).startswith("hydra.")),
        axes={key: [value_of(text) for text in values] for key, values in asked.axes.items()},
        num_points=asked.num_points,
        objective=objective,
        versions=versions(),
        identity=identity_of(command, asked),
    )
    directory, earlier = _find_directory(asked, file, retry)
    own = directory if process == 0 else directory / PROCESSES / str(process)
    own.mkdir(parents=True, exist_ok=True)
    fix = f"wait for its end, stop it, or choose another {SWEEP_DIR}"
    with locked(own, Problem(SWEEP_DIR, f"another sweep is in progress in {own}", fix)):
        # Other processes may have added rows since it was found. Those that are run again are left out.
        done = read_sweep(directory).rows if earlier else ()
        rows = {row.index: row for row in done if row.status not in retry}
        _keep_rows(own / ROWS_FILE, rows if process == 0 else {})
        if process == 0:
            replace_json(directory / SWEEP_FILE, file.model_dump(mode="json"))
        for note in earlier.notes if earlier else ():
            if "cut off" in note:
                console.line(f"note: {note}")
        engine = Engine(command, asked, allowed, own, file, settings, console, rows)
        if earlier and engine.is_complete:
            again = f"remove it, or choose another {SWEEP_DIR}, to run it again"
            console.line(f"all {counted(len(rows), 'point')} of this sweep are there, in {directory}: {again}")
        elif earlier:
            total = "" if file.num_points is None else f" of {file.num_points:,}"
            console.line(f"continuing {directory}: {len(rows):,}{total} points have a row")
        with engine.pool or nullcontext():
            yield engine


def _find_directory(asked: SweepRequest, file: SweepFile, retry: Sequence[Status]) -> tuple[Path, Sweep | None]:
    """Returns the directory of the sweep, and the sweep that an earlier start has left there."""
    settled = replace(asked.request, overrides=asked.settled)
    if "*" in (pattern := as_glob(asked.directory)):
        earlier = next((sweep for sweep in sweeps_in(pattern) if sweep.file.identity == file.identity), None)
        if earlier and (earlier.num_left or any(row.status in retry for row in earlier.rows)):
            return as_typed(earlier.directory.absolute()), earlier
        return as_typed(hydra_sweep_dir(settled)), None
    directory = as_typed(hydra_sweep_dir(settled))
    if not (directory / SWEEP_FILE).exists():
        return directory, None
    earlier = read_sweep(directory)
    if earlier.file.identity != file.identity:
        typed = shlex.join(["meshloom", earlier.file.command, "-m", *earlier.file.overrides, *earlier.file.axes])
        what = f"{directory} holds another sweep, or one by other versions: {typed} ..."
        raise ConfigError([Problem(SWEEP_DIR, what, "choose another directory, or remove this one")])
    return directory, earlier


def _keep_rows(path: Path, rows: dict[int, Row]) -> None:
    """Removes all lines but those of these rows from the file: a cut-off line, and rows that are made again."""
    content = path.read_text() if path.exists() else ""
    whole = content[: content.rfind("\n") + 1].splitlines(keepends=True)
    kept = "".join(line for line in whole if json.loads(line)["index"] in rows)
    if content != kept:
        replace_text(path, kept)


class EndedPoint(Record):
    """A file of the spool: the outcome of a point. overrides: all that Hydra has for it. directory: the point's."""

    index: int
    overrides: tuple[str, ...]
    directory: str
    outcome: Outcome


@dataclass(frozen=True)
class PointTask:
    """The task that another launcher calls for each point.

    template: what all points share. axes: the swept keys. spool: takes the outcomes. objective: the name of a figure.
    first_index: the index of the first point. ended: the objectives of points that have a row, by index and overrides;
    by overrides alone if the sweeper chooses points as it goes.
    """

    template: Task
    axes: tuple[str, ...]
    spool: Path
    objective: str
    first_index: int
    ended: Mapping[tuple[int | None, tuple[str, ...]], float]

    def __call__(self, job: HydraJob) -> float:
        """Runs the point of the job, and returns its objective."""
        index, overrides = self.first_index + job.number, job.overrides
        swept = tuple(swept_of(overrides, self.axes))
        for key in ((index, swept), (None, swept)):
            if key in self.ended:
                return self.ended[key]
        declared = replace(self.template.request, overrides=(*self.template.request.overrides, *swept))
        task = replace(self.template, request=declared, directory=job.directory)
        outcome = OwnProcess(task, timeout_seconds=None).run()
        ended = EndedPoint(index=index, overrides=overrides, directory=str(task.directory), outcome=outcome)
        self.spool.mkdir(parents=True, exist_ok=True)
        replace_text(self.spool / f"{index}.json", ended.model_dump_json())
        return _objective(outcome, self.objective)


def _objective(point: Outcome | Row | None, name: str) -> float:
    """Returns the objective of a point; the worst value for one that is not done, so that a sweeper that chooses by
    results keeps away from it."""
    figure = find_figure(name, where="sweep.objective")
    value = known(getattr(point.figures, figure.name, None)) if point and point.status == "done" else None
    return value if value is not None else math.inf if figure.better == "less" else -math.inf


def launch(jobs: Sequence[Sequence[str]], first_index: int) -> list[float]:
    """Runs a batch of Hydra's jobs in our pool, and returns the objective of each."""
    if _engine is None:
        what = "meshloom_pool runs sweeps of meshloom alone"
        raise ConfigError([Problem("hydra/launcher", what, "choose another one: hydra/launcher=basic")])
    return [_objective(row, _engine.file.objective) for row in _engine.run_batch(jobs, first_index)]


@contextmanager
def launching(engine: Engine) -> Iterator[PointTask]:
    """Lets Hydra's launchers run the points of this sweep within the `with`. Yields the task for launchers other than
    ours, whose outcomes become rows as they come."""
    global _engine
    _engine = engine
    name, spool = engine.file.objective, engine.directory.absolute() / SPOOL
    rows = engine.rows.values()
    ended = {(row.index if engine.asked.is_grid else None, row.overrides): _objective(row, name) for row in rows}
    task = PointTask(engine.task_of(None), tuple(engine.asked.axes), spool, name, engine.first_index, ended)
    is_over = threading.Event()

    def collect() -> None:
        while not is_over.wait(_POLL_SECONDS):
            _collect(engine, spool)

    thread = threading.Thread(target=collect, daemon=True)
    try:
        if engine.settings is None:
            make_sources_portable()
            _collect(engine, spool)  # left by an earlier start
            thread.start()
        yield task
    finally:
        _engine = None
        if thread.ident:  # it was started
            is_over.set()
            thread.join()
            _collect(engine, spool)
            with suppress(OSError):
                spool.rmdir()


def _collect(engine: Engine, spool: Path) -> None:
    for path in sorted(spool.glob("*.json")):
        try:
            ended = EndedPoint.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
        if ended.index not in engine.rows:
            engine.record(engine.point_of(ended.overrides, ended.index, Path(ended.directory)), ended.outcome)
        path.unlink()
