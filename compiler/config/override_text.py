"""Writes values in Hydra's override grammar, such that they are read back unchanged."""

import json
import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

_PLAIN = re.compile(r"[\w./*+-]+")


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
