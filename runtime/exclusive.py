"""One process at a time in a folder: two would write over each other."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from meshloom.compiler.problems import ConfigError, Problem

LOCK = ".lock"  # a file: network file systems lock no directories


@contextmanager
def alone(folder: Path, busy: Problem) -> Iterator[None]:
    """Hold the folder; the system lets go of it when this process dies. Raises ConfigError with `busy` where another
    process holds it."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([busy]) from None
        yield


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Hold the directory of a run; the first process does it for all of them."""
    if jax.process_index() != 0:
        yield
        return
    fix = "wait for its end, stop it, or choose another hydra.run.dir"
    with alone(run_dir, Problem("hydra.run.dir", f"another run is going on in {run_dir}", fix)):
        yield
