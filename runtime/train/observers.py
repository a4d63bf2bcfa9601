"""Lists the observers of every run, in the order in which they see it, and holds the small ones."""

from collections.abc import Callable
from typing import Self

from meshloom.compiler.core.errors import Problem

from .display import Display
from .metrics import Metrics
from .observer import ObservedRun, Observer
from .profiler import Profiler
from .replay import Replay
from .stragglers import Stragglers
from .trackers import MetricsLog, Trackers
from .watchdog import LastStep, Watchdog

LONGER_DOCUMENTS = "train on longer documents, or set data.isolate_documents=false; metrics.jsonl has num_targets"
DROPPED = "dropped"  # the statistic of a layer (models/moe.py): layers/dropped, or layers/dropped/0 of one layer
MORE_ROOM = (
    "raise moe.max_imbalance (null: room for any imbalance), or moe.capacity_factor with parallel.experts=capacity; "
    "metrics.jsonl has the share of each step"
)


class TokenWarning(Observer):
    """Warns about tokens that teach the model nothing, each time once in a run."""

    def __init__(self, warn: Callable[[Problem], None]):
        self._warn = warn
        self._warned = set[str]()

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the observer of a run."""
        return cls(run.warn)

    def _warn_once(self, name: str, problem: Problem) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warn(problem)


class MissingTargets(TokenWarning):
    """Warns about the first step, and the first evaluation, whose batches have no targets."""

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step's global batch had no target."""
        if not metrics.num_targets:
            what = "its global batch has no target: the loss is 0, and only auxiliary losses have gradients"
            self._warn_once("step", Problem(f"step {metrics.step}", what, LONGER_DOCUMENTS))

    def evaluated(self, step: int, loss: float | None) -> None:  # noqa: ARG002
        """Warns if no held-out batch has a target."""
        if loss is None:
            what = "no token of the held-out batches has a target: there is no held-out loss"
            self._warn_once("evaluation", Problem("evaluation", what, LONGER_DOCUMENTS))


class DroppedTokens(TokenWarning):
    """Warns about the first step in which experts had no room for all choices."""

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step dropped a choice."""
        shares = [value for name, value in metrics.auxiliary.items() if name.split("/")[1] == DROPPED]
        if any(share > 0 for share in shares):
            what = f"{max(shares):.2%} of the choices of experts found no room and were dropped"
            self._warn_once(DROPPED, Problem(f"step {metrics.step}", what, MORE_ROOM))


# Each returns the observer of a run, or None if the declaration or this process has none. The watchdog comes before the
# profiler, so that writing a trace is not watched; the profiler comes after the replay, whose steps it traces.
OBSERVERS: tuple[Callable[[ObservedRun], Observer | None], ...] = (
    MetricsLog.of_run,
    Trackers.of_run,
    Display.of_run,
    LastStep.of_run,
    DroppedTokens.of_run,
    MissingTargets.of_run,
    Watchdog.of_run,
    Replay.of_run,
    Profiler.of_run,
    Stragglers.of_run,
)


def add_observers(run: ObservedRun) -> None:
    """Makes the observers of a run, and adds them to `run.observers`."""
    for make in OBSERVERS:
        observer = make(run)
        if observer is not None:
            run.observers.add(observer)
