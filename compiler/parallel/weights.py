"""From a parameter's shard to the weights that a layer multiplies with, from their gradient to the shard that is
updated, and from there back to the one that is stored.

The step is manual over the mesh axes that split the batch (`shard_map`) and auto over the others. So what crosses
the network for a weight is written here, and is not left to the partitioner: for a dimension sharded over a batch axis
an all-gather in the compute type, and for its gradient a *reduce-scatter*. (Left to itself, XLA emits an all-reduce
of the whole gradient for large groups on TPU, and always on CPU: twice the bytes.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ..core.partition_spec import Axes, axes_in, without
from ..jaxpr.program import LANES
from .encodings import decoded_weight
from .weight_plan import ShardedDims, WeightPlan


def _moved_by(parts: ShardedDims, num_dimensions: int) -> ShardedDims:
    return tuple((dimension + num_dimensions, axes) for dimension, axes in parts)


@dataclass(frozen=True)
class Reduction:
    """The options of the reductions in a backward pass.

    dtype: the type in which they are reduced over devices. accumulator_dtype: the type in which they are accumulated.
    is_last: once per step, they are reduced all the way to the layout of the update; else to the one that they are
    accumulated in.
    """

    dtype: Any
    accumulator_dtype: Any
    is_last: bool


@dataclass(frozen=True)
class Weights:
    """The weights of a model, a piece of it or a layer, and where their gradients go: trees alike.

    accumulators: arrays of the shape and type of each gradient, which flows to them; their values are not read. None
    for what is frozen, in `before` too. before: what earlier microbatches have accumulated, which is added; None:
    nothing. working: this device's shards as they are gathered, encoded once per step. layouts: of WeightPlan.
    """

    accumulators: Any
    before: Any
    working: Any
    layouts: Any
    reduction: Reduction

    def piece(self, name: str) -> "Weights":
        before = None if self.before is None else self.before[name]
        return Weights(self.accumulators[name], before, self.working[name], self.layouts[name], self.reduction)

    def gathered(self) -> Any:
        """Returns the whole weights in the compute type, in a tree; a GatheredWeight for those whose sites multiply
        what is gathered."""
        before = jax.tree.map(lambda _: None, self.layouts) if self.before is None else self.before
        return jax.tree.map(partial(_gather, self.reduction), self.layouts, self.accumulators, before, self.working)

    def gathered_in_parts(self, cut: Any, sizes: Sequence[int], after: Array) -> list[Any]:
        """Returns the whole weights in parts, a tree each; the gather of a part begins when the part before it is
        there.

        cut: a tree like them, of each the dimension that is cut into `sizes`; None: all of it is in each part. after:
        an array that the first part's gather waits for: XLA would begin it in front of a loop that makes that array,
        and end it there, as nothing asynchronous crosses a loop.
        """
        layouts, structure = jax.tree.flatten(self.layouts)
        befores = [None] * len(layouts) if self.before is None else structure.flatten_up_to(self.before)
        trees = (self.accumulators, self.working, cut)
        accumulators, workings, places = (structure.flatten_up_to(tree) for tree in trees)
        each = [Weights(*one, self.reduction) for one in zip(accumulators, befores, workings, layouts, strict=True)]
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
        """Returns the entries of one weight from `first` on along a dimension; its gather begins when `earlier` is
        there."""

        def cut(x: Array) -> Array:
            return jax.lax.slice_in_dim(x, first, first + size, axis=dimension)

        accumulators, before = (None if x is None else cut(x) for x in (self.accumulators, self.before))
        return replace(self, accumulators=accumulators, before=before, working=_begun_after(earlier, cut(self.working)))


def _whole(layout: WeightPlan) -> WeightPlan:
    """Returns the plan of a weight that was gathered already: encoded until a layer uses it, or decoded."""
    encoding = layout.encoding
    return replace(layout, gathered=(), encoding=encoding if encoding.is_held else encoding.decoded)


def _gather(
    reduction: Reduction, layout: WeightPlan, accumulator: Array | None, before: Array | None, working: Any
) -> Any:
    def taken(working: Any) -> Any:
        return layout.encoding.taken(_whole_parts(working, layout))

    if accumulator is None:
        return taken(working)

    @jax.custom_vjp
    def use(_: Array, _before: Array | None, working: Any) -> Any:
        return taken(working)

    def forward(_: Array, before: Array | None, working: Any) -> tuple[Any, Array | None]:
        return taken(working), before

    def backward(before: Array | None, gradient: Any) -> tuple[Array, None, None]:
        return reduce_weight_gradient(decoded_weight(gradient), before, layout, reduction), None, None

    use.defvjp(forward, backward)
    return use(accumulator, before, working)


def _begun_after(earlier: Array, x: Array) -> Array:
    """Returns `x`, for which a compiler needs `earlier`. It removes barriers, so NaN is made of `x` where NaN came
    before."""
    first = jax.lax.stop_gradient(earlier)[(0,) * earlier.ndim]
    return jnp.where(jnp.isnan(first), jnp.full_like(x, jnp.nan), x)


def hoist(weights: Weights) -> Weights:
    """Returns a stack's weights with those that the plan hoists gathered for all layers at once, and their gradients
    reduced at once; those that it holds are gathered alike, and their gradients reduced where they are made."""
    before = jax.tree.map(lambda _: None, weights.layouts) if weights.before is None else weights.before
    each = partial(_hoisted, weights.reduction)
    made = jax.tree.map(each, weights.layouts, weights.accumulators, before, weights.working)
    accumulators, before, working, layouts = (
        jax.tree.map(lambda one, place=place: one[place], made, is_leaf=lambda one: isinstance(one, tuple))
        for place in range(4)
    )
    return Weights(accumulators, None if weights.before is None else before, working, layouts, weights.reduction)


def _hoisted(
    reduction: Reduction, layout: WeightPlan, accumulator: Array | None, before: Array | None, working: Any
) -> tuple[Array | None, Array | None, Any, WeightPlan]:
    """Returns (accumulator, before, working, layout) of one weight of a stack, as they are or whole."""
    if layout.use not in ("hoisted", "held"):
        return accumulator, before, working, layout
    at_once = replace(
        layout,
        gathered=_moved_by(layout.gathered, 1),
        scattered=_moved_by(layout.scattered, 1),
        auto_spec=layout.auto_stored_spec,
        is_stacked=False,
    )
    parts = _gathered_parts(working, at_once)
    whole = parts if layout.encoding.is_held else layout.encoding.decode(parts)
    if layout.use == "held":
        return accumulator, before, whole, _whole(layout)
    of_layer = replace(_whole(layout), use="sharded", scattered=(), split_early=(), split_late=(), reduced=())
    if accumulator is None:
        return None, None, whole, of_layer
    shape = jax.eval_shape(layout.encoding.decode, parts).shape

    @jax.custom_vjp
    def of_layers(_: Array, _before: Array | None) -> Array:
        return jnp.zeros(shape, reduction.accumulator_dtype)

    def forward(accumulator: Array, before: Array | None) -> tuple[Array, Array | None]:
        return of_layers(accumulator, before), before

    def backward(before: Array | None, gradient: Array) -> tuple[Array, None]:
        return reduce_weight_gradient(gradient, before, at_once, reduction), None

    of_layers.defvjp(forward, backward)
    nothing = None if before is None else jnp.zeros(shape, before.dtype)
    return of_layers(accumulator, before), nothing, whole, of_layer


def all_gather_weight(working: Any, layout: WeightPlan) -> Array:
    """Returns the whole weight, as a model takes it, from this device's shard of what is gathered: an array, or a tree
    of those of an encoded one."""
    return layout.encoding.decode(_whole_parts(working, layout))


def _whole_parts(working: Any, layout: WeightPlan) -> Any:
    """Returns the arrays of a weight, whole, gathered where they are shards."""
    return _gathered_parts(working, layout) if layout.gathered else working


def _gathered_parts(working: Any, layout: WeightPlan) -> Any:
    """Returns the arrays of a weight, whole, as they travel."""
    with layout.scope:
        return jax.tree.map(partial(_gathered_part, layout), layout.encoding.constant(), working)


def _gathered_part(layout: WeightPlan, constant: frozenset[int], part: Array) -> Array:
    """Returns one array of a weight, gathered. constant: dimensions along which it has one entry for all shards."""
    own = tuple(each for each in layout.gathered if each[0] - part.ndim not in constant)
    gather = on_shards(lambda w: gather_dims(w, own, layout.tile_rows), without(layout.auto_spec, constant))
    return gather(part)


def reduce_weight_gradient(gradient: Array, before: Array | None, layout: WeightPlan, reduction: Reduction) -> Array:
    """Returns this device's part of the gradient of a whole weight of a layer: where a part is kept, summed over the
    devices that share it. before: what is accumulated of it already."""
    if layout.scattered:
        scatter = _reduced(lambda g: scatter_dims(g, layout.scattered, layout.tile_rows), layout.auto_spec, layout)
        with layout.scope:
            gradient = scatter(gradient.astype(reduction.dtype))
    if before is not None:
        gradient = before + gradient.astype(before.dtype)
    if reduction.is_last and layout.is_reduced_once:
        parts = _moved_by(layout.split_late, -1 if layout.is_stacked else 0)
        gradient = _reduced_once(gradient, parts, layout.auto_spec, layout, reduction.dtype)
    return gradient.astype(reduction.accumulator_dtype)


def gradient_accumulator(
    shard: Array, layout: WeightPlan, reduction: Reduction, num_shards: Callable[[Axes], int]
) -> Array | None:
    """Returns the accumulator of the gradient of a parameter's shard; None for a frozen one. The compiler drops its
    values."""
    if not layout.is_trained:
        return None
    shape = list(shard.shape)
    for dimension, axes in layout.split_early + (layout.split_late if reduction.is_last else ()):
        shape[dimension] //= num_shards(axes)
    return jnp.zeros(shape, reduction.accumulator_dtype)


def reduce_gradient(gradient: Array, layout: WeightPlan, reduction: Reduction) -> Array:
    """Returns an accumulated gradient, of all layers, summed over the axes of tokens that its use did not sum it over,
    in the layout of the update."""
    if not layout.is_reduced_once:
        return gradient
    reduced = _reduced_once(gradient, layout.split_late, layout.auto_stored_spec, layout, reduction.dtype)
    return reduced.astype(reduction.accumulator_dtype)


def _reduced_once(
    gradient: Array, parts: ShardedDims, auto_spec: PartitionSpec, layout: WeightPlan, dtype: Any
) -> Array:
    def reduce(g: Array) -> Array:
        g = scatter_dims(g, parts, layout.tile_rows)
        return jax.lax.psum(g, layout.reduced) if layout.reduced else g

    with layout.scope:
        return _reduced(reduce, auto_spec, layout)(gradient.astype(dtype))


def assemble(updated: Array, layout: WeightPlan) -> Array:
    """Returns an updated parameter, from the layout of the update to the one that it is stored in."""
    parts = layout.split_late + layout.split_early  # the last split is undone first
    with layout.scope:
        return on_shards(lambda x: gather_dims(x, parts, layout.tile_rows), layout.auto_stored_spec)(updated)


def is_assembled(layout: WeightPlan) -> bool:
    """Returns True where a parameter is updated in smaller shards than it is stored in."""
    return bool(layout.split_early or layout.split_late)


def gather_dims(x: Array, parts: ShardedDims, tile_rows: int = 1) -> Array:
    """Returns shards with dimensions all-gathered. tile_rows: the rows of the compiler's tiles (CompilerTraits)."""
    for dimension, axes in parts:
        x = _unpadded(partial(_all_gather, axes), x, dimension, x.shape[dimension], tile_rows)
    return x


