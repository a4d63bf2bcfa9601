"""Converts between trees and dicts by path: `{"layers": {"mlp": {"up_EM": x}}}` <-> `{"layers/mlp/up_EM": x}`."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves by their path, in the order of the tree."""
    return {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """Returns a tree with the structure of `tree` and the leaf of each path from `leaves`."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[_path(keys)], tree)


def node_at(tree: Any, path: str) -> Any:
    """Returns the node of a nested dict at a path: a leaf, or a tree."""
    for key in path.split("/"):
        tree = tree[key]
    return tree


def pick(tree: Any, paths: Collection[str], is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the nested dict of the leaves at these paths: {"a": {"b": 1}, "c": 2}, ["a/b"] -> {"a": {"b": 1}}."""
    return nested_dict({path: leaf for path, leaf in leaves_by_path(tree, is_leaf).items() if path in paths})


def combined(tree: Any, other: Any) -> dict[str, Any]:
    """Returns the nested dict of the leaves of both."""
    return nested_dict(leaves_by_path(tree) | leaves_by_path(other))


def nested_dict(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of leaves by path: undoes `leaves_by_path`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
