"""Runs the processes of a search: those that trace and estimate candidates, and those that compile the best.

JAX traces in Python, on one core per process.
"""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_seconds
from meshloom.compiler.core.known import known
from meshloom.compiler.core.user_imports import allowed_modules, code_allowed_from
from meshloom.compiler.spec.target_spec import TargetSpec
from meshloom.compiler.tune.answer import Answer, Estimated, Runner

from ..core.failures import RunFailed
from ..processes.devices import plan_without_devices
from ..processes.process_log import announce
from ..sweep.pool import OwnProcess, end_with
from ..sweep.rows import Outcome, Task, directory_name
from .variants import Space

T = TypeVar("T")
R = TypeVar("R")


SECONDS_PER_LINE = 15.0  # between two lines of progress, where there is no terminal


def progress(console: Console, doing: str, done: Iterable[T], total: int) -> Iterator[T]:
    """Yields what is done, and shows how far it is: a bar on a terminal, and elsewhere a line now and then."""
    bar = console.bar(doing, "doing", "bar", "count", "elapsed", is_transient=True)
    start = last = time.monotonic()
    bar.start()
    try:
        bar.update(0, total=total)
        for number, result in enumerate(done, start=1):
            bar.update(number, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - last >= SECONDS_PER_LINE:
                announce(console, f"{doing}: {number} of {total}, {human_seconds(now - start)}")
                last = now
            yield result
    finally:
        bar.stop()


@contextmanager
def workers(target: TargetSpec, console: Console) -> Iterator[Runner]:
    """Yields a runner that maps functions over values, in one process per core, and shows how far it is."""
    context = multiprocessing.get_context("spawn")
    count = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    initargs = (os.getpid(), target, allowed_modules())
    pool = ProcessPool(count, initializer=_start, initargs=initargs, context=context)
    pool.schedule(os.getpid)  # they start now, and import while this process applies the rules

    def over(doing: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterator[R]]:
        def mapped(function: Callable[[T], R], values: Sequence[T]) -> Iterator[R]:
            def results() -> Iterator[R]:  # waits for the first one, so it begins within the bar
                yield from pool.map(function, values).result()

            return progress(console, doing, results(), len(values)) if values else iter(())

        return mapped

    try:
        yield Runner(over("tracing programs"), over("estimating the best"))
    except ProcessExpired as error:
        what, fix = "a process that traces candidates died", "look for what ended it: it may be a lack of memory"
        raise RunFailed(Problem("tune", what, fix), exit_code=1) from error
    finally:
        pool.stop()  # does not wait: a trace that runs when Ctrl-C is pressed takes seconds
        pool.join()


def _start(parent: int, target: TargetSpec, allowed: tuple[str, ...]) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the command, which ends this
    code_allowed_from(allowed).__enter__()  # as long as the process lives
    plan_without_devices(target)
    # A traced program is many objects that stay, as modules are: collecting takes a fourth of the time otherwise.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@dataclass(frozen=True)
class CompiledCandidate:
    """One of the best candidates, and the outcome of compiling it. directory: relative to the search's."""

    one: Estimated
    outcome: Outcome
    directory: str

    @property
    def seconds(self) -> float | None:
        """Returns the predicted step time; None if the candidate does not fit."""
        figures = self.outcome.figures
        return known(figures.step_seconds) if figures and self.outcome.status == "done" else None


def compile_best(space: Space, answer: Answer, run_dir: Path, console: Console) -> tuple[CompiledCandidate, ...]:
    """Compiles the first `tune.num_compiled` of the answer, each in a process of its own, which may abort."""
    ones = answer.best[: space.spec.tune.num_compiled]
    return tuple(progress(console, "compiling the best", _compiled(space, ones, run_dir), len(ones)))


def _compiled(space: Space, ones: tuple[Estimated, ...], run_dir: Path) -> Iterator[CompiledCandidate]:
    for one in ones:
        name = directory_name(one.candidate.overrides)
        request = replace(space.request, overrides=(*space.request.overrides, *one.compile_overrides))
        task = Task("compile", request, allowed_modules(), run_dir.resolve() / name)
        yield CompiledCandidate(one, OwnProcess(task, None).run(), name)


def best_compiled(compiled: tuple[CompiledCandidate, ...]) -> CompiledCandidate | None:
    """Returns the candidate with the shortest predicted step of those that fit; None if none does."""
    done = [(seconds, n) for n, one in enumerate(compiled) if (seconds := one.seconds) is not None]
    return compiled[min(done)[1]] if done else None
