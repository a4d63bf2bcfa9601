"""Plans and their compiled programs, on batches of tokens."""

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.jax_private import taking_packed
from meshloom.compiler.pipeline.stage_layers import layers_of, split_evenly
from meshloom.compiler.pipeline.table import PipelineTable
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.pipeline import PipelineSchedule
from meshloom.compiler.step.pipeline_state import SlotBranches
from meshloom.compiler.step.placement_order import FromState
from meshloom.compiler.step.train_step import build_loss
from meshloom.compiler.target.target import TargetPlan, plan_target
from meshloom.compiler.xla.programs import Programs, build, lower
from meshloom.runtime.train.feed import in_token_order


def target_of(name: str, *, num_slices: int = 1) -> TargetPlan:
    """The plan of a target by its name, computing in bfloat16."""
    chosen = (f"target={name}", *(() if num_slices == 1 else (f"target.num_slices={num_slices}",)))
    return plan_target(read_spec(Request(chosen), then=lambda spec: spec.target), "bfloat16")


def plan_as_declared(*overrides: str) -> Plan[RunSpec]:
    """Returns the plan of exactly these overrides, without the small sizes that `plan_of` adds."""
    return read_spec(Request(overrides), then=plan_run)


class _LazyPrograms:
    """The programs of a plan on the first devices, each lowered and compiled when it is first asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.rows = plan, plan.batch.row_order.rows()
        self._mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
        self._shapes = lower(plan, self._mesh, ())

        self._lowered, self._built = dict[str, Programs](), dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shapes, name)

    def lowered(self, name: str) -> Programs:
        if name not in self._lowered:
            self._lowered[name] = lower(self._plan, self._mesh, [name])
        return self._lowered[name]

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built |= build(self.lowered(name))
        return self._built[name]


_PROGRAMS: dict[int, _LazyPrograms] = {}  # by the identity of the plan, which each keeps alive


def programs_of(plan: Plan) -> Programs:
    """Returns the plan's compiled programs on the first devices; the tests of a process share them."""
    if id(plan) not in _PROGRAMS:
        _PROGRAMS[id(plan)] = _LazyPrograms(plan)
    return cast(Programs, _PROGRAMS[id(plan)])


def lowered_of(plan: Plan, *names: str) -> list[Any]:
    """Returns what the plan's compiled programs are made from, for a proof (support/proofs.py)."""
    programs = cast(_LazyPrograms, programs_of(plan))
    options = repr((programs.compiler_options, programs.options_without_device))
    return [programs.lowered(name)[name] for name in names] + [options, of_reference(plan)]


def on_host(programs: Programs, tokens: np.ndarray, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """(batch, length + 1) tokens as the arrays that go to devices. order: of the tokens, where devices split them."""
    batch = in_token_order(batch_of(tokens), order)
    return {name: x[programs.rows] if isinstance(programs, _LazyPrograms) else x for name, x in batch.items()}


def on_devices(programs: Programs, tokens: np.ndarray, order: np.ndarray | None = None) -> dict[str, Array]:
    """(batch, length + 1) tokens as a global batch. order: of the tokens, where devices split sequences."""
    batch = on_host(programs, tokens, order)
    return {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}


def evaluate(programs: Programs, params: Any, tokens: np.ndarray) -> float:
    """Mean loss over the tokens of a batch."""
    loss, num_targets = programs["evaluate"](params, on_devices(programs, tokens))
    return float(loss / num_targets)


def batch_of(tokens: np.ndarray, documents: Mapping[str, np.ndarray] = MappingProxyType({})) -> dict[str, np.ndarray]:
    """(batch, length + 1) tokens as inputs and targets. documents: positions and segment_ids of packed sequences."""
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], **documents}


def of_reference(plan: Plan) -> str:
    """Returns what a reference takes from our front end."""
    spec = plan.spec
    return repr(
        (spec.model, spec.adapter, spec.optimizer, spec.schedule, spec.seed, spec.num_steps, spec.num_microbatches)
    )


class StepProgram:
    """A program of a plan's parameters and a batch, lowered on the first devices; compiled when it is first called.

    build: of the plan, to the function. batch: arrays as data has them. shapes: of the parameters, if they are not the
    model's own. parts: what a proof is about (support/proofs.py).
    """

    def __init__(
        self, plan: Plan, build: Callable[[Plan], Any], batch: Mapping[str, np.ndarray], *more: Any, shapes: Any = None
    ) -> None:
        self.plan, self._more = plan, more
        self._mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
        self._layouts = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), plan.specs["params"])
        like = plan.model.abstract() if shapes is None else shapes
        params = jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=layout), like, self._layouts
        )
        self._host = self.on_host(batch)
        with jax.set_mesh(self._mesh):
            self._lowered = jax.jit(build(plan)).lower(params, self._placed(self._host), *more)
        self.parts = (self._lowered, self._host, of_reference(plan))

    def on_host(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a batch as it goes to the devices."""
        order = self.plan.batch.token_order.of_sequence(batch["inputs"].shape[1])
        return {name: x[self.plan.batch.row_order.rows()] for name, x in in_token_order(dict(batch), order).items()}

    def _placed(self, host: Mapping[str, np.ndarray]) -> dict[str, Array]:
        rows = NamedSharding(self._mesh, self.plan.roles.tokens_spec)
        return {name: jax.device_put(x, rows) for name, x in host.items()}

    @cached_property
    def _compiled(self) -> Any:
        return taking_packed(self._lowered.compile())

    def run(self, params: Any, batch: Mapping[str, np.ndarray] | None = None) -> Any:
        """Returns what the program makes of parameters and its own batch, or another one, on the host."""
        placed = self._placed(self._host if batch is None else self.on_host(batch))
        with jax.set_mesh(self._mesh):
            found = self._compiled(jax.tree.map(jax.device_put, params, self._layouts), placed, *self._more)
        return jax.tree.map(np.asarray, found)


class Gradients(StepProgram):
    """The program of a plan's loss and gradients. dropout_key: None for no dropout."""

    def __init__(
        self, plan: Plan, batch: Mapping[str, np.ndarray], dropout_key: Array | None = None, *, shapes: Any = None
    ) -> None:
        super().__init__(plan, partial(build_loss, with_gradients=True), batch, dropout_key, shapes=shapes)

    def __call__(self, params: Any, batch: Mapping[str, np.ndarray] | None = None) -> tuple[float, Any]:
        (loss, num_targets), gradients, *_ = self.run(params, batch)
        return float(loss / num_targets), gradients


def gradients_of(
    plan: Plan,
    params: Any,
    tokens: np.ndarray,
    documents: Mapping[str, np.ndarray] = MappingProxyType({}),
    dropout_key: Array | None = None,
) -> tuple[float, Any]:
    """Loss and gradients of the plan's sharded program, with documents as `batch_of` takes them."""
    return Gradients(plan, batch_of(tokens, documents), dropout_key, shapes=params)(params)


def schedule_of(table: PipelineTable, plan: Plan, *, by_loops: bool = False) -> FromState:
    """The schedule of a plan by a table, with as many of its layers on each stage as can be. by_loops: as on GPUs."""
    sizes = {stack.name: stack.num_layers for stack in plan.model.stacks}
    layers = layers_of(sizes, table.placement, split_evenly(sum(sizes.values()), table.placement))
    return FromState(PipelineSchedule(table, layers, SlotBranches(by_loops)), layers)
