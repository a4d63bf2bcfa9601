"""What compilers and drivers print by themselves, in C++, kept off the terminal."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

STDERR = 2


@dataclass
class Captured:
    """lines: what was printed, once the `with` is left. read: within it, the lines so far. terminal: within it, where
    stderr went before, a descriptor."""

    terminal: int = STDERR
    lines: tuple[str, ...] = field(default=())
    read: Callable[[], tuple[str, ...]] = tuple


@contextmanager
def captured_stderr(path: Path | None = None) -> Iterator[Captured]:
    """Redirects this process's stderr, at the level of the file descriptor, to a file within the `with`.

    path: appended to, so that what is said before an abort is kept; None: a file that is gone afterwards.
    """
    sys.stderr.flush()
    with path.open("a+b") if path else tempfile.TemporaryFile() as file:
        start = file.seek(0, os.SEEK_END)
        kept = os.dup(STDERR)
        captured = Captured(kept, read=lambda: _lines_from(file.fileno(), start))
        os.dup2(file.fileno(), STDERR)
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(kept, STDERR)
            os.close(kept)
            captured.lines = captured.read()


def _lines_from(file: int, start: int) -> tuple[str, ...]:
    """Returns a file's lines from an offset on; the place where it is written to stays."""
    sys.stderr.flush()
    written = os.pread(file, os.fstat(file).st_size - start, start)
    return tuple(written.decode(errors="replace").splitlines())
