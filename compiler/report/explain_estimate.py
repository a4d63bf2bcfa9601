"""Explains the estimate of a step: memory at its peak, transfers, and the resource that bounds each part."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..core.console import Column, Console, Line, Part, Table
from ..core.format import human_bytes, human_count, human_range, human_seconds
from ..core.known import Unknown, all_known, or_unknown, text_of
from ..core.traffic import Traffic
from ..estimate.communication import PlannedCollective, sent_bytes
from ..estimate.estimate import HOST_UNKNOWN, MemoryEstimate, StepEstimate, estimate_step
from ..estimate.estimated_step import overrides_of, overrides_of_imbalance, plan_usual_imbalance
from ..estimate.roofline import NO_RATES, least_step_seconds, roofline_seconds
from ..estimate.step_time import StepTime
from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart
from ..target.accuracy import CALIBRATED, accuracy_of

SCALAR_BYTES = 8


def print_estimate(plan: Plan, estimate: StepEstimate, console: Console) -> None:
    """Prints three tables, and the overlap that they assume if it is left to a search."""
    assumed = overrides_of(estimate.overlap, plan.spec.overlap)
    if assumed:
        console.wrapped(("overlap", "bold"), f" is left to a search; the estimate assumes {' '.join(assumed)}")
        console.line()
    console.table(_memory(plan, estimate))
    console.line()
    if estimate.communication:
        console.table(_communication(estimate.communication))
        console.line()
    console.table(_roofline(estimate.roofline))
    if seconds := roofline_seconds(estimate.roofline):
        console.wrapped(f"roofline of this program: {human_seconds(seconds)}, each part by its own bound")
    if bound := least_step_seconds(plan):
        console.wrapped(f"no program of this declaration takes less than {human_seconds(bound)} a step")
    if estimate.time is not None:
        title = "estimated step"
        if usual := plan_usual_imbalance(plan):
            console.wrapped(_usual(usual))
            title = "as declared, with room for any imbalance"
        console.wrapped(f"{title}: {_time(plan, estimate.time)}")
    console.wrapped(*_verdict(estimate.memory))


def _usual(plan: Plan) -> str:
    """Returns a line about the step with room for the usual imbalance of experts."""
    found = estimate_step(plan)
    assert found.time is not None, "the declared step has one, on the same chips"
    (limit,) = overrides_of_imbalance(plan.spec.moe.max_imbalance)
    return (f"estimated step with room for {plan.spec.moe.max_imbalance:g} times the mean rows of experts ({limit}, "
            f"which drops what is more), {human_bytes(found.memory.peak_bytes)} per device: "
            f"{_time(plan, found.time)}")  # fmt: skip


def _verdict(memory: MemoryEstimate) -> Line:
    """Returns whether the step fits by the estimate, in a device's memory and in its share of the host's."""
    told: Line = [_verdict_of("", memory.peak_bytes, memory.limit_bytes, memory.fits)]
    if memory.host_bytes:
        host = _verdict_of("the host's memory: ", memory.host_bytes, memory.host_limit_bytes, memory.host_fits)
        told += ["; ", host]
    return [*told, ", estimated"]


def _verdict_of(what: str, needed: int, limit: int | None, fits: bool | None) -> Part:
    if limit is None or fits is None:
        return f"{what}{human_bytes(needed)} per device, limit unknown", "yellow"
    text = f"{what}{'fits' if fits else 'does not fit'}: {human_bytes(needed)} of {human_bytes(limit)} per device"
    return text, "green" if fits else "bold red"


def _time(plan: Plan, time: StepTime[float]) -> str:
    """Returns the time of a step as text, with the waits by mesh axes, the longest first."""
    rate = text_of(plan.work.tokens_per_second_per_chip(time.seconds), "{:,.0f}".format)
    waited = sorted(time.exposed.items(), key=lambda one: -one[1])
    exposed = ", ".join(f"{human_seconds(seconds)} over {'+'.join(axes)}" for axes, seconds in waited if seconds > 0)
    accuracy = accuracy_of(plan.target, "estimated")
    between = f" ({human_range(accuracy.range_of(time.seconds))}: {accuracy})" if accuracy else ""
    text = f"{human_seconds(time.seconds)}{between}, {rate} tokens per second and chip; compute"
    bubble = "" if time.bubble is None else f", bubble {human_seconds(time.bubble)}"
    return f"{text} {human_seconds(time.compute_seconds)}, exposed communication {exposed or 'none'}{bubble}"


def estimate_as_json(plan: Plan, estimate: StepEstimate) -> dict[str, Any]:
    """Returns the estimate for `plan.json`. assumed_overlap: overrides, if the overlap is left to a search."""
    memory = estimate.memory
    found = asdict(memory) | {"peak_bytes": memory.peak_bytes}
    found["host_limit_bytes"] = or_unknown(memory.host_limit_bytes, HOST_UNKNOWN)
    return {
        "assumed_overlap": overrides_of(estimate.overlap, plan.spec.overlap),
        "peak_memory_bytes_per_device": found | {"fits": memory.fits, "host_fits": memory.host_fits},
        "communication": [_collective_as_json(one) for one in estimate.communication],
        "roofline": estimate.roofline,
        "roofline_seconds": roofline_seconds(estimate.roofline),
        "bound_seconds": least_step_seconds(plan),
        "time": or_unknown(_time_as_json(plan, estimate.time), estimate.why_uncounted or NO_RATES.why),
        **_usual_as_json(plan),
        "unknown_primitives": [asdict(one) for one in estimate.unknown],
    }


def _time_as_json(plan: Plan, time: StepTime[float] | None) -> dict[str, Any] | None:
    if time is None:
        return None
    exposed = {"+".join(axes): seconds for axes, seconds in time.exposed.items()}
    accuracy = accuracy_of(plan.target, "estimated")
    between = accuracy.range_of(time.seconds) if accuracy else Unknown(CALIBRATED)
    return {"seconds": time.seconds, "range_seconds": between, "compute_seconds": time.compute_seconds,
            "exposed_seconds": exposed, "bubble_seconds": time.bubble_seconds}  # fmt: skip


def _usual_as_json(plan: Plan) -> dict[str, Any]:
    """Returns the step with room for the usual imbalance of experts, if the declaration has room for any imbalance."""
    usual = plan_usual_imbalance(plan)
    if usual is None:
        return {}
    found = estimate_step(usual)
    return {
        "usual_imbalance": {
            "overrides": list(overrides_of_imbalance(usual.spec.moe.max_imbalance)),
            "peak_bytes_per_device": found.memory.peak_bytes,
            "time": _time_as_json(usual, found.time),
        }
    }


def unknown_primitives(plan: Plan, estimate: StepEstimate) -> tuple[UnknownPrimitive, ...]:
    """Returns each unknown primitive once: the model's, then those that only the backward pass or the optimizer has. In
    the step, JAX may attribute one to the line that calls it."""
    met = {(one.name, one.part, one.why) for one in plan.model_flops.unknown}
    return (*plan.model_flops.unknown, *(one for one in estimate.unknown if (one.name, one.part, one.why) not in met))


def _memory(plan: Plan, estimate: StepEstimate) -> Table:
    known, peak = plan.memory, estimate.memory
    ahead = f"; {human_bytes(known.prefetched_weights)} a layer ahead" if known.prefetched_weights else ""
    classes: tuple[tuple[str, int, str], ...] = (
        *((name, count, "exact") for name, count in known.by_role.items()),
        ("master", known.master, "exact"),
        ("optimizer", known.optimizer, "exact"),
        ("scalars, batch", known.scalars + known.batch, "exact"),
        ("working parameters", peak.working_parameters, "shards in the compute type"),
        ("gathered weights", peak.gathered_weights, f"whole, for use{ahead}"),
        ("gradients", peak.gradients, f"{human_bytes(known.gradients)} accumulated in the end"),
        ("activations", peak.activations, "kept for the backward pass"),
        ("temporaries", peak.temporaries, "of the operation at hand"),
    )
    rows: list[Sequence[Part]] = [(name, human_bytes(count), note) for name, count, note in classes]
    limit = peak.limit_bytes
    room = "" if limit is None else f"{'fits' if peak.fits else 'does not fit'} in {human_bytes(limit)}"
    rows.append((("peak, estimated", "bold"), (human_bytes(peak.peak_bytes), "bold"), room))
    if peak.host_bytes:
        rows.append((("in the host's memory", "bold"), (human_bytes(peak.host_bytes), "bold"), _host_room(peak)))
    return _titled("memory per device at the peak of a step", ("class", "bytes", ""), rows)


def _host_room(memory: MemoryEstimate) -> str:
    if memory.host_limit_bytes is None:
        return HOST_UNKNOWN
    verdict = "fits" if memory.host_fits else "does not fit"
    return f"{verdict} in {human_bytes(memory.host_limit_bytes)}, a device's share of its host"


def traffic_as_json(one: Traffic) -> dict[str, Any]:
    """Returns a collective as plan.json has it, of an operation and of the whole step."""
    return {
        "kind": one.kind, "mesh_axes": one.mesh_axes, "group_size": one.group_size, "bytes_each": one.bytes_each,
        "count": one.count, "direction": one.origin.in_pass,
    }  # fmt: skip


def _collective_as_json(one: PlannedCollective) -> dict[str, Any]:
    more = {"dtype": one.dtype, "source": one.origin.what, "rule": one.rule, "bytes": one.bytes}
    return traffic_as_json(one) | more


def _communication(collectives: tuple[PlannedCollective, ...]) -> Table:
    """Returns a row for each kind, mesh axes and rule; scalars are left out."""
    alike: dict[tuple[str, str, str], list[PlannedCollective]] = defaultdict(list)
    for one in collectives:
        if one.bytes_each > SCALAR_BYTES:
            alike[one.kind, "+".join(one.mesh_axes), one.rule or ""].append(one)
    rows: list[Sequence[Part]] = []
    for (kind, axes, rule), ones in alike.items():
        most = max(ones, key=lambda one: one.bytes)
        count, sent = f"{sum(one.count for one in ones):,}", human_bytes(sum(map(sent_bytes, ones)))
        rows.append((kind, axes, count, sent, str(most.origin), rule))
    columns = ("collective", "mesh axes", "times", "sent per device", "most of it", "rule")
    return _titled("communication per step, but of scalars", columns, rows)


def _roofline(parts: tuple[RooflinePart, ...]) -> Table:
    columns = ("part", "FLOPs", "memory traffic", "sent", "seconds", "bound by")
    rows: list[Sequence[Part]] = []
    names = {"flops": "FLOPs", "hbm": "memory", "link": "links", None: "unknown"}
    for part in parts:
        each = (part.flops_seconds, part.hbm_seconds, part.link_seconds)
        longest = all_known(each[:2], lambda known, last=each[2]: max(*known, last or 0.0))
        rows.append((
            part.name, text_of(part.flops, human_count), text_of(part.hbm_bytes, human_bytes),
            text_of(part.link_bytes, human_bytes), text_of(longest, human_seconds), names[part.bound],
        ))  # fmt: skip
    return _titled("the least that each part takes, per device", columns, rows)


def _titled(title: str, names: Sequence[str], rows: Sequence[Sequence[Part]]) -> Table:
    numbers = ("bytes", "times", "sent per device", "FLOPs", "memory traffic", "sent", "seconds")
    columns = [Column(name, justify="right" if name in numbers else "left") for name in names]
    return Table(columns, rows, title)
