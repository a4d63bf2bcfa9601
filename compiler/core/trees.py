"""Trees by path: `{"layers": {"mlp": {"up_EM": x}}}` <-> `{"layers/mlp/up_EM": x}`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves in the order of the tree, by their path."""
    return {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)}


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree with the structure of `tree` and the leaf of each path from `leaves`."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: leaves[_path(keys)], tree)


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
