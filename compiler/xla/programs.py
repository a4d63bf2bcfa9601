"""Traces and lowers a plan's programs for a mesh of devices, then compiles them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..plan import Plan
from ..sharding.batch import REFERENCE, BatchPlan
from ..sharding.state import State
from ..step.decode import (
    BatchShape,
    Sampling,
    batch_spec,
    build_decode,
    build_prefill,
    build_working,
    plan_cache,
    sample,
)
from ..step.train_step import build_init, build_log_probs, build_loss, build_train_step
from ..target.compiler_options import Options, refused_options
from ..target.target import TargetPlan
from ..target.topology import options_without_device


@dataclass(frozen=True)
class Programs(Mapping[str, Any]):
    """The programs of a run, by name.

    by_name: those that were asked for. state, batch: what they take, as sharded
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


def is_finite(state: Any) -> jax.Array:
    """Returns True if no array of the state holds NaN or infinity. A run asks before each save."""
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


PROGRAMS = ("init", "train", "evaluate", "is_finite")  # of every run; others are asked for by name


def lower(plan: Plan, mesh: Mesh, names: Collection[str] = PROGRAMS) -> Programs:
    """Traces and lowers the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`.

    init: () -> state. train: (state, batch) -> (state, metrics); the state is donated unless `StepSpec.keeps_state`.
    evaluate: (params, batch) -> [summed loss, number of targets]. is_finite: state -> boolean. log_probs: (params,
    batch) -> log-probabilities of the sequences, by their numbers in the batch. scores: the same, and below them how
    many targets of each sequence are not the likeliest.
    """
    operands = _operands(plan.abstract, plan.specs, plan.batch, mesh)
    state, params, batch, one = operands.state, operands.state["params"], operands.batch, operands.replicated
    tokens = {name: x for name, x in batch.items() if name != REFERENCE}
    of_step = {"donate_argnums": () if plan.spec.keeps_state else (0,), "out_shardings": (operands.shardings, one)}

    def jitted(function: Callable[..., Any], out: Any = one) -> Any:
        return jax.jit(function, out_shardings=out)

    lowerings: dict[str, Callable[[], Any]] = {
        "init": lambda: jitted(build_init(plan), operands.shardings).lower(),
        "train": lambda: jax.jit(build_train_step(plan), **of_step).lower(state, batch),
        "evaluate": lambda: jitted(build_loss(plan, with_gradients=False)).lower(params, batch),
        "is_finite": lambda: jitted(is_finite).lower(state),
        "log_probs": lambda: jitted(build_log_probs(plan)).lower(params, tokens),
        "scores": lambda: jitted(build_log_probs(plan, counts_misses=True)).lower(params, tokens),
    }
    with jax.set_mesh(mesh):
        programs = {name: lower_one() for name, lower_one in lowerings.items() if name in names}
    return _programs(plan.preset_options, plan.spec.compiler_options, plan.target, mesh, programs, operands)


def lower_generation(
    plan: Plan, mesh: Mesh, shape: BatchShape, names: Collection[str] = ("working", "prefill", "decode")
) -> Programs:
    """Traces and lowers the programs that generate text (step/decode.py) for batches of one size.

    working: parameters as they are stored -> as the others take them. prefill: (parameters, tokens, padding, sampling,
    numbers of the sequences) -> (next token of each, cache). decode: (parameters, cache, newest tokens, their slot,
    padding, sampling, numbers of the sequences, number of the next token) -> the same; the cache is donated.
    """
    operands = _operands(plan.abstract, plan.specs, plan.batch, mesh)
    stored = operands.state["params"]
    cache, specs = plan_cache(plan, shape)
    cache = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), cache, specs)
    rows = batch_spec(plan.spec.sharding, plan.mesh, shape.num_sequences)
    of_rows = _on(mesh, (shape.num_sequences,), jnp.int32, rows)
    tokens = _on(mesh, (shape.num_sequences, shape.prompt_length), jnp.int32, PartitionSpec(*rows, None))
    one = operands.replicated
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=one)
    sampling = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), Sampling.abstract())
    layout = jax.tree.map(lambda x: x.sharding, cache)
    layout_of = (plan.model, plan.spec.sharding, plan.mesh)
    run_prefill, run_decode = build_prefill(*layout_of, cache), build_decode(*layout_of, plan.ops, shape.num_slots)

    def prefill(params: Any, tokens: Any, padding: Any, sampling: Any, numbers: Any) -> Any:
        logits, cache = run_prefill(params, tokens, padding)
        return sample(logits, sampling, numbers, jnp.zeros((), jnp.int32)), cache

    def decode(
        params: Any, cache: Any, newest: Any, slot: Any, padding: Any, sampling: Any, numbers: Any, count: Any
    ) -> Any:
        logits, cache = run_decode(params, cache, newest, slot, padding)
        return sample(logits, sampling, numbers, count), cache

    to_working = jax.jit(build_working(plan.weights), out_shardings=operands.shardings["params"])
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
            jax.eval_shape(to_working, stored),
            stored,
        )
        lowerings: dict[str, Callable[[], Any]] = {
            "working": lambda: to_working.lower(stored),
            "prefill": lambda: jax.jit(prefill, out_shardings=(one, layout)).lower(
                params, tokens, of_rows, sampling, of_rows
            ),
            "decode": lambda: jax.jit(decode, donate_argnums=1, out_shardings=(one, layout)).lower(
                params, cache, _on(mesh, of_rows.shape, jnp.int32, one.spec), scalar, of_rows, sampling, of_rows, scalar
            ),
        }
        programs = {name: lower_one() for name, lower_one in lowerings.items() if name in names}
    return _programs(plan.preset_options, plan.spec.compiler_options, plan.target, mesh, programs, operands)


def _operands(abstract: State, specs: State, batch: BatchPlan, mesh: Mesh) -> _Operands:
    state = jax.tree.map(lambda x, spec: _on(mesh, x.shape, x.dtype, spec), abstract, specs)
    arrays = {name: _on(mesh, x.shape, x.dtype, spec) for name, (x, spec) in batch.shapes.items()}
    return _Operands(state, arrays, NamedSharding(mesh, PartitionSpec()))


def _programs(
    of_presets: Options,
    declared: Options,
    target: TargetPlan,
    mesh: Mesh,
    programs: Mapping[str, Any],
    operands: _Operands,
) -> Programs:
    left_out = refused_options(of_presets, mesh.devices.flat[0])
    options = {**{k: v for k, v in of_presets.items() if k not in left_out}, **declared}
    without_device = {k: v for k, v in options_without_device(target).items() if k not in options}
    return Programs(programs, operands.state, operands.batch, options, without_device, tuple(left_out))


def build(lowered: Programs) -> Programs:
    """Compiles each lowered program for its devices."""
    options = {**lowered.options_without_device, **lowered.compiler_options} or None
    compiled = {name: program.compile(compiler_options=options) for name, program in lowered.items()}
    return replace(lowered, by_name=compiled)


def _on(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
