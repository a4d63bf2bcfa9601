"""Keys of a declaration as text: optimizer.b1, sharding.parameters[0].mesh."""

from collections.abc import Iterator, Mapping
from typing import Any


def is_within(inner: str, outer: str) -> bool:
    """Returns whether one key is the other or lies below it: mesh.fsdp within mesh."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Returns each key with its value; lists are values, and so is a group without keys.

    {"optimizer": {"b1": 0.9}, "parallel": {}} -> ("optimizer.b1", 0.9), ("parallel", {})
    """
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node


def value_at(node: Any, key: str) -> Any:
    """Returns the value at a key, or None if there is none. Items of lists go by their index."""
    for part in filter(None, key.split(".")):
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node