def scatter_dims(x: Array, parts: ShardedDims, tile_rows: int = 1) -> Array:
    """Returns an array with dimensions reduce-scattered: the transpose of `gather_dims`."""
    for dimension, axes in reversed(parts):
        size = x.shape[dimension] // jax.lax.axis_size(axes)
        x = _unpadded(partial(_reduce_scatter, axes), x, dimension, size, tile_rows)
    return x


def _all_gather(axes: Axes, x: Array, dimension: int) -> Array:
    return jax.lax.all_gather(x, axes, axis=dimension, tiled=True)


def _reduce_scatter(axes: Axes, x: Array, dimension: int) -> Array:
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)


def _unpadded(collective: Callable[[Array, int], Array], x: Array, dimension: int, size: int, tile_rows: int) -> Array:
    """Returns what a collective along a dimension gives, of shards of that size. Rows of a matrix (or its columns)
    whose shards are not whole tiles of the compiler are moved as arrays of (columns / 128, 128), which are: padded,
    they are copied before and after, and a reduce-scatter is a synchronous all-reduce (docs/sharding.md)."""
    if x.ndim != 2 or size % tile_rows == 0 or x.shape[1 - dimension] % LANES:
        return collective(x, dimension)
    rows = jnp.moveaxis(x, dimension, 0)
    moved = collective(rows.reshape(len(rows), -1, LANES), 0)
    return jnp.moveaxis(moved.reshape(len(moved), -1), 0, dimension)


def on_shards(collective: Callable[[Array], Array], auto_spec: PartitionSpec) -> Callable[[Array], Array]:
    """Runs a collective that moves, on each shard of the auto axes: without this XLA gathers those first."""
    return _within(collective, auto_spec, axes_in(auto_spec))


def _reduced(
    collective: Callable[[Array], Array], auto_spec: PartitionSpec, layout: WeightPlan
) -> Callable[[Array], Array]:
    """Runs a collective that adds, likewise; and with every axis of the mesh manual. XLA's CPU compiler aborts the
    process at a reduction of bfloat16 in a program that is manual over some axes only (jaxlib 0.10.2: `Invalid binary
    instruction opcode copy`)."""
    return _within(collective, auto_spec, layout.partitioner)


def _within(collective: Callable[[Array], Array], spec: PartitionSpec, axes: Axes) -> Callable[[Array], Array]:
    if not axes:
        return collective
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=set(axes), check_vma=False)
