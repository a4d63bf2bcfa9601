"""Hides values that a declaration took from environment variables. Imports nothing heavy."""

import json

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
