"""The train state: what a step takes and returns, and a checkpoint saves.

step        updates made
params      as stored, laid out by sharding.parameters
master      the trained parameters in float32 if precision.master is set, by sharding.optimizer
optimizer   the state of optax for the trained parameters, by sharding.optimizer and its own computation
loss_scale  if precision.loss_scale is set
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from meshloom.models import Model

from ..core.partition_spec import axes_of
from ..core.trees import leaves_by_path, like, pick
from ..spec.spec import RunSpec
from ..target.mesh import MeshPlan
from .optimizer_state import plan_optimizer_state
from .sharding import ShardingPlan

State = dict[str, Any]


def plan_state(
    spec: RunSpec, model: Model, optimizer: optax.GradientTransformation, sharding: ShardingPlan, mesh: MeshPlan
) -> tuple[State, State]:
    """Returns the state as two trees: of ShapeDtypeStruct and of PartitionSpec."""

    arrays = {plan.array.path: plan.array for plan in sharding.parameters}
    params = like(model.abstract(), {p: jax.ShapeDtypeStruct(x.shape, x.dtype) for p, x in arrays.items()})
    trained = pick(params, sharding.trained)
    params_specs = like(params, {plan.array.path: plan.spec for plan in sharding.parameters})
    update_specs = update_layouts(model, sharding)
    state, state_specs = plan_optimizer_state(optimizer, trained, update_specs, mesh)
    abstract: State = {"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "optimizer": state}
    specs: State = {"step": PartitionSpec(), "params": params_specs, "optimizer": state_specs}
    if spec.precision.master is not None:
        master = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, spec.precision.master), trained)
        abstract["master"], specs["master"] = master, update_specs
    if spec.precision.loss_scale is not None:
        abstract["loss_scale"] = jax.eval_shape(lambda: initial_loss_scale(spec))
        specs["loss_scale"] = jax.tree.map(lambda _: PartitionSpec(), abstract["loss_scale"])
    return abstract, specs


def update_layouts(model: Model, sharding: ShardingPlan) -> Any:
    """Returns the PartitionSpec in which each parameter is updated, as a tree like the trained parameters."""
    trained = pick(model.abstract(), sharding.trained)
    return like(trained, {plan.array.path: plan.spec for plan in sharding.optimizer})


def initial_loss_scale(spec: RunSpec) -> dict[str, jax.Array]:
    """Returns the initial loss scale. scale: the factor of the loss. num_finite_steps: since the scale last changed."""
    assert spec.precision.loss_scale is not None
    return {
        "scale": jnp.asarray(spec.precision.loss_scale.initial, jnp.float32),
        "num_finite_steps": jnp.zeros((), jnp.int32),
    }


def bytes_per_device(abstract: Any, specs: Any, mesh: MeshPlan) -> int:
    """Returns the bytes of a tree of arrays on each device."""
    layouts = leaves_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def size(path: str, x: Any) -> int:
        shards = mesh.num_shards(tuple(axis for entry in layouts[path] for axis in axes_of(entry)))
        return math.prod(x.shape) * x.dtype.itemsize // shards

    return sum(size(path, x) for path, x in leaves_by_path(abstract).items())
