"""Locks a folder for one process at a time: two would overwrite each other's files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url

LOCK = ".lock"  # a file: network file systems cannot lock directories
SECONDS_OF_A_LOOK = 0.2  # `is_held` takes the lock for an instant; a run must not be refused for that


@contextmanager
def alone(folder: Path, busy: Problem) -> Iterator[None]:
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


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Locks the directory of a run or a compile within the `with`; process 0 does it for all processes."""
    if jax.process_index() != 0:
        yield
        return
    with alone(run_dir, _busy(run_dir)):
        yield


def check_is_free(run_dir: Path) -> None:
    """Raises ConfigError if a run or a compile holds the directory. Creates nothing."""
    if (run_dir / LOCK).exists():
        with alone(run_dir, _busy(run_dir)):
            pass


@contextmanager
def only_run_that_saves_in(directory: str | None) -> Iterator[None]:
    """Locks a folder of checkpoints outside the run directory within the `with`; there are no locks behind a URL."""
    if directory is None or is_url(directory) or jax.process_index() != 0:
        yield
        return
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{folder} cannot be made: {error.strerror}"
        raise ConfigError([Problem("checkpoint.directory", what, "name a folder that this process may make")]) from None
    fix = "wait for its end, or name another folder"
    with alone(folder, Problem("checkpoint.directory", f"another run saves its checkpoints in {folder}", fix)):
        yield


def _busy(run_dir: Path) -> Problem:
    fix = "wait for its end, stop it, or choose another hydra.run.dir"
    return Problem("hydra.run.dir", f"another run is in progress in {run_dir}", fix)
