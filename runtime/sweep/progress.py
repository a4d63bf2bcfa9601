"""Reports on a running sweep: a line for each point that has ended, and how many are done, running and left."""

import shlex
import time
from collections import Counter
from collections.abc import Iterable

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_seconds

from .figures import FIGURES, Figure, value_of
from .rows import Row
from .table import STATUS_TEXT

SECONDS_BETWEEN_LINES = 30.0  # without a terminal
MOST_LINES = 200  # for points that are done; the others are always shown


class SweepProgress:
    """Shows the counts; on a terminal, in a line that stays below all others. num_points: None if unknown. rows: of
    points that ended before."""

    def __init__(self, console: Console, *, num_points: int | None, objective: str, rows: Iterable[Row] = ()):
        self._console, self._num_points, self._figure = console, num_points, FIGURES[objective]
        self._counts = Counter(row.status for row in rows)
        self._num_said, self._last_line = 0, time.monotonic()
        self._bar = console.bar("sweep", "doing", "bar", "numbers", "elapsed", "left", is_transient=True)

    def __enter__(self) -> "SweepProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def ended(self, row: Row) -> None:
        """Shows the outcome of a point."""
        self._counts[row.status] += 1
        if row.status == "done":
            self._num_said += 1
            if self._num_said > MOST_LINES:
                return
        text = shlex.join(row.overrides) or "the point"
        style = "green" if row.status == "done" else "red"
        self._console.line((STATUS_TEXT[row.status], style), f"  {text}  ", (_result(row, self._figure), "dim"))

    def update(self, num_running: int) -> None:
        """Shows the counts."""
        num_ended = self._counts.total()
        self._bar.update(num_ended, total=self._num_points, numbers=self.numbers(num_running))
        if not self._console.is_terminal and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.line(self.numbers(num_running))

    def numbers(self, num_running: int) -> str:
        """Returns "12 done, 1 failed, 2 running, 85 left"; a point that does not fit has not failed."""
        done, does_not_fit = self._counts["done"], self._counts["does_not_fit"]
        failed = self._counts.total() - done - does_not_fit
        parts = [f"{done:,} done", *([f"{does_not_fit:,} not fitting"] if does_not_fit else []), f"{failed:,} failed"]
        parts.append(f"{num_running:,} running")
        if self._num_points is not None:
            parts.append(f"{max(0, self._num_points - self._counts.total() - num_running):,} left")
        return ", ".join(parts)


def _result(row: Row, figure: Figure) -> str:
    if row.status != "done":
        return row.why or ""
    value = value_of(row, figure)
    taken = f"in {human_seconds(row.seconds)}" if row.seconds is not None else ""
    return taken if value is None else f"{figure.heading} {figure.human(value)}, {taken}"
