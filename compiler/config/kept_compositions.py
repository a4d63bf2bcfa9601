"""Compositions that are kept, for programs that read hundreds of declarations: the points of a sweep.

Hydra reads and merges some 30 files for each composition, a quarter of a second. Which files these are depends on the
choices of groups alone; overrides of values are applied to what they come to, by Hydra itself. So within
`compositions_kept` one composition for each set of choices is kept, and values are applied to a copy of it. Files that
change meanwhile are not read again.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from .composition_errors import Groups
from .override_parser import parsed_or_none

MOST_KEPT = 256  # compositions; each is some 100 kB


@dataclass
class _Kept:
    groups: dict[tuple[str | None, ...], Groups] = field(default_factory=dict)
    composed: dict[tuple[str | None, ...], DictConfig] = field(default_factory=dict)


_kept: _Kept | None = None


@contextmanager
def compositions_kept() -> Iterator[None]:
    """Keeps compositions within the `with`."""
    global _kept
    before, _kept = _kept, _kept or _Kept()
    try:
        yield
    finally:
        _kept = before


def keep_compositions() -> None:
    """Keeps compositions from here on, in a process that does nothing else."""
    global _kept
    _kept = _kept or _Kept()


def kept_groups(key: tuple[str | None, ...], find: Callable[[], Groups]) -> Groups:
    """Returns the groups that a request can see, found once for each key."""
    if _kept is None:
        return find()
    if key not in _kept.groups:
        _kept.groups[key] = find()
    return _kept.groups[key]


def compose_kept(config_name: str, config_path: str | None, overrides: Sequence[str]) -> DictConfig:
    """Returns the composition of the overrides, with Hydra's node; only within a session of Hydra.

    overrides: values are `++key=value`, as `compose._forced` writes them.
    """
    if _kept is None or any(text.startswith("~") for text in overrides):
        return compose(config_name, overrides=list(overrides), return_hydra_config=True)
    values = [text for text in overrides if text.startswith("++") and not text.startswith("++hydra.")]
    choices = [text for text in overrides if text not in values]
    key = (config_name, config_path, *choices)
    if key not in _kept.composed:
        if len(_kept.composed) >= MOST_KEPT:
            _kept.composed.clear()
        _kept.composed[key] = compose(config_name, overrides=choices, return_hydra_config=True)
    composed = copy.deepcopy(_kept.composed[key])
    parsed = [found for found in map(parsed_or_none, values) if found]
    ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
    return composed
