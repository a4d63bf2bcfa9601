"""What several tests share: a reference step on one device, and ways to run a plan."""

import io
import logging
import lzma
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from jax import Array
from jax.profiler import ProfileData
from jax.sharding import NamedSharding

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.jaxpr.subprograms import scan_of, subprograms, without_consts
from meshloom.compiler.optim.lr_schedules import CosineSchedule
from meshloom.compiler.optim.optimizers import AdamWConfig
from meshloom.compiler.plan import Plan
from meshloom.compiler.sharding.batch import batch_arrays
from meshloom.compiler.spec.spec import RunSpec
from meshloom.compiler.step.train_step import build_loss, build_train_step
from meshloom.compiler.target.target import TargetPlan, plan_target
from meshloom.compiler.xla.programs import Programs, build, lower
from meshloom.models import Context, Model, split_aux
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.cli.main import run
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train.feed import in_token_order
from meshloom.runtime.train.loop import Loop
from meshloom.runtime.train.metrics import Metrics
from meshloom.runtime.train.observer import Observer, Observers
from meshloom.runtime.train.time_spent import Stopwatch

TESTS = Path(__file__).parents[1]
SCHEDULES = TESTS / "schedules"


def recorded_text(name: str) -> str:
    """A scheduled program as a compiler wrote it; README.md of the folder says what it is of."""
    return lzma.decompress((SCHEDULES / f"{name}.txt.xz").read_bytes()).decode()


def forward(model: Model, params: Any, inputs: Array, segment_ids: Array | None = None) -> Array:
    """Logits on one device: layers unrolled, no scan, no remat, no sharding."""
    context = Context(jnp.arange(inputs.shape[1])[None], lambda name, x, *axes, **_: x, segment_ids_BT=segment_ids)
    x = model.embed.apply(params["embed"], inputs, context)
    for stack in model.stacks:
        for i in range(stack.num_layers):
            x, _ = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
    return model.head.apply(model.head_params(params["head"], params["embed"]), x, context)


def reference_loss(model: Model, params: Any, inputs: Array, targets: Array) -> Array:
    """Mean cross-entropy on one device, by optax's own loss."""
    logits = forward(model, params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def reference_adamw(run: RunSpec, params: Any, gradients: Any, moments: Any, step: int) -> Any:
    """One step of clipped AdamW in NumPy, from the paper's formulas. `step` counts from 0. Updates in place."""
    spec, schedule, num_steps = run.optimizer, run.schedule, run.num_steps
    assert isinstance(spec, AdamWConfig)
    assert isinstance(schedule, CosineSchedule)
    assert spec.max_grad_norm is not None
    norm = math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(gradients)))
    warmup = schedule.num_warmup_steps
    if step < warmup:
        rate = spec.learning_rate * (step + 1) / warmup
    else:
        progress = (step - warmup) / (num_steps - 1 - warmup)
        low = spec.learning_rate * schedule.final_learning_rate_fraction
        rate = low + (spec.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * progress))
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    updated = []
    for (path, p), g, m, v in zip(flat, jax.tree.leaves(gradients), *map(jax.tree.leaves, moments), strict=True):
        g = np.asarray(g, np.float64) * (min(1.0, spec.max_grad_norm / norm) if norm else 1.0)
        m[...] = spec.b1 * m + (1 - spec.b1) * g
        v[...] = spec.b2 * v + (1 - spec.b2) * g**2
        direction = m / (1 - spec.b1 ** (step + 1)) / (np.sqrt(v / (1 - spec.b2 ** (step + 1))) + spec.epsilon)
        decay = 0.0 if "scale_E" in str(path) else spec.weight_decay
        updated.append(np.asarray(p, np.float64) - rate * (direction + decay * np.asarray(p, np.float64)))
    return jax.tree.unflatten(tree, updated), norm, rate


