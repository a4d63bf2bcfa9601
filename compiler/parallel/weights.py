"""From a parameter's shard to the weights that a layer multiplies with, from their gradient to the shard that is
updated, and from there back to the one that is stored.

The step is manual over the mesh axes that split the batch (`shard_map`) and automatic over the others. So what crosses
the network for a weight is written here, and is not left to the partitioner: for a dimension sharded over a batch axis
an all-gather in the compute type, and for its gradient a *reduce-scatter*. (Left to itself, XLA emits an all-reduce
of the whole gradient for large groups on TPU, and always on CPU: twice the bytes.)
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ..core.partition_spec import Axes, axes_in, axes_of
from ..core.scopes import weight_scope

Parts = tuple[tuple[int, Axes], ...]  # (dimension, the mesh axes that it is split over), for each that is


@dataclass(frozen=True)
class WeightLayout:
    """How one parameter is stored, how its gradient is accumulated, and how it is updated, over the batch axes.

    path: of the parameter. gathered: dimensions whose shards are gathered for use. scattered: dimensions over which a
    gradient is reduce-scattered as soon as it is made. Both as a layer sees them; what follows is with the dimension
    `layers`, the first one where `is_stacked`. split_early: what `scattered` splits more than `gathered` gathers.
    split_late: what the update splits more than that, reduce-scattered once per step. reduced: the batch axes over
    which every device updates the same shard: its gradient is summed over them once per step.
    automatic, automatic_stored: the part of its layout that is over axes that do not split the batch, and is XLA's to
    keep: as a layer sees it, and with the dimension `layers`. automatic_axes: all of those axes.
    """

    path: str
    gathered: Parts
    scattered: Parts
    split_early: Parts
    split_late: Parts
    reduced: Axes
    is_stacked: bool
    automatic: PartitionSpec
    automatic_stored: PartitionSpec
    automatic_axes: Axes

    @property
    def is_reduced_once(self) -> bool:
        """True where something of the gradient's reduction is left for once per step."""
        return bool(self.reduced or self.split_late)

    def crosses(self, reduction: "Reduction") -> bool:
        """True where a backward pass sends the gradient over the network."""
        return bool(self.scattered) or (reduction.is_last and self.is_reduced_once)

    @property
    def scope(self) -> Any:
        """Within the `with`, operations carry the parameter's path: the schedule's report reads it off them."""
        return jax.named_scope(weight_scope(self.path))


def plan_weight(
    path: str,
    stored: PartitionSpec,
    accumulated: PartitionSpec,
    updated: PartitionSpec,
    batch_axes: Axes,
    automatic_axes: Axes,
    *,
    is_stacked: bool,
) -> WeightLayout:
    """All three P(None, 'fsdp', 'tensor') with the batch over (data, fsdp), stacked -> gather and scatter dimension 0
    over fsdp, reduce over data, leave dimension 1 to XLA over tensor.

    Each layout splits every dimension over what the one before it does, and maybe more behind that (sharding.py).
    """
    manual = [
        [tuple(axis for axis in axes_of(entry) if axis in batch_axes) for entry in spec]
        for spec in (stored, accumulated, updated)
    ]
    # A dimension over both kinds of axes is left to XLA whole: its chunks interleave.
    automatic = [None if axes else entry for entry, axes in zip(stored, manual[2], strict=True)]
    first = 1 if is_stacked else 0
    used = {axis for axes in manual[2] for axis in axes}
    return WeightLayout(
        path=path,
        gathered=_parts(manual[0][first:]),
        # One level of a hierarchy after the other: within the shards that are gathered first.
        scattered=_added(manual[0][first:], manual[1][first:]) + _parts(manual[0][first:]),
        split_early=_added(manual[0], manual[1]),
        split_late=_added(manual[1], manual[2]),
        reduced=tuple(axis for axis in batch_axes if axis not in used),
        is_stacked=is_stacked,
        automatic=PartitionSpec(*automatic[first:]),
        automatic_stored=PartitionSpec(*automatic),
        automatic_axes=automatic_axes,
    )


def _parts(entries: Sequence[Axes]) -> Parts:
    return tuple((dimension, axes) for dimension, axes in enumerate(entries) if axes)


def _added(before: Sequence[Axes], after: Sequence[Axes]) -> Parts:
    return _parts([longer[len(shorter) :] for shorter, longer in zip(before, after, strict=True)])


def _moved_by(parts: Parts, num_dimensions: int) -> Parts:
    return tuple((dimension + num_dimensions, axes) for dimension, axes in parts)


@dataclass(frozen=True)
class Reduction:
    """What a backward pass does with gradients. dtype: in which they cross the network. slot_dtype: in which they are
    accumulated. is_last: once per step, they are reduced all the way to the layout of the update; else to the one that
    they are accumulated in."""

    dtype: Any
    slot_dtype: Any
    is_last: bool


