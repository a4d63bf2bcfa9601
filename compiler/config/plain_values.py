"""Converts a composed config to plain values that JSON can represent."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..core.errors import Problem
from .config_limits import check_references

MOST_BITS = 1024  # of a whole number; every field accepts far fewer


def plain_values(composed: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """Returns the values with interpolations resolved, and what is wrong with them.

    Keys that are still `???` are omitted, so that they count as missing. Raises ConfigError for interpolations that
    cannot be resolved in reasonable time.
    """
    check_references(OmegaConf.to_container(composed, resolve=False))  # type: ignore[arg-type]
    problems: list[Problem] = []

    def plain(node: Any, key: str) -> Any:
        if isinstance(node, dict):
            return {
                str(name): plain(value, f"{key}.{name}" if key else str(name))
                for name, value in node.items()
                if not (isinstance(value, str) and value == "???")
            }
        if isinstance(node, list):
            return [plain(value, f"{key}[{index}]") for index, value in enumerate(node)]
        if what := _not_plain(node):
            problems.append(Problem(key, what, "write a number, text in quotes, true, false or null"))
            return None
        return node

    return plain(OmegaConf.to_container(composed, resolve=True), ""), problems


def _not_plain(value: Any) -> str | None:
    """Returns what is wrong with a value, or None."""
    if isinstance(value, str):
        return "is not Unicode text" if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"is a number of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return None
    return f"has the type {type(value).__name__}, which a declaration cannot hold"
