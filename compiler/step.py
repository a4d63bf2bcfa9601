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
import optax
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import IGNORED_TARGET, Context, Params

from .attention import build_attend
from .gather import Axes, WeightLayout, gather, keep_axes, plan_weight, reduce_gradient
from .layers import scan_layers
from .loss import sum_losses
from .optimizer import build_schedule
from .plan import Plan
from .trees import leaves_by_path, like

State = dict[str, Any]  # step: int32; params: Params; optimizer: the state of optax
Batch = dict[str, Array]  # inputs, targets: int32 (global_batch_size, sequence_length)
TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """The step as a function of global arrays; metrics: loss (nats per token), grad_norm, learning_rate."""
    gradients = build_loss(plan, with_gradients=True)
    schedule = build_schedule(plan.spec.optimizer, plan.spec.num_steps)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        dropout_key = jax.random.fold_in(jax.random.key(plan.spec.seed), state["step"])
        (loss, num_targets), grads = gradients(state["params"], batch, dropout_key)
        updates, optimizer_state = plan.optimizer.update(grads, state["optimizer"], state["params"])
        metrics = {
            "loss": loss / num_targets,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state["step"]),
        }
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state}, metrics

    return train_step


def build_eval_step(plan: Plan) -> Callable[[Params, Batch], Array]:
    """(params, batch) -> float32 [summed cross-entropy in nats, number of targets] of one global batch."""
    return build_loss(plan, with_gradients=False)


def build_init(plan: Plan) -> Callable[[], State]:
    """The state before the first step. Compile with output shardings: every device makes its own shards."""

    def init() -> State:
        params = plan.model.init(jax.random.key(plan.spec.seed))
        params = jax.tree.map(lambda x: x.astype(plan.spec.precision.parameters), params)
        return {"step": jnp.zeros((), jnp.int32), "params": params, "optimizer": plan.optimizer.init(params)}

    return init


def build_loss(plan: Plan, *, with_gradients: bool) -> Callable[..., Any]:
    """(params, batch, dropout_key) -> sums over the targets of a global batch: [cross-entropy, number of targets]; with
    `with_gradients` also the gradient of the mean objective, in the parameters' layout.

    dropout_key: None for no dropout. Gradients are accumulated in float32 over the microbatches, which run one after
    the other.
    """
    spec, batch_axes = plan.spec, plan.sharding.batch_axes
    layouts = _weight_layouts(plan)
    reduction = jnp.dtype(spec.precision.gradient_reduction)
    over_batch = partial(jax.lax.psum, axis_name=batch_axes) if batch_axes else lambda x: x

    def local(params: Params, batch: Batch, dropout_key: Array | None) -> Any:
        working = _cast(params, spec.precision.compute)
        num_targets = over_batch(jnp.sum(batch["targets"] != IGNORED_TARGET))

        def objective(params: Params, part: Batch) -> tuple[Array, Array]:
            """This device's part of the mean objective over all targets of the global batch, and of the summed loss."""
            objective, loss = _losses(plan, layouts, params, working, part, dropout_key)
            return objective / jnp.maximum(num_targets, 1), loss

        def one(part: Batch) -> tuple[Array, Params | None]:
            if not with_gradients:
                return objective(params, part)[1], None
            (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(params, part)
            return loss, _cast(grads, "float32")

        loss, grads = _sum_over_microbatches(one, batch, spec.num_microbatches)
        sums = jnp.stack([over_batch(loss), num_targets.astype(jnp.float32)])
        if not with_gradients:
            return sums
        grads = jax.tree.map(lambda g, layout: reduce_gradient(g, layout, reduction), grads, layouts)
        return sums, jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)

    def over_the_mesh(params: Params, batch: Batch, dropout_key: Array | None = None) -> Any:
        batch = batch | {"row": jnp.arange(spec.global_batch_size)}
        if not batch_axes:
            return local(params, batch, dropout_key)
        params_specs = jax.tree.map(lambda p: keep_axes(p, batch_axes), plan.specs["params"], is_leaf=_is_spec)
        return jax.shard_map(
            local,
            in_specs=(params_specs, PartitionSpec(batch_axes), PartitionSpec()),
            out_specs=(PartitionSpec(), params_specs) if with_gradients else PartitionSpec(),
            axis_names=set(batch_axes),
            check_vma=False,  # the reductions are all written out, and tested against one device
        )(params, batch, dropout_key)

    return over_the_mesh


def _losses(
    plan: Plan, layouts: Params, params: Params, working: Params, part: Batch, dropout_key: Array | None
) -> Array:
    """The forward pass of one microbatch of this device: (objective, cross-entropy), summed over its targets."""
    model, context = plan.model, _context(plan, part)
    reduction = jnp.dtype(plan.spec.precision.gradient_reduction)
    keys_B = None if dropout_key is None else jax.vmap(partial(jax.random.fold_in, dropout_key))(part["row"])

    def gathered(name: str, params: Params, working: Params) -> Params:
        return jax.tree.map(lambda p, w, layout: gather(p, w, layout, reduction), params, working, layouts[name])

    def with_keys(index: Array | int) -> Context:
        """index: 0 for the embedding, from 1 on for the layers."""
        if keys_B is None:
            return context
        return replace(context, dropout_keys_B=jax.vmap(lambda key: jax.random.fold_in(key, index))(keys_B))

    embed = gathered("embed", params["embed"], working["embed"])
    x_BTE = model.embed.apply(embed, part["inputs"], with_keys(0))
    num_before = 1
    for stack in model.stacks:

        def layer(stored: tuple[Params, Params, Array], x_BTE: Array, stack=stack) -> Array:
            params, working, index = stored
            return stack.layer.apply(gathered(stack.name, params, working), x_BTE, with_keys(index))

        indices = num_before + jnp.arange(stack.num_layers)
        stored = (params[stack.name], working[stack.name], indices)
        x_BTE = scan_layers(layer, stored, x_BTE, remat=plan.spec.remat.policy)
        num_before += stack.num_layers
    return sum_losses(
        lambda params, x_BTE: model.head.apply(params, x_BTE, context),
        model.head_params(gathered("head", params["head"], working["head"]), embed),
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
    return keep_axes(PartitionSpec(None, None, axes, None), _automatic_axes(plan))


def _automatic_axes(plan: Plan) -> Axes:
    return tuple(axis for axis, n in plan.mesh.sizes.items() if n > 1 and axis not in plan.sharding.batch_axes)


def _activation_layout(plan: Plan) -> Callable[..., Array]:
    """Activation rules over the automatic mesh axes, as constraints; the batch axes are split already."""
    automatic = _automatic_axes(plan)
    specs = {planned.array.path: keep_axes(planned.spec, automatic) for planned in plan.sharding.activations}

    def activation(name: str, x: Array, *_: str | None) -> Array:
        return jax.lax.with_sharding_constraint(x, specs[name]) if automatic else x

    return activation


def _weight_layouts(plan: Plan) -> Params:
    stacked = {stack.name for stack in plan.model.stacks}
    layouts: dict[str, WeightLayout] = {
        path: plan_weight(spec, plan.sharding.batch_axes, is_stacked=path.split("/")[0] in stacked)
        for path, spec in leaves_by_path(plan.specs["params"], is_leaf=_is_spec).items()
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
