"""Processes that trace and estimate candidates. JAX traces in Python, on one core each."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

from meshloom.compiler.config.allowed_code import allowed_modules, code_allowed_from
from meshloom.compiler.config.target_spec import TargetSpec
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.tune.answer import Runner

from ..core.failures import RunFailed
from ..processes.devices import plan_without_devices
from ..sweep.worker_process import end_with

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def workers(target: TargetSpec, console: Console) -> Iterator[Runner]:
    """Yields what maps functions over values in as many processes as there are cores; a bar shows how far it is."""
    context = multiprocessing.get_context("spawn")
    count = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    initargs = (os.getpid(), target, allowed_modules())
    pool = ProcessPool(count, initializer=_start, initargs=initargs, context=context)

    def over(doing: str) -> Callable[[Callable[[T], R], Sequence[T]], Iterator[R]]:
        def mapped(function: Callable[[T], R], values: Sequence[T]) -> Iterator[R]:
            bar = console.bar(doing, "doing", "bar", "count", "elapsed", is_transient=True)
            bar.start()
            try:
                for number, result in enumerate(pool.map(function, values).result(), start=1):
                    bar.update(number, total=len(values))
                    yield result
            finally:
                bar.stop()

        return mapped

    try:
        yield Runner(over("tracing"), over("estimating the best"))
    except ProcessExpired as error:
        what, fix = "a process that traces candidates died", "look for what ended it: it may be a lack of memory"
        raise RunFailed(Problem("tune", what, fix), exit_code=1) from error
    finally:
        pool.stop()  # nothing is waited for: a trace that runs when Ctrl-C is pressed takes seconds
        pool.join()


def _start(parent: int, target: TargetSpec, allowed: tuple[str, ...]) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the command, which ends this
    code_allowed_from(allowed).__enter__()  # for as long as the process lives
    plan_without_devices(target)
    gc.set_threshold(50_000, 20, 100)  # a traced program is many objects that stay; looking through them takes a tenth
