"""Meshloom: a training run is declared, compiled ahead of time, proved from its schedule, and run."""

from pathlib import Path

# The real folders first, so that tracebacks and breakpoints name the files one edits.
__path__ = [str((Path(__file__).parent / "compiler").resolve().parent), *__path__]
__version__ = "0.1.0"
