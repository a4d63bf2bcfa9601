"""Builds the update half of the train step: loss and gradients in, the next state out.

    gradients  in the layout of the update, reduce-scattered after those of the backward pass
    masters    float32: state["master"], or this layout's part of the parameters
    rules      what the model updates by a rule of its own, from totals of the global batch
    params     the masters in their stored type, all-gathered where they are stored in larger shards

Arithmetic is float32. If a step may be skipped, all of its results are selected away: moments, counts and weights keep
their bits, and nothing waits for the host.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from ..core.partition_spec import keep_axes
from ..core.trees import combined, leaves_by_path, nested_dict, pick
from ..parallel.weights import assemble, is_assembled
from ..plan import Plan
from ..sharding.sharding import ShardingPlan
from ..sharding.state import State, build_schedule, update_layouts
from ..spec.step_spec import LossScaleSpec

Totals = Mapping[str, Mapping[str, Array]]
Update = Callable[[State, Array, Any, Totals], tuple[State, dict[str, Array]]]


def build_update(plan: Plan) -> Update:
    """Returns a function (state, loss, gradients, totals) -> (state, metrics).

    gradients: the gradients of the loss times the loss scale, if there is one, for each trained parameter; other
    parameters stay as they are unless a rule updates them. totals: the values that rules read, by stack and name, each
    with a first dimension `layers`. Metrics: loss in nats per token, grad_norm before clipping, learning_rate, skipped
    (1 if the update was left out), and loss_scale.
    """
    precision, schedule = plan.spec.precision, build_schedule(plan.spec)
    of_update = update_layouts(plan.model, plan.sharding)
    stored_types = pick(plan.abstract["params"], plan.sharding.trained)

    def update(state: State, loss: Array, gradients: Any, totals: Totals) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)
        grad_norm = optax.tree.norm(gradients)
        masters = (
            state["master"] if "master" in state else _split(plan.weights, plan.sharding, of_update, state["params"])
        )
        updates, optimizer = plan.optimizer.update(gradients, state["optimizer"], masters)
        masters = optax.apply_updates(masters, updates)
        params = jax.tree.map(lambda x, stored: x.astype(stored.dtype), masters, stored_types)
        params = _assembled(plan.weights, plan.sharding, of_update, plan.specs["params"], params)
        params = combined(state["params"], params)  # frozen parameters stay
        ruled = [p.array.path for p in plan.sharding.parameters if p.array.updated_by == "rule"]
        now, made = leaves_by_path(params), dict[str, Array]()
        for path in ruled:
            rule = plan.model.rules[path]
            made[path] = jax.vmap(rule.update)(now[path], totals[path.split("/")[0]][rule.total])
        params = combined(params, nested_dict(made))
        new = state | {"step": state["step"] + 1, "params": params, "optimizer": optimizer}
        new |= {"master": masters} if "master" in state else {}
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if plan.spec.may_skip:
            new = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(state["step"])}
        metrics["skipped"] = jnp.where(is_finite, 0.0, 1.0) if plan.spec.may_skip else jnp.zeros(())
        if precision.loss_scale is not None:
            metrics["loss_scale"] = scale
            new["loss_scale"] = next_loss_scale(precision.loss_scale, state["loss_scale"], is_finite)
        return new, metrics

    return update


def next_loss_scale(spec: LossScaleSpec, state: dict[str, Array], is_finite: Array) -> dict[str, Array]:
    """Returns the state of the loss scale after a step: lowered, but not below 1, if gradients overflowed; raised after
    enough steps that did not."""
    scale, num_finite_steps = state["scale"], state["num_finite_steps"] + 1
    is_due = num_finite_steps >= spec.growth_interval
    raised = jnp.where(is_due, scale * spec.growth_factor, scale)
    # A scale that is not finite would never be lowered again.
    raised = jnp.where(jnp.isfinite(raised), raised, scale)
    lowered = jnp.maximum(scale * spec.backoff_factor, 1.0)
    return {
        "scale": jnp.where(is_finite, raised, lowered),
        "num_finite_steps": jnp.where(is_finite & ~is_due, num_finite_steps, 0),
    }


def _split(weights: Any, sharding: ShardingPlan, of_update: Any, params: Any) -> Any:
    """Returns the trained parameters in float32 and in the layout of the update: a slice of what each device has."""

    def split(x: Array, layout: Any, spec: PartitionSpec) -> Array:
        x = jax.lax.with_sharding_constraint(x, spec) if is_assembled(layout) else x
        return x.astype(jnp.float32)

    trained, weights = (pick(tree, sharding.trained) for tree in (params, weights))
    return jax.tree.map(split, trained, weights, of_update)


def _assembled(weights: Any, sharding: ShardingPlan, of_update: Any, specs: Any, params: Any) -> Any:
    """Returns updated parameters in the layout in which they are stored."""

    def assembled(x: Array, layout: Any, updated: PartitionSpec, stored: PartitionSpec) -> Array:
        if not is_assembled(layout):
            return x
        axes = sharding.roles.tokens
        gather = jax.shard_map(
            lambda x: assemble(x, layout),
            in_specs=keep_axes(updated, axes),
            out_specs=keep_axes(stored, axes),
            axis_names=set(axes),
            check_vma=False,
        )
        return gather(x)

    weights = pick(weights, sharding.trained)
    stored = pick(specs, sharding.trained, is_leaf=lambda node: isinstance(node, PartitionSpec))
    return jax.tree.map(assembled, params, weights, of_update, stored)
