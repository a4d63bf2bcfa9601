"""Traces and lowers a plan's programs for a mesh of devices, then compiles them."""

from collections.abc import Callable, Collection, Iterator, Mapping
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


@dataclass(frozen=True)
class Programs(Mapping[str, Any]):
    """The programs of a run, by name.

    by_name: those that were asked for, in the order of `PROGRAMS`. state, batch: what they take, as sharded
    ShapeDtypeStructs. compiler_options: the declared ones, for all programs. options_without_device: those that
    compiling for absent chips takes. options_left_out: options of presets that the compiler does not know.
    """

    by_name: Mapping[str, Any]
    state: Any
    batch: Any
    compiler_options: Options
    options_without_device: Options
    options_left_out: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)


@dataclass(frozen=True)
class _Operands:
    """The operands of a plan's programs, as sharded ShapeDtypeStructs.

    replicated: the layout of small results.
    """

    state: Any
    batch: Any
    replicated: NamedSharding

    @property
    def shardings(self) -> Any:
        """Returns the layout of the state."""
        return jax.tree.map(lambda x: x.sharding, self.state)


def _lower_init(plan: Plan, operands: _Operands) -> Any:
    """Lowers () -> state."""
    return jax.jit(build_init(plan), out_shardings=operands.shardings).lower()


def _lower_train(plan: Plan, operands: _Operands) -> Any:
    """Lowers (state, batch) -> (state, metrics); the state is donated unless `StepSpec.keeps_state`."""
    donated = () if plan.spec.keeps_state else (0,)
    layouts = (operands.shardings, operands.replicated)
    step = jax.jit(build_train_step(plan), donate_argnums=donated, out_shardings=layouts)
    return step.lower(operands.state, operands.batch)


def _lower_evaluate(plan: Plan, operands: _Operands) -> Any:
    """Lowers (params, batch) -> [summed loss, number of targets]."""
    step = jax.jit(build_eval_step(plan), out_shardings=operands.replicated)
    return step.lower(operands.state["params"], operands.batch)


def _lower_is_finite(plan: Plan, operands: _Operands) -> Any:
    """Lowers state -> boolean."""
    del plan
    return jax.jit(is_finite, out_shardings=operands.replicated).lower(operands.state)


_LOWER: Mapping[str, Callable[[Plan, _Operands], Any]] = {
    "init": _lower_init, "train": _lower_train, "evaluate": _lower_evaluate, "is_finite": _lower_is_finite,
}  # fmt: skip
PROGRAMS = tuple(_LOWER)


def lower(plan: Plan, mesh: Mesh, names: Collection[str] = PROGRAMS) -> Programs:
    """Traces and lowers the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`."""
    state = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), plan.abstract, plan.specs)
    tokens_shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    tokens = _on(mesh, tokens_shape, jnp.int32, plan.roles.tokens_spec)
    batch = dict.fromkeys(batch_arrays(plan.spec), tokens)
    operands = _Operands(state, batch, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        programs = {name: lower_one(plan, operands) for name, lower_one in _LOWER.items() if name in names}
    left_out = refused_options(plan.preset_options, mesh.devices.flat[0])
    options = {k: v for k, v in plan.preset_options.items() if k not in left_out} | plan.spec.compiler_options
    without_device = {k: v for k, v in options_without_device(plan.target).items() if k not in options}
    return Programs(programs, state, batch, options, without_device, tuple(left_out))


def build(lowered: Programs) -> Programs:
    """Compiles each lowered program for its devices."""
    options = {**lowered.options_without_device, **lowered.compiler_options} or None
    compiled = {name: program.compile(compiler_options=options) for name, program in lowered.items()}
    return replace(lowered, by_name=compiled)


def _on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
