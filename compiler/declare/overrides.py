"""Parses overrides as typed, by Hydra's grammar, and writes values in it such that they are read back unchanged."""

import json
import re
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from ..core.errors import COMMAND_LINE, ConfigError, Problem
from ..core.visible import visible_line

MOST_POINTS = 100_000  # points of a sweep
_PLAIN = re.compile(r"[\w./*+-]+")


@lru_cache(maxsize=4096)  # reading one declaration parses each override five times; no caller changes the result
def parse_override(text: str) -> Override:
    """Returns one parsed override. Raises ConfigError if it is not valid."""
    what, fix = "", "write key=value; quote values with spaces: 'key=\"a b\"'"
    if any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for c in text):
        raise _no_override(text, "it contains a control character, or is not UTF-8", "leave it out")
    try:
        parsed = OverridesParser.create().parse_override(text)
        if parsed.key_or_group:
            return parsed
        what = "it has no key"
    except HydraException as error:
        what = str(error).splitlines()[0].replace(text, shortened(text))
        fix = _quoted_fix(text) or fix
        if element := re.match(r"([\w.]+)\[\d+\]", text):
            what, fix = "one element of a list cannot be set alone", f"give the whole list: '{element[1]}=[...]'"
    except RecursionError:
        what, fix = "it is nested too deeply", "write it in a file, in fewer levels"
    except ValueError as error:  # Python's, of a number of more than 4300 digits
        what, fix = str(error).partition(";")[0], "write a smaller number"
    raise _no_override(text, what, fix)


def quoted(text: str) -> str:
    """Returns `key=value` with the value as text, as it is typed in a shell: run.name=12 -> 'run.name="12"'."""
    key, _, value = text.partition("=")
    return shlex.quote(f"{key}={in_quotes(value)}" if '"' in value else f'{key}="{value}"')


def _quoted_fix(text: str) -> str:
    """Returns how to type an override whose value is text that the grammar reads as more than that; "" if quotes do
    not help."""
    key, equals, value = text.partition("=")
    if not equals and re.fullmatch(r"[\w./@]+", key):
        return f"give it a value: {key}=..."
    if value.startswith("="):
        once = f"{key}={shortened(value, 200).lstrip('=')}"
        return f"write it with one '=': {shlex.quote(once)}"
    try:
        (word,) = shlex.split(quoted(text))
        parsed = OverridesParser.create().parse_override(word)
    except (HydraException, RecursionError, ValueError):
        return ""
    return f"quote text: {quoted(shortened(text, 200))}" if parsed.key_or_group and len(text) <= 200 else ""


def with_quoted_homes(text: str) -> str:
    """Returns an override with quotes around places that begin with `~`, which Hydra's grammar lacks.

    data.source.paths=[~/a/*.txt,b.txt] -> data.source.paths=['~/a/*.txt',b.txt]
    """
    if "~" not in text or "'" in text or '"' in text:
        return text
    return re.sub(r"(?<=[=\[,])~[^,\]]*", lambda found: f"'{found[0]}'", text)


def parsed_or_none(text: str) -> Override | None:
    """Returns None for an override that `parse_override` refuses, which is reported where each override is checked."""
    try:
        return parse_override(text)
    except ConfigError:
        return None


def overridden_key(text: str) -> str:
    """Returns the key or group that an override sets, however it is typed: "++a.b=c" -> "a.b"; "" for none."""
    parsed = parsed_or_none(text)
    return parsed.key_or_group if parsed else ""


def sweep_values(parsed: Override, options: Sequence[str] = ()) -> list[str]:
    """Returns the overrides of a sweep over one key. options: of its group, for `glob`. Raises ConfigError if there are
    none, or too many."""
    key, text = parsed.get_key_element(), shortened(str(parsed.input_line))
    try:
        values = list(islice(_values(parsed, options), MOST_POINTS + 1))
    except (HydraException, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"'{text}' cannot be swept over: {str(error).splitlines()[0]}"
        raise ConfigError([Problem(key, what, f"name the values: {key}=a,b")]) from error
    if not values:
        raise ConfigError([Problem(key, f"'{text}' names no value", f"name some: {key}=a,b, or {key}=range(1,3)")])
    if len(values) > MOST_POINTS:
        what = f"'{text}' names more than {MOST_POINTS:,} values"
        raise ConfigError([Problem(key, what, "sweep over fewer")])
    return [f"{key}={value}" for value in values]


def shortened(text: str, most: int = 100) -> str:
    """Returns the text, cut if it is too long for a message."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _values(parsed: Override, options: Sequence[str]) -> Iterator[Any]:
    if isinstance(glob := parsed.value(), Glob):
        return iter(glob.filter(list(options)))
    if parsed.is_range_sweep() and not parsed.value().step:  # type: ignore[union-attr]
        raise ValueError("a step of 0 never ends")
    return parsed.sweep_string_iterator()


def _no_override(text: str, why: str, fix: str) -> ConfigError:
    return ConfigError([Problem(COMMAND_LINE, f"'{visible_line(shortened(text))}' is not an override: {why}", fix)])


def override(key: str, value: Any) -> str:
    """Returns `key=value` as it is typed; text is quoted if it would otherwise be read as something else."""
    return f"{key}={override_value(value)}"


def override_value(value: Any) -> str:
    """Returns only the right-hand side: text, numbers, booleans, null, lists and groups of keys."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{override_value(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, str):
        return json.dumps(value)
    return value if _is_plain(value) else in_quotes(literal(value))


def literal(text: str) -> str:
    """Returns the text escaped for OmegaConf, which reads `${` as the start of an interpolation."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", text)


def in_quotes(text: str) -> str:
    """Returns the text in quotes; interpolations in it stay. Hydra drops a backslash only before a quote."""
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + (r"\'" if match[2] else ""), text)
    return f"'{text}'"


def _is_plain(text: str) -> bool:
    """Returns True if the text is read as itself without quotes: not `12`, `true` or `null`."""
    try:
        return bool(_PLAIN.fullmatch(text)) and OverridesParser.create().parse_override(f"k={text}").value() == text
    except HydraException:
        return False
