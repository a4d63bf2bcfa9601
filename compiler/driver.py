"""The straight line: RunSpec -> Plan -> Lowered -> Compiled. One line per pass; a decision belongs inside its pass."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.models import build_model

from .arrays import find_arrays
from .batch import batch_arrays, check_batch
from .flops import model_flops_per_step
from .mesh import plan_mesh
from .optimizer import build_optimizer, plan_optimizer_state
from .plan import Plan, plan_memory, plan_state_arrays
from .problems import all_of
from .sharding import check_rules, plan_sharding
from .spec import RunSpec
from .step import build_eval_step, build_init, build_train_step
from .target import plan_target
from .trees import like


def plan_run(spec: RunSpec) -> Plan:
    """Decide everything that can be decided without a compiler. Raises ConfigError with all that cannot run."""
    model = build_model(spec.model)
    target = plan_target(spec.target)
    arrays = find_arrays(spec, model)
    mesh, _ = all_of(lambda: plan_mesh(spec.mesh, target), lambda: check_rules(spec.sharding, arrays))
    sharding, _ = all_of(lambda: plan_sharding(spec.sharding, arrays, mesh), lambda: check_batch(spec, mesh))
    optimizer = build_optimizer(spec.optimizer, spec.num_steps)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, spec.precision.parameters), model.abstract())
    params_specs = like(params, {plan.array.path: plan.spec for plan in sharding.parameters})
    moments_specs = like(params, {plan.array.path: plan.spec for plan in sharding.optimizer})
    state, state_specs = plan_optimizer_state(optimizer, params, moments_specs, mesh)
    state_arrays = plan_state_arrays(state, state_specs, sharding.optimizer, mesh)
    return Plan(
        spec=spec,
        target=target,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        sharding=sharding,
        optimizer_state=state_arrays,
        abstract={"step": jax.ShapeDtypeStruct((), jnp.int32), "params": params, "optimizer": state},
        specs={"step": PartitionSpec(), "params": params_specs, "optimizer": state_specs},
        memory=plan_memory(spec, mesh, sharding, state_arrays),
        model_flops_per_step=model_flops_per_step(model, spec),
    )


@dataclass(frozen=True)
class Programs:
    """What a run executes. init: () -> state. train: (state, batch) -> (state, metrics), the state donated.
    evaluate: (params, batch) -> loss. state, batch: what they take, as ShapeDtypeStructs with shardings."""

    init: Any
    train: Any
    evaluate: Any
    state: Any
    batch: Any


def lower(plan: Plan, mesh: Mesh) -> Programs:
    """Trace the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`."""
    state = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), plan.abstract, plan.specs)
    tokens_shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    tokens = _on(mesh, tokens_shape, jnp.int32, PartitionSpec(plan.sharding.batch_axes or None))
    batch = dict.fromkeys(batch_arrays(plan.spec), tokens)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        init = jax.jit(build_init(plan), out_shardings=shardings).lower()
        train = jax.jit(build_train_step(plan), donate_argnums=0, out_shardings=(shardings, replicated))
        evaluate = jax.jit(build_eval_step(plan), out_shardings=replicated)
        return Programs(init, train.lower(state, batch), evaluate.lower(state["params"], batch), state, batch)


def build(lowered: Programs) -> Programs:
    """Compile each lowered program for its devices."""
    return replace(
        lowered, init=lowered.init.compile(), train=lowered.train.compile(), evaluate=lowered.evaluate.compile()
    )


def _on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
