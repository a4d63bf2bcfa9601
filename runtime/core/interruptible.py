"""Ctrl-C beside C++: during a long call Python runs no signal handler, so that it would be heard minutes later; where
it hits a callback, as XLA has one in the garbage collector, the KeyboardInterrupt is lost."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_heard = threading.Event()
_last_acts: list[Callable[[int], object]] = []
_is_command = False  # the whole process; else Meshloom is a guest in a program of someone else's


def hear_interrupts() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt that `raise_if_interrupted` raises again. One that is ignored, as in a
    background job, stays so. The command calls it: the process is its own, and `leave_now` may end it."""
    global _is_command
    _is_command = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)


def raise_if_interrupted() -> None:
    """The KeyboardInterrupt that was heard, and may have been lost."""
    if _heard.is_set():
        raise KeyboardInterrupt


def leave_now(exit_code: int) -> None:
    """Ends the command at once, whatever its other threads are at. In a program of someone else's, such as a notebook,
    return: it gets the KeyboardInterrupt, and a thread runs on until it is done."""
    if _is_command:
        for act in reversed(_last_acts):
            act(exit_code)
        sys.stdout.flush()
        os._exit(exit_code)


@contextmanager
def before_leaving(act: Callable[[int], object]) -> Iterator[None]:
    """Within the `with`, `leave_now` does this first, with the exit code: it runs nothing else that was to be run."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def _hear(number: int, frame: FrameType | None) -> None:
    _heard.set()
    signal.default_int_handler(number, frame)


def interruptibly(step: Callable[[], T]) -> T:
    """Returns the result of the step, which runs in a thread; Ctrl-C is a KeyboardInterrupt here at once.

    The step runs on behind it, and would keep the process from ending in order: `leave_now` ends it.
    """
    raise_if_interrupted()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(step())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()
