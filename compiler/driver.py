"""The straight line: RunSpec -> Plan -> Lowered -> Compiled. One line per pass; a decision belongs inside its pass."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .arrays import build_model, find_arrays
from .attention import plan_attention
from .batch import batch_arrays, check_batch, check_length
from .compiler_options import Options, check_unroll, plan_set_options, refused_options
from .finite import is_finite
from .flops import model_flops_per_step
from .gradients import check_gradients
from .head import plan_head
from .look_up import plan_look_ups
from .loss import plan_loss_blocks
from .mesh import plan_mesh
from .optimizer import build_optimizer, check_schedule
from .plan import Plan, plan_memory, plan_state_arrays
from .problems import all_of
from .projection import plan_projections
from .remat import check_remat
from .sharding import check_rules, plan_sharding, usable_mesh
from .spec import RunSpec
from .state import plan_state, update_layouts
from .step import build_eval_step, build_init, build_train_step
from .target import plan_target
from .topology import options_without_device


def plan_run(spec: RunSpec) -> Plan:
    """Decide everything that can be decided without a compiler. Raises ConfigError with all that cannot run."""
    model = build_model(spec)
    target = plan_target(spec.target, spec.precision.compute)
    arrays = find_arrays(spec, model)
    mesh, *_ = all_of(
        lambda: plan_mesh(usable_mesh(spec), target),
        lambda: check_rules(spec.sharding, arrays),
        lambda: check_schedule(spec),
        lambda: check_remat(spec.remat, arrays),
    )
    sharding, attention, set_options, *_ = all_of(
        lambda: plan_sharding(spec.sharding, arrays, mesh),
        lambda: plan_attention(spec, target),
        lambda: plan_set_options(spec.overlap.option_sets, target),
        lambda: check_batch(spec, mesh),
        lambda: check_length(spec, model),
    )
    num_loss_blocks = plan_loss_blocks(spec, sharding, mesh, target)
    look_ups, projections, head, *_ = all_of(
        lambda: plan_look_ups(spec, model, arrays.looked_up, sharding, mesh),
        lambda: plan_projections(spec, arrays.projected, sharding, mesh, target),
        lambda: plan_head(spec, model, sharding, mesh, target, num_loss_blocks),
        lambda: check_gradients(spec, sharding),
        lambda: check_unroll(spec.overlap.layers.unroll, mesh.besides(sharding.batch_axes), target),
    )
    optimizer = build_optimizer(spec, model, update_layouts(model, sharding), mesh)
    abstract, specs = plan_state(spec, model, optimizer, sharding, mesh)
    return Plan(
        spec=spec,
        target=target,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        sharding=sharding,
        optimizer_state=plan_state_arrays(abstract, specs, sharding.optimizer, mesh),
        abstract=abstract,
        specs=specs,
        attention=attention,
        look_ups=look_ups,
        projections=projections,
        head=head,
        num_loss_blocks=num_loss_blocks,
        memory=plan_memory(spec, mesh, sharding, abstract, specs),
        model_flops_per_step=model_flops_per_step(model, spec),
        set_options=set_options,
    )


PROGRAMS = ("init", "train", "evaluate", "is_finite")


@dataclass(frozen=True)
class Programs:
    """What a run executes. init: () -> state. train: (state, batch) -> (state, metrics), the state donated. evaluate:
    (params, batch) -> [summed loss, number of targets]. is_finite: state -> boolean. state, batch: what they take, as
    sharded ShapeDtypeStructs. compiler_options: those declared, for all programs; options_without_device: those
    that compiling for absent chips takes; options_left_out: of sets, those that the compiler does not know. None: a
    program that was not asked for."""

    init: Any
    train: Any
    evaluate: Any
    is_finite: Any
    state: Any
    batch: Any
    compiler_options: Options
    options_without_device: Options
    options_left_out: tuple[str, ...]

    def named(self) -> dict[str, Any]:
        """The programs that were asked for, by name."""
        return {name: program for name in PROGRAMS if (program := getattr(self, name)) is not None}


def lower(plan: Plan, mesh: Mesh, names: Collection[str] = PROGRAMS) -> Programs:
    """Trace the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`."""
    state = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), plan.abstract, plan.specs)
    tokens_shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    tokens = _on(mesh, tokens_shape, jnp.int32, PartitionSpec(plan.sharding.batch_axes or None))
    batch = dict.fromkeys(batch_arrays(plan.spec), tokens)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    train = jax.jit(build_train_step(plan), donate_argnums=0, out_shardings=(shardings, replicated))
    traced = {
        "init": lambda: jax.jit(build_init(plan), out_shardings=shardings).lower(),
        "train": lambda: train.lower(state, batch),
        "evaluate": lambda: jax.jit(build_eval_step(plan), out_shardings=replicated).lower(state["params"], batch),
        "is_finite": lambda: jax.jit(is_finite, out_shardings=replicated).lower(state),
    }
    with jax.set_mesh(mesh):
        programs = {name: traced[name]() if name in names else None for name in PROGRAMS}
    left_out = refused_options(plan.set_options, mesh.devices.flat[0])
    options = {k: v for k, v in plan.set_options.items() if k not in left_out} | plan.spec.compiler_options
    without_device = {k: v for k, v in options_without_device(plan.target).items() if k not in options}
    return Programs(
        **programs,
        state=state,
        batch=batch,
        compiler_options=options,
        options_without_device=without_device,
        options_left_out=tuple(left_out),
    )


def build(lowered: Programs) -> Programs:
    """Compile each lowered program for its devices."""
    options = {**lowered.options_without_device, **lowered.compiler_options} or None
    return replace(lowered, **{name: p.compile(compiler_options=options) for name, p in lowered.named().items()})


def _on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
