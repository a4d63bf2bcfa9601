"""The optimizer of a run: clipping and then the chosen optimizer, in float32, and the layout of its state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshloom.models import Model

from ..core.errors import raise_if_any
from ..core.trees import leaves_by_path, pick
from ..core.user_code import blamed_on_user
from ..optim.contract import Setting
from ..optim.parameter_kinds import parameter_kinds
from ..spec.spec import RunSpec
from ..target.mesh import MeshPlan


def check_schedule(spec: RunSpec) -> None:
    """Raises ConfigError if the schedule does not fit in the run."""
    raise_if_any(spec.schedule.problems(spec.num_steps))


def build_schedule(spec: RunSpec) -> optax.Schedule:
    """Returns the schedule: the number of updates made -> the learning rate of the next."""
    return spec.schedule.build(spec.optimizer.learning_rate, spec.num_steps)


def build_optimizer(spec: RunSpec, model: Model, layouts: Any, mesh: MeshPlan) -> optax.GradientTransformation:
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
