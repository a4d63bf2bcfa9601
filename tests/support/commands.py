"""Runs the command, in this process or in one of its own."""

import gc
import io
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import absl.logging
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from meshloom.runtime.cli.main import run
from support.forked import start


def with_plugin(folder: Path, name: str, code: str) -> dict[str, str]:
    """The environment of a process in which JAX finds this plugin, instead of any of its name."""
    path = folder / "plugins/jax_plugins" / name / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])])}


@dataclass(frozen=True)
class Ended:
    """A command that has ended, with what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_in_process(*args: str, cwd: Path | None = None, **environment: str) -> Ended:
    """Runs the command in this process, to its end: what a start of Python costs is saved. What it sets for a whole
    process is put back: Hydra's state, its arguments, the level of logging, the environment, the directory, and how
    often Python looks for garbage."""
    out, error = io.StringIO(), io.StringIO()
    # Hydra closes all handlers of logging, and this one closes any stream but Python's own: pytest's would be lost.
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
    argv, before, here, level = list(sys.argv), dict(os.environ), Path.cwd(), logging.root.level
    garbage = gc.get_threshold()
    os.environ |= environment
    os.chdir(cwd or here)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = run(list(args))
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ |= before
        sys.argv[:] = argv
        logging.root.setLevel(level)
        gc.set_threshold(*garbage)
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    if "--json" in args:
        from support.schemas import check_printed  # noqa: PLC0415 (it imports what most commands do not)

        check_printed(args, out.getvalue())
    return Ended(code, out.getvalue(), error.getvalue())


def meshloom(*args: str, cwd: Path | None = None, **env: str) -> Ended:
    """Runs the command in a process of its own, to its end, with the XLA flags of the tests."""
    return run_python("-m", "meshloom", *args, cwd=cwd, env=os.environ | env)


def run_python(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Ended:
    """Runs `python WORDS`, forked, to its end."""
    process = start(words, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return Ended(process.wait(), out, err)
