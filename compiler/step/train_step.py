"""Builds the train step: (state, batch) -> (state, metrics). It is pure; everything about devices comes from the plan.

The gradient is a function of local batches. It is manual over the mesh axes that split tokens or layers (roles.py), so
that the transfers of data parallelism are written down (weights.py), and automatic over the others, along which
activation rules say how matmuls are split. The update takes loss and gradients, and makes the next state:

    gradients  in the layout of the update, reduce-scattered after those of the backward pass
    masters    float32: state["master"], or this layout's part of the parameters
    rules      what the model updates by a rule of its own, from totals of the global batch
    params     the masters in their stored type, all-gathered where they are stored in larger shards

Its arithmetic is float32. If a step may be skipped, all of its results are selected away: moments, counts and weights
keep their bits, and nothing waits for the host.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models import PADDING_TARGET, Aux, Model, Params
from meshloom.models.loss import has_loss

from ..core.partition_spec import keep_axes
from ..core.scopes import UPDATE, WORKING_PARAMETERS
from ..core.trees import combined, leaves_by_path, like, nested_dict, pick
from ..optim.optimizers import parameter_kinds
from ..parallel.delayed import (
    MAGNITUDES,
    Magnitudes,
    clipped_metrics,
    delayed_scales,
    delayed_sites,
    next_magnitudes,
)
from ..parallel.weight_plan import WeightPlan
from ..parallel.weights import Reduction, assemble, is_assembled
from ..plan import Plan
from ..sharding.batch import REFERENCE, BatchPlan
from ..sharding.roles import AxisRoles
from ..sharding.sharding import ShardingPlan
from ..sharding.state import State, build_schedule, initial_loss_scale, update_layouts
from ..spec.step_spec import LossScaleSpec, PrecisionSpec
from ..target.mesh import MeshPlan
from .forward import build_functions
from .schedule import Batch, ModelWeights
from .sequential import choose_schedule
from .streamed_update import Streaming, UpdateScalars, streamed_stacks

LOSS_BY_SHARD = "loss_by_shard"
NUM_TARGETS = "num_targets"
GRADIENTS = "gradients"
NUM_PADDING = "num_padding"  # the number of places of the batch that hold no token

TrainStep = Callable[[State, Batch], tuple[State, dict[str, Array]]]


def build_train_step(plan: Plan, *, returns_gradients: bool = False) -> TrainStep:
    """Returns the step as a function of global arrays, whose rows are in the order of `plan.batch.row_order`.

    Its metrics are those of the update, NUM_TARGETS, NUM_PADDING if the data may have some,
    `plan.auxiliary`, and those of a stack by layer. If the state before a step is kept, also LOSS_BY_SHARD: the sums
    over the shards of the batch, in the order of the mesh, which reveal a device that computes wrongly.
    returns_gradients: they are among the metrics, as GRADIENTS, for a check.

    A global batch without any target has a loss of 0, the sum over no targets; its gradients are those of auxiliary
    losses alone.
    """
    gradients = build_loss(plan, with_gradients=True)
    update = build_update(plan)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        dropout_key = jax.random.fold_in(jax.random.key(plan.spec.seed), state["step"])
        history = state.get(MAGNITUDES, {})
        (loss, num_compared), grads, auxiliary, more = gradients(state["params"], batch, dropout_key, scale, history)
        with jax.named_scope(UPDATE):
            totals = {name: aux.totals for name, aux in auxiliary.items()}
            magnitudes = more.pop(MAGNITUDES, {})
            state, metrics = update(state, loss / jnp.maximum(num_compared, 1), grads, totals, magnitudes)
        metrics |= {GRADIENTS: grads} if returns_gradients else {}
        return state, metrics | {NUM_TARGETS: num_compared} | _auxiliary_metrics(plan.model, auxiliary) | more

    return train_step


def build_init(plan: Plan, drawn_paths: Collection[str] | None = None) -> Callable[[], State]:
    """Returns a function that makes the state before the first step. Compile it with output shardings: every device
    makes its own shards. drawn_paths: the parameters that are drawn; the others are zeros, in whose place weights are
    read. None: all are drawn."""

    precision = plan.spec.precision
    magnitudes = {name: tree for name, tree in plan.abstract.items() if name == MAGNITUDES}

    def init() -> State:
        drawn = jax.tree.map(lambda x: x.astype("float32"), plan.model.init(jax.random.key(plan.spec.seed)))
        if drawn_paths is not None:
            leaves = leaves_by_path(drawn).items()
            drawn = like(drawn, {path: x if path in drawn_paths else jnp.zeros_like(x) for path, x in leaves})
        trained, params = pick(drawn, plan.sharding.trained), stored_params(plan.weights, drawn, drawn_paths)
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "optimizer": plan.optimizer.init(trained)}
        state |= {"master": trained} if precision.master is not None else {}
        state |= jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), magnitudes)
        return state | ({"loss_scale": initial_loss_scale(plan.spec)} if precision.loss_scale is not None else {})

    return init


def stored_params(weights: Any, drawn: Any, drawn_paths: Collection[str] | None) -> Params:
    """Returns parameters as the state holds them. weights: their plans, as a tree. drawn_paths: as in `build_init`."""

    def stored(weight: WeightPlan, x: Array) -> Any:
        is_drawn = drawn_paths is None or weight.path in drawn_paths
        return weight.encoding.store_of(x) if is_drawn else weight.encoding.zeros(x.shape)

    return jax.tree.map(stored, weights, drawn)


def build_loss(plan: Plan, *, with_gradients: bool) -> Callable[..., Any]:
    """Returns a function (params, batch, dropout_key, scale, history) -> [loss, number of what it is a sum over], of a
    global batch: cross-entropy and targets, or the loss of an objective of pairs and their number. history: the
    magnitudes of operands in earlier steps, whose scales come from them; empty: all scales come from magnitudes now.

    With `with_gradients` it also returns the gradient of scale times the mean objective, in the layout of the update,
    for the trained parameters; the auxiliary outputs by stack, and of the head; and NUM_PADDING, LOSS_BY_SHARD and
    MAGNITUDES by name, if they are due. dropout_key: None for no dropout. Gradients are accumulated in
    `precision.gradients` over the microbatches.
    """
    spec, tokens, schedule = plan.spec, plan.roles.tokens, choose_schedule(plan)
    over_batch = partial(jax.lax.psum, axis_name=tokens) if tokens else lambda x: x
    most = partial(jax.lax.pmax, axis_name=tokens) if tokens else lambda x: x
    delayed = delayed_sites(plan.operations, plan.model.stacks) if with_gradients else ()
    by_shard = partial(jax.lax.all_gather, axis_name=tokens) if tokens else lambda x: x[None]

    def local(params: Params, batch: Batch, dropout_key: Array | None, scale: Array, history: Magnitudes) -> Any:
        weights = _model_weights(spec.precision, plan.weights, plan.mesh, params)
        if history:  # until it is known, the magnitude of a gradient is taken for that of the loss of one token
            weights = replace(weights, scales=delayed_scales(delayed, history, scale / spec.tokens_per_step))
        num_targets = num_compared = over_batch(jnp.sum(has_loss(batch["targets"])))
        num_tokens: Array | float = float(spec.tokens_per_step)  # it may exceed int32
        more = dict[str, Array]()
        if spec.data.may_pad:
            more[NUM_PADDING] = over_batch(jnp.sum(batch["targets"] == PADDING_TARGET))
            num_tokens = jnp.maximum(num_tokens - more[NUM_PADDING].astype(jnp.float32), 1)
        if spec.has_pairs:
            more[NUM_TARGETS], num_compared = num_targets, jnp.asarray(spec.global_batch_size // 2, jnp.int32)
        functions = build_functions(plan, num_targets, num_tokens, dropout_key)
        sums, grads = schedule.run(functions, weights, batch, gradient_scale=scale if with_gradients else None)
        loss = jnp.stack([over_batch(sums.loss), num_compared.astype(jnp.float32)])
        if not with_gradients:
            return loss
        grads, auxiliary = pick(grads, plan.sharding.trained), jax.tree.map(over_batch, sums.auxiliary)
        more |= {LOSS_BY_SHARD: by_shard(sums.loss)} if spec.keeps_state else {}
        return loss, grads, auxiliary, more | ({MAGNITUDES: most(sums.magnitudes)} if history else {})

    of_update = update_layouts(plan.model, plan.sharding) if with_gradients else None
    split = _over_the_mesh(local, plan.specs["params"], of_update, plan.batch, plan.mesh, plan.roles)

    def over_the_mesh(
        params: Params,
        batch: Batch,
        dropout_key: Array | None = None,
        scale: Any = 1.0,
        history: Any = MappingProxyType({}),
    ) -> Any:
        return split(params, batch, dropout_key, jnp.asarray(scale, jnp.float32), dict(history))

    return over_the_mesh


def build_log_probs(plan: Plan, *, counts_misses: bool = False) -> Callable[[Params, Batch], Array]:
    """Returns a function (params, batch) -> float32 (global_batch_size,): the sum of the log-probabilities of each
    sequence's targets, by the number of the sequence in the global batch. With `counts_misses` it is float32
    (2, global_batch_size): below them the number of targets of each sequence that another token is likelier than."""
    tokens, schedule = plan.roles.tokens, choose_schedule(plan)

    def local(params: Params, batch: Batch, dropout_key: Array | None, scale: Array, history: Magnitudes) -> Array:
        del scale, history
        weights = _model_weights(plan.spec.precision, plan.weights, plan.mesh, params)
        num_tokens = float(plan.spec.tokens_per_step)  # scales losses of layers, which are not returned
        functions = build_functions(
            plan, jnp.ones(()), num_tokens, dropout_key, is_by_sequence=True, counts_misses=counts_misses
        )
        sums, _ = schedule.run(functions, weights, batch, gradient_scale=None)
        return jax.lax.psum(sums.loss, tokens) if tokens else sums.loss

    batch = replace(plan.batch, shapes={name: x for name, x in plan.batch.shapes.items() if name != REFERENCE})
    split = _over_the_mesh(local, plan.specs["params"], None, batch, plan.mesh, plan.roles)
    return lambda params, batch: split(params, batch, None, jnp.zeros(()), {})


def _over_the_mesh(
    local: Callable[..., Any], params: Any, of_update: Any, batch: BatchPlan, mesh: MeshPlan, roles: AxisRoles
) -> Callable[..., Any]:
    """Returns a function of this device's arrays as one of global arrays: (params, batch, dropout_key, scale, history).

    params: the layouts of the parameters. of_update: those of the gradients that it returns after its first result;
    None if it returns no gradients.
    """
    specs = {name: spec for name, (_, spec) in batch.shapes.items()}
    split, whole, order = local, PartitionSpec(), batch.row_order

    def manual(specs: Any) -> Any:
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: keep_axes(spec, roles.manual), specs, is_leaf=is_spec)

    if roles.manual:
        split = jax.shard_map(
            local,
            in_specs=(manual(params), specs | {"row": roles.rows_spec}, whole, whole, whole),
            out_specs=whole if of_update is None else (whole, manual(of_update), whole, whole),
            axis_names=set(mesh.sizes) - set(roles.partitioner),  # an axis of size 1 may be manual, too
            check_vma=False,  # the reductions are all written out, and tested against one device
        )

    def with_rows(params: Params, batch: Batch, dropout_key: Array | None, scale: Array, history: Magnitudes) -> Any:
        # The number of each sequence, on whichever device it is.
        rows = {"row": order.rows_at(jnp.arange(order.num_rows))}
        return split(params, batch | rows, dropout_key, scale, history)

    return with_rows


def _model_weights(precision: PrecisionSpec, weights: Params, mesh: MeshPlan, params: Params) -> ModelWeights:
    """Returns this device's shards as the weights of a pass, as they are gathered. weights: their plans, as a tree."""
    reduction = Reduction(jnp.dtype(precision.gradient_reduction), precision.gradients, is_last=False)
    with jax.named_scope(WORKING_PARAMETERS):
        working = jax.tree.map(lambda weight, x: weight.encoding.encode(x), weights, params)
    return ModelWeights(params, working, weights, reduction, mesh.num_shards)


