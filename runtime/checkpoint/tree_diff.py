"""Describes in a few lines how the arrays of a checkpoint differ from those of a run."""

from collections.abc import Mapping
from typing import Any

from meshloom.compiler.core.trees import leaves_by_path

MOST_SHOWN = 6


def tree_differences(there: Any, here: Any) -> list[str]:
    """Returns a line for each array that differs; parameters first, since the optimizer's state follows them.

    there, here: trees whose leaves have a shape and a dtype.
    """
    a, b = _described(there), _described(here)
    paths = [path for path in a.keys() | b.keys() if a.get(path) != b.get(path)]
    return [_difference(path, a, b) for path in sorted(paths, key=parameters_first)]


def parameters_first(path: str) -> tuple[bool, str]:
    """Returns the key by which paths of a state are sorted for people."""
    return not path.startswith("params/"), path


def first_lines(lines: list[str]) -> list[str]:
    """Returns the first lines, and how many more there are."""
    more = [f"and {len(lines) - MOST_SHOWN} more"] if len(lines) > MOST_SHOWN else []
    return lines[:MOST_SHOWN] + more


def shown(differences: list[str]) -> str:
    """Returns the first differences, and how many more there are."""
    return "".join(f"\n    {line}" for line in first_lines(differences))


def described(array: Any) -> str:
    """Returns type and shape: float32[264,32]."""
    return f"{array.dtype}{list(array.shape)}".replace(" ", "")


def _difference(path: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    if path not in here:
        return f"{path} {there[path]} is there, not here"
    if path not in there:
        return f"{path} {here[path]} is not there, but here"
    return f"{path} is {there[path]} there, {here[path]} here"


def _described(tree: Any) -> dict[str, str]:
    return {path: described(x) for path, x in leaves_by_path(tree).items()}