def reference_steps(run: RunSpec, params: Any, tokens: Any, loss_and_gradients: Any) -> Any:
    """Steps on one device without any of our step: ((loss, gradients) of the first batch, (loss, norm, rate) of each).
    loss_and_gradients: of (parameters, a batch of tokens)."""
    moments = [jax.tree.map(lambda x: np.zeros(x.shape, np.float64), params) for _ in range(2)]
    first, curve = None, []
    for step, batch in enumerate(tokens):
        loss, grads = loss_and_gradients(jax.tree.map(np.float32, params), batch)
        first = first or (float(loss), jax.tree.map(np.asarray, grads))
        params, norm, rate = reference_adamw(run, params, grads, moments, step)
        curve.append((float(loss), norm, rate))
    return first, np.array(curve)


def target_of(name: str, *, num_slices: int = 1) -> TargetPlan:
    """The plan of a target by its name, computing in bfloat16."""
    chosen = (f"target={name}", *(() if num_slices == 1 else (f"target.num_slices={num_slices}",)))
    return plan_target(read_spec(Request(chosen), then=lambda spec: spec.target), "bfloat16")


def plan_as_declared(*overrides: str) -> Plan:
    """Returns the plan of exactly these overrides, without the small sizes that `plan_of` adds."""
    return read_spec(Request(overrides), then=plan_run)


class _LazyPrograms:
    """The programs of a plan on the first devices, each lowered and compiled when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.rows = plan, plan.row_order.rows()
        self._mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
        self._shapes = lower(plan, self._mesh, ())

        self._built: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shapes, name)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built |= build(lower(self._plan, self._mesh, [name]))
        return self._built[name]


_PROGRAMS: dict[int, _LazyPrograms] = {}  # by the identity of the plan, which each keeps alive


def programs_of(plan: Plan) -> Programs:
    """Returns the plan's compiled programs on the first devices; the tests of a process share them."""
    if id(plan) not in _PROGRAMS:
        _PROGRAMS[id(plan)] = _LazyPrograms(plan)
    return cast(Programs, _PROGRAMS[id(plan)])


def tiered(names: Iterable[str], *, plain: Collection[str], release: Collection[str] = ()) -> list[Any]:
    """Returns a test's parameters: `plain` names are of the plain tier, `release` names of the last, others of `ci`."""
    names = list(names)
    assert {*plain, *release} <= {*names}, {*plain, *release} - {*names}
    mark = {name: pytest.mark.release if name in release else pytest.mark.ci for name in names if name not in plain}
    return [pytest.param(name, marks=mark[name]) if name in mark else name for name in names]


def on_devices(programs: Programs, tokens: np.ndarray, order: np.ndarray | None = None) -> dict[str, Array]:
    """(batch, length + 1) tokens as a global batch. order: of the tokens, where devices split sequences."""
    batch = in_token_order({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}, order)
    if isinstance(programs, _LazyPrograms):
        batch = {name: x[programs.rows] for name, x in batch.items()}
    return {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}


def evaluate(programs: Programs, params: Any, tokens: np.ndarray) -> float:
    """Mean loss over the tokens of a batch."""
    loss, num_targets = programs["evaluate"](params, on_devices(programs, tokens))
    return float(loss / num_targets)