@dataclass(frozen=True)
class Weights:
    """Those of a model, a piece of it or a layer, and where their gradients go: trees alike.

    slots: of the shape and type of each gradient; their values are not looked at, the gradient flows to them. before:
    what the microbatches before have accumulated, which is added; None: nothing. working: this device's shards in the
    compute type, cast once per step. layouts: of WeightLayout.
    """

    slots: Any
    before: Any
    working: Any
    layouts: Any
    reduction: Reduction

    def piece(self, name: str) -> "Weights":
        before = None if self.before is None else self.before[name]
        return Weights(self.slots[name], before, self.working[name], self.layouts[name], self.reduction)

    def gathered(self) -> Any:
        """The whole weights in the compute type, in a tree."""
        before = jax.tree.map(lambda _: None, self.layouts) if self.before is None else self.before
        return jax.tree.map(partial(_gather, self.reduction), self.layouts, self.slots, before, self.working)

    def gathered_in_parts(self, cut: Any, sizes: Sequence[int], after: Array) -> list[Any]:
        """The whole weights in parts, a tree each; the gather of a part begins when the part before it is there.

        cut: a tree like them, of each the dimension that is cut into `sizes`; None: all of it is in each part. after:
        an array that the first part's gather waits for: XLA would begin it in front of a loop that makes that array,
        and end it there, as nothing asynchronous crosses a loop.
        """
        layouts, structure = jax.tree.flatten(self.layouts)
        befores = [None] * len(layouts) if self.before is None else structure.flatten_up_to(self.before)
        slots, workings, places = (structure.flatten_up_to(tree) for tree in (self.slots, self.working, cut))
        each = [Weights(*one, self.reduction) for one in zip(slots, befores, workings, layouts, strict=True)]
        uncut = {at: each[at].gathered() for at, place in enumerate(places) if place is None}
        trees, first = [], 0
        for size in sizes:
            own = {
                at: each[at].slice_begun_after(after, place, first, size).gathered()
                for at, place in enumerate(places)
                if place is not None
            }
            after = next(iter(own.values()))
            trees.append(structure.unflatten([(uncut | own)[at] for at in range(len(each))]))
            first += size
        return trees

    def slice_begun_after(self, earlier: Array, dimension: int, first: int, size: int) -> "Weights":
        """Of one weight, the entries from `first` on along a dimension; its gather begins when `earlier` is there."""

        def cut(x: Array) -> Array:
            return jax.lax.slice_in_dim(x, first, first + size, axis=dimension)

        before = None if self.before is None else cut(self.before)
        return replace(self, slots=cut(self.slots), before=before, working=_begun_after(earlier, cut(self.working)))


def _gather(reduction: Reduction, layout: WeightLayout, slot: Array, before: Array | None, working: Array) -> Array:
    @jax.custom_vjp
    def use(_: Array, _before: Array | None, working: Array) -> Array:
        return fetch(working, layout)

    def forward(_: Array, before: Array | None, working: Array) -> tuple[Array, Array | None]:
        return fetch(working, layout), before

    def backward(before: Array | None, gradient: Array) -> tuple[Array, None, None]:
        return send_back(gradient, before, layout, reduction), None, None

    use.defvjp(forward, backward)
    return use(slot, before, working)


def _begun_after(earlier: Array, x: Array) -> Array:
    """`x`, for which a compiler needs `earlier`. It removes barriers, so NaN is made of `x` where NaN came before."""
    first = jax.lax.stop_gradient(earlier)[(0,) * earlier.ndim]
    return jnp.where(jnp.isnan(first), jnp.full_like(x, jnp.nan), x)


def leave_split(weights: Weights, names: Collection[str]) -> Weights:
    """The same, but these parameters of a piece are used as this device's shards, and a gradient of one is that of the
    shard already."""
    layouts = {
        name: replace(layout, gathered=(), scattered=()) if name in names else layout
        for name, layout in weights.layouts.items()
    }
    return replace(weights, layouts=layouts)


def gather_vectors(weights: Weights) -> Weights:
    """Of a stack's weights those that are vectors in a layer, scales and biases, gathered for all layers at once, and
    their gradients reduced at once: a short collective in a layer waits for the long ones that have begun before it."""
    before = jax.tree.map(lambda _: None, weights.layouts) if weights.before is None else weights.before
    each = partial(_vectors_whole, weights.reduction)
    made = jax.tree.map(each, weights.layouts, weights.slots, before, weights.working)
    slots, before, working, layouts = (
        jax.tree.map(lambda one, place=place: one[place], made, is_leaf=lambda one: isinstance(one, tuple))
        for place in range(4)
    )
    return Weights(slots, None if weights.before is None else before, working, layouts, weights.reduction)


