"""Reports an abort of the compiler on the terminal, and saves its reason for the next time.

A compiler that fails one of its own checks aborts in C++: no `except` and no `finally` runs, and its message is in a
log. So while a compiler works, a small process reads the log. This file, run as a script, is that process, so it
imports only the standard library. It ends when its input is closed, which the system does when the watched process
dies.
"""

import json
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDED_WELL = "."
_POLL_SECONDS = 0.1
# A fatal line of Abseil's log, which XLA writes: severity and date, time, thread, source, text
# (https://abseil.io/docs/cpp/guides/logging). Not those of JAX's coordination service, which ../processes/lost.py
# reports.
FATAL = re.compile(r"^F\d{4} \S+ +\d+ (?P<why>(?!.*the JAX distributed service).*?) *\n", re.MULTILINE)
SHOW_CURSOR = "\x1b[?25h"  # a terminal's spinner hides it


@contextmanager
def abort_reported(log: Path, terminal: int, *, during: str, kept_in: Path | None) -> Iterator[None]:
    """Reports on `terminal`, a file descriptor, if this process is ended within the `with`, and during which work.

    log: an existing file, to which the compiler writes; a fatal line that is added from now on is reported. kept_in:
    the file that takes the reason of an abort.
    """
    start = log.stat().st_size
    told = json.dumps({"log": str(log), "start": start, "during": during, "kept_in": kept_in and str(kept_in)})
    command = [sys.executable, "-I", "-S", __file__, told]
    # In a session of its own, so that Ctrl-C does not end it before the process that it watches.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=terminal, text=True, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            watcher.communicate(ENDED_WELL)


def read_abort_reason(kept_in: Path) -> str | None:
    """Returns the saved reason of an abort; None if there is none."""
    try:
        return kept_in.read_text()
    except OSError:
        return None


def _watch(log: str, start: int, during: str, kept_in: str | None) -> None:
    """Reports a fatal line as soon as it is in the log: a container ends with its first process."""
    is_over, fatal, said = False, None, b""
    with open(log, "rb") as file:
        file.seek(start)
        while not is_over and not fatal:
            is_over = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
            if more := file.read():
                said += more
                fatal = FATAL.search(said.decode(errors="replace"))
    if fatal:
        fix = f"see {log}; other options or another version of it may do"
        why = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in fatal["why"])
        print(f"\nerror: the compiler: aborted while {during}: {why}\n  fix: {fix}", file=sys.stderr)
        if kept_in:
            try:
                Path(kept_in).parent.mkdir(parents=True, exist_ok=True)
                Path(kept_in).write_text(fatal["why"])
            except OSError as error:
                print(f"warning: not kept in {Path(kept_in).parent}: {error.strerror}", file=sys.stderr)
    if sys.stdin.read() != ENDED_WELL:
        if not fatal:
            print(f"\nthe process was ended while {during}", file=sys.stderr)
        if sys.stderr.isatty():
            print(SHOW_CURSOR, file=sys.stderr)


if __name__ == "__main__":
    _watch(**json.loads(sys.argv[1]))
