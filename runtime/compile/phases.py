"""Says what a compile is doing and for how long: on a terminal in one line that moves, elsewhere in a line after one
minute of a phase, after two, after four, and so on, so that a log of hours stays short."""

import threading
import time
from contextlib import ExitStack
from types import TracebackType

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_seconds

from ..core.interruptible import before_leaving
from ..processes.say import say

FIRST_SECONDS = 60.0
LOWER, COMPILE, READ = "tracing and lowering", "in XLA", "reading the schedule"


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
