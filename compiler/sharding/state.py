"""The train state, which a step takes and returns and a checkpoint saves, and the optimizer that updates it.

step        updates made
params      as stored, laid out by sharding.parameters
master      the trained parameters in float32 if precision.master is set, by sharding.optimizer
optimizer   the state of optax for the trained parameters, by sharding.optimizer and its own computation
loss_scale  if precision.loss_scale is set
magnitudes  of operands in earlier steps, if matmuls have a history (parallel/delayed.py), whole on each device
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshloom.models import Model

from ..core.errors import Problem, raise_if_any
from ..core.float_types import num_bits
from ..core.partition_spec import axes_of
from ..core.trees import leaves_by_path, like, pick
from ..core.user_code import blamed_on_user
from ..formats.block import SCALES
from ..formats.layout import abstract_encoded, encoded_specs
from ..optim.contract import Setting
from ..optim.moments import moment_of, owner_of
from ..optim.optimizers import learning_rates, parameter_kinds
from ..spec.step_spec import StepSpec
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .arrays import Array
from .rules import ArrayPlan
from .sharding import ShardingPlan


def check_schedule(spec: StepSpec) -> None:
    """Raises ConfigError if the schedule does not fit in the run."""
    raise_if_any(spec.schedule.problems(spec.num_steps))


def build_schedule(spec: StepSpec) -> optax.Schedule:
    """Returns the schedule: the number of updates made -> the learning rate of the next."""
    return learning_rates(spec.schedule, spec.optimizer.learning_rate, spec.num_steps)


def build_optimizer(spec: StepSpec, model: Model, layouts: Any, mesh: MeshPlan) -> optax.GradientTransformation:
    """Returns clipping by global norm followed by the optimizer. It computes in float32, whatever the parameters' type.
    layouts: the PartitionSpec in which each trained parameter is updated."""
    trained = leaves_by_path(layouts, is_leaf=lambda node: isinstance(node, PartitionSpec))
    kinds = pick(parameter_kinds(model), trained)
    name = spec.optimizer.name
    with blamed_on_user("optimizer.name", f"building {name}", is_theirs=":" in name):
        chosen = spec.optimizer.build(Setting(build_schedule(spec), kinds, layouts, mesh.sizes))
    limit = spec.optimizer.max_grad_norm
    clip = optax.identity() if limit is None else optax.clip_by_global_norm(limit)
    return optax.chain(clip, chosen)


def plan_optimizer_state(optimizer: optax.GradientTransformation, params: Any, specs: Any, mesh: MeshPlan) -> Any:
    """Returns the abstract optimizer state, with the PartitionSpec of each leaf as its computation yields it.

    params: tree of ShapeDtypeStruct. specs: the layout of parameter-shaped state, as a tree like it. `optimizer.init`
    is traced over explicitly sharded types, so factored, masked and partitioned states come out right without devices.
    Returns two trees like the state: of ShapeDtypeStruct and of PartitionSpec.
    """
    explicit = mesh.abstract(AxisType.Explicit)
    sharded = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=NamedSharding(explicit, spec)),
        params,
        specs,
    )
    with jax.sharding.use_abstract_mesh(explicit):
        state = jax.eval_shape(optimizer.init, sharded)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return abstract, jax.tree.map(lambda x: x.sharding.spec if x.sharding is not None else PartitionSpec(), state)


State = dict[str, Any]
HOST_KIND = "pinned_host"  # JAX's name of the host's memory, which devices copy from by themselves


def plan_state(
    spec: StepSpec, model: Model, optimizer: optax.GradientTransformation, sharding: ShardingPlan, mesh: MeshPlan,
    magnitudes: Any,
) -> tuple[State, State]:  # fmt: skip
    """Returns the state as two trees: of ShapeDtypeStruct and of PartitionSpec. magnitudes: of earlier steps, abstract;
    empty: there are none."""

    arrays = {plan.array.path: plan for plan in sharding.parameters}
    params = like(model.abstract(), {path: _abstract(plan.array) for path, plan in arrays.items()})
    trained = pick(params, sharding.trained)
    params_specs = like(model.abstract(), {path: _specs(plan) for path, plan in arrays.items()})
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
    if magnitudes:
        abstract["magnitudes"] = magnitudes
        specs["magnitudes"] = jax.tree.map(lambda _: PartitionSpec(), magnitudes)
    return abstract, specs


def paths_on_host(spec: StepSpec, model: Model, sharding: ShardingPlan, abstract: State) -> frozenset[str]:
    """Returns the paths of the state's arrays that lie in the memory of the host: with `optimizer.moments_on=host` the
    moments of matrices of stacks. Scales and vectors, which are small, and what has no loop over layers stay on the
    device."""
    matrices = _streamed_matrices(model, sharding) if spec.optimizer.has_moments_on_host else []

    def is_there(path: str) -> bool:
        return moment_of(path)[1] != SCALES and owner_of(path, matrices) is not None

    paths = leaves_by_path(abstract["optimizer"])
    return frozenset(f"optimizer/{path}" for path in paths if is_there(path))


def _streamed_matrices(model: Model, sharding: ShardingPlan) -> list[str]:
    """Returns the paths of the trained matrices of stacks."""
    stacks, kinds = {stack.name for stack in model.stacks}, leaves_by_path(parameter_kinds(model))
    return [path for path in sharding.trained if path.split("/")[0] in stacks and kinds[path].is_matrix]


def check_moments_on_host(spec: StepSpec, model: Model, sharding: ShardingPlan, target: TargetPlan) -> None:
    """Raises ConfigError for moments on the host that no loop over layers can stream."""
    if not spec.optimizer.has_moments_on_host:
        return
    matrices, problems, key = _streamed_matrices(model, sharding), list[Problem](), "optimizer.moments_on"
    dimensions = [each.dimensions[0] for each in sharding.optimizer if each.array.path in matrices]
    of_layers = {*sharding.roles.stage, *(axis for dimension in dimensions for axis in dimension.axes)}
    if not target.compiler.streams_from_host:
        what = f"is host, and the compiler for {target.name} is not known to copy a layer's moments beside compute"
        problems.append(Problem(key, what, "set optimizer.moments_on=device, or choose a TPU"))
    if not matrices:
        what = "is host, and no matrix of a layer is trained"
        problems.append(Problem(key, what, "set optimizer.moments_on=device, or train some"))
    if of_layers:
        axis = sorted(of_layers)[0]
        what = f"is host, which updates layers one after the other, and {axis} splits them"
        problems.append(Problem(key, what, f"set optimizer.moments_on=device, or mesh.{axis}=1"))
    if spec.keeps_state:
        what = "is host, where moments are changed in place, and the state before a step is kept to repeat it"
        fix = "set optimizer.moments_on=device, or on_nonfinite=skip and replay.check_every_num_steps=null"
        problems.append(Problem(key, what, fix))
    raise_if_any(problems)


def is_on_host(x: Any) -> bool:
    """Returns True for a traced array in the memory of the host."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def _abstract(array: Array) -> Any:
    """Returns a parameter as the state holds it: an array, or the tree of an encoded one."""
    if array.format is None:
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    return abstract_encoded(array.format, array.shape)


def _specs(plan: ArrayPlan) -> Any:
    """Returns the layout of each array that holds a parameter."""
    if plan.array.format is None:
        return plan.spec
    return encoded_specs(plan.array.format, plan.array.shape, plan.spec)


def update_layouts(model: Model, sharding: ShardingPlan) -> Any:
    """Returns the PartitionSpec in which each parameter is updated, as a tree like the trained parameters."""
    trained = pick(model.abstract(), sharding.trained)
    return like(trained, {plan.array.path: plan.spec for plan in sharding.optimizer})


def initial_loss_scale(spec: StepSpec) -> dict[str, jax.Array]:
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
        return math.prod(x.shape) * num_bits(x.dtype) // 8 // shards

    return sum(size(path, x) for path, x in leaves_by_path(abstract).items())
