"""Traces and lowers a plan's programs for a mesh of devices, then compiles them; and identifies them.

Equal fingerprints mean the same program for the same devices. The text of the lowered program says all that a
declaration, a model's code and the version of Meshloom have to do with it; so it is what is compared, as a hash. The
step of the declaration (StepSpec) is saved with it for one purpose: to name the keys that make two texts differ. Where
it runs is compared as what it comes to: devices, compiler options and the sizes of the mesh, so that mesh.fsdp=-1 is
mesh.fsdp=8 on eight devices.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.config_types import CompilerOption
from ..core.errors import Problem
from ..core.key_paths import leaves
from ..core.trees import leaves_by_path, like
from ..jax_private import taking_packed
from ..pipeline.table_file import write_table
from ..plan import Plan
from ..sharding.batch import REFERENCE, BatchPlan
from ..sharding.state import HOST_KIND, State, is_on_host
from ..spec.cost_model import cost_model
from ..spec.overlap_spec import PRICES
from ..spec.plan_spec import PlanSpec
from ..spec.step_spec import StepSpec
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
from .pgle import OPTION


@dataclass(frozen=True)
class Programs(Mapping[str, Any]):
    """The programs of a run, by name. by_name: those that were asked for. state, batch: what they take, as sharded
    ShapeDtypeStructs. compiler_options: the declared ones, for all programs. options_without_device: those that
    compiling for absent chips takes. options_left_out: options of presets that the compiler does not know."""

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
    """The operands of a plan's programs, as sharded ShapeDtypeStructs. replicated: the layout of small results."""

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
    return jnp.all(jnp.stack([_all_finite(x) for x in floats]))


def _all_finite(x: jax.Array) -> jax.Array:
    if not is_on_host(x):
        return jnp.all(jnp.isfinite(x))
    # A layer after the other: the device need not have room for all of what lies on the host.
    return jnp.all(jax.lax.map(lambda layer: jnp.all(jnp.isfinite(jax.device_put(layer, jax.memory.Space.Device))), x))


PROGRAMS = ("init", "train", "evaluate", "is_finite")  # of every run; others are asked for by name


def lower(
    plan: Plan, mesh: Mesh, names: Collection[str] = PROGRAMS, drawn_paths: Collection[str] | None = None
) -> Programs:
    """Traces and lowers the plan's programs for a mesh of devices; each is a `jax.stages.Lowered`.

    init: () -> state; drawn_paths as of `build_init`. train: (state, batch) -> (state, metrics); the state is donated
    unless `StepSpec.keeps_state`. evaluate: (params, batch) -> [summed loss, number of targets]. is_finite: state ->
    boolean. log_probs: (params, batch) -> log-probabilities of the sequences, by their numbers in the batch. scores:
    the same, and below them how many targets of each sequence are not the likeliest.
    """
    operands = _operands(state_on(mesh, plan.abstract, plan.specs, plan.on_host), plan.batch, mesh)
    state, params, batch, one = operands.state, operands.state["params"], operands.batch, operands.replicated
    tokens = {name: x for name, x in batch.items() if name != REFERENCE}
    of_step = {"donate_argnums": () if plan.spec.keeps_state else (0,), "out_shardings": (operands.shardings, one)}

    def jitted(function: Callable[..., Any], out: Any = one) -> Any:
        return jax.jit(function, out_shardings=out)

    lowerings: dict[str, Callable[[], Any]] = {
        "init": lambda: jitted(build_init(plan, drawn_paths), operands.shardings).lower(),
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
    """Traces and lowers the programs that generate text (step/decode.py) for batches of one size. working: parameters
    as they are stored -> as the others take them. prefill: (parameters, tokens, padding, sampling, numbers of the
    sequences) -> (next token of each, cache). decode: (parameters, cache, newest tokens, their slot, padding, sampling,
    numbers of the sequences, number of the next token) -> the same; the cache is donated."""
    operands = _operands(state_on(mesh, plan.abstract, plan.specs, plan.on_host), plan.batch, mesh)
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

    specs_of = {each.array.path: NamedSharding(mesh, each.spec) for each in plan.sharding.parameters}
    decoded = like(plan.weights, specs_of)  # one array each, whether it is stored as several or not
    to_working = jax.jit(build_working(plan.weights), out_shardings=decoded)
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(to_working, stored),
            decoded,
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


def state_on(mesh: Mesh, abstract: State, specs: State, on_host: Collection[str]) -> State:
    """Returns the state as programs take it: of ShapeDtypeStruct, with layout and memory. on_host: paths of what lies
    on the host."""
    layouts = leaves_by_path(specs, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def one(path: str, x: Any) -> jax.ShapeDtypeStruct:
        return _on(mesh, x.shape, x.dtype, layouts[path], HOST_KIND if path in on_host else None)

    return like(abstract, {path: one(path, x) for path, x in leaves_by_path(abstract).items()})


def _operands(state: State, batch: BatchPlan, mesh: Mesh) -> _Operands:
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
    compiled = {name: taking_packed(program.compile(compiler_options=options)) for name, program in lowered.items()}
    return replace(lowered, by_name=compiled)


def _on(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, kind: str | None = None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))


PACKAGES = ("jax", "jaxlib")
PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}  # where the compiler of a platform is
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # they change the compiled program, not the lowered one
UNSET = "not set"