def documented_files(command: str) -> set[str]:
    """Returns what docs/running.md says that a command leaves in its run directory: files, and folders by name."""
    lines = (TESTS.parent / "docs" / "running.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    column = next(row for row in rows if row[0] == "file").index(f"`{command}`")
    written = [re.findall(r"`(.*?)`", row[0]) for row in rows if row[column : column + 1] == ["yes"]]
    return {name if name.startswith("logs/") else name.split("/")[0] for names in written for name in names}


def written_files(run_dir: Path) -> set[str]:
    """Returns what there is in a run directory, as `documented_files` names it."""
    names = {path.name for path in run_dir.iterdir()} - {"logs"}
    return names | {f"logs/{path.name.replace('process-0', 'process-N')}" for path in (run_dir / "logs").iterdir()}


class NoData:
    """Takes the place of an iterator over batches, for checkpoints of states that came from none."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: Mapping[str, int]) -> None:
        assert state == {}


class Batches(NoData):
    """Gives the same batch again and again, as `Loop` reads them."""

    def __init__(self, batch: dict[str, np.ndarray]):
        super().__init__()
        self.batch = batch

    def __next__(self) -> dict[str, np.ndarray]:
        return self.batch


class Reported(Observer):
    """Collects the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[Metrics] = []

    def step_reported(self, metrics: Metrics) -> None:
        self.metrics.append(metrics)


def observers_of(*each: Observer) -> Observers:
    """Returns the observers of a loop, with a stopwatch of their own."""
    observers = Observers(Stopwatch(time.time()))
    for one in each:
        observers.add(one)
    return observers


def loop_over(
    batch: dict[str, np.ndarray],
    plan: Plan,
    programs: Programs,
    checkpoints: Checkpoints,
    stop: StopRequest,
    observers: Observers,
) -> Loop:
    """Returns a loop that trains on one batch again and again, and evaluates on it."""
    batches: Any = Batches(batch)
    return Loop(
        plan, programs, batches=batches, held_out=[batch], checkpoints=checkpoints, stop=stop, observers=observers
    )


def gradients_of(
    plan: Plan, params: Any, tokens: np.ndarray, documents: Mapping[str, np.ndarray] = MappingProxyType({})
) -> tuple[float, Any]:
    """Loss and gradients of the plan's sharded program. documents: positions and segment_ids of packed sequences."""
    mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
    specs = plan.specs["params"]
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    rows = NamedSharding(mesh, plan.roles.tokens_spec)
    host = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], **documents}
    host = in_token_order(host, plan.token_order.of_sequence(tokens.shape[1] - 1))
    batch = {name: jax.device_put(x[plan.row_order.rows()], rows) for name, x in host.items()}
    with jax.set_mesh(mesh):
        (loss, num_targets), grads, *_ = jax.jit(build_loss(plan, with_gradients=True))(sharded, batch)
    return float(loss / num_targets), jax.tree.map(np.asarray, grads)


WRITTEN = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce",
           "psum_invariant": "all-reduce", "all_to_all": "all-to-all", "ppermute": "collective-permute"}  # fmt: skip


def written_collectives(plan: Plan) -> tuple[Counter[str], Counter[str]]:
    """Returns how many collectives the train step itself asks for and the elements of their results on a device, by
    kind, loop bodies once per trip, all branches, without scalars. Nothing is compiled: what a partitioner adds along
    the axes that are left to it is not in it."""
    shape = (plan.spec.global_batch_size, plan.spec.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in batch_arrays(plan.spec)}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])):
        traced = jax.make_jaxpr(build_train_step(plan))(plan.abstract, batch)
    counts, elements = Counter[str](), Counter[str]()
    for kind, size, trips in _each_written(without_consts(traced), 1):
        counts[kind] += trips
        elements[kind] += trips * size
    return counts, elements


def _each_written(jaxpr: Any, trips: int) -> Iterator[tuple[str, int, int]]:
    for equation in jaxpr.eqns:
        if kind := WRITTEN.get(equation.primitive.name):
            yield from ((kind, x.aval.size, trips) for x in equation.outvars if x.aval.size > 1)
        elif equation.primitive.name == "scan":
            scan = scan_of(equation.params)
            yield from _each_written(scan.body, trips * scan.num_trips)
        else:
            for inner in subprograms(equation.params):
                yield from _each_written(inner, trips)


_COLLECTIVE = re.compile(r" = (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")  # fmt: skip  # noqa: E501
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|(?:true|false)_computation|branch_computations)=(\{.*?\}|\S+)")


