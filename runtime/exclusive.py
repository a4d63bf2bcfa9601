"""Long work on a folder: by one process at a time, and stopped in order when a signal asks for it."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from meshloom.compiler.problems import ConfigError, Problem


@contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Signals to stop that came within the `with`: a KeyboardInterrupt would be lost where it hits a callback of C++,
    as XLA has one in the garbage collector. A second Ctrl-C interrupts at once."""
    noted: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.append(signal.Signals(number))
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def alone(folder: Path, where: str) -> Iterator[None]:
    """Hold the folder for this process, as long as it lives. Raises ConfigError where another one does. `where`: its
    key."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder, where)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, where: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        what = f"another process writes into {folder}"
        raise ConfigError([Problem(where, what, "wait for it, or name another directory")]) from error
