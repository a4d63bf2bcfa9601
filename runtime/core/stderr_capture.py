"""Keeps off the terminal what compilers and drivers print by themselves, in C++."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

STDERR = 2
TAIL_BYTES = 2**18
_active: list["Captured"] = []  # the outermost first


@dataclass
class Captured:
    """lines: what was printed, once the `with` is left. read, tail: within it, the lines and the last bytes so far.
    terminal: within it, where stderr went before any capture, a descriptor."""

    terminal: int = STDERR
    lines: tuple[str, ...] = field(default=())
    read: Callable[[], tuple[str, ...]] = tuple
    tail: Callable[[], bytes] = bytes


@contextmanager
def captured_stderr(path: Path | None = None) -> Iterator[Captured]:
    """Redirects this process's stderr, at the level of the file descriptor, to a file within the `with`.

    path: appended to, so that what is said before an abort is kept; None: a file that is gone afterwards.
    """
    sys.stderr.flush()
    with path.open("a+b") if path else tempfile.TemporaryFile("a+b") as file:
        start = file.seek(0, os.SEEK_END)
        kept = os.dup(STDERR)
        number = file.fileno()
        captured = Captured(
            terminal() if _active else kept,
            read=lambda: _lines_from(number, start),
            tail=lambda: _tail_from(number, start),
        )
        os.dup2(number, STDERR)
        _active.append(captured)
        try:
            yield captured
        finally:
            sys.stderr.flush()
            _active.remove(captured)
            os.dup2(kept, STDERR)
            os.close(kept)
            captured.lines = captured.read()


@contextmanager
def captured_native_stderr(path: Path | None = None) -> Iterator[Captured]:
    """Redirects what C++ prints, as `captured_stderr` does; what Python prints still goes to the terminal."""
    with captured_stderr(path) as captured:
        stream = os.fdopen(os.dup(captured.terminal), "w", buffering=1, errors="backslashreplace")
        with stream, redirect_stderr(stream):
            yield captured


def terminal() -> int:
    """Returns the descriptor of stderr as it is without captures."""
    return _active[0].terminal if _active else STDERR


def captured_tail() -> bytes:
    """Returns the last of what active captures have taken, the outermost first; another thread may ask."""
    return b"".join(captured.tail() for captured in tuple(_active))


def _lines_from(file: int, start: int) -> tuple[str, ...]:
    """Returns a file's lines from an offset on; the place where it is written to stays."""
    sys.stderr.flush()
    written = os.pread(file, os.fstat(file).st_size - start, start)
    return tuple(written.decode(errors="replace").splitlines())


def _tail_from(file: int, start: int) -> bytes:
    """Returns a file's last bytes, none before an offset; nothing where the capture has just ended."""
    try:
        size = os.fstat(file).st_size
        start = max(start, size - TAIL_BYTES)
        return os.pread(file, size - start, start)
    except OSError:
        return b""
