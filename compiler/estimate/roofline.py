"""The bounds of a step: of each part of its program, and of its declaration, whatever program runs it.

The roofline is the least time that each part can take for its arithmetic, its memory traffic and its communication,
each alone at the full rate of the hardware. The largest of the three is the bound.

FLOPs are the executed ones: remat's are included, and only the unmasked blocks of causal kernels count. HBM bytes are
read and written by the fused program (fusion.py), each operand once, however it is tiled. Link bytes are what a device
sends (communication.py). If the arithmetic or traffic of an operation is unknown, so are its part's figure and the
step's bound.

The declaration itself asks for less:

arithmetic    FLOPs of the model, forward and backward, nothing computed twice, attention's masked scores left out, at
              the peaks of the types that its sites multiply in; choices that an expert drops for lack of room count
memory        what training changes of the state that a device holds between two steps: read once and written once

The longer of the two is its bound, since a program may do both at once. What a program adds (recomputation,
collectives, activations in memory) is in its roofline, which another program can beat.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from meshloom.models import Stack

from ..core.known import Unknown, all_known, each_known, or_unknown
from ..core.scopes import ATTENTION, UPDATE, OperationName
from ..jaxpr.program import Operation
from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart, total
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan
from .communication import sent_bytes
from .regions import Region, largest_sum

Quantity = Literal["flops", "flops_seconds", "hbm_bytes", "link_bytes", "link_seconds"]
Bound = Literal["flops", "hbm", "link"]
NO_RATES = Unknown("the target's peak or bandwidths are not known")
LINKS_UNKNOWN = "simulated devices, or of unknown links"
Term = tuple[Region, float | None]  # a figure of one execution of a region; None: unknown


def plan_roofline(stacks: Sequence[Stack], mesh: MeshPlan, step: Region, why: str | None) -> tuple[RooflinePart, ...]:
    """Returns a row for embed, each stack of layers without its attention, attention, head and optimizer: the figures
    of a device, on the stage of the mesh where each is largest. why: the reason why something of the step is not
    counted; None if everything is."""
    names = {stack.name: f"{stack.name} (x{stack.num_layers})" for stack in stacks}
    terms: dict[str, dict[Quantity, list[Term]]] = defaultdict(lambda: {name: [] for name in get_args(Quantity)})
    for region in step.walk():
        if region.stacked_bytes:
            terms[_part(region.scope, names)]["hbm_bytes"].append((region, sum(region.stacked_bytes)))
    for region, one in (each for each in step.each() if not each[1].inside):
        of_part, collective = terms[_part(one.operation.scope, names)], one.operation.collective
        of_part["flops"].append((region, one.operation.flops))
        of_part["flops_seconds"].append((region, _at_peak(region, one.operation, mesh.placement.target)))
        of_part["hbm_bytes"].append((region, one.hbm_bytes))
        if collective is not None and collective.mesh_axes:
            axes, groups = collective.mesh_axes, collective.groups
            seconds = mesh.alone_seconds(collective.kind, collective.bytes, axes, groups)
            of_part["link_bytes"].append((region, sent_bytes(collective)))
            of_part["link_seconds"].append((region, seconds))
    parts = (part for part in ("embed", *names, "attention", "head", "optimizer") if part in terms)
    return tuple(_row(names.get(part, part), terms[part], mesh.placement.target, why) for part in parts)


def _at_peak(region: Region, operation: Operation, target: TargetPlan) -> float | None:
    """Returns the seconds of an operation's arithmetic at the peak of the type of its operands; None: unknown."""
    dtype = region.program.dtypes[operation.inputs[0]] if operation.is_product and operation.inputs else ""
    peak = target.peak_of(dtype) if dtype else target.peak_flops_per_second
    return None if peak is None or operation.flops is None else operation.flops / peak


def find_unknown(stacks: Sequence[Stack], step: Region) -> tuple[UnknownPrimitive, ...]:
    """Returns the unknown primitives of a step, each once, with the part of the step that first contains it."""
    names = {stack.name: stack.name for stack in stacks}
    found: dict[tuple[str, str, str | None], UnknownPrimitive] = {}
    for one in (each.operation.unknown for _, each in step.each()):
        if one is not None:
            found.setdefault((one.name, one.place, one.why), replace(one, part=_part(one.part, names)))
    return tuple(found.values())


def _sum(terms: list[Term]) -> float | None:
    """Returns the sum; None where a term or its number of executions is unknown. Zero stays zero for any number of
    trips."""
    known = [(region, value) for region, value in terms if value is not None and (region.is_counted or not value)]
    return largest_sum(known) if len(known) == len(terms) else None


def _row(name: str, terms: dict[Quantity, list[Term]], target: TargetPlan, why: str | None) -> RooflinePart:
    flops, num_bytes, sent = (_whole(_sum(terms[each]), why) for each in ("flops", "hbm_bytes", "link_bytes"))
    peak, bandwidth = target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
    seconds: dict[Bound, float | Unknown] = {
        "flops": or_unknown(_sum(terms["flops_seconds"]), why) if peak else NO_RATES,
        "hbm": each_known(num_bytes, lambda count: count / bandwidth) if bandwidth else NO_RATES,
        "link": or_unknown(_sum(terms["link_seconds"]), (why if isinstance(sent, Unknown) else None) or LINKS_UNKNOWN),
    }
    known: dict[Bound, float] = {resource: x for resource, x in seconds.items() if not isinstance(x, Unknown)}
    return RooflinePart(
        name=name,
        flops=flops,
        hbm_bytes=num_bytes,
        link_bytes=sent,
        flops_seconds=seconds["flops"],
        hbm_seconds=seconds["hbm"],
        link_seconds=seconds["link"],
        bound=max(known, key=lambda resource: known[resource]) if len(known) == len(seconds) else None,
    )


def _whole(value: float | None, why: str | None) -> int | Unknown:
    return or_unknown(None if value is None else round(value), why)


def roofline_seconds(parts: tuple[RooflinePart, ...]) -> float | Unknown:
    """Returns the sum of the longest time of each part: the bound of a step whose communication hides behind its
    compute as far as it can."""
    each = [(part.flops_seconds, part.hbm_seconds, part.link_seconds) for part in parts]
    return total(all_known(one, max) for one in each)


def least_step_seconds(plan: Plan) -> float | Unknown:
    """Returns the time that no step of this declaration can beat, in seconds."""
    target, memory = plan.target, plan.memory
    peak, bandwidth = target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
    flops = plan.model_flops.least_per_step
    if peak is None or bandwidth is None:
        return NO_RATES
    if flops is None:
        return Unknown(plan.model_flops.why_unknown or "")
    trained = sum(each.bytes_per_device for each in plan.sharding.parameters if each.array.is_trained)
    written = trained + memory.master + memory.optimizer
    read = (memory.master or trained) + memory.optimizer
    least = plan.work.seconds_at_peak(flops)
    return each_known(least, lambda seconds: max(seconds, (read + written) / bandwidth))


def _part(scope: str, stacks: dict[str, str]) -> str:
    """Returns the part that a scope belongs to: 'transpose(jvp(layers))/attend/..' -> attention."""
    words = OperationName(scope).words
    if UPDATE in words:
        return "optimizer"
    if ATTENTION in words:
        return "attention"
    return next((word for word in words if word in stacks or word in ("embed", "head")), "optimizer")
