"""Shows the progress of reading a corpus: a bar on a terminal, lines elsewhere, and nothing if it is quick."""

import time
from typing import Self

from meshloom.compiler.core.console import Console

QUICK_SECONDS = 2.0
SECONDS_PER_LINE = 30.0


class TextProgress:
    """Within the `with`, shows how many bytes of text are done of `total` (0: unknown)."""

    def __init__(self, console: Console, doing: str, *, total: int, completed: int = 0):
        self._console, self._doing, self._total, self._completed = console, doing, total, completed
        self._start = self._last_line = time.monotonic()
        self._bar = console.bar(doing, "doing", "bar", "bytes", "bytes_per_second", "left", is_transient=True)
        self._is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Counts more bytes as done."""
        self._completed += num_bytes
        now = time.monotonic()
        if self._console.is_terminal:
            if not self._is_shown and now - self._start > QUICK_SECONDS:
                self._bar.start()
                self._is_shown = True
            self._bar.update(self._completed, total=self._total or None)
        elif now - self._last_line > SECONDS_PER_LINE:
            self._last_line = now
            of = f" of {self._total / 1e6:,.0f}" if self._total else ""
            self._console.line(f"{self._doing}: {self._completed / 1e6:,.0f}{of} MB")
