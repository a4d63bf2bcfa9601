"""Locks a folder for one process at a time: two would overwrite each other's files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from meshloom.compiler.core.errors import ConfigError, Problem

LOCK = ".lock"  # a file: network file systems cannot lock directories
SECONDS_OF_A_LOOK = 0.2  # `is_held` takes the lock for an instant; a run must not be refused for that


@contextmanager
def locked(folder: Path, busy: Problem) -> Iterator[None]:
    """Locks the folder within the `with`; the system releases it when this process dies. Raises ConfigError with `busy`
    if another process holds it."""
    lock = FileLock(folder / LOCK, timeout=SECONDS_OF_A_LOOK)
    try:
        lock.acquire(poll_interval=SECONDS_OF_A_LOOK / 10)
    except Timeout:
        raise ConfigError([busy]) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_turn(folder: Path, say_waits: Callable[[], None]) -> Iterator[None]:
    """Locks the folder within the `with`, after waiting for other processes. Calls `say_waits` once if it waits."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=SECONDS_OF_A_LOOK, poll_interval=SECONDS_OF_A_LOOK / 10)
    except Timeout:
        say_waits()
        lock.acquire(poll_interval=SECONDS_OF_A_LOOK)
    try:
        yield
    finally:
        lock.release()


def is_held(folder: Path) -> bool:
    """Returns True while a process holds the folder. Creates nothing and does not wait."""
    path = folder / LOCK
    if not path.exists():
        return False
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # a read-only folder: no process of this account works in it
        return False
    lock.release()
    return False