def collectives_per_step(hlo: str, *, at_least_elements: int = 2) -> Counter[str]:
    """Collectives by kind that a compiled program runs, one for each array, loop bodies once per trip, all branches.

    Scalars are left out: the loss and the squares of the gradient norm are summed whatever the layout.
    """
    counts: Counter[str] = Counter()
    for kind, sizes, trips in _each_collective(hlo):
        counts[kind] += trips * sum(size >= at_least_elements for size in sizes)
    return counts


def collective_elements_per_step(hlo: str) -> Counter[str]:
    """Elements of their results, by kind, likewise."""
    elements: Counter[str] = Counter()
    for kind, sizes, trips in _each_collective(hlo):
        elements[kind] += trips * sum(size for size in sizes if size > 1)
    return elements


def collectives_run(programs: Programs, tokens: np.ndarray, folder: Path) -> Counter[str]:
    """Collectives by kind that a CPU device runs in a step, by the runtime's own trace: branches where they are taken.

    folder: for the trace.
    """
    state, batch = programs["init"](), on_devices(programs, tokens)
    with jax.profiler.trace(folder):
        jax.block_until_ready(programs["train"](state, batch))
    trace = ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    events = Counter(event.name for plane in trace.planes for line in plane.lines for event in line.events)
    counts: Counter[str] = Counter()
    for name, _, kind, _ in re.findall(rf"%?([\w.\-]+){_COLLECTIVE.pattern}", programs["train"].as_text()):
        counts[kind] += events[name]
    return Counter({kind: count // jax.device_count() for kind, count in counts.items()})


def largest_outside_loops(hlo: str, kind: str) -> int:
    """Elements of the largest array of this kind of collective that no loop runs."""
    return max(max(sizes) for each, sizes, trips in _each_collective(hlo) if each == kind and trips == 1)


def _each_collective(hlo: str) -> Iterator[tuple[str, list[int], int]]:
    """(kind, elements of each array of its result, times that it is run)."""
    computations = {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)}
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry

    def visit(name: str, trips: int) -> Iterator[tuple[str, list[int], int]]:
        for line in computations.get(name, "").splitlines():
            if match := _COLLECTIVE.search(line):
                shapes = re.findall(r"\w+\[([\d,]*)\]", match["type"])
                sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
                # The operands of an all-to-all are the parts of one array.
                yield match["kind"], [sum(sizes)] if match["kind"] == "all-to-all" else sizes, trips
                continue
            inner = trips
            if " while(" in line:
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                assert known, line
                inner = trips * int(known[1])
            for called in re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line))):
                yield from visit(called, inner)

    yield from visit(entry[1], 1)


def with_plugin(folder: Path, name: str, code: str) -> dict[str, str]:
    """The environment of a process in which JAX finds this plugin, instead of any of its name."""
    path = folder / "plugins/jax_plugins" / name / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])])}


@dataclass(frozen=True)
class Ended:
    """A command that has ended, with what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_in_process(*args: str, cwd: Path | None = None, **environment: str) -> Ended:
    """Runs the command in this process, to its end: what a start of Python costs is saved. What it sets for a whole
    process is put back: Hydra's state, its arguments, the level of logging, the environment, the directory."""
    out, error = io.StringIO(), io.StringIO()
    # Hydra closes all handlers of logging, and this one closes any stream but Python's own: pytest's would be lost.
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
    argv, before, here, level = list(sys.argv), dict(os.environ), Path.cwd(), logging.root.level
    os.environ |= environment
    os.chdir(cwd or here)
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = run(list(args))
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ |= before
        sys.argv[:] = argv
        logging.root.setLevel(level)
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    return Ended(code, out.getvalue(), error.getvalue())


def meshloom(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, to its end, with the XLA flags of the tests."""
    line = [sys.executable, "-m", "meshloom", *args]
    return subprocess.run(line, capture_output=True, text=True, cwd=cwd, env=os.environ | env, timeout=300, check=False)
