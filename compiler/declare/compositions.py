"""Compositions that are kept, for programs that read many declarations: the points of a sweep, a notebook.

Hydra merges about 40 files for each composition, which takes a quarter of a second. The choices of groups
alone decide which files; Hydra then applies overrides of values to the result. So one composition is kept for each set
of choices, and values are applied to a copy of it. Meshloom's own files do not change while a process
runs, so their compositions are always kept. Users' files may: compositions with them are kept within
`compositions_kept` alone.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hydra import compose
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from .hydra_private import apply_overrides
from .hydra_settings import SEARCH_PATH
from .overrides import overridden_key, parsed_or_none
from .problems import ConfigGroups

MOST_KEPT = 256  # compositions; each takes about 40 kB


@dataclass
class Kept:
    """Holds what is kept. last: the last request and what it declares; a command checks it, then reads it again."""

    last: tuple[object, Any] = (None, None)
    groups: dict[tuple[str | None, ...], ConfigGroups] = field(default_factory=dict)
    composed: dict[tuple[str | None, ...], bytes] = field(default_factory=dict)  # pickled: read by threads at once


_own = Kept()
_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)  # threads read declarations at once


@contextmanager
def compositions_kept() -> Iterator[Kept]:
    """Keeps compositions of users' files, too, within the `with`."""
    kept = _kept.get() or Kept()
    before = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(before)


def keep_compositions() -> None:
    """Keeps compositions of users' files, too, from here on, in a process that does nothing else."""
    _kept.set(_kept.get() or Kept())


def forget_compositions() -> None:
    """Forgets the compositions of Meshloom's own files, so that Hydra makes them again."""
    global _own
    _own = Kept()


def kept_groups(
    config_name: str, config_path: str | None, search_path: Sequence[str], find: Callable[[], ConfigGroups]
) -> ConfigGroups:
    """Returns the groups that a request can see, found once for each configuration and search path."""
    kept = _kept_for(config_path, search_path)
    if kept is None:
        return find()
    key = (config_name, config_path, *search_path)
    if key not in kept.groups:
        kept.groups[key] = find()
    return kept.groups[key]


def compose_kept(
    config_name: str, config_path: str | None, overrides: Sequence[str], groups: ConfigGroups
) -> DictConfig:
    """Returns the composition of the overrides, with Hydra's node; only within a session of Hydra.

    overrides: values are `++key=value`, as `compose._forced` writes them. groups: those that the request can see.
    """
    kept = _kept_for(config_path, overrides)
    if kept is None:
        return compose(config_name, overrides=list(overrides), return_hydra_config=True)
    values = [text for text in overrides if _is_value(text, groups)]
    choices = [text for text in overrides if text not in values]
    key = (config_name, config_path, *choices)
    if (pickled := kept.composed.get(key)) is None:
        if len(kept.composed) >= MOST_KEPT:
            kept.composed.clear()
        made = compose(config_name, overrides=choices, return_hydra_config=True)
        try:
            pickled = kept.composed[key] = pickle.dumps(made)
        except (pickle.PicklingError, AttributeError, TypeError):  # a structured config of a class within a function
            return compose(config_name, overrides=list(overrides), return_hydra_config=True)
    composed: DictConfig = pickle.loads(pickled)  # a copy takes seven times as long
    parsed = [found for found in map(parsed_or_none, values) if found]
    apply_overrides(parsed, composed)
    return composed


def _kept_for(config_path: str | None, overrides: Sequence[str]) -> Kept | None:
    """Returns where compositions of these files are kept; None if they may have changed."""
    is_plugged_in = bool(Plugins.instance().discover(SearchPathPlugin))  # a package adds its files by itself
    has_users_files = is_plugged_in or config_path is not None or any(SEARCH_PATH in text for text in overrides)
    return _kept.get() if has_users_files else _own


def _is_value(text: str, groups: ConfigGroups) -> bool:
    """Returns True if the override changes a value, and not which files are read."""
    if text.startswith("~"):
        key = overridden_key(text)
        return key not in groups and not key.startswith("hydra.")
    return text.startswith("++") and not text.startswith("++hydra.")
