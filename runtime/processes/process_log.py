"""`logs/process-N.log`: what each process said, its warnings, and where it crashed."""

import faulthandler
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshloom import __version__
from meshloom.compiler.core.visible import visible
from meshloom.compiler.xla.stderr_capture import captured_native_stderr, captured_tail

from .distributed import Processes

FOLDER = "logs"
LOG = logging.getLogger("meshloom")


class _Visible(logging.Formatter):
    """Escapes what libraries and users' code log, which may hold anything, for people who read it on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextmanager
def meshloom_log(run_dir: Path) -> Iterator[None]:
    """Within the `with`, the file of process 0 takes what Meshloom itself says. What other loggers are set up to do in
    this program stays as it is, and they get nothing of it."""
    path = run_dir / FOLDER / "process-0.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        file = logging.StreamHandler(stream)
        file.setFormatter(_Visible("%(asctime)s %(levelname)s %(message)s"))
        level, propagates = LOG.level, LOG.propagate
        LOG.addHandler(file)
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        try:
            yield
        finally:
            LOG.removeHandler(file)
            LOG.setLevel(level)
            LOG.propagate = propagates


@contextmanager
def process_log(run_dir: Path, processes: Processes) -> Iterator[Path]:
    """Within the `with`, this process's file takes what is logged, warnings, and stacks of a fatal signal; of one of
    several processes also what C++ prints by itself.

    Warnings appear on the terminal of process 0 too, as they would without this; those of the others do not.
    """
    path = run_dir / FOLDER / f"process-{processes.index}.log"
    path.parent.mkdir(exist_ok=True)
    with ExitStack() as held:
        if processes.lookout:
            with path.open("ab") as file:
                file.write(captured_tail())  # what it printed before there was a log
            held.enter_context(captured_native_stderr(path))
            processes.lookout.has_log = True
        held.enter_context(_logged_to(path, processes))
        yield path


@contextmanager
def _logged_to(path: Path, processes: Processes) -> Iterator[None]:
    stream = path.open("a", encoding="utf-8")
    file = logging.StreamHandler(stream)
    file.setFormatter(_Visible("%(asctime)s %(levelname)s %(message)s"))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(_Visible())
    terminal.setLevel(logging.WARNING)
    terminal.addFilter(lambda record: record.name != LOG.name)  # what we say is on the terminal already
    handlers = [file, terminal] if processes.is_first else [file]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.WARNING)
    LOG.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    faulthandler.enable(stream)  # the coordination service ends a process whose peers are lost by SIGABRT
    LOG.info(
        f"meshloom {__version__}, process {processes.index} of {processes.count} on {socket.gethostname()}, "
        f"pid {os.getpid()}: {shlex.join(sys.argv)}"
    )
    try:
        yield
    finally:
        faulthandler.disable()
        logging.captureWarnings(False)
        for handler in handlers:
            root.removeHandler(handler)
        stream.close()
        root.setLevel(level)
