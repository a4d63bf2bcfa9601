"""Compiles within a budget, `compile.timeout_seconds`, in a child process: XLA's compiler cannot be interrupted.

The child is `meshloom compile` of the same declaration. It leaves the compiled step in `compilation_cache`, where this
process finds it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshloom.compiler.config.spec import RunSpec
from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_names, human_seconds

from ..core.failures import RunFailed

NOT_OF_CHILD = ("hydra.run.dir=", "compile.timeout_seconds=", "overlap.search=")


def compile_in_child(spec: RunSpec, overrides: Sequence[str], *, log: Path) -> None:
    """Waits for a child that compiles the declaration. If its compile fails, this returns all the same: the caller then
    compiles for itself and gets the compiler's own error. log: the file that the child's output is appended to.

    Raises RunFailed, after it has ended the child, if the budget is spent.
    """
    seconds = spec.compile.timeout_seconds
    assert seconds is not None
    words = [word for word in overrides if not word.startswith(NOT_OF_CHILD)]
    with tempfile.TemporaryDirectory() as run_dir, log.open("ab") as printed:
        own = ("compile.timeout_seconds=null", "overlap.search=null", f"hydra.run.dir={run_dir}")
        command = [sys.executable, "-m", "meshloom", "compile", *words, *own]
        child = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunFailed(_too_long(spec, seconds), exit_code=1) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _too_long(spec: RunSpec, seconds: float) -> Problem:
    options = [f"{name}={value}" for name, value in spec.compiler_options.items()]
    at_work = [*options, *(f"overlap.flag_presets={name}" for name in spec.overlap.flag_presets)]
    what = f"the compiler is still at work after {human_seconds(seconds)}"
    with_what = f", with {human_names(at_work, most=6)}" if at_work else ", with its default options"
    fix = "leave out one of these options at a time, or set a longer compile.timeout_seconds"
    return Problem("compile.timeout_seconds", what + with_what, fix)
