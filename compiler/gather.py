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
    """How one parameter is stored, seen from inside a layer (without the dimension `layers`).

    gathered: (dimension, mesh axes) of each dimension whose shards are gathered for use. reduced: the batch axes over
    which every device holds the same shard: its gradient is summed over them once per step. automatic: the part of its
    layout that XLA keeps, over axes that do not split the batch.
    """

    gathered: tuple[tuple[int, Axes], ...]
    reduced: Axes
    automatic: PartitionSpec

    @property
    def automatic_axes(self) -> set[str]:
        return {axis for entry in self.automatic for axis in axes_of(entry)}


def axes_of(entry: Any) -> Axes:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def plan_weight(spec: PartitionSpec, batch_axes: Axes, *, is_stacked: bool) -> WeightLayout:
    """P(None, ('fsdp',), 'tensor') with batch over (data, fsdp), stacked -> gather dimension 0 over fsdp, reduce over
    data, leave dimension 1 to tensor."""
    entries = [axes_of(entry) for entry in spec][1 if is_stacked else 0 :]
    manual = [tuple(axis for axis in axes if axis in batch_axes) for axes in entries]
    gathered = tuple((dimension, axes) for dimension, axes in enumerate(manual) if axes)
    return WeightLayout(
        gathered=gathered,
        reduced=tuple(axis for axis in batch_axes if not any(axis in axes for _, axes in gathered)),
        # A dimension over both kinds of axes is left to XLA whole: its chunks interleave.
        automatic=PartitionSpec(*(axes if axes and not m else None for axes, m in zip(entries, manual, strict=True))),
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
        return _automatic_kept(whole, layout)(working)

    def forward(master: Array, working: Array) -> tuple[Array, None]:
        return _automatic_kept(whole, layout)(working), None

    def backward(_: None, gradient: Array) -> tuple[Array, None]:
        if layout.gathered:
            gradient = _automatic_kept(scattered, layout)(gradient.astype(reduction_dtype))
        return gradient.astype(master.dtype), None

    use.defvjp(forward, backward)
    return use(master, working)


def reduce_gradient(gradient: Array, layout: WeightLayout, reduction_dtype: Any) -> Array:
    """Sum a parameter's gradient over the batch axes that its gather did not reduce: once per step."""
    if not layout.reduced:
        return gradient
    total = _automatic_kept(lambda g: jax.lax.psum(g, layout.reduced), layout)(gradient.astype(reduction_dtype))
    return total.astype(gradient.dtype)


def _automatic_kept(collective: Callable[[Array], Array], layout: WeightLayout) -> Callable[[Array], Array]:
    """The collective on each shard of the automatic axes: without this XLA gathers those first."""
    if not layout.automatic_axes:
        return collective
    return jax.shard_map(
        collective,
        in_specs=layout.automatic,
        out_specs=layout.automatic,
        axis_names=layout.automatic_axes,
        check_vma=False,
    )
