"""Runs the sequential schedule: one microbatch after the other, each through all layers forward and then backward.

The loop over layers gathers a layer's weights where the layer begins (`scan_layers`), or the weights of a later layer
while a layer computes, forward and backward (`prefetch_layers`). The latter may also reduce a layer's gradient beside
the backward pass of the layer below: nothing waits for what an iteration starts until the iteration is over.

    forward    trip t:  gather W[t + d]             x = layer(W[t], x)
    backward   trip t:  gather W[t - d]             dx, dW[t] = derivative of layer(W[t], x[t])
                        reduce dW[t + 1]

A reduction is the reduce-scatter of fully sharded weights. In the last pass of a step (`Reduction.is_last`) it also
adds up over replicas, or over all devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.extend
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.scopes import piece_scope
from ..jax_private import residuals_of
from ..parallel.delayed import Magnitudes
from ..parallel.weight_plan import WeightPlan
from ..parallel.weights import Reduction, Weights, all_gather_weight, hoist, reduce_weight_gradient
from ..plan import Plan
from ..spec.overlap_spec import LayerLoop
from .pipeline import PipelineSchedule
from .pipeline_state import SlotBranches, read_slot, write_slot
from .placement_order import FromState
from .schedule import (
    Batch,
    LayerSchedule,
    ModelFunctions,
    ModelWeights,
    StackFunctions,
    Sums,
    objective,
    split_microbatches,
)


class StackLoop(Protocol):
    """Runs all layers of a stack on x, one after the other. Returns x, and the layers' auxiliary outputs, stacked.
    shared: the values that layers read besides their weights."""

    def __call__(self, stack: StackFunctions, weights: Weights, shared: Any, x: Any, /) -> tuple[Any, Aux]: ...


def choose_schedule(plan: Plan) -> LayerSchedule:
    """Returns the schedule that the plan declares: a pipeline, or the loop over layers that it declares."""
    if plan.pipeline is not None:
        table, layers = plan.pipeline.table, plan.pipeline.layers
        branches = SlotBranches(by_loops=plan.target.compiler.copies_conditionals)
        return FromState(PipelineSchedule(table, layers, branches), layers)
    loop = plan.spec.overlap.layers
    scan = partial(scan_layers, unroll=loop.unroll)
    is_synchronous = plan.target.compiler.synchronous_collectives
    prefetch = partial(prefetch_layers, loop=loop, skip_boundary_collectives=is_synchronous)
    return SequentialSchedule(
        prefetch if loop.prefetch else scan,
        num_microbatches=plan.spec.num_microbatches,
        reduce_in_backward=loop.reduce_in_backward,
    )


@dataclass(frozen=True)
class SequentialSchedule:
    """A `LayerSchedule` that finishes a microbatch before it begins the next.

    run_stack: the loop over layers, `scan_layers` or `prefetch_layers`. reduce_in_backward: whether reductions that run
    once per step are part of the backward pass of the last microbatch instead of following it.
    """

    run_stack: StackLoop
    num_microbatches: int
    reduce_in_backward: bool

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        in_backward = gradient_scale is not None and self.reduce_in_backward and weights.is_reduced_once
        one = partial(self._run_microbatch, model, weights, gradient_scale)
        run = _reduce_in_last if in_backward else _sum_over
        sums, gradients = run(one, batch, self.num_microbatches)
        if gradients is not None and not in_backward:
            gradients = weights.reduce(gradients)
        return sums, gradients

    def _run_microbatch(
        self,
        model: ModelFunctions,
        weights: ModelWeights,
        gradient_scale: Array | None,
        microbatch: Batch,
        before: Params | None = None,
        *,
        is_last: bool = False,
    ) -> tuple[Sums, Params | None]:
        """Returns sums and gradients of a microbatch. before: gradients to add. is_last: whether gradients are reduced
        at once."""

        def forward(accumulators: Params, scales: Magnitudes) -> tuple[Array, Sums]:
            bound, auxiliary = weights.bound(accumulators, before, is_last=is_last), dict[str, Aux]()
            prepared = model.prepare(microbatch, scales)
            x, tied = model.embed(bound.piece("embed"), prepared)
            for stack in model.stacks:
                with jax.named_scope(piece_scope(stack.name)):
                    stacked = hoist(bound.piece(stack.name))
                    x, auxiliary[stack.name] = self.run_stack(stack, stacked, prepared.layers, x)
            output = model.head(bound.piece("head"), tied, x, prepared)
            auxiliary["head"] = output.aux
            return objective(output, auxiliary), Sums(output.loss, auxiliary)

        accumulators = weights.gradient_accumulators(is_last=is_last)
        if gradient_scale is None:
            return forward(accumulators, weights.scales)[1], None
        _, pull_back, sums = jax.vjp(forward, accumulators, weights.scales, has_aux=True)
        gradients, magnitudes = pull_back(gradient_scale)
        return replace(sums, magnitudes=magnitudes), gradients


def _sum_over(one: Callable[[Batch], Any], batch: Batch, num_microbatches: int) -> Any:
    """Returns the sum of `one` over the microbatches of this device, run one after the other."""
    if num_microbatches == 1:
        return one(batch)
    return _added_up(one, split_microbatches(batch, num_microbatches))


def _reduce_in_last(one: Callable[..., Any], batch: Batch, num_microbatches: int) -> Any:
    """Returns the same sum. The last microbatch runs after the loop over the others, takes the gradients that they have
    accumulated, and reduces the sum as it adds its own."""
    if num_microbatches == 1:
        return one(batch, is_last=True)
    parts = split_microbatches(batch, num_microbatches)
    sums, gradients = _added_up(one, jax.tree.map(lambda x: x[:-1], parts))
    own_sums, gradients = one(jax.tree.map(lambda x: x[-1], parts), gradients, is_last=True)
    return sums.plus(own_sums), gradients


def _added_up(one: Callable[[Batch], Any], parts: Batch) -> Any:
    traced, result = jax.make_jaxpr(one, return_shape=True)(
        jax.tree.map(lambda x: x[0], parts)
    )  # traced once for both uses
    run = jax.extend.core.jaxpr_as_fun(traced)
    structure = jax.tree.structure(result)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        (sums, gradients), (own_sums, own) = total, jax.tree.unflatten(structure, run(*jax.tree.leaves(part)))
        return (sums.plus(own_sums), jax.tree.map(jnp.add, gradients, own)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, zeros, parts)[0]


def scan_layers(stack: StackFunctions, weights: Weights, shared: Any, x: Any, *, unroll: int) -> tuple[Any, Any]:
    """Runs one layer's program once per layer, and gathers a layer's weights where the layer begins. weights: arrays
    whose first dimension is `layers`. Returns x, and the auxiliary outputs of all layers, stacked."""

    def one(x: Any, accumulators: Any, before: Any, working: Any, index: Array) -> tuple[Any, Any]:
        of_layer = replace(weights, accumulators=accumulators, before=before, working=working)
        return stack.layer(of_layer.gathered(), shared, index, x)

    saved = jax.checkpoint(one, policy=stack.policy, prevent_cse=may_merge(stack.num_layers, unroll))
    layers = (weights.accumulators, weights.before, weights.working, jnp.arange(stack.num_layers))
    return jax.lax.scan(lambda x, stored: saved(x, *stored), x, layers, unroll=unroll)


def may_merge(num_layers: int, unroll: int) -> bool:
    """Returns True if a compiler may merge the forward pass of a layer with its recomputation, so that nothing is
    computed again. It cannot where both are in loops of their own; it unrolls a loop of one trip, and layers that fill
    no trip are in no loop."""
    return num_layers // unroll == 1 or num_layers % unroll > 0


def prefetch_layers(
    stack: StackFunctions, weights: Weights, shared: Any, x: Any, *, loop: LayerLoop, skip_boundary_collectives: bool
) -> tuple[Any, Any]:
    """Runs the layers with the weights of `loop.prefetch` layers gathered ahead; as many more are held whole.

    An iteration is one program, so some of its work is redundant: the last iterations of the forward pass gather the
    last layers again, with which the backward pass begins; the last iterations of the backward pass gather the first
    layer once more; and its first iteration reduces zeros if gradients are deferred. With `skip_boundary_collectives`
    the latter two are in a branch.

    Returns x, and the auxiliary outputs of all layers, stacked.
    """
    layouts, tree = jax.tree.flatten(weights.layouts)
    layer = layer_pass(stack, weights, shared, loop.unroll)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights.accumulators)
    passes = _Passes(layer, stack.num_layers, shapes, tree, layouts, weights.reduction, loop, skip_boundary_collectives)

    @jax.custom_vjp
    def run(accumulators: Any, before: Any, working: Any, shared: Any, x: Any) -> tuple[Any, Any]:
        return passes.forward(accumulators, before, working, shared, x)[0]

    run.defvjp(passes.forward, passes.backward)
    return run(weights.accumulators, weights.before, weights.working, shared, x)


@dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of a loop that prefetches. gradients: a tree of their shapes and types, None
    for frozen parameters. tree: the structure of all weights."""

    layer: "LayerPass"
    num_layers: int
    gradients: Any
    tree: Any
    layouts: list[WeightPlan]
    reduction: Reduction
    loop: LayerLoop
    skip_boundary_collectives: bool

    @property
    def distance(self) -> int:
        return min(self.loop.prefetch, self.num_layers)

    def forward(self, _: Any, before: Any, working: Any, shared: Any, x: Any) -> tuple[tuple[Any, Any], Any]:
        """Returns ((x, auxiliary outputs), what the backward pass needs)."""
        stack, num_layers = self._stack(before, working), self.num_layers

        def trip(carry: tuple[Any, list[Any]], t: Array) -> tuple[tuple[Any, list[Any]], Any]:
            x, (arrived, *on_the_way) = carry
            beyond = t + self.distance  # past the last layer come the layers that the backward pass begins with
            next_one = stack.fetched_ahead(jnp.where(beyond < num_layers, beyond, 2 * num_layers - 1 - beyond))
            (x, aux), pull_back = self.layer.forward(stack.whole(t, arrived), jax.tree.leaves(shared), t, x)
            return (x, [*on_the_way, next_one]), (aux, pull_back)

        first = [stack.fetched_ahead(jnp.array(index)) for index in range(self.distance)]
        (x, last), (aux, pull_backs) = jax.lax.scan(trip, (x, first), jnp.arange(num_layers), unroll=self.loop.unroll)
        return (x, aux), (before, working, shared, last, pull_backs)

    def backward(self, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, None, None, None, Any]:
        dx, daux = cotangents
        before, working, shared, last, pull_backs = saved
        stack = self._stack(before, working)
        accumulators = self.tree.flatten_up_to(self.gradients)
        whole = jax.eval_shape(lambda: stack.whole(jnp.array(0), last[0]))  # gradients are as large as the weights
        zeros, deferred = (
            [jnp.zeros(x.shape, x.dtype) for x in _selected(each, stack.late)] for each in (whole, accumulators)
        )
        trip = partial(self._backward_trip, stack, jax.tree.leaves(shared))
        trips = (jnp.arange(self.num_layers), daux, pull_backs)
        (dx, _, lowest, deferred), now = jax.lax.scan(
            trip, (dx, last, zeros, deferred), trips, reverse=True, unroll=self.loop.unroll
        )
        deferred = write_slot(deferred, stack.sent_back(lowest, jnp.array(0), stack.late), jnp.array(0))
        gradients = _merged((deferred, stack.late), (now, stack.now))
        return jax.tree.unflatten(self.tree, gradients), None, None, None, dx

    def _backward_trip(self, stack: "_Stack", shared: list[Array], carry: Any, trip: Any) -> tuple[Any, list[Array]]:
        """Runs one iteration of the backward pass. carry: the gradient of the layer's result; weights that have arrived
        and that are on the way; gradients of the layer above, which are reduced late; and the gradients that have been.
        Returns the gradients that this layer's own iteration reduces."""
        (dx, (arrived, *on_the_way), above, deferred), (t, daux, pull_back) = carry, trip
        layer_ahead = jnp.maximum(t - self.distance, 0)
        next_one = self._moved(t >= self.distance, lambda: stack.fetched_ahead(layer_ahead), otherwise=lambda: arrived)
        dw, dx = self.layer.backward(stack.whole(t, arrived), shared, t, pull_back, (dx, daux))
        below, now = _selected(dw, stack.late), _selected(dw, stack.now)
        layer_above = jnp.minimum(t + 1, self.num_layers - 1)  # the second trip writes over the first one's
        sent = self._moved(
            t < self.num_layers - 1,
            lambda: stack.sent_back(above, layer_above, stack.late),
            otherwise=lambda: read_slot(deferred, layer_above),
        )
        deferred = write_slot(deferred, sent, layer_above)
        return (dx, [*on_the_way, next_one], below, deferred), stack.sent_back(now, t, stack.now)

    def _moved(
        self, is_needed: Array, move: Callable[[], list[Array]], *, otherwise: Callable[[], list[Array]]
    ) -> list[Array]:
        return jax.lax.cond(is_needed, move, otherwise) if self.skip_boundary_collectives else move()

    def _stack(self, before: Any, working: Any) -> "_Stack":
        ahead = [bool(layout.gathered) for layout in self.layouts]
        late = [
            self.loop.deferred_reduce_scatter and layout.has_collective_in_backward(is_last=self.reduction.is_last)
            for layout in self.layouts
        ]
        now = [layout.is_trained and not is_late for layout, is_late in zip(self.layouts, late, strict=True)]
        totals = [None] * len(self.layouts) if before is None else self.tree.flatten_up_to(before)
        return _Stack(self.tree.flatten_up_to(working), totals, self.layouts, self.reduction, ahead, late, now)


