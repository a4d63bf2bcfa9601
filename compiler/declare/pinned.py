"""Values of a declaration that hold whatever its words say: what the weights of a checkpoint mean.

    Pinned({"model": {"rope_theta": 10000.0, ...}}, free=("model.attention_windows",))

A key that the user types now stays as typed, and so does a value that was taken from the environment, of which a
checkpoint holds the name. A key that a class has got since the checkpoint was saved is as it is declared.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..core.key_paths import is_within

TAGS = ("family", "kind")  # keys that name the class of a node


@dataclass(frozen=True)
class Pinned:
    """Values by key, as JSON, so that requests can be compared. free: the keys that the user types."""

    text: str
    free: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any], free: Iterable[str]) -> Self:
        """Returns values to hold to. free: the keys that stay as they are declared."""
        return cls(json.dumps(values), tuple(free))

    def applied(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a declaration with these in their places."""
        found = dict(values)
        for key, value in json.loads(self.text).items():
            if not any(is_within(key, free) for free in self.free):
                found = _with(found, key.split("."), self._held(key, value, _at(values, key)))
        return found

    def _held(self, key: str, value: Any, declared: Any) -> Any:
        """Returns a value with what is declared in the places of free keys. declared: the value by the words."""
        if key in self.free or (isinstance(value, str) and "${" in value and declared is not None):
            return declared
        if not isinstance(value, dict):
            return value if not any(is_within(free, key) for free in self.free) else declared
        words = declared if isinstance(declared, dict) else {}
        held = {name: self._held(f"{key}.{name}", each, words.get(name)) for name, each in value.items()}
        is_same = any(tag in value and value[tag] == words.get(tag) for tag in TAGS)  # its keys are those of one class
        later = {name: each for name, each in words.items() if is_same and name not in value}
        return held | later | {name: each for name, each in words.items() if self._is_typed(f"{key}.{name}")}

    def _is_typed(self, key: str) -> bool:
        return any(is_within(key, free) for free in self.free)


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _with(values: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *below = path
    node = values.get(name)
    return values | {name: _with(node if isinstance(node, dict) else {}, below, value) if below else value}
