"""The train step: (state, batch) -> (state, metrics). Pure; everything about devices comes from the plan.

The gradient is a function of local batches: manual over the mesh axes that split the batch, so that what crosses the
network for data parallelism is written down (weights.py); automatic over the others, along which activation rules say
how matmuls are split.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import IGNORED_TARGET, Params

from ..core.partition_spec import keep_axes
from ..core.scopes import UPDATE, WORKING_PARAMETERS
from ..parallel.weights import Reduction, Weights, gradient_slot, reduce_gradient
from ..plan import Plan
from ..sharding.state import State, initial_loss_scale, update_layouts
from .forward import Batch, forward
from .update import build_update

TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """Returns the step as a function of global arrays; its metrics: those of the update (update.py), and num_targets.

    A global batch without any target has a loss of 0 and gradients of zero: the sum over no targets.
    """
    gradients = build_loss(plan, with_gradients=True)
    update = build_update(plan)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        dropout_key = jax.random.fold_in(jax.random.key(plan.spec.seed), state["step"])
        (loss, num_targets), grads = gradients(state["params"], batch, dropout_key, scale)
        with jax.named_scope(UPDATE):
            state, metrics = update(state, loss / jnp.maximum(num_targets, 1), grads)
        return state, metrics | {"num_targets": num_targets}

    return train_step


def build_eval_step(plan: Plan) -> Callable[[Params, Batch], Array]:
    """(params, batch) -> float32 [summed cross-entropy in nats, number of targets] of one global batch."""
    return build_loss(plan, with_gradients=False)


def build_init(plan: Plan) -> Callable[[], State]:
    """The state before the first step. Compile with output shardings: every device makes its own shards."""

    precision = plan.spec.precision

    def init() -> State:
        drawn = _cast(plan.model.init(jax.random.key(plan.spec.seed)), "float32")
        params = _cast(drawn, precision.parameters)
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "optimizer": plan.optimizer.init(drawn)}
        state |= {"master": drawn} if precision.master is not None else {}
        return state | ({"loss_scale": initial_loss_scale(plan.spec)} if precision.loss_scale is not None else {})

    return init


def build_loss(plan: Plan, *, with_gradients: bool) -> Callable[..., Any]:
    """(params, batch, dropout_key, scale) -> sums over the targets of a global batch, [cross-entropy, number of them];
    with `with_gradients` also the gradient of scale times the mean objective, in the layout of the update.

    dropout_key: None for no dropout. Gradients are accumulated in `precision.gradients` over the microbatches, which
    run one after the other.
    """
    batch_axes = plan.sharding.batch_axes
    local = _build_local_loss(plan, with_gradients=with_gradients)
    split = local
    if batch_axes:
        params_specs, update_specs = (
            jax.tree.map(lambda p: keep_axes(p, batch_axes), specs, is_leaf=_is_spec)
            for specs in (plan.specs["params"], update_layouts(plan.model, plan.sharding))
        )
        split = jax.shard_map(
            local,
            in_specs=(params_specs, PartitionSpec(batch_axes), PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(), update_specs) if with_gradients else PartitionSpec(),
            axis_names=set(plan.mesh.sizes) - set(plan.auto_axes),
            check_vma=False,  # the reductions are all written out, and tested against one device
        )

    def over_the_mesh(params: Params, batch: Batch, dropout_key: Array | None = None, scale: Any = 1.0) -> Any:
        rows = {"row": jnp.arange(plan.spec.global_batch_size)}  # a sequence's number, whichever device has it
        return split(params, batch | rows, dropout_key, jnp.asarray(scale, jnp.float32))

    return over_the_mesh


def _build_local_loss(plan: Plan, *, with_gradients: bool) -> Callable[..., Any]:
    """The same of this device's part of the batch, with its shards of the parameters."""
    spec, batch_axes = plan.spec, plan.sharding.batch_axes
    layouts = plan.weights
    is_left = any(layout.is_reduced_once for layout in jax.tree.leaves(layouts))
    in_backward = with_gradients and is_left and spec.overlap.layers.reduce_in_backward
    crossing_dtype = jnp.dtype(spec.precision.gradient_reduction)
    reductions = [Reduction(crossing_dtype, spec.precision.gradients, is_last=is_last) for is_last in (False, True)]
    over_batch = partial(jax.lax.psum, axis_name=batch_axes) if batch_axes else lambda x: x

    def local(params: Params, batch: Batch, dropout_key: Array | None, scale: Array) -> Any:
        with jax.named_scope(WORKING_PARAMETERS):
            working = _cast(params, spec.precision.compute)
        num_targets = over_batch(jnp.sum(batch["targets"] != IGNORED_TARGET))

        def one(part: Batch, before: Params | None = None, *, is_last: bool = False) -> tuple[Array, Params | None]:
            """Loss and gradients of a microbatch. before: gradients to add. is_last: they are reduced at once."""
            reduction = reductions[is_last]

            def objective(slots: Params) -> tuple[Array, Array]:
                """This device's part of the mean objective over all targets of the global batch, and of the summed
                loss."""
                weights = Weights(slots, before, working, layouts, reduction)
                objective, loss = forward(plan, weights, part, dropout_key)
                return objective / jnp.maximum(num_targets, 1), loss

            slots = jax.tree.map(lambda x, p: gradient_slot(x, p, reduction, plan.mesh.num_shards), params, layouts)
            if not with_gradients:
                return objective(slots)[1], None
            _, pull_back, loss = jax.vjp(objective, slots, has_aux=True)
            return loss, pull_back(scale)[0]

        run = _reduce_in_last if in_backward else _sum_over
        loss, grads = run(one, batch, spec.num_microbatches)
        sums = jnp.stack([over_batch(loss), num_targets.astype(jnp.float32)])
        if not with_gradients:
            return sums
        if not in_backward:
            grads = jax.tree.map(lambda layout, g: reduce_gradient(g, layout, reductions[False]), layouts, grads)
        return sums, grads

    return local


def _sum_over(one: Callable[[Batch], Any], batch: Batch, num_microbatches: int) -> Any:
    """`one` on each microbatch of this device, in turn; results are added."""
    if num_microbatches == 1:
        return one(batch)
    return _added_up(one, _microbatches(batch, num_microbatches))


def _reduce_in_last(one: Callable[..., Any], batch: Batch, num_microbatches: int) -> Any:
    """The same; the last microbatch runs behind the loop over the others, takes the gradients that these have
    accumulated, and reduces the sum as it adds its own."""
    if num_microbatches == 1:
        return one(batch, is_last=True)
    parts = _microbatches(batch, num_microbatches)
    loss, grads = _added_up(one, jax.tree.map(lambda x: x[:-1], parts))
    own_loss, grads = one(jax.tree.map(lambda x: x[-1], parts), grads, is_last=True)
    return loss + own_loss, grads


def _microbatches(batch: Batch, num_microbatches: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)


def _added_up(one: Callable[[Batch], Any], parts: Batch) -> Any:
    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(part)), None

    result = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, zeros, parts)[0]


def _cast(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
