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
from meshloom.compiler.declare.application import HydraJob, make_sources_portable
from meshloom.models.record import Record

from ..core.files import replace_text
from .engine import Engine
from .figures import find_figure
from .pool import OwnProcess
from .rows import POINT_NAME, Figures, Outcome, Task, swept_of

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

    template: what all points share. axes: the swept keys. spool: takes the outcomes. worst: the objective of a point
    that is not done. first_index: the index of the first point. ended: the objectives of points that have a row, by
    index and overrides; by overrides alone if the sweeper chooses points as it goes.
    """

    template: Task
    axes: tuple[str, ...]
    spool: Path
    objective: str
    worst: float
    first_index: int
    ended: Mapping[tuple[int | None, tuple[str, ...]], float | None]

    def __call__(self, job: HydraJob) -> float:
        """Runs the point of the job, and returns its objective. The worst value keeps a sweeper that chooses by
        results away from points that are not done."""
        index, overrides = self.first_index + job.number, job.overrides
        swept = tuple(swept_of(overrides, self.axes))
        for key in ((index, swept), (None, swept)):
            if key in self.ended:
                return self._or_worst(self.ended[key])
        declared = replace(self.template.request, overrides=(*self.template.request.overrides, *swept))
        task = replace(self.template, request=declared, directory=job.directory)
        outcome = OwnProcess(task, timeout_seconds=None).run()
        ended = EndedPoint(index=index, overrides=overrides, directory=str(task.directory), outcome=outcome)
        self.spool.mkdir(parents=True, exist_ok=True)
        replace_text(self.spool / f"{index}.json", ended.model_dump_json())
        return self._or_worst(_objective(outcome.figures, self.objective) if outcome.status == "done" else None)

    def _or_worst(self, value: float | None) -> float:
        return self.worst if value is None else value


def launch(jobs: Sequence[Sequence[str]], first_index: int) -> list[float]:
    """Runs a batch of Hydra's jobs in our pool, and returns the objective of each; the worst one for a point that is
    not done."""
    if _engine is None:
        what = "meshloom_pool runs sweeps of meshloom alone"
        raise ConfigError([Problem("hydra/launcher", what, "choose another one: hydra/launcher=basic")])
    rows = _engine.run_batch(jobs, first_index)
    name = _engine.file.objective
    found = (_objective(row.figures, name) if row and row.status == "done" else None for row in rows)
    return [_worst(name) if value is None else value for value in found]


@contextmanager
def launching(engine: Engine) -> Iterator[PointTask]:
    """Lets Hydra's launchers run the points of this sweep within the `with`. Yields the task for launchers other than
    ours."""
    global _engine
    _engine = engine
    objective, spool = engine.file.objective, engine.directory.absolute() / SPOOL
    task = PointTask(
        template=engine.template(),
        axes=tuple(engine.asked.axes),
        spool=spool,
        objective=objective,
        worst=_worst(objective),
        first_index=engine.first_index,
        ended={
            (row.index if engine.asked.is_grid else None, row.overrides): _objective(row.figures, objective)
            for row in engine.rows.values()
        },
    )
    try:
        if engine.settings is not None:
            yield task
        else:
            make_sources_portable()
            with _collecting(engine, spool):
                yield task
    finally:
        _engine = None


def subdirectory(swept_keys: Sequence[str]) -> str:
    """Returns the value of `hydra.sweep.subdir` that names points by their overrides."""
    return f'${{{POINT_NAME}:${{hydra.overrides.task}},"{" ".join(swept_keys)}"}}'


@contextmanager
def _collecting(engine: Engine, spool: Path) -> Iterator[None]:
    """Makes rows of outcomes as they come, within the `with`; afterwards none is left."""
    is_over = threading.Event()

    def collect() -> None:
        while not is_over.wait(_POLL_SECONDS):
            _collect(engine, spool)

    _collect(engine, spool)  # left by an earlier start
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield
    finally:
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
            engine.record(engine.point_at(ended.overrides, ended.index, Path(ended.directory)), ended.outcome)
        path.unlink()


def _objective(figures: Figures | None, name: str) -> float | None:
    return find_figure(name, where="sweep.objective").of(figures) if figures else None


def _worst(name: str) -> float:
    return math.inf if find_figure(name, where="sweep.objective").better == "less" else -math.inf
