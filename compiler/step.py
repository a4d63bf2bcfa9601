"""The train step: (state, batch) -> (state, metrics). Pure; everything about devices comes from the plan.

The gradient is a function of local batches: manual over the mesh axes that split the batch, so that what crosses the
network for data parallelism is written down (gather.py); automatic over the others, along which activation rules say
how matmuls are split.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import Context, Params

from .gather import WeightLayout, gather, gradient_slot, keep_axes, plan_weight, reduce_gradient
from .layers import scan_layers
from .plan import Plan
from .remat import build_policy, marked
from .state import State, initial_loss_scale, update_layouts
from .trees import like
from .update import build_update

Batch = dict[str, Array]  # inputs, targets: int32 (global_batch_size, sequence_length)
TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """The step as a function of global arrays; metrics: those of the update (update.py)."""
    gradients = build_loss(plan, with_gradients=True)
    update = build_update(plan, weight_layouts(plan))

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        return update(state, *gradients(state["params"], batch, scale))

    return train_step


def build_eval_step(plan: Plan) -> Callable[[Params, Batch], Array]:
    """Mean loss of one global batch, in nats per token."""
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
    """(params, batch) -> mean loss per token; with `with_gradients` (params, batch, scale=1) -> that loss, and the
    gradient of scale times it, in the layout of the update.

    Gradients are accumulated in `precision.gradients` over the microbatches, which run one after the other.
    """
    spec, batch_axes = plan.spec, plan.sharding.batch_axes
    layouts = weight_layouts(plan)
    reduction = jnp.dtype(spec.precision.gradient_reduction)

    def local_loss(params: Params, working: Params, part: Batch) -> Array:
        """This device's part of the mean loss over all tokens of the global batch."""
        logits_BTV = _forward(plan, layouts, params, working, part["inputs"])
        return sum_cross_entropy(logits_BTV, part["targets"]) / spec.tokens_per_step

    def local(params: Params, batch: Batch, scale: Array) -> Any:
        working = _cast(params, spec.precision.compute)
        slots = jax.tree.map(
            lambda x, layout: gradient_slot(x, layout, spec.precision.gradients, plan.mesh.num_shards), params, layouts
        )

        def one(part: Batch) -> tuple[Array, Params | None]:
            if not with_gradients:
                return local_loss(slots, working, part), None
            loss, pull_back = jax.vjp(lambda slots: local_loss(slots, working, part), slots)
            return loss, pull_back(scale)[0]

        loss, grads = _sum_over_microbatches(one, batch, spec.num_microbatches)
        loss = jax.lax.psum(loss, batch_axes) if batch_axes else loss
        if not with_gradients:
            return loss
        return loss, jax.tree.map(lambda g, layout: reduce_gradient(g, layout, reduction), grads, layouts)

    split = local
    if batch_axes:
        params_specs, update_specs = (
            jax.tree.map(lambda p: keep_axes(p, batch_axes), specs, is_leaf=_is_spec)
            for specs in (plan.specs["params"], update_layouts(plan.model, plan.sharding))
        )
        split = jax.shard_map(
            local,
            in_specs=(params_specs, PartitionSpec(batch_axes), PartitionSpec()),
            out_specs=(PartitionSpec(), update_specs) if with_gradients else PartitionSpec(),
            axis_names=set(plan.mesh.sizes) - set(automatic_axes(plan)),
            check_vma=False,  # the reductions are all written out, and tested against one device
        )
    return lambda params, batch, scale=1.0: split(params, batch, jnp.asarray(scale, jnp.float32))


def sum_cross_entropy(logits_BTV: Array, targets_BT: Array) -> Array:
    """Sum over tokens of -log softmax(logits)[target], in float32. Splits over a sharded vocabulary."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logit_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    return jnp.sum(jax.nn.logsumexp(logits_BTV, axis=-1) - target_logit_BT)


def _forward(plan: Plan, layouts: Params, params: Params, working: Params, tokens_BT: Array) -> Array:
    model, context = plan.model, Context(jnp.arange(tokens_BT.shape[1]), _activation_layout(plan))
    reduction = jnp.dtype(plan.spec.precision.gradient_reduction)

    def gathered(name: str, params: Params, working: Params) -> Params:
        return jax.tree.map(lambda p, w, layout: gather(p, w, layout, reduction), params, working, layouts[name])

    x_BTE = model.embed.apply(gathered("embed", params["embed"], working["embed"]), tokens_BT, context)
    for stack in model.stacks:

        def layer(stored: tuple[Params, Params], x_BTE: Array, stack=stack) -> Array:
            return stack.layer.apply(gathered(stack.name, *stored), x_BTE, context)

        policy = build_policy(plan.spec.remat, stack.name)
        x_BTE = scan_layers(layer, (params[stack.name], working[stack.name]), x_BTE, policy=policy)
    return model.head.apply(gathered("head", params["head"], working["head"]), x_BTE, context)


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
