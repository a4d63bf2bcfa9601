"""One run at a time in a directory: two would save over each other."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from meshloom.compiler.problems import ConfigError, Problem


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Hold the directory; the first process does it for all of a run, and the system lets go when it dies.

    Raises ConfigError where another run holds it.
    """
    if jax.process_index() != 0:
        yield
        return
    with (run_dir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for its end, stop it, or choose another hydra.run.dir"
            raise ConfigError([Problem("hydra.run.dir", f"another run is going on in {run_dir}", fix)]) from None
        yield
