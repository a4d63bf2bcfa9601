"""Makes text safe for a terminal or a log: characters that would control either are shown as escapes."""

import sys
from typing import TextIO

from .redaction import hidden


def visible(text: str) -> str:
    """Returns the text with each unprintable character written as Python writes it: a raw escape as `\\x1b`.

    Line breaks and tabs stay. Values come from users, files and compilers: `[2J` after a raw escape clears a screen,
    and half of a surrogate pair, from a name that is not UTF-8, cannot be encoded. A value that a declaration took from
    the environment is shown as `${oc.env:NAME}`.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in hidden(text))


def visible_line(text: str) -> str:
    """Returns the same with line breaks escaped too, so that a value cannot start a new line."""
    return visible(text).replace("\n", "\\n")


def write_out(text: str, *, end: str = "\n") -> None:
    """Writes text to standard output and flushes."""
    _write(text, end, sys.stdout)


def write_error(text: str) -> None:
    """Writes text to standard error and flushes."""
    _write(text, "\n", sys.stderr)


def _write(text: str, end: str, stream: TextIO) -> None:
    print(visible(text), end=end, file=stream, flush=True)
