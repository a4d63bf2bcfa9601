"""Plans and their compiled programs, on batches of tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
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


def gradients_of(
    plan: Plan,
    params: Any,
    tokens: np.ndarray,
    documents: Mapping[str, np.ndarray] = MappingProxyType({}),
    dropout_key: Array | None = None,
) -> tuple[float, Any]:
    """Loss and gradients of the plan's sharded program. documents: positions and segment_ids of packed sequences.
    dropout_key: None for no dropout."""
    mesh = plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])
    specs = plan.specs["params"]
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    rows = NamedSharding(mesh, plan.roles.tokens_spec)
    host = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], **documents}
    host = in_token_order(host, plan.batch.token_order.of_sequence(tokens.shape[1] - 1))
    batch = {name: jax.device_put(x[plan.batch.row_order.rows()], rows) for name, x in host.items()}
    with jax.set_mesh(mesh):
        (loss, num_targets), grads, *_ = jax.jit(build_loss(plan, with_gradients=True))(sharded, batch, dropout_key)
    return float(loss / num_targets), jax.tree.map(np.asarray, grads)


def schedule_of(table: PipelineTable, plan: Plan, *, by_loops: bool = False) -> FromState:
    """The schedule of a plan by a table, with as many of its layers on each stage as can be. by_loops: as on GPUs."""
    sizes = {stack.name: stack.num_layers for stack in plan.model.stacks}
    layers = layers_of(sizes, table.placement, split_evenly(sum(sizes.values()), table.placement))
    return FromState(PipelineSchedule(table, layers, SlotBranches(by_loops)), layers)