@dataclass(frozen=True)
class _Stack:
    """The weights of a stack as lists. before: gradients of earlier passes. ahead: whether a weight is gathered ahead.
    late: whether its gradient is reduced one iteration late. now: whether its gradient is reduced in the layer's own
    iteration. Both are False for frozen weights."""

    working: list[Any]
    before: Sequence[Array | None]
    layouts: list[WeightPlan]
    reduction: Reduction
    ahead: list[bool]
    late: list[bool]
    now: list[bool]

    def fetched_ahead(self, index: Array) -> list[Array]:
        """Returns the whole weights of a layer that are gathered ahead."""
        return self._fetched(index, self.ahead)

    def whole(self, index: Array, arrived: list[Array]) -> list[Array]:
        """Returns all weights of a layer, whole. arrived: the ones that were gathered ahead."""
        others = [not is_ahead for is_ahead in self.ahead]
        return _merged((arrived, self.ahead), (self._fetched(index, others), others))

    def sent_back(self, gradients: list[Array], index: Array, which: Sequence[bool]) -> list[Array]:
        """Returns gradients of a layer, added to those before, for the weights that `which` selects."""
        chosen = _selected(list(zip(self.before, self.layouts, strict=True)), which)
        return [
            reduce_weight_gradient(gradient, None if total is None else read_slot(total, index), layout, self.reduction)
            for gradient, (total, layout) in zip(gradients, chosen, strict=True)
        ]

    def _fetched(self, index: Array, which: Sequence[bool]) -> list[Array]:
        chosen = _selected(list(zip(self.working, self.layouts, strict=True)), which)
        return [all_gather_weight(read_slot(w, index), layout) for w, layout in chosen]


