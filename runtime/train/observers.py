"""The observers of every run, in the order in which they see it."""

from collections.abc import Callable

from .display import Display
from .metrics_log import MetricsLog
from .observer import ObservedRun, Observer
from .profiler import Profiler
from .replay import Replay
from .stragglers import Stragglers
from .token_warnings import DroppedTokens, MissingTargets
from .trackers import Trackers
from .watchdog import LastStep, Watchdog

# Each returns the observer of a run, or None where the declaration or this process has none. The watchdog comes before
# the profiler, so that writing a trace is not watched; the profiler comes after the replay, whose steps it traces.
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
