"""The planned collectives of a step: what is sent, over which mesh axes, how often, and why.

    all-gather  fsdp  layers/attention/query_EHD  64 times a step  sharding.parameters[0]

Collectives of weights and gradients are written in the step (weights.py) and carry the path of their parameter; those
over auto axes follow from matmuls and sums over a split dimension (propagate.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..core.partition_spec import STAGE, Axes
from ..core.scopes import OperationName, Pass
from ..core.traffic import MOVING, DeviceTraffic, Traffic, TrafficSource
from ..jaxpr.program import Operation
from ..parallel.operation import find_source
from ..plan import Plan
from ..sharding.sharding import ShardingPlan
from ..spec.sharding_spec import Rule
from .regions import Region, largest_sum


@dataclass(frozen=True)
class PlannedCollective(DeviceTraffic):
    """All collectives of a step that are equal. rule: the key of the rule that causes them."""

    rule: str | None = field(kw_only=True)


def plan_communication(plan: Plan, step: Region) -> tuple[PlannedCollective, ...]:
    """Returns the collectives of a step in the order of its program, with equal ones grouped. Where stages of the mesh
    run different numbers of one, its count is the largest."""
    paths = [p.array.path for p in plan.sharding.parameters]
    found: dict[PlannedCollective, list[tuple[Region, float]]] = defaultdict(list)
    for region, operation in ((region, step.operation) for region, step in step.each()):
        collective = operation.collective
        if collective is None or not collective.mesh_axes:
            continue
        name = OperationName(operation.scope)
        path = next(iter(name.parameters(paths)), None)
        activation = find_source(plan.ops, name) or name.activation or _operation_name(operation)
        is_gradient = path is not None and collective.kind not in MOVING
        origin = TrafficSource(
            path or "", "" if path else activation, in_pass=_direction(name, is_gradient=is_gradient)
        )
        rule = _rule(plan.sharding, plan.spec.sharding.activations, collective.kind, collective.mesh_axes, path)
        found[PlannedCollective(**vars(replace(collective, origin=origin)), rule=rule)].append((region, 1))
    counts = {one: round(largest_sum(terms)) for one, terms in found.items()}
    return tuple(one.times(count) for one, count in counts.items() if count)


def sent_bytes(collective: Traffic) -> int:
    """Returns the bytes that a device sends, and receives, in all executions: all of the full array but its own part,
    twice that if every device gets the sum; for a permute its own array."""
    each, size = collective.bytes_each, collective.group_size
    others = each * (size - 1) // size
    sent = {"all-reduce": 2 * others, "all-to-all": others // size, "collective-permute": each}
    return collective.count * sent.get(collective.kind, others)


def _direction(name: OperationName, *, is_gradient: bool) -> Pass:
    """Returns the pass of an operation; recomputation counts as part of the backward pass."""
    if name.is_update:
        return "update"
    return "backward" if is_gradient or name.is_transposed else "forward"


def _operation_name(operation: Operation) -> str:
    part = OperationName(operation.scope).first_scope or "step"
    return f"{part}: {operation.name} over a split dimension"


def _rule(sharding: ShardingPlan, activations: Sequence[Rule], kind: str, axes: Axes, path: str | None) -> str | None:
    """Returns the rule that splits the parameter over these axes, or else the activations' rule; None for
    the stages of a pipeline, over which no rule splits anything."""
    tables = (sharding.parameters, sharding.optimizer) if path and kind != "all-reduce" else ()
    for table in tables:
        for array in table:
            if array.array.path != path:
                continue
            for dimension in array.dimensions:
                if set(axes) & set(dimension.axes) - {STAGE}:
                    return f"sharding.{array.table}[{dimension.rule}]"
    for index, rule in enumerate(activations):
        if set(axes) & set(rule.mesh):
            return f"sharding.activations[{index}]"
    return None
