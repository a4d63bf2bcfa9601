"""Runs the sequential schedule: one microbatch after the other, each through all layers forward and then backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.extend
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params

from ..core.scopes import piece_scope
from ..parallel.weights import Weights, hoist
from ..plan import Plan
from .pipeline import PipelineSchedule
from .placement_order import FromState
from .prefetch import prefetch_layers
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
from .slot_branches import SlotBranches


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

        def forward(accumulators: Params) -> tuple[Array, Sums]:
            bound, auxiliary = weights.bound(accumulators, before, is_last=is_last), dict[str, Aux]()
            prepared = model.prepare(microbatch)
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
            return forward(accumulators)[1], None
        _, pull_back, sums = jax.vjp(forward, accumulators, has_aux=True)
        return sums, pull_back(gradient_scale)[0]


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
    return jax.tree.map(jnp.add, sums, own_sums), gradients


def _added_up(one: Callable[[Batch], Any], parts: Batch) -> Any:
    traced, result = jax.make_jaxpr(one, return_shape=True)(
        jax.tree.map(lambda x: x[0], parts)
    )  # traced once for both uses
    run = jax.extend.core.jaxpr_as_fun(traced)
    structure = jax.tree.structure(result)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        own = jax.tree.unflatten(structure, run(*jax.tree.leaves(part)))
        return jax.tree.map(jnp.add, total, own), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, zeros, parts)[0]


def scan_layers(stack: StackFunctions, weights: Weights, shared: Any, x: Any, *, unroll: int) -> tuple[Any, Any]:
    """Runs one layer's program once per layer, and gathers a layer's weights where the layer begins. weights: arrays
    whose first dimension is `layers`. Returns x, and the auxiliary outputs of all layers, stacked."""

    def one(x: Any, accumulators: Any, before: Any, working: Any, index: Array) -> tuple[Any, Any]:
        of_layer = replace(weights, accumulators=accumulators, before=before, working=working)
        return stack.layer(of_layer.gathered(), shared, index, x)

    # prevent_cse guards against the compiler merging both passes; in a loop they cannot be merged.
    saved = jax.checkpoint(one, policy=stack.policy, prevent_cse=False)
    layers = (weights.accumulators, weights.before, weights.working, jnp.arange(stack.num_layers))
    return jax.lax.scan(lambda x, stored: saved(x, *stored), x, layers, unroll=unroll)
