"""Defines observers: the log, the display, the watchdog and others follow a training run step by step.

    run_started, then for each step: around_step, step_ended, [evaluated], step_reported; at the end run_ended

An observer is also a context: it is entered before the first step and left after the last one, with the exception that
ended the run, if there is one. `pause` surrounds the work between steps: an evaluation, a save. An exception that an
observer raises ends the run like any other; checkpoints that were saved before stay complete. A new observer is a class
in a file of its own and a line in `loop.py`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs

from ..data import Data, describe_documents
from ..processes.distributed import Processes
from ..processes.process_log import announce
from .metrics import Metrics, Stopwatch, TimeKind

LOG = logging.getLogger("meshloom")

# Takes a state, a batch, the number of the step and the batch's place in the data; returns the new state and metrics.
TakeStep = Callable[[Any, dict[str, jax.Array], int, dict[str, Any]], tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True)
class StepTimes:
    """The seconds of one process for a step, or their means over several steps. step: from one step to the next. input:
    the time to get a batch onto the devices. input_wait: the part of it for which devices may have stood still."""

    step: float
    input: float
    input_wait: float


class Observer:
    """Follows a run. Each method does nothing by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.left(error)

    def left(self, error: BaseException | None) -> None:
        """Sees the end of the run, with the exception that ended it, if there is one."""

    def run_started(self, first_step: int) -> None:
        """Sees that training begins, after `first_step` steps."""

    def around_step(self, take: TakeStep) -> TakeStep:
        """Returns the function that takes each step of the run, with `take` inside it."""
        return take

    def reads_at_once(self, step: int) -> bool:  # noqa: ARG002
        """Returns True if this step has to end before the next one is dispatched; `step_ended` then gets its state."""
        return False

    def step_ended(self, step: int, times: StepTimes, state: Any) -> Mapping[str, float] | None:
        """Returns values to add to the metrics of a step that ended, if there are any. state: the state after the step;
        None if it was donated to the next step."""

    def evaluated(self, step: int, loss: float | None) -> None:
        """Sees the held-out loss after a step; None if no held-out token has a target."""

    def step_reported(self, metrics: Metrics) -> None:
        """Sees the metrics of a step."""

    def run_ended(self, num_steps_done: int) -> None:
        """Sees that the loop is done, at its last step or because a stop was requested."""

    def pause(self, kind: TimeKind) -> AbstractContextManager[object]:  # noqa: ARG002
        """Returns a context for the run's work between two steps: evaluation, save or profile."""
        return nullcontext()


class Observers(Observer):
    """Passes each event to the observers of a run, in their order, and leaves them in the opposite order. watch: counts
    the time of pauses."""

    def __init__(self, watch: Stopwatch):
        self.watch = watch
        self._each: list[Observer] = []
        self._entered = ExitStack()

    def add(self, observer: Observer) -> None:
        """Enters an observer, which sees all events from now on."""
        self._each.append(self._entered.enter_context(observer))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def run_started(self, first_step: int) -> None:
        for each in self._each:
            each.run_started(first_step)

    def around_step(self, take: TakeStep) -> TakeStep:
        for each in self._each:
            take = each.around_step(take)
        return take

    def reads_at_once(self, step: int) -> bool:
        return any(each.reads_at_once(step) for each in self._each)

    def step_ended(self, step: int, times: StepTimes, state: Any) -> Mapping[str, float]:
        return {name: x for each in self._each for name, x in (each.step_ended(step, times, state) or {}).items()}

    def evaluated(self, step: int, loss: float | None) -> None:
        for each in self._each:
            each.evaluated(step, loss)

    def step_reported(self, metrics: Metrics) -> None:
        for each in self._each:
            each.step_reported(metrics)

    def run_ended(self, num_steps_done: int) -> None:
        for each in self._each:
            each.run_ended(num_steps_done)

    @contextmanager
    def pause(self, kind: TimeKind) -> Iterator[None]:
        """Within the `with`, time counts as this kind and not as that of a step."""
        with self.watch.spending(kind), ExitStack() as paused:
            for each in self._each:
                paused.enter_context(each.pause(kind))
            yield


@dataclass(frozen=True)
class ObservedRun:
    """A run that is about to train, as its observers know it. first_step: the steps that are done already. model: the
    declaration's name for its model; None if it has none."""

    plan: Plan[RunSpec]
    programs: Programs
    data: Data
    run_dir: Path
    processes: Processes
    console: Console
    observers: Observers
    first_step: int
    model: str | None = None

    @property
    def spec(self) -> RunSpec:
        return self.plan.spec

    def announce(self, text: str) -> None:
        """Shows and logs a text."""
        announce(self.console, text)

    def warn(self, problem: Problem) -> None:
        """Shows and logs a problem that does not end the run."""
        announce(self.console, problem.as_warning())

    def documents(self, position: Mapping[str, Any], rows: Sequence[int] | None = None) -> str:
        """Returns a description of the documents in some rows of a batch, or in all. Only process 0 reads them, and
        logs each."""
        if not self.processes.is_first:
            return ""
        located = self.data.locate(position, range(self.spec.global_batch_size) if rows is None else rows)
        for one in located:
            LOG.info(f"row {one.row} of the batch: {describe_documents([one])}")
        return describe_documents(located)
