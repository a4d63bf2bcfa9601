"""A compile at work: its own words go to a log, an abort is reported, and Ctrl-C ends it at once."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshloom.compiler.core.console import Console

from ..core.interruptible import interruptibly, leave_now
from .abort_watchdog import last_words

T = TypeVar("T")


def watched(
    compile_programs: Callable[[], T], *, log: Path, terminal: int, status: str, kept_in: Path | None, console: Console
) -> T:
    """Returns what `compile_programs` does, which runs in a thread: C++ hears no signal.

    log: takes what the compiler prints. terminal: a descriptor of stderr as it was before it went there. status: what
    is being done, for the terminal. kept_in: where the reason of an abort is kept.
    """
    try:
        with last_words(log, terminal, during=status, kept_in=kept_in), console.status(status):
            return interruptibly(compile_programs)
    except KeyboardInterrupt as interrupt:
        os.write(terminal, f"interrupted while {status}\n".encode())
        logging.getLogger("meshloom").error(f"interrupted while {status}")
        # In order the process could end only after the compiler.
        leave_now(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
        raise
