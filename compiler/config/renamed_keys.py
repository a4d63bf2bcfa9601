"""Keys that had another name in an earlier version: the error for an old key names the new one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import Problem
from .override_text import override_value


def _same(value: Any) -> Any:
    return value


def _strategies_of_rings(value: Any) -> Any:
    """Returns the strategies for what `rings` was, auto or names of matmuls: [mlp_output] ->
    {mlp_output:collective_matmul}."""
    if not isinstance(value, (list, tuple)):
        return value
    return "{" + ",".join(f"{name}:collective_matmul" for name in value) + "}" if value else "plain"


def _listed(value: Any) -> Any:
    """[a, b] -> [a,b], as one types it."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Renamed:
    """A renamed key. key: the current name. value: converts an old value to a current one."""

    key: str
    value: Callable[[Any], Any] = _same


def _words(**words: str) -> Callable[[Any], Any]:
    return lambda value: words.get(value, value) if isinstance(value, str) else value


RENAMED: Mapping[str, Renamed] = {
    "notes": Renamed("run.extra", override_value),
    "sharding.look_up": Renamed("parallel.embedding", _words(gather="all_gather", exchange="all_to_all")),
    "overlap.rings": Renamed("parallel.matmul", _strategies_of_rings),
    "overlap.head": Renamed("parallel.lm_head", _words(parts="vocab_chunks")),
    "kernels.attention": Renamed("parallel.attention"),
    "overlap.option_sets": Renamed("overlap.flag_presets", _listed),
    "overlap.layers.batch_parts": Renamed("overlap.layers.batch_split"),
    "logging.tensorboard": Renamed("logging.trackers", lambda value: "[tensorboard]" if value else "[]"),
}


def find_renamed(key: str, value: Any) -> Problem | None:
    """Returns the problem of a renamed key, or of the first one below it; None if it never existed."""
    if renamed := RENAMED.get(key):
        now = renamed.value(value)
        shown = f"={str(now).lower() if isinstance(now, bool) else now}" if isinstance(now, (str, int, float)) else ""
        return Problem(key, f"is {renamed.key} now", f"use {renamed.key}{shown}")
    below = value.items() if isinstance(value, Mapping) else ()
    return next((found for name, inner in below if (found := find_renamed(f"{key}.{name}", inner))), None)
