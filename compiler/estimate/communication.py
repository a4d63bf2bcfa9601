"""The planned collectives of a step: what is sent, over which mesh axes, how often, and why.

    all-gather  fsdp  layers/attention/query_EHD  64 times a step  sharding.parameters[0]

Collectives of weights and gradients are written in the step (weights.py) and carry the path of their parameter; those
over auto axes follow from matmuls and sums over a split dimension (propagate.py).
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from ..core.collectives import MOVING, CollectiveKind
from ..core.partition_spec import Axes
from ..core.scopes import OperationName, Pass
from ..jaxpr.program import Operation, TracedCollective
from ..parallel.operation import find_source
from ..plan import Plan
from .regions import Region, largest_sum


@dataclass(frozen=True)
class PlannedCollective:
    """All collectives of a step that are equal.

    bytes_each: the bytes of the full array of one, within the shards of the other mesh axes. source: the path of the
    parameter, the activation that a ring computes, or the operation whose partial results are added. rule: the key of
    the rule that causes it.
    """

    kind: CollectiveKind
    mesh_axes: Axes
    group_size: int
    bytes_each: int
    count: int
    dtype: str
    source: str
    direction: Pass
    rule: str | None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the full arrays in all executions of a step."""
        return self.bytes_each * self.count


def plan_communication(plan: Plan, step: Region) -> tuple[PlannedCollective, ...]:
    """Returns the collectives of a step in the order of its program, with equal ones grouped. Where stages of the mesh
    run different numbers of one, its count is the largest."""
    paths = [p.array.path for p in plan.sharding.parameters]
    found: dict[PlannedCollective, list[tuple[Region, float]]] = defaultdict(list)
    for region, operation in ((region, step.operation) for region, step in step.each()):
        collective = operation.collective
        if collective is None or not collective.axes:
            continue
        name = OperationName(operation.scope)
        path = next(iter(name.parameters(paths)), None)
        found[
            PlannedCollective(
                kind=collective.kind,
                mesh_axes=collective.axes,
                group_size=plan.mesh.num_shards(collective.axes),
                bytes_each=collective.full_bytes,
                count=0,
                dtype=collective.dtype,
                source=path or find_source(plan.ops, name) or name.activation or _operation_name(operation),
                direction=_direction(name, is_gradient=path is not None and collective.kind not in MOVING),
                rule=_rule(plan, collective.kind, collective.axes, path),
            )
        ].append((region, 1))
    counts = {one: round(largest_sum(terms)) for one, terms in found.items()}
    return tuple(replace(one, count=count) for one, count in counts.items() if count)


def sent_bytes(planned: PlannedCollective) -> int:
    """Returns the bytes that a device sends for all executions in a step."""
    collective = TracedCollective(planned.kind, planned.mesh_axes, planned.bytes_each, planned.dtype)
    return planned.count * link_bytes(collective, planned.group_size)


def link_bytes(collective: TracedCollective, group_size: int) -> int:
    """Returns the bytes that a device sends, and receives, for one collective: all of the full array but its own part,
    twice that if every device gets the sum; for a permute its own array."""
    others = collective.full_bytes * (group_size - 1) // group_size
    sent = {"all-reduce": 2 * others, "all-to-all": others // group_size, "collective-permute": collective.full_bytes}
    return sent.get(collective.kind, others)


def _direction(name: OperationName, *, is_gradient: bool) -> Pass:
    """Returns the pass of an operation; recomputation counts as part of the backward pass."""
    if name.is_update:
        return "update"
    return "backward" if is_gradient or name.is_transposed else "forward"


def _operation_name(operation: Operation) -> str:
    part = OperationName(operation.scope).first_scope or "step"
    return f"{part}: {operation.name} over a split dimension"


def _rule(plan: Plan, kind: str, axes: Axes, path: str | None) -> str | None:
    """Returns the rule that splits the parameter over these axes, or else the activations' rule."""
    tables = (plan.sharding.parameters, plan.sharding.optimizer) if path and kind != "all-reduce" else ()
    for table in tables:
        for array in table:
            if array.array.path != path:
                continue
            for dimension in array.dimensions:
                if set(axes) & set(dimension.axes):
                    return f"sharding.{array.table}[{dimension.rule}]"
    for index, rule in enumerate(plan.spec.sharding.activations):
        if set(axes) & set(rule.mesh):
            return f"sharding.activations[{index}]"
    return None