def _selected(leaves: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, is_one in zip(leaves, which, strict=True) if is_one]


def _merged(*groups: tuple[Sequence[Any], Sequence[bool]]) -> list[Any]:
    """Undoes `_selected` for several selections; a leaf that none selects is None."""
    merged: list[Any] = [None] * len(groups[0][1])
    for leaves, which in groups:
        places = [place for place, is_one in enumerate(which) if is_one]
        for place, leaf in zip(places, leaves, strict=True):
            merged[place] = leaf
    return merged


@dataclass(frozen=True)
class LayerPass:
    """A layer as its forward and its backward pass, which a loop calls where it wants.

    `jax.vjp` returns what the backward pass needs as a pytree. Its residuals that are arguments (weights, what all
    layers share, the number of the layer) are left out, and restored from the arguments of the backward pass: so
    gathered weights are never saved. layer: a function of (whole weights, shared values, number of the layer, x), the
    first two as lists.
    """

    layer: Callable[[list[Array], list[Array], Array, Any], tuple[Any, Any]]

    def forward(self, whole: list[Array], shared: list[Array], index: Array, x: Any) -> tuple[tuple[Any, Any], Any]:
        """Returns (x, auxiliary outputs), and a pytree whose leaves are what the backward pass needs."""
        pull_back: Any
        made, pull_back = jax.vjp(self.layer, whole, shared, index, x)
        residuals = residuals_of(pull_back)
        residuals[:3] = map(_left_out, residuals[:3])
        return made, pull_back

    def backward(
        self, whole: list[Array], shared: list[Array], index: Array, pull_back: Any, cotangents: tuple[Any, Any]
    ) -> tuple[list[Array], Any]:
        """Returns the gradients of the weights, and of x. pull_back: what `forward` returned. cotangents: of x and of
        the auxiliary outputs."""
        residuals = residuals_of(pull_back)
        residuals[:3] = map(_put_back, residuals[:3], (whole, shared, index))
        dw, _, _, dx = pull_back(cotangents)
        return dw, dx


