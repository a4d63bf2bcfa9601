"""From a parameter's shard to the weights that a layer multiplies with, and from their gradient back to the shard's.

The step is manual over the mesh axes that split the batch (`shard_map`) and automatic over the others. So what crosses
the network for a weight is written here, and is not left to the partitioner: for a dimension sharded over a batch axis
an all-gather in the compute type, and for its gradient a *reduce-scatter*. (Left to itself, XLA emits an all-reduce
of the whole gradient for large groups on TPU, and always on CPU: twice the bytes.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


@dataclass(frozen=True)
class WeightLayout:
    """How one parameter is stored.

    gathered: (dimension as a layer sees it, mesh axes) of each dimension whose shards are gathered for use. reduced:
    the batch axes over which every device holds the same shard: its gradient is summed over them once per step.
    automatic, automatic_stored: the part of its layout that is over axes that do not split the batch, and is XLA's to
    keep: as a layer sees it, and with the dimension `layers`.
    """

    gathered: tuple[tuple[int, Axes], ...]
    reduced: Axes
    automatic: PartitionSpec
    automatic_stored: PartitionSpec


def axes_of(entry: Any) -> Axes:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def plan_weight(spec: PartitionSpec, batch_axes: Axes, *, is_stacked: bool) -> WeightLayout:
    """P(None, 'fsdp', 'tensor') with the batch over (data, fsdp), stacked -> gather dimension 0 over fsdp, reduce over
    data, leave dimension 1 to XLA over tensor."""
    manual = [tuple(axis for axis in axes_of(entry) if axis in batch_axes) for entry in spec]
    # A dimension over both kinds of axes is left to XLA whole: its chunks interleave.
    automatic = [entry if not axes else None for entry, axes in zip(spec, manual, strict=True)]
    first = 1 if is_stacked else 0
    gathered = tuple((dimension, axes) for dimension, axes in enumerate(manual[first:]) if axes)
    return WeightLayout(
        gathered=gathered,
        reduced=tuple(axis for axis in batch_axes if not any(axis in axes for _, axes in gathered)),
        automatic=PartitionSpec(*automatic[first:]),
        automatic_stored=PartitionSpec(*automatic),
    )


def keep_axes(spec: PartitionSpec, axes: Axes) -> PartitionSpec:
    """The part of a PartitionSpec that is over these mesh axes."""
    kept = (tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*(entry or None for entry in kept))


def gather(master: Array, working: Array, layout: WeightLayout, reduction_dtype: Any) -> Array:
    """The whole weight in the compute type.

    master: this device's shard in the parameter type; gradients flow to it. working: the same shard in the compute
    type, cast once per step. The gradient crosses the network in `reduction_dtype` and arrives in the master's type.
    """

    def whole(working: Array) -> Array:
        for dimension, axes in layout.gathered:
            working = jax.lax.all_gather(working, axes, axis=dimension, tiled=True)
        return working

    def scattered(gradient: Array) -> Array:
        for dimension, axes in reversed(layout.gathered):
            gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
        return gradient

    @jax.custom_vjp
    def use(master: Array, working: Array) -> Array:
        return forward(master, working)[0]

    def forward(_: Array, working: Array) -> tuple[Array, None]:
        return _automatic_kept(whole, layout.automatic)(working), None

    def backward(_: None, gradient: Array) -> tuple[Array, None]:
        if layout.gathered:
            gradient = _automatic_kept(scattered, layout.automatic)(gradient.astype(reduction_dtype))
        return gradient.astype(master.dtype), None

    use.defvjp(forward, backward)
    return use(master, working)


def reduce_gradient(gradient: Array, layout: WeightLayout, reduction_dtype: Any) -> Array:
    """Sum a stored parameter's gradient over the batch axes that its gather did not reduce: once per step."""
    if not layout.reduced:
        return gradient
    add = _automatic_kept(lambda g: jax.lax.psum(g, layout.reduced), layout.automatic_stored)
    return add(gradient.astype(reduction_dtype)).astype(gradient.dtype)


def _automatic_kept(collective: Callable[[Array], Array], automatic: PartitionSpec) -> Callable[[Array], Array]:
    """The collective on each shard of the automatic axes: without this XLA gathers those first."""
    axes = {axis for entry in automatic for axis in axes_of(entry)}
    if not axes:
        return collective
    return jax.shard_map(collective, in_specs=automatic, out_specs=automatic, axis_names=axes, check_vma=False)
