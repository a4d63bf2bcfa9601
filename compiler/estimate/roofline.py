"""The roofline: the least time that each part of a step can take for its arithmetic, its memory traffic and its
communication, each alone at the full rate of the hardware. The largest of the three is the bound.

FLOPs are the executed ones: remat's are included, and only the unmasked blocks of causal kernels count. HBM bytes are
read and written by the fused program (fusion.py), each operand once, however it is tiled. Link bytes are what a device
sends (communication.py). If the arithmetic or traffic of an operation is unknown, so are its part's figure and the
step's bound.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..core.scopes import ATTENTION, UPDATE, OperationName
from ..jaxpr.fusion import fuse, needed, stacked_bytes, traffic
from ..jaxpr.program import Operation, Program, TracedCollective
from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart
from ..spec.compiler_traits import CompilerTraits
from .communication import link_bytes


@dataclass
class _Sums:
    flops: list[int | None] = field(default_factory=list)  # of each operation; None: unknown
    hbm_bytes: list[int | None] = field(default_factory=list)
    link_bytes: list[int | None] = field(default_factory=list)  # of each collective
    link_seconds: list[float | None] = field(default_factory=list)


def plan_roofline(plan: Plan, program: Program) -> tuple[RooflinePart, ...]:
    """Returns a row for embed, each stack of layers without its attention, attention, head and optimizer, per
    device."""
    bandwidth = plan.target.hbm_bytes_per_second_per_device
    sums: dict[str, _Sums] = defaultdict(_Sums)
    names = {stack.name: f"{stack.name} (x{stack.num_layers})" for stack in plan.model.stacks}
    parts = ["embed", *names, "attention", "head", "optimizer"]
    for operation, hbm, num_trips in _operations(program, plan.target.compiler, is_loop=False):
        total = sums[_part(operation.scope, names)]
        total.flops.append(_times(num_trips, operation.flops))
        total.hbm_bytes.append(_times(num_trips, hbm))
        if (collective := operation.collective) is not None and collective.axes:
            sent = link_bytes(collective, plan.mesh.num_shards(collective.axes))
            total.link_bytes.append(_times(num_trips, sent))
            total.link_seconds.append(_alone_seconds(plan, collective, num_trips))
    return tuple(
        _row(names.get(part, part), sums[part], plan.target.peak_flops_per_second, bandwidth)
        for part in parts
        if part in sums
    )


def find_unknown(plan: Plan, program: Program) -> tuple[UnknownPrimitive, ...]:
    """Returns the unknown primitives of a step, each once, with the part of the step that first contains it."""
    names = {stack.name: stack.name for stack in plan.model.stacks}
    found: dict[tuple[str, str, str | None], UnknownPrimitive] = {}
    for one in _unknown(program):
        found.setdefault((one.name, one.place, one.why), replace(one, part=_part(one.part, names)))
    return tuple(found.values())


def _unknown(program: Program) -> Iterator[UnknownPrimitive]:
    for operation in needed(program):
        if operation.unknown is not None:
            yield operation.unknown
        if operation.body is not None:
            yield from _unknown(operation.body)


def _alone_seconds(plan: Plan, collective: TracedCollective, count: int | None) -> float | None:
    seconds = plan.mesh.alone_seconds(collective.kind, collective.full_bytes, collective.axes)
    return None if seconds is None or count is None else count * seconds


def _times(count: int | None, each: int | None) -> int | None:
    if each == 0:
        return 0
    return None if count is None or each is None else count * each


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(x for x in values if x is not None)


def _row(name: str, sums: _Sums, peak: float | None, bandwidth: float | None) -> RooflinePart:
    flops, hbm_bytes = _sum(sums.flops), _sum(sums.hbm_bytes)
    seconds = {
        "flops": flops / peak if peak and flops is not None else None,
        "hbm": hbm_bytes / bandwidth if bandwidth and hbm_bytes is not None else None,
        "link": None if None in sums.link_seconds else sum(x for x in sums.link_seconds if x is not None),
    }
    known = {resource: value for resource, value in seconds.items() if value is not None}
    return RooflinePart(
        name=name,
        flops=flops,
        hbm_bytes=hbm_bytes,
        link_bytes=_sum(sums.link_bytes),
        flops_seconds=seconds["flops"],
        hbm_seconds=seconds["hbm"],
        link_seconds=seconds["link"],
        bound=max(known, key=lambda resource: known[resource]) if len(known) == len(seconds) else None,  # type: ignore[arg-type]
    )


def roofline_seconds(parts: tuple[RooflinePart, ...]) -> float | None:
    """Returns the bound of a step whose communication hides behind its compute as far as it can: the
    sum of each part's largest time."""
    each = [(part.flops_seconds, part.hbm_seconds, part.link_seconds) for part in parts]
    longest = [max(x for x in one if x is not None) for one in each if None not in one]
    return sum(longest) if len(longest) == len(each) else None


def _operations(
    program: Program, compiler: CompilerTraits, *, is_loop: bool, num_trips: int | None = 1
) -> Iterator[tuple[Operation, int | None, int | None]]:
    """Yields (operation, HBM bytes, executions) for each step of the fused program, with loops replaced by their
    bodies.
    None: unknown."""
    for step, moved in traffic(fuse(program, is_loop=is_loop), into_matmuls=compiler.fuses_into_matmuls):
        operation = step.operation
        if operation.body is not None:
            inner = None if operation.unknown else _times(num_trips, operation.num_trips)
            if compiler.copies_loop_carry:
                yield operation, stacked_bytes(operation, program), inner
            yield from _operations(operation.body, compiler, is_loop=True, num_trips=inner)
            continue
        is_told = operation.hbm_bytes is not None or operation.flops is None
        yield operation, operation.hbm_bytes if is_told else sum(program.sizes[i] for i in moved), num_trips


def _part(scope: str, stacks: dict[str, str]) -> str:
    """Returns the part that a scope belongs to: 'transpose(jvp(layers))/attend/..' -> attention."""
    words = OperationName(scope).words
    if UPDATE in words:
        return "optimizer"
    if ATTENTION in words:
        return "attention"
    return next((word for word in words if word in stacks or word in ("embed", "head")), "optimizer")
