"""Defines how a run fails for reasons outside its declaration: an error with a fix, and an exit code for each kind.

It also makes Ctrl-C work during long calls into C++. During such a call Python runs no signal handler, so Ctrl-C would
take effect minutes later. If it arrives in a callback, such as XLA's in the garbage collector, the KeyboardInterrupt is
lost.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from meshloom.compiler.core.errors import DOES_NOT_FIT, EXPOSED, MISTAKE, WORSE, WRONG, ConfigError, Problem

NONFINITE = 5  # NaN or infinity where training cannot go on
STORAGE = 6  # a checkpoint or a metric cannot be written, or no checkpoint can be read
HUNG = 7  # no step ended for too long, and watchdog.abort asked for the end
LOST = 8  # another process of the run is gone, or never came
FAULTY = 9  # a device does not give the same result twice
PREEMPTED = 128 + signal.SIGTERM  # asked to stop; its work is saved
INTERRUPTED = 128 + signal.SIGINT  # by a person, who does not want it started again
# By schedulers and supervisors: USR1, USR2 and XCPU come before a limit (--signal of SLURM, s_rt and s_cpu of SGE), HUP
# when a terminal closes, QUIT from some containers.
ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU)

EXIT_CODES = {
    0: "done",
    1: "a crash, with its traceback",
    MISTAKE: "a mistake: of the words, of a file that they name, of the declaration",
    DOES_NOT_FIT: "the step does not fit into the memory",
    EXPOSED: "more is exposed, or stages wait longer, than the declaration allows",
    NONFINITE: "a loss is not a number, or is infinite",
    STORAGE: "a checkpoint or a metric cannot be written or read",
    HUNG: "no step ended for too long, and watchdog.abort ended the run",
    LOST: "another process of the run is gone, or never came",
    FAULTY: "a device does not give the same result twice",
    WORSE: "guard: the step is worse than tolerated",
    WRONG: "check: the program does not compute what one device computes",
    INTERRUPTED: "stopped by Ctrl-C; a run has saved",
    PREEMPTED: "stopped by SIGTERM; a run has saved",
}
# Starting again would end in the same way. After any other code but 0 a run is started again: a host was lost, the
# processes that waited for it ended, or a disk was full.
FINAL = (MISTAKE, DOES_NOT_FIT, EXPOSED, NONFINITE, INTERRUPTED)
T = TypeVar("T")

_heard = threading.Event()
_last_acts: list[Callable[[int], object]] = []
_is_command = False  # whether this process is the command's; else Meshloom is a guest in another program


class RunFailed(ConfigError):
    """The run ended early. It is reported like a mistake; the exit code tells a scheduler the kind of failure."""

    def __init__(self, problem: Problem, exit_code: int):
        super().__init__([problem])
        self.exit_code = exit_code


def is_of_one_process(error: BaseException) -> bool:
    """Returns True for an error that one of several processes may have while the others continue or are gone: its disk
    refuses a write, or another process did not come to a meeting."""
    return isinstance(error, OSError) or (isinstance(error, RunFailed) and error.exit_code in (STORAGE, LOST))


def storage_reason(error: BaseException) -> str | None:
    """Returns the operating system's reason for an error, such as `No space left on device`; None if it has none.

    TensorStore, which writes the arrays, puts it into the text of a ValueError.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    if match := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(match[1]))
    inner = error.__cause__ or error.__context__
    return storage_reason(inner) if inner else None


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
    return in_thread(step).result()


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Returns the future of a call in a thread that does not keep this process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
