"""Makes text safe for a terminal or a log: characters that would control either are shown as escapes, and values that a
declaration took from environment variables as their interpolations. Imports nothing heavy."""

import json
import sys
from typing import TextIO

from .folding import folded_problems, width_of

SHORTEST = 6  # a shorter value occurs in too many other words to be replaced

_values: dict[str, str] = {}  # by variable


def hide(name: str, value: str) -> None:
    """Makes `hidden` remove the value of this variable from texts from now on."""
    _values[name] = value


def hidden(text: str) -> str:
    """Returns the text with `${oc.env:NAME}` instead of each value that came from the environment."""
    for name, value in sorted(_values.items(), key=lambda item: -len(item[1])):
        if len(value) >= SHORTEST:
            in_json = (json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False))
            for form in dict.fromkeys((value, *in_json, repr(value)[1:-1])):
                text = text.replace(form, interpolation(name))
    return text


def interpolation(name: str) -> str:
    """Returns the interpolation of a variable: "TOKEN" -> "${oc.env:TOKEN}"."""
    return f"${{oc.env:{name}}}"


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


def write_problems(text: str) -> None:
    """Writes problems to standard error; a terminal gets their lines folded between words."""
    write_error(folded_problems(visible(text), width_of(sys.stderr)))


def _write(text: str, end: str, stream: TextIO) -> None:
    print(visible(text), end=end, file=stream, flush=True)
