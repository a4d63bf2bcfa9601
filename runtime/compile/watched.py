"""A compile at work: what it is doing, how it is interrupted, and what its compiler raised.

What the compiler prints goes to a log; an abort is reported, and Ctrl-C ends the compile at once. On a terminal one
line moves; elsewhere there is a line after one minute of a phase, after two, after four, and so on, so that a log of
hours stays short.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.compiler.core.format import human_bytes, human_seconds
from meshloom.compiler.target.compiler_options import option_problem
from meshloom.compiler.xla.aot import OutOfMemory, parse_out_of_memory

from ..core.failures import RunFailed
from ..core.interruptible import before_leaving, interruptibly, leave_now
from ..processes.process_log import say
from .abort_watchdog import last_words

T = TypeVar("T")
FIRST_SECONDS = 60.0
LOWER, COMPILE, READ = "tracing and lowering", "in XLA", "reading the schedule"
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


class Phases:
    """The phases of one piece of work. what: the work, as the line begins."""

    def __init__(self, console: Console, what: str):
        self.what = what
        self._console = console
        self._stack = ExitStack()
        self._phase, self._began = "", time.monotonic()
        self._changed, self._is_over = threading.Event(), False
        self._bar = console.bar(what, "spinner", "doing", "elapsed", is_transient=True)

    def __enter__(self) -> "Phases":
        self._stack.enter_context(before_leaving(lambda _: self.stop()))
        self._bar.start()
        self._stack.callback(self._bar.stop)
        if not self._console.is_terminal and not self._console.is_quiet:
            thread = threading.Thread(target=self._tell, daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._end_telling)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def begin(self, phase: str) -> None:
        """Says from now on that this is being done, with the time since now."""
        self._phase, self._began = phase, time.monotonic()
        self._bar.begin(f"{self.what}: {phase}")
        self._changed.set()

    def stop(self) -> None:
        """Ends the line. What is printed afterwards stays."""
        self._stack.close()

    def _end_telling(self) -> None:
        self._is_over = True
        self._changed.set()

    def _tell(self) -> None:
        due = FIRST_SECONDS
        while not self._is_over:
            elapsed = time.monotonic() - self._began
            if self._changed.wait(max(0.0, due - elapsed)):
                self._changed.clear()
                due = FIRST_SECONDS
            else:
                say(self._console, f"{self.what}: {self._phase}, for {human_seconds(due)} so far")
                due *= 2


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


@contextmanager
def compiler_errors_reported(log: Path) -> Iterator[None]:
    """Turns a compiler's exceptions within the `with` into RunFailed, or ConfigError for options that it refuses.

    log: what it printed; what it raised is added there, whole.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"{said}\n")
        raise _reported(said, log) from error


def _reported(said: str, log: Path) -> ConfigError:
    if refused := parse_out_of_memory(said):
        fix = "choose a smaller model or batch, more remat, or more devices; `meshloom compile` says what would help"
        return RunFailed(Problem("target", _lack(refused), fix), DOES_NOT_FIT)
    if problem := option_problem(said, "this target"):
        return ConfigError([problem])
    what = f"failed, and not for memory: {_reason(said)}"
    fix = f"see {log}; other compiler_options or another version of it may do"
    return RunFailed(Problem("the compiler", what, fix), exit_code=1)


def _reason(said: str) -> str:
    """Returns the line that says why: the first one, or the exception of Python code that the compiler called."""
    lines = said.splitlines() or ["it did not say why"]
    raised = [line for line in lines if _EXCEPTION.match(line)] if "Traceback" in lines[0] else []
    return raised[-1] if raised else lines[0]


def _lack(refused: OutOfMemory) -> str:
    if refused.needed_bytes is None or refused.available_bytes is None:
        return f"the train step does not fit the memory of a device: {refused.said}"
    needed, available = human_bytes(refused.needed_bytes), human_bytes(refused.available_bytes)
    return f"the train step does not fit: {needed} are needed on each device, and {available} are available"