@dataclass(frozen=True)
class Fingerprint:
    """programs: SHA-256 of each lowered text. devices, environment: what they are compiled for, and by.
    compiler_options: those declared, by name or in sets; options_without_device: those added where the devices are not
    there. spec: the keys of the step, and the sizes of the mesh, each value as JSON."""

    programs: Mapping[str, str]
    devices: Mapping[str, str]
    environment: Mapping[str, str]
    compiler_options: Mapping[str, CompilerOption]
    options_without_device: Mapping[str, CompilerOption]
    spec: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Returns one text for everything that decides the compiled program."""
        return sha256(json.dumps(asdict(self) | {"spec": None}, sort_keys=True))


def fingerprint_of(plan: Plan, lowered: Programs, mesh: Mesh) -> Fingerprint:
    """Returns the fingerprint of lowered programs, before they are compiled."""
    own_table, file = dict[str, str](), plan.spec.pipeline.table
    if plan.pipeline is not None and file is not None:  # a table of the user's own has its contents beside its name
        own_table["pipeline.table"] = json.dumps(f"{file} ({sha256(write_table(plan.pipeline.table))[:12]})")
    return Fingerprint(
        programs={name: sha256(program.as_text()) for name, program in lowered.items()},
        devices=describe_devices(mesh),
        environment=describe_environment(mesh.devices.flat[0].platform),
        compiler_options={**lowered.compiler_options, **pgle_options(plan.spec)},
        options_without_device=lowered.options_without_device,
        spec=dict(flat(StepSpec.of(plan.spec).as_compared() | {"mesh": dict(plan.mesh.sizes)})) | own_table,
    )


def pgle_options(spec: PlanSpec) -> Options:
    """Returns the option of a PGLE file, with what the file's times come from instead of its path."""
    if (declared := spec.overlap.pgle) is None:
        return {}
    if declared != PRICES:
        return {OPTION: f"file {sha256(Path(declared).read_text())[:12]}"}
    figures = (spec.target, spec.calibration, cost_model())
    return {OPTION: f"{PRICES} {sha256(' '.join(each.model_dump_json() for each in figures))[:12]}"}


def describe_devices(mesh: Mesh) -> dict[str, str]:
    """Returns kind, number and order in the mesh of the devices."""
    devices = list(mesh.devices.flat)
    first = devices[0]
    places = [[getattr(d, name, None) for name in ("coords", "core_on_chip", "slice_index")] for d in devices]
    if not hasattr(first, "coords"):
        places = [[d.id, d.process_index] for d in devices]
    described = {
        "platform": first.platform,
        "kind": first.device_kind,
        "num_devices": str(len(devices)),
        "arrangement": sha256(json.dumps(places)),
    }
    return described | ({"processor": _processor()} if first.platform == "cpu" else {})


def describe_environment(platform_name: str) -> dict[str, str]:
    """Versions of the compiler, and flags that it takes from environment variables."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    plugin = plugin_version(platform_name)
    flags = {name: os.environ.get(name, UNSET) for name in FLAGS}
    return versions | ({"plugin": plugin} if plugin else {}) | flags


def plugin_version(platform_name: str) -> str | None:
    """Returns the compiler, such as "libtpu 0.0.42.1"; None if it is part of jaxlib."""
    for name in PLUGINS.get(platform_name, ()):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def differences(wanted: Fingerprint, found: Fingerprint, *, folder: str, fix: str) -> list[Problem]:
    """Returns the differences between the programs in `folder`, of fingerprint `found`, and the wanted ones; empty if
    they are the same. Programs that were not compiled there are not compared."""
    problems = []
    for name, ours, theirs in (
        ("devices", wanted.devices, found.devices),
        ("environment", wanted.environment, found.environment),
        ("compiler_options", wanted.compiler_options, found.compiler_options),
    ):
        problems += _different(name, ours, theirs, folder, fix)
    others = [name for name, text in found.programs.items() if wanted.programs.get(name) != text]
    if others:
        keys = list(_different("", wanted.spec, found.spec, folder, fix))
        what = f"the {' and '.join(others)} program of {folder} is another, though no key of the declaration is"
        unnamed = Problem("artifact", what, "the code of the model or of Meshloom has changed: compile it again")
        problems += keys or ([] if problems else [unnamed])
    return problems


def flat(values: Any) -> Iterable[tuple[str, str]]:
    """Yields keys with values as JSON: {"optimizer": {"b1": 0.9}} -> ("optimizer.b1", "0.9"). Lists are values, and so
    is a group without keys."""
    return ((key, json.dumps(value)) for key, value in leaves(values))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _different(
    name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], folder: str, fix: str
) -> Iterable[Problem]:
    for key in dict.fromkeys([*ours, *theirs]):
        here, there = ours.get(key, UNSET), theirs.get(key, UNSET)
        if here != there:
            where = f"{name}.{key}" if name else key
            yield Problem(where, f"{_short(here)} here, {_short(there)} in {folder}", fix)


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 and " " not in text else text


def _processor() -> str:
    """Returns the instructions that this machine's processor has: a program for one CPU may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {sha256(' '.join(sorted(flags.split())))[:12]}"
