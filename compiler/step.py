"""The train step: (state, batch) -> (state, metrics). Pure; everything about devices comes from the plan.

The gradient is a function of local batches: manual over the mesh axes that split the batch, so that what crosses the
network for data parallelism is written down (gather.py); automatic over the others, along which activation rules say
how matmuls are split.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import IGNORED_TARGET, Context, Params

from .attention import build_attend
from .gather import WeightLayout, gather, gradient_slot, keep_axes, plan_weight, reduce_gradient
from .layers import scan_layers
from .loss import sum_losses
from .plan import Plan
from .remat import build_policy, marked
from .state import State, initial_loss_scale, update_layouts
from .trees import like
from .update import build_update

Batch = dict[str, Array]  # int32 (global_batch_size, sequence_length), by the names of batch_arrays
TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """The step as a function of global arrays; metrics: those of the update (update.py)."""
    gradients = build_loss(plan, with_gradients=True)
    update = build_update(plan, weight_layouts(plan))

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        dropout_key = jax.random.fold_in(jax.random.key(plan.spec.seed), state["step"])
        (loss, num_targets), grads = gradients(state["params"], batch, dropout_key, scale)
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
            objective, loss = _losses(plan, layouts, slots, working, part, dropout_key)
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


def _losses(
    plan: Plan, layouts: Params, slots: Params, working: Params, part: Batch, dropout_key: Array | None
) -> Array:
    """The forward pass of one microbatch of this device: (objective, cross-entropy), summed over its targets."""
    model, context = plan.model, _context(plan, part)
    reduction = jnp.dtype(plan.spec.precision.gradient_reduction)
    keys_B = None if dropout_key is None else jax.vmap(partial(jax.random.fold_in, dropout_key))(part["row"])

    def gathered(name: str, slots: Params, working: Params) -> Params:
        return jax.tree.map(lambda s, w, layout: gather(s, w, layout, reduction), slots, working, layouts[name])

    def with_keys(index: Array | int) -> Context:
        """index: 0 for the embedding, from 1 on for the layers."""
        if keys_B is None:
            return context
        return replace(context, dropout_keys_B=jax.vmap(lambda key: jax.random.fold_in(key, index))(keys_B))

    embed = gathered("embed", slots["embed"], working["embed"])
    x_BTE = model.embed.apply(embed, part["inputs"], with_keys(0))
    num_before = 1
    for stack in model.stacks:

        def layer(stored: tuple[Params, Params, Array], x_BTE: Array, stack=stack) -> Array:
            slots, working, index = stored
            return stack.layer.apply(gathered(stack.name, slots, working), x_BTE, with_keys(index))

        indices = num_before + jnp.arange(stack.num_layers)
        stored = (slots[stack.name], working[stack.name], indices)
        x_BTE = scan_layers(layer, stored, x_BTE, policy=build_policy(plan.spec.remat, stack.name))
        num_before += stack.num_layers
    return sum_losses(
        lambda params, x_BTE: model.head.apply(params, x_BTE, context),
        model.head_params(gathered("head", slots["head"], working["head"]), embed),
        x_BTE,
        part["targets"],
        z_loss_weight=plan.spec.loss.z_loss_weight,
        num_blocks=plan.num_loss_blocks,
    )


def _context(plan: Plan, part: Batch) -> Context:
    positions_BT = part["positions"] if "positions" in part else jnp.arange(part["inputs"].shape[1])[None]
    attend = build_attend(plan.attention.implementation, _heads_layout(plan))
    return Context(positions_BT, _activation_layout(plan), attend, part.get("segment_ids"))


def _heads_layout(plan: Plan) -> PartitionSpec:
    """Queries (batch, length, heads, head_dim) over the automatic mesh axes."""
    dimensions = (d for planned in plan.sharding.activations for d in planned.dimensions if d.logical == "heads")
    axes = next((d.axes for d in dimensions), ())
    return keep_axes(PartitionSpec(None, None, axes, None), automatic_axes(plan))


def _activation_layout(plan: Plan) -> Callable[..., Array]:
    """Activation rules over the automatic mesh axes, as constraints; the batch axes are split already. Each activation
    is marked with its name, for remat."""
    automatic = automatic_axes(plan)
    specs = {planned.array.path: keep_axes(planned.spec, automatic) for planned in plan.sharding.activations}

    def activation(name: str, x: Array, *_: str | None) -> Array:
        return marked(name, jax.lax.with_sharding_constraint(x, specs[name]) if automatic else x)

    return activation


def automatic_axes(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that split matmuls and not the batch: XLA's to arrange. (One of size 1 is as good as manual.)"""
    return tuple(axis for axis, n in plan.mesh.sizes.items() if n > 1 and axis not in plan.sharding.batch_axes)


def weight_layouts(plan: Plan) -> Params:
    """A WeightLayout for every parameter, as a tree like them."""
    stacked = {stack.name for stack in plan.model.stacks}
    stored, updated = plan.sharding.parameters, plan.sharding.optimizer
    accumulated = stored if plan.spec.sharding.gradients == "parameters" else updated
    layouts: dict[str, WeightLayout] = {
        p.array.path: plan_weight(
            p.spec,
            g.spec,
            u.spec,
            plan.sharding.batch_axes,
            automatic_axes(plan),
            is_stacked=p.array.path.split("/")[0] in stacked,
        )
        for p, g, u in zip(stored, accumulated, updated, strict=True)
    }
    return like(plan.abstract["params"], layouts)


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
