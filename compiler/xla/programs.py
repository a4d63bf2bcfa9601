"""A plan's programs: traced and lowered for a mesh of devices, then compiled."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..plan import Plan
from ..sharding.batch import batch_arrays
from ..step.state_checks import is_finite
from ..step.train_step import build_eval_step, build_init, build_train_step
from ..target.compiler_options import Options, refused_options
from ..target.topology import options_without_device

PROGRAMS = ("init", "train", "evaluate", "is_finite")


@dataclass(frozen=True)
class Programs:
    """A run executes these programs. init: () -> state. train: (state, batch) -> (state, metrics), the state
    donated unless `RunSpec.keeps_state`. evaluate:
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
        """Returns the programs that were asked for, by name."""
        return {name: program for name in PROGRAMS if (program := getattr(self, name)) is not None}


def lower(plan: Plan, mesh: Mesh, names: Collection[str] = PROGRAMS) -> Programs:
    """Traces and lowers the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`."""
    state = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), plan.abstract, plan.specs)
    tokens_shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    tokens = _on(mesh, tokens_shape, jnp.int32, plan.roles.tokens_spec)
    batch = dict.fromkeys(batch_arrays(plan.spec), tokens)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    replicated = NamedSharding(mesh, PartitionSpec())
    donated = () if plan.spec.keeps_state else (0,)
    train = jax.jit(build_train_step(plan), donate_argnums=donated, out_shardings=(shardings, replicated))
    traced = {
        "init": lambda: jax.jit(build_init(plan), out_shardings=shardings).lower(),
        "train": lambda: train.lower(state, batch),
        "evaluate": lambda: jax.jit(build_eval_step(plan), out_shardings=replicated).lower(state["params"], batch),
        "is_finite": lambda: jax.jit(is_finite, out_shardings=replicated).lower(state),
    }
    with jax.set_mesh(mesh):
        programs = {name: traced[name]() if name in names else None for name in PROGRAMS}
    left_out = refused_options(plan.preset_options, mesh.devices.flat[0])
    options = {k: v for k, v in plan.preset_options.items() if k not in left_out} | plan.spec.compiler_options
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
    """Compiles each lowered program for its devices."""
    options = {**lowered.options_without_device, **lowered.compiler_options} or None
    return replace(lowered, **{name: p.compile(compiler_options=options) for name, p in lowered.named().items()})


def _on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
