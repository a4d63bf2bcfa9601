"""The train step: (state, batch) -> (state, metrics). Pure; everything about devices comes from the plan.

The gradient is a function of local batches: manual over the mesh axes that split the batch, so that what crosses the
network for data parallelism is written down (gather.py); automatic over the others, along which activation rules say
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

from .forward import Batch, automatic_axes, forward, weight_layouts
from .gather import gradient_slot, keep_axes, reduce_gradient
from .plan import Plan
from .state import State, initial_loss_scale, update_layouts
from .update import build_update

TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """The step as a function of global arrays; metrics: those of the update (update.py)."""
    gradients = build_loss(plan, with_gradients=True)
    update = build_update(plan, weight_layouts(plan))

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        dropout_key = jax.random.fold_in(jax.random.key(plan.spec.seed), state["step"])
        (loss, num_targets), grads = gradients(state["params"], batch, dropout_key, scale)
        with jax.named_scope("update"):
            return update(state, loss / num_targets, grads)

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
    spec, batch_axes = plan.spec, plan.sharding.batch_axes
    layouts = weight_layouts(plan)
    reduction = jnp.dtype(spec.precision.gradient_reduction)
    over_batch = partial(jax.lax.psum, axis_name=batch_axes) if batch_axes else lambda x: x

    def local(params: Params, batch: Batch, dropout_key: Array | None, scale: Array) -> Any:
        working = _cast(params, spec.precision.compute)
        num_targets = over_batch(jnp.sum(batch["targets"] != IGNORED_TARGET))
        slots = jax.tree.map(
            lambda x, layout: gradient_slot(x, layout, spec.precision.gradients, plan.mesh.num_shards), params, layouts
        )

        def objective(slots: Params, part: Batch) -> tuple[Array, Array]:
            """This device's part of the mean objective over all targets of the global batch, and of the summed loss."""
            objective, loss = forward(plan, layouts, slots, working, part, dropout_key)
            return objective / jnp.maximum(num_targets, 1), loss

        def one(part: Batch) -> tuple[Array, Params | None]:
            if not with_gradients:
                return objective(slots, part)[1], None
            _, pull_back, loss = jax.vjp(lambda slots: objective(slots, part), slots, has_aux=True)
            return loss, pull_back(scale)[0]

        loss, grads = _sum_over_microbatches(one, batch, spec.num_microbatches)
        sums = jnp.stack([over_batch(loss), num_targets.astype(jnp.float32)])
        if not with_gradients:
            return sums
        return sums, jax.tree.map(lambda g, layout: reduce_gradient(g, layout, reduction), grads, layouts)

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
            axis_names=set(plan.mesh.sizes) - set(automatic_axes(plan)),
            check_vma=False,  # the reductions are all written out, and tested against one device
        )

    def over_the_mesh(params: Params, batch: Batch, dropout_key: Array | None = None, scale: Any = 1.0) -> Any:
        rows = {"row": jnp.arange(spec.global_batch_size)}  # a sequence's number, whichever device has it
        return split(params, batch | rows, dropout_key, jnp.asarray(scale, jnp.float32))

    return over_the_mesh


def _sum_over_microbatches(one: Callable[[Batch], Any], batch: Batch, num_microbatches: int) -> Any:
    """`one` on each microbatch of this device, in turn; results are added."""
    if num_microbatches == 1:
        return one(batch)
    parts = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(part)), None

    result = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, zeros, parts)[0]


def _cast(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
