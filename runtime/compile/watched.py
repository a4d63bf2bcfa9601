"""A compile at work: its own words go to a log, an abort is reported, and Ctrl-C ends it at once."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..core.interruptible import interruptibly, leave_now
from .abort_watchdog import last_words
from .phases import COMPILE, Phases

T = TypeVar("T")


def watched(compile_programs: Callable[[], T], *, log: Path, terminal: int, phases: Phases, kept_in: Path | None) -> T:
    """Returns what `compile_programs` does, which runs in a thread: C++ hears no signal.

    log: takes what the compiler prints. terminal: a descriptor of stderr as it was before it went there. phases: what
    is being done, of which this one begins. kept_in: where the reason of an abort is kept.
    """
    phases.begin(COMPILE)
    try:
        with last_words(log, terminal, during=phases.what, kept_in=kept_in):
            return interruptibly(compile_programs)
    except KeyboardInterrupt as interrupt:
        phases.stop()
        os.write(terminal, f"interrupted while {phases.what}\n".encode())
        logging.getLogger("meshloom").error(f"interrupted while {phases.what}")
        # In order the process could end only after the compiler.
        leave_now(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
        raise
