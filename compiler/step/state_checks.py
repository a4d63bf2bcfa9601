"""Checks a state on its devices: whether it is finite, and whether two states, or the replicas of one, have the same
bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ..core.partition_spec import axes_in
from ..core.trees import leaves_by_path
from ..plan import Plan
from ..sharding.state import State


def is_finite(state: Any) -> Array:
    """Returns True if no array of the state holds NaN or infinity. A run asks before each save."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


def build_digest(plan: Plan) -> Callable[[State], dict[str, Array]]:
    """Returns a function from a state to checksums: for each array the sum of the bits of each device's shard, as
    uint32 in the shape of the mesh. Compile it with replicated output."""
    sizes = plan.mesh.sizes
    specs = leaves_by_path(plan.specs, is_leaf=_is_spec)

    def local(state: dict[str, Array]) -> dict[str, Array]:
        sums = jnp.stack([_sum_of_bits(x) for x in state.values()])
        everywhere = jax.lax.all_gather(sums, tuple(sizes))
        return {path: everywhere[:, i].reshape(tuple(sizes.values())) for i, path in enumerate(state)}

    over_devices = jax.shard_map(local, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return lambda state: over_devices(leaves_by_path(state))


def replica_dimensions(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns, for each array of the state, the dimensions of the mesh along which devices hold the same shard."""
    found = {}
    for path, spec in leaves_by_path(plan.specs, is_leaf=_is_spec).items():
        split = axes_in(spec)
        found[path] = tuple(i for i, axis in enumerate(plan.mesh.sizes) if axis not in split)
    return found


def _sum_of_bits(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32, 1: jnp.uint8}[x.dtype.itemsize])
    return jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
