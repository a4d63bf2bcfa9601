"""Locks the directories of a run for one run at a time, in all of its processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.places import is_url

from ..core.exclusive import LOCK, locked


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Locks the directory of a run or a compile within the `with`; process 0 does it for all processes."""
    if jax.process_index() != 0:
        yield
        return
    with locked(run_dir, _busy(run_dir)):
        yield


def check_is_free(run_dir: Path) -> None:
    """Raises ConfigError if a run or a compile holds the directory. Creates nothing."""
    if (run_dir / LOCK).exists():
        with locked(run_dir, _busy(run_dir)):
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
    with locked(folder, Problem("checkpoint.directory", f"another run saves its checkpoints in {folder}", fix)):
        yield


def _busy(run_dir: Path) -> Problem:
    fix = "wait for its end, stop it, or choose another hydra.run.dir"
    return Problem("hydra.run.dir", f"another run is in progress in {run_dir}", fix)