def _auxiliary_metrics(model: Model, auxiliary: dict[str, Aux]) -> dict[str, Array]:
    """Returns means over the entries of each output, (layers,) for a stack and a scalar for the head, and the stacks'
    measures."""
    means = {
        f"{piece}/{name}": jnp.mean(value, axis=tuple(range(0 if piece == "head" else 1, value.ndim)))
        for piece, aux in auxiliary.items()
        for name, value in {**aux.losses, **aux.statistics}.items()
    }
    return means | {
        f"{stack.name}/{name}": jax.vmap(measure.of)(auxiliary[stack.name].totals[measure.total])
        for stack in model.stacks
        for name, measure in stack.measures.items()
    }


Totals = Mapping[str, Mapping[str, Array]]
Update = Callable[[State, Array, Any, Totals, Magnitudes], tuple[State, dict[str, Array]]]


def build_update(plan: Plan) -> Update:
    """Returns a function (state, loss, gradients, totals, magnitudes) -> (state, metrics).

    gradients: the gradients of the loss times the loss scale, if there is one, for each trained parameter; other
    parameters stay as they are unless a rule updates them. totals: the values that rules read, by stack and name, each
    with a first dimension `layers`. magnitudes: of operands in this step, if scales come from earlier ones; else empty.
    Metrics: loss in nats per token, grad_norm before clipping, learning_rate, skipped (1 if the update was left out),
    loss_scale, and how many operands of each layer were clipped.
    """
    precision, schedule = plan.spec.precision, build_schedule(plan.spec)
    of_update = update_layouts(plan.model, plan.sharding)
    stored_types = pick(plan.abstract["params"], plan.sharding.trained)
    streamed = streamed_stacks(plan.model.stacks, plan.on_host)
    kinds = pick(parameter_kinds(plan.model), plan.sharding.trained)
    streaming = Streaming(streamed, plan.spec.optimizer, kinds, of_update, plan.mesh.sizes)
    delayed = delayed_sites(plan.operations, plan.model.stacks)

    def update(
        state: State, loss: Array, gradients: Any, totals: Totals, magnitudes: Magnitudes
    ) -> tuple[State, dict[str, Array]]:
        for each in jax.tree.leaves(magnitudes):  # infinity was rounded to the largest number of its type
            loss = jnp.where(jnp.all(jnp.isfinite(each)), loss, jnp.nan)
        scale = state["loss_scale"]["scale"] if "loss_scale" in state else 1.0
        accumulated = gradients
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)
        grad_norm = optax.tree.norm(gradients)
        masters = (
            state["master"] if "master" in state else _split(plan.weights, plan.sharding, of_update, state["params"])
        )
        if streamed:
            may = _is_finite(loss, grad_norm) if plan.spec.may_skip else None
            limit, rate = plan.spec.optimizer.max_grad_norm, schedule(state["step"])
            scalars = UpdateScalars(scale, grad_norm, limit, rate, may)
            masters, optimizer = streaming.updated(scalars, accumulated, state["optimizer"], masters)
        else:
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
        new |= {MAGNITUDES: next_magnitudes(state[MAGNITUDES], magnitudes)} if magnitudes else {}
        is_finite = _is_finite(loss, grad_norm)
        if plan.spec.may_skip:
            before, after = leaves_by_path(state), leaves_by_path(new).items()
            new = like(new, {p: x if streaming.has(p) else jnp.where(is_finite, x, before[p]) for p, x in after})
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(state["step"])}
        metrics["skipped"] = jnp.where(is_finite, 0.0, 1.0) if plan.spec.may_skip else jnp.zeros(())
        if magnitudes:
            metrics |= clipped_metrics(delayed, state[MAGNITUDES], scale / plan.spec.tokens_per_step, magnitudes)
        if precision.loss_scale is not None:
            metrics["loss_scale"] = scale
            new["loss_scale"] = next_loss_scale(precision.loss_scale, state["loss_scale"], is_finite)
        return new, metrics

    return update


def _is_finite(loss: Array, grad_norm: Array) -> Array:
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


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
