"""The optimizer, its schedule and the layout of its state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .mesh import MeshPlan
from .spec import OptimizerSpec


def build_schedule(spec: OptimizerSpec, num_steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then a cosine down to the final fraction at the last step.

    A run that is shorter than its warm-up ends on the way up.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=spec.learning_rate,
        warmup_steps=spec.num_warmup_steps,
        decay_steps=max(num_steps, spec.num_warmup_steps + 1),
        end_value=spec.learning_rate * spec.final_learning_rate_fraction,
    )


def build_optimizer(spec: OptimizerSpec, num_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW. Weight decay is on matrices alone: not on norm scales."""
    return optax.chain(
        optax.clip_by_global_norm(spec.max_grad_norm),
        optax.adamw(
            build_schedule(spec, num_steps),
            b1=spec.b1,
            b2=spec.b2,
            eps=spec.epsilon,
            weight_decay=spec.weight_decay,
            mask=_is_matrix,
        ),
    )


def plan_optimizer_state(optimizer: optax.GradientTransformation, params: Any, specs: Any, mesh: MeshPlan) -> Any:
    """The abstract optimizer state, each leaf with the PartitionSpec that its computation gives it.

    params: tree of ShapeDtypeStruct. specs: the layout of parameter-shaped state, as a tree like it. `optimizer.init`
    is traced over explicitly sharded types, so factored, masked and partitioned states come out right without devices.
    Returns two trees like the state: of ShapeDtypeStruct and of PartitionSpec.
    """
    explicit = mesh.abstract(AxisType.Explicit)
    sharded = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(explicit, spec)), params, specs
    )
    with jax.sharding.use_abstract_mesh(explicit):
        state = jax.eval_shape(optimizer.init, sharded)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return abstract, jax.tree.map(lambda x: x.sharding.spec if x.sharding is not None else PartitionSpec(), state)


def _is_matrix(params: Any) -> Any:
    """True for leaves that multiply activations. A norm scale has one dimension, or two when stacked over layers."""
    stacked = {name for name in params if name not in ("embed", "head")}
    return {
        name: jax.tree.map(lambda x: jnp.ndim(x) - (name in stacked) > 1, tree)  # noqa: B023 (used at once)
        for name, tree in params.items()
    }
