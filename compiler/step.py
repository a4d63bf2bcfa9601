"""The train step: (state, batch) -> (state, metrics). Pure; everything about devices comes from the plan.

The gradient is a function of local batches: manual over the mesh axes that split the batch, so that what crosses the
network for data parallelism is written down (gather.py); automatic over the others, along which activation rules say
how matmuls are split.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import IGNORED_TARGET, Context, Params

from .gather import WeightLayout, gather, keep_axes, plan_weight, reduce_gradient
from .layers import scan_layers
from .optimizer import build_schedule
from .plan import Plan
from .trees import leaves_by_path, like

State = dict[str, Any]  # step: int32; params: Params; optimizer: the state of optax
Batch = dict[str, Array]  # int32 (global_batch_size, sequence_length), by the names of batch_arrays
TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan) -> TrainStep:
    """The step as a function of global arrays; metrics: loss (nats per token), grad_norm, learning_rate."""
    gradients = build_loss(plan, with_gradients=True)
    schedule = build_schedule(plan.spec.optimizer, plan.spec.num_steps)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        loss, grads = gradients(state["params"], batch)
        updates, optimizer_state = plan.optimizer.update(grads, state["optimizer"], state["params"])
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": schedule(state["step"])}
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "optimizer": optimizer_state}, metrics

    return train_step


def build_eval_step(plan: Plan) -> Callable[[Params, Batch], Array]:
    """Mean loss of one global batch, in nats per token."""
    return build_loss(plan, with_gradients=False)


def build_init(plan: Plan) -> Callable[[], State]:
    """The state before the first step. Compile with output shardings: every device makes its own shards."""

    def init() -> State:
        params = plan.model.init(jax.random.key(plan.spec.seed))
        params = jax.tree.map(lambda x: x.astype(plan.spec.precision.parameters), params)
        return {"step": jnp.zeros((), jnp.int32), "params": params, "optimizer": plan.optimizer.init(params)}

    return init


def build_loss(plan: Plan, *, with_gradients: bool) -> Callable[[Params, Batch], Any]:
    """(params, batch) -> mean loss per token, with `with_gradients` also its gradient, in the parameters' layout.

    Gradients are accumulated in float32 over the microbatches, which run one after the other.
    """
    spec, batch_axes = plan.spec, plan.sharding.batch_axes
    layouts = _weight_layouts(plan)
    reduction = jnp.dtype(spec.precision.gradient_reduction)

    def local_loss(params: Params, working: Params, part: Batch) -> Array:
        """This device's part of the mean loss over all tokens of the global batch."""
        logits_BTV = _forward(plan, layouts, params, working, part["inputs"])
        return sum_cross_entropy(logits_BTV, part["targets"]) / spec.tokens_per_step

    def local(params: Params, batch: Batch) -> Any:
        working = _cast(params, spec.precision.compute)

        def one(part: Batch) -> tuple[Array, Params | None]:
            if not with_gradients:
                return local_loss(params, working, part), None
            loss, grads = jax.value_and_grad(local_loss)(params, working, part)
            return loss, _cast(grads, "float32")

        loss, grads = _sum_over_microbatches(one, batch, spec.num_microbatches)
        loss = jax.lax.psum(loss, batch_axes) if batch_axes else loss
        if not with_gradients:
            return loss
        grads = jax.tree.map(lambda g, layout: reduce_gradient(g, layout, reduction), grads, layouts)
        return loss, jax.tree.map(lambda g, x: g.astype(x.dtype), grads, params)

    if not batch_axes:
        return local
    params_specs = jax.tree.map(lambda p: keep_axes(p, batch_axes), plan.specs["params"], is_leaf=_is_spec)
    return jax.shard_map(
        local,
        in_specs=(params_specs, PartitionSpec(batch_axes)),
        out_specs=(PartitionSpec(), params_specs) if with_gradients else PartitionSpec(),
        axis_names=set(batch_axes),
        check_vma=False,  # the reductions are all written out, and tested against one device
    )


def sum_cross_entropy(logits_BTV: Array, targets_BT: Array) -> Array:
    """Sum over tokens of -log softmax(logits)[target], in float32, but for IGNORED_TARGET. Splits over a sharded
    vocabulary."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_logit_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logit_BT
    return jnp.sum(jnp.where(targets_BT == IGNORED_TARGET, 0.0, loss_BT))


def _forward(plan: Plan, layouts: Params, params: Params, working: Params, tokens_BT: Array) -> Array:
    model, context = plan.model, Context(jnp.arange(tokens_BT.shape[1]), _activation_layout(plan))
    reduction = jnp.dtype(plan.spec.precision.gradient_reduction)

    def gathered(name: str, params: Params, working: Params) -> Params:
        return jax.tree.map(lambda p, w, layout: gather(p, w, layout, reduction), params, working, layouts[name])

    x_BTE = model.embed.apply(gathered("embed", params["embed"], working["embed"]), tokens_BT, context)
    for stack in model.stacks:

        def layer(stored: tuple[Params, Params], x_BTE: Array, stack=stack) -> Array:
            return stack.layer.apply(gathered(stack.name, *stored), x_BTE, context)

        x_BTE = scan_layers(layer, (params[stack.name], working[stack.name]), x_BTE, remat=plan.spec.remat.policy)
    return model.head.apply(gathered("head", params["head"], working["head"]), x_BTE, context)


def _activation_layout(plan: Plan) -> Callable[..., Array]:
    """Activation rules over the automatic mesh axes, as constraints; the batch axes are split already."""
    automatic = tuple(axis for axis, n in plan.mesh.sizes.items() if n > 1 and axis not in plan.sharding.batch_axes)
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
