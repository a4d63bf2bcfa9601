"""A worker process of the pool: prepared before it knows what it will run, and evaluating one point after the other.

Importing this imports all that a point needs.
"""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

from meshloom.compiler.config.kept_compositions import keep_compositions

from .evaluate import evaluate
from .points import Outcome, Task

_POLL_SECONDS = 0.5


def prepare_worker(parent: int, scratch: Path) -> None:
    """Prepares the process. parent: whose end is its own. scratch: takes what the process prints.

    Ctrl-C reaches all processes of a terminal, and the parent alone answers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    log = os.open(scratch / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())


def say_at(index: int, scratch: Path) -> None:
    """Says which point this process is at, for whoever measures its memory."""
    (scratch / f"{os.getpid()}.point").write_text(str(index))


def end_with(parent: int) -> None:
    """Ends this process when its parent has died, however that died; what it is at would be nobody's."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start_worker(parent: int, scratch: Path) -> None:
    """Prepares the process, and has it keep what all points share."""
    prepare_worker(parent, scratch)
    keep_compositions()
    gc.freeze()  # all that was imported, some 500,000 objects
    gc.set_threshold(50_000, 20, 100)  # a traced program has as many: not a look at every 700 new ones


def work(task: Task) -> Outcome | None:
    """Evaluates a point; None where it needs a process of its own."""
    return evaluate(task)
