"""What a compiler says when it ends the process, told on the terminal and kept for the next time.

A compiler that finds itself wrong aborts, in C++: no `except` and no `finally` is run, and what it said is in a log. So
while one is at work a small process watches. This file, run as a script, is that process: it reads the
log, until its input ends, which the system closes when the process that is watched dies, however it dies.
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
# A fatal line of Abseil's log, which XLA writes: severity and date, time, thread, source, words
# (https://abseil.io/docs/cpp/guides/logging). JAX's coordination service, too, which ../processes/lost.py tells of.
FATAL = re.compile(r"^F\d{4} \S+ +\d+ (?P<why>(?!.*the JAX distributed service).*?) *\n", re.MULTILINE)
SHOW_CURSOR = "\x1b[?25h"  # which a terminal's spinner hides


@contextmanager
def last_words(log: Path, terminal: int, *, during: str, kept_in: Path | None) -> Iterator[None]:
    """Reports, if this process is ended within the `with`, that it was and during what: on `terminal`, a file
    descriptor.

    log: where the compiler writes, a file that is there; what is fatal in it from here on is told, and kept: `kept_in`.
    """
    start = log.stat().st_size
    told = json.dumps({"log": str(log), "start": start, "during": during, "kept_in": kept_in and str(kept_in)})
    command = [sys.executable, "-I", "-S", __file__, told]
    # In a session of its own: Ctrl-C ends it with the process that it watches, and not before.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=terminal, text=True, start_new_session=True
    ) as watcher:
        try:
            yield
        finally:
            watcher.communicate(ENDED_WELL)


def read_abort_reason(kept_in: Path) -> str | None:
    """Returns what the compiler said before it ended a process; None where it has not."""
    try:
        return kept_in.read_text()
    except OSError:
        return None


def _watch(log: str, start: int, during: str, kept_in: str | None) -> None:
    """Tells what is fatal as soon as it is in the log: behind the end of a container's process there is no time."""
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
            _keep(fatal["why"], Path(kept_in))
    if sys.stdin.read() != ENDED_WELL:
        if not fatal:
            print(f"\nthe process was ended while {during}", file=sys.stderr)
        if sys.stderr.isatty():
            print(SHOW_CURSOR, file=sys.stderr)


def _keep(why: str, kept_in: Path) -> None:
    try:
        kept_in.parent.mkdir(parents=True, exist_ok=True)
        kept_in.write_text(why)
    except OSError as error:
        print(f"warning: not kept in {kept_in.parent}: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    _watch(**json.loads(sys.argv[1]))