def layer_pass(stack: StackFunctions, weights: Weights, shared: Any, unroll: int) -> LayerPass:
    """Returns the passes of a stack's layers. Under `jax.checkpoint` they save what the stack's policy selects.
    unroll: layers in a trip of the loop."""
    layouts, tree = jax.tree.flatten(weights.layouts)
    tree_of_shared = jax.tree.structure(shared)

    def flat(whole: list[Array], shared: list[Array], index: Array, x: Any) -> tuple[Any, Any]:
        """Runs a layer with lists instead of trees: then the residuals of its derivative are tuples, in the same
        order."""
        trained = [w if one.is_trained else jax.lax.stop_gradient(w) for w, one in zip(whole, layouts, strict=True)]
        params, common = jax.tree.unflatten(tree, trained), jax.tree.unflatten(tree_of_shared, shared)
        return stack.layer(params, common, index, x)

    prevent_cse = may_merge(stack.num_layers, unroll)
    return LayerPass(jax.checkpoint(flat, policy=stack.policy, prevent_cse=prevent_cse))


def _left_out(residuals: Any) -> Any:
    """Returns residuals with None for those that are arguments; residuals that the derivative does not need stay as
    they are."""
    return jax.tree.map(lambda _: None, residuals)


def _put_back(residuals: Any, values: Any) -> Any:
    """Undoes `_left_out`. values: an argument, an array or a list of them; the residuals of a list are a tuple."""
    if isinstance(values, list):
        return tuple(_put_back(r, value) for r, value in zip(residuals, values, strict=True))
    return values if residuals is None else residuals
