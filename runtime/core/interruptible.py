"""Makes Ctrl-C work during long calls into C++.

During such a call Python runs no signal handler, so Ctrl-C would take effect minutes later. If it arrives in a
callback, such as XLA's in the garbage collector, the KeyboardInterrupt is lost.
"""

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
_is_command = False  # whether this process is the command's; else Meshloom is a guest in another program


def hear_interrupts() -> None:
    """Remembers each Ctrl-C from now on, so that `raise_if_interrupted` can raise it again, and lets `leave_now` end
    the process. The command calls it: the process is its own. Where Ctrl-C is ignored, as in a background job, it stays
    ignored."""
    global _is_command
    _is_command = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _hear)


def raise_if_interrupted() -> None:
    """Raises the KeyboardInterrupt again if there was one, since it may have been lost."""
    if _heard.is_set():
        raise KeyboardInterrupt


def leave_now(exit_code: int) -> None:
    """Ends the command at once, whatever its other threads do. In another program, such as a notebook, it returns: the
    program gets the KeyboardInterrupt, and a thread runs until it is done."""
    if _is_command:
        for act in reversed(_last_acts):
            act(exit_code)
        sys.stdout.flush()
        os._exit(exit_code)


@contextmanager
def before_leaving(act: Callable[[int], object]) -> Iterator[None]:
    """Within the `with`, `leave_now` calls `act` with the exit code first; it runs no `finally` and no exit handler."""
    _last_acts.append(act)
    try:
        yield
    finally:
        _last_acts.remove(act)


def _hear(number: int, frame: FrameType | None) -> None:
    _heard.set()
    signal.default_int_handler(number, frame)


def interruptibly(step: Callable[[], T]) -> T:
    """Returns the result of the step, which runs in a thread, so that Ctrl-C raises KeyboardInterrupt here at once.

    The step continues in its thread and would keep the process from ending; `leave_now` ends both.
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
