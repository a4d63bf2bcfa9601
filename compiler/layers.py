"""The loop over the layers of a stack. The compiler owns it, so one model serves every way to run it."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

# (parameters of one layer as stored, x) -> x: gathers its weights and computes
LayerFn = Callable[[Any, Array], Array]

# Operations that move data and compute nothing. Their results are made again in the backward pass, never kept: to keep
# a gathered weight would undo its sharding, and what is derived from one by moving it is as large.
_MOVES = frozenset({
    "all_gather", "broadcast_in_dim", "reshape", "sharding_constraint", "squeeze", "transpose",
})  # fmt: skip


def _all_but_moved(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MOVES


REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": _all_but_moved,
    "full": jax.checkpoint_policies.nothing_saveable,
    "save_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def scan_layers(layer: LayerFn, stacked: Any, x: Array, *, remat: str) -> Array:
    """One layer's program, run once per layer. stacked: parameters with a first dimension `layers`."""
    # prevent_cse guards against the compiler merging both passes; in a loop they cannot be merged.
    kept = jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)
    return jax.lax.scan(lambda x, params: (kept(params, x), None), x, stacked)[0]
