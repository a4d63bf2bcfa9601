"""Connects Hydra's launchers to the sweep: ours hands its batch to the engine, others call a task for each point.

The task may be pickled and called in another process or on another machine. It runs the point in a process of its own
and leaves the outcome in the sweep's directory; the process of the sweep finds it there and writes the row.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.known import known
from meshloom.compiler.declare.application import HydraJob, make_sources_portable
from meshloom.models.record import Record

from ..core.files import replace_text
from .engine import Engine
from .figures import find_figure
from .pool import OwnProcess
from .rows import Outcome, Row, Task, swept_of

SPOOL = ".ended"  # a folder of the sweep: outcomes of points that other processes ran
_POLL_SECONDS = 0.5

_engine: Engine | None = None  # Hydra makes a launcher itself, from a config alone: ours finds its sweep here


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
