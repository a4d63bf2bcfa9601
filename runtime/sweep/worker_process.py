"""Prepares each worker process of the pool before it knows what it will run."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

POLL_SECONDS = 0.5


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
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
