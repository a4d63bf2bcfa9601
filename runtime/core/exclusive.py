"""One process at a time in a folder: two would write over each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from filelock import FileLock, Timeout

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url

LOCK = ".lock"  # a file: network file systems lock no directories
SECONDS_OF_A_LOOK = 0.2  # `is_held` takes the lock for an instant: that is no reason to refuse a run


@contextmanager
def alone(folder: Path, busy: Problem) -> Iterator[None]:
    """Holds the folder; the system lets go of it when this process dies. Raises ConfigError with `busy` where another
    process holds it."""
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
    """Holds the folder, after every other process that holds it. Calls `say_waits` once where it has to wait."""
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
    """Returns True while a process holds the folder. Makes nothing, and waits for nobody."""
    path = folder / LOCK
    if not path.exists():
        return False
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    except OSError:  # a folder that may only be read: nobody of this account works in it
        return False
    lock.release()
    return False


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Holds the directory of a run or of a compile; the first process does it for all of them."""
    if jax.process_index() != 0:
        yield
        return
    with alone(run_dir, _busy(run_dir)):
        yield


def check_is_free(run_dir: Path) -> None:
    """Raises ConfigError where a run or a compile holds the directory. Makes nothing."""
    if (run_dir / LOCK).exists():
        with alone(run_dir, _busy(run_dir)):
            pass


@contextmanager
def only_run_that_saves_in(directory: str | None) -> Iterator[None]:
    """Holds a folder of checkpoints that is not in the run directory; behind a URL there are no locks."""
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
