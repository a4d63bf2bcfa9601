"""Watches a compile: shows what it is doing, ends it on Ctrl-C or after a time limit, and reports how it failed.

XLA cannot be interrupted, so it runs in a thread (`watched`), and Ctrl-C ends the process. An abort of the compiler
ends the process too; a helper process reports it (abort_watchdog.py). Only another process can be ended by itself: a
compile with a budget, `compile.timeout_seconds`, runs in a child (`compile_in_child`). docs/libraries.md says why other
compiles do not.

On a terminal one line shows the phase. Elsewhere a line is written after one minute of a phase, after two, after four,
and so on, so that a log of hours stays short.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import jax

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.compiler.core.format import human_bytes, human_names, human_seconds
from meshloom.compiler.core.user_code import allow_words
from meshloom.compiler.target.compiler_options import option_problem
from meshloom.compiler.xla.aot import parse_out_of_memory

from ..core.failures import RunFailed, before_leaving, interruptibly, leave_now
from ..processes.process_log import announce
from .abort_watchdog import abort_reported

T = TypeVar("T")
FIRST_SECONDS = 60.0
LOWER, COMPILE, READ = "tracing and lowering", "in XLA", "reading the schedule"
NOT_OF_CHILD = ("hydra.run.dir=", "compile.timeout_seconds=", "overlap.search=")  # a child has its own
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception): ")


class Phases:
    """Shows the phases of one piece of work. what: the work, with which the line begins."""

    def __init__(self, console: Console, what: str):
        self.what = what
        self._console = console
        self._stack = ExitStack()
        self._phase, self._began = "", time.monotonic()
        self._changed, self._over = threading.Event(), threading.Event()
        self._bar = console.bar(what, "spinner", "doing", "elapsed", is_transient=True)

    def __enter__(self) -> "Phases":
        self._stack.enter_context(before_leaving(lambda _: self.stop()))
        self._bar.start()
        self._stack.callback(self._bar.stop)
        if not self._console.is_terminal and not self._console.is_quiet:
            thread = threading.Thread(target=self._tell, daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._changed.set)
            self._stack.callback(self._over.set)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, phase: str) -> None:
        """Shows this phase from now on, with the time since now."""
        self._phase, self._began = phase, time.monotonic()
        self._bar.begin(f"{self.what}: {phase}")
        self._changed.set()

    def stop(self) -> None:
        """Ends the line, so that other output can follow."""
        self._stack.close()

    def _tell(self) -> None:
        due = FIRST_SECONDS
        while not self._over.is_set():
            elapsed = time.monotonic() - self._began
            if self._changed.wait(max(0.0, due - elapsed)):
                self._changed.clear()
                due = FIRST_SECONDS
            else:
                announce(self._console, f"{self.what}: {self._phase}, for {human_seconds(due)} so far")
                due *= 2


def watched(compile_programs: Callable[[], T], *, log: Path, terminal: int, phases: Phases, kept_in: Path | None) -> T:
    """Returns the result of `compile_programs`, which runs in a thread: C++ handles no signal.

    log: the file with the compiler's output. terminal: a descriptor of stderr before it was redirected. phases: the
    display, in which this phase begins. kept_in: the file that takes the reason of an abort.
    """
    phases.begin(COMPILE)
    try:
        with abort_reported(log, terminal, during=phases.what, kept_in=kept_in):
            return interruptibly(compile_programs)
    except KeyboardInterrupt as interrupt:
        phases.stop()
        os.write(terminal, f"interrupted while {phases.what}\n".encode())
        logging.getLogger("meshloom").error(f"interrupted while {phases.what}")
        # An orderly exit would wait for the compiler.
        leave_now(128 + (interrupt.args[0] if interrupt.args else signal.SIGINT))
        raise


def compile_in_child(words: Sequence[str], *, seconds: float, at_work: Sequence[str], log: Path) -> None:
    """Waits for a child, `meshloom compile` of the same declaration, which leaves the step in `compilation_cache`.

    If the child fails, this returns all the same: the caller then warns, and compiles the step itself.

    words: its arguments, the overrides last. seconds: the budget. at_work: options that may take the time. log: takes
    the child's output. Raises RunFailed, after ending the child, if the budget is spent.
    """
    words = [word for word in words if not word.startswith(NOT_OF_CHILD)]
    with tempfile.TemporaryDirectory() as run_dir, log.open("ab") as printed:
        own = ("compile.timeout_seconds=null", "overlap.search=null", f"hydra.run.dir={run_dir}")
        command = [sys.executable, "-m", "meshloom", "compile", *allow_words(), *words, *own]
        child = subprocess.Popen(command, stdout=printed, stderr=printed, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            with_what = human_names(at_work, most=6) if at_work else "its default options"
            what = f"the compiler is still at work after {human_seconds(seconds)}, with {with_what}"
            fix = "leave out one of these options at a time, or set a longer compile.timeout_seconds"
            raise RunFailed(Problem("compile.timeout_seconds", what, fix), exit_code=1) from None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@contextmanager
def compiler_errors_reported(log: Path) -> Iterator[None]:
    """Turns a compiler's exceptions within the `with` into RunFailed, or ConfigError for options that it refuses.

    log: the file with its output, to which the whole exception is added.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.write(f"{said}\n")
        if refused := parse_out_of_memory(said):
            what = f"the train step does not fit the memory of a device: {refused.said}"
            if refused.needed_bytes is not None and refused.available_bytes is not None:
                needed, available = human_bytes(refused.needed_bytes), human_bytes(refused.available_bytes)
                what = f"the train step does not fit: {needed} are needed on each device, and {available} are available"
            fix = (
                "choose a smaller model or batch, more remat, or more devices; `meshloom compile` says what would help"
            )
            raise RunFailed(Problem("target", what, fix), DOES_NOT_FIT) from error
        if problem := option_problem(said, "this target"):
            raise ConfigError([problem]) from error
        # The first line has the reason, unless Python code that the compiler called raised an exception.
        lines = said.splitlines() or ["it did not say why"]
        raised = [line for line in lines if _EXCEPTION.match(line)] if "Traceback" in lines[0] else []
        what = f"failed, and not for memory: {raised[-1] if raised else lines[0]}"
        fix = f"see {log}; other compiler_options or another version of it may do"
        raise RunFailed(Problem("the compiler", what, fix), exit_code=1) from error