def _vectors_whole(
    reduction: Reduction, layout: WeightLayout, slot: Array, before: Array | None, working: Array
) -> tuple[Array, Array | None, Array, WeightLayout]:
    """(slot, before, working, layout) of one weight of a stack, as they are or whole."""
    is_vector = working.ndim == 2  # the first dimension is `layers`
    if not (is_vector and layout.gathered):
        return slot, before, working, layout
    at_once = replace(
        layout,
        gathered=_moved_by(layout.gathered, 1),
        scattered=_moved_by(layout.scattered, 1),
        automatic=layout.automatic_stored,
        is_stacked=False,
    )
    whole = fetch(working, at_once)

    @jax.custom_vjp
    def of_layers(_: Array, _before: Array | None) -> Array:
        return jnp.zeros(whole.shape, reduction.slot_dtype)

    def forward(slot: Array, before: Array | None) -> tuple[Array, Array | None]:
        return of_layers(slot, before), before

    def backward(before: Array | None, gradient: Array) -> tuple[Array, None]:
        return send_back(gradient, before, at_once, reduction), None

    of_layers.defvjp(forward, backward)
    of_layer = replace(layout, gathered=(), scattered=(), split_early=(), split_late=(), reduced=())
    nothing = None if before is None else jnp.zeros(whole.shape, before.dtype)
    return of_layers(slot, before), nothing, whole, of_layer


def fetch(working: Array, layout: WeightLayout) -> Array:
    """The whole weight from this device's shard of it."""
    if not layout.gathered:
        return working
    with layout.scope:
        return _moved(lambda w: _all_gather(w, layout.gathered), layout.automatic)(working)


def send_back(gradient: Array, before: Array | None, layout: WeightLayout, reduction: Reduction) -> Array:
    """This device's part of the gradient of a whole weight of a layer: where a part is kept, summed over the devices
    that share it. before: what is accumulated of it already."""
    if layout.scattered:
        scatter = _reduced(lambda g: _reduce_scatter(g, layout.scattered), layout.automatic, layout)
        with layout.scope:
            gradient = scatter(gradient.astype(reduction.dtype))
    if before is not None:
        gradient = before + gradient.astype(before.dtype)
    if reduction.is_last and layout.is_reduced_once:
        parts = _moved_by(layout.split_late, -1 if layout.is_stacked else 0)
        gradient = _reduced_once(gradient, parts, layout.automatic, layout, reduction.dtype)
    return gradient.astype(reduction.slot_dtype)


def gradient_slot(shard: Array, layout: WeightLayout, reduction: Reduction, num_shards: Callable[[Axes], int]) -> Array:
    """The slot of the gradient of a stored parameter's shard. The compiler drops its values."""
    shape = list(shard.shape)
    for dimension, axes in layout.split_early + (layout.split_late if reduction.is_last else ()):
        shape[dimension] //= num_shards(axes)
    return jnp.zeros(shape, reduction.slot_dtype)


def reduce_gradient(gradient: Array, layout: WeightLayout, reduction: Reduction) -> Array:
    """An accumulated gradient, of all layers, summed over the batch axes that its use did not sum it over, in the
    layout of the update."""
    if not layout.is_reduced_once:
        return gradient
    reduced = _reduced_once(gradient, layout.split_late, layout.automatic_stored, layout, reduction.dtype)
    return reduced.astype(reduction.slot_dtype)


def _reduced_once(gradient: Array, parts: Parts, automatic: PartitionSpec, layout: WeightLayout, dtype: Any) -> Array:
    def reduce(g: Array) -> Array:
        g = _reduce_scatter(g, parts)
        return jax.lax.psum(g, layout.reduced) if layout.reduced else g

    with layout.scope:
        return _reduced(reduce, automatic, layout)(gradient.astype(dtype))


def assemble(updated: Array, layout: WeightLayout) -> Array:
    """An updated parameter, from the layout of the update to the one that it is stored in."""
    parts = layout.split_late + layout.split_early  # the last split is undone first
    with layout.scope:
        return _moved(lambda x: _all_gather(x, parts), layout.automatic_stored)(updated)


def is_assembled(layout: WeightLayout) -> bool:
    """True where a parameter is updated in smaller shards than it is stored in."""
    return bool(layout.split_early or layout.split_late)


def _all_gather(x: Array, parts: Parts) -> Array:
    for dimension, axes in parts:
        x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def _reduce_scatter(x: Array, parts: Parts) -> Array:
    for dimension, axes in reversed(parts):
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    return x


def _moved(collective: Callable[[Array], Array], automatic: PartitionSpec) -> Callable[[Array], Array]:
    """A collective that moves, on each shard of the automatic axes: without this XLA gathers those first."""
    return _within(collective, automatic, axes_in(automatic))


def _reduced(
    collective: Callable[[Array], Array], automatic: PartitionSpec, layout: WeightLayout
) -> Callable[[Array], Array]:
    """A collective that adds, likewise; and with every axis of the mesh manual. XLA's CPU compiler aborts the process
    at a reduction of bfloat16 in a program that is manual over some axes only (jaxlib 0.10.2: `Invalid binary
    instruction opcode copy`)."""
    return _within(collective, automatic, layout.automatic_axes)


def _within(collective: Callable[[Array], Array], spec: PartitionSpec, axes: Axes) -> Callable[[Array], Array]:
    if not axes:
        return collective
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=set(axes), check_vma=False)
