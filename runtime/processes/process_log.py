"""Writes to the terminal and to `logs/process-N.log`: messages, warnings, and the stacks of a crash."""

import faulthandler
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshloom import __version__
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.visible import visible
from meshloom.compiler.declare.run_spec import RunLabels

from ..core.stderr_capture import captured_native_stderr, captured_tail
from .distributed import Processes

LOG = logging.getLogger("meshloom")
FOLDER = "logs"


def announce(console: Console, text: str, *, is_shown: bool = True) -> None:
    """Shows and logs text; a terminal gets its lines wrapped between words."""
    LOG.info("%s", text)
    if is_shown:
        for line in text.split("\n"):
            console.wrapped(line)


def say_command(console: Console, label: str, words: Sequence[str]) -> None:
    """Shows a command to paste, in lines that the terminal does not break, and logs it as one line."""
    LOG.info("%s: %s", label, shlex.join(words))
    console.command(label, words)


def say_labels(console: Console, run: RunLabels) -> None:
    """Shows and logs the user's labels of the run, if it has any."""
    labels = {key: value for key, value in run.model_dump(mode="json").items() if value}
    if labels:
        announce(console, f"run: {json.dumps(labels, ensure_ascii=False)}")


class _Visible(logging.Formatter):
    """Escapes control characters in the messages of libraries and users' code, for reading on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextmanager
def meshloom_log(run_dir: Path) -> Iterator[None]:
    """Within the `with`, Meshloom's own messages go to the log of process 0, and to no other logger. Other loggers of
    this program are left as they are."""
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
    """Within the `with`, the log of this process takes messages, warnings, and the stacks of a fatal signal; if there
    are several processes, also the output of C++.

    Warnings of process 0 appear on the terminal too, as they would without this; those of the others do not.
    """
    path = run_dir / FOLDER / f"process-{processes.index}.log"
    path.parent.mkdir(exist_ok=True)
    with ExitStack() as held:
        if processes.lookout:
            with path.open("ab") as file:
                file.write(captured_tail())  # printed before there was a log
            held.enter_context(captured_native_stderr(path))
            processes.lookout.has_log = True
        stream = held.enter_context(path.open("a", encoding="utf-8"))
        file = logging.StreamHandler(stream)
        file.setFormatter(_Visible("%(asctime)s %(levelname)s %(message)s"))
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(_Visible())
        terminal.setLevel(logging.WARNING)
        terminal.addFilter(lambda record: record.name != LOG.name)  # our own messages are on the terminal already
        root = logging.getLogger()
        held.callback(root.setLevel, root.level)
        root.setLevel(logging.WARNING)
        LOG.setLevel(logging.INFO)
        for handler in (file, terminal) if processes.is_first else (file,):
            root.addHandler(handler)
            held.callback(root.removeHandler, handler)
        logging.captureWarnings(True)
        held.callback(logging.captureWarnings, False)
        faulthandler.enable(stream)  # the coordination service ends a process whose peers are lost by SIGABRT
        held.callback(faulthandler.disable)
        LOG.info(
            f"meshloom {__version__}, process {processes.index} of {processes.count} on {socket.gethostname()}, "
            f"pid {os.getpid()}: {shlex.join(sys.argv)}"
        )
        yield path
