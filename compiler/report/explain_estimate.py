"""Explains the estimate of a step: memory at its peak, transfers, and the resource that bounds each part."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..core.console import Column, Console, Line, Part, Table
from ..core.format import human_bytes, human_count, human_range, human_seconds, human_share
from ..core.known import Unknown, all_known, each_known, text_of
from ..core.traffic import HOST, Traffic
from ..estimate.communication import PlannedCollective, sent_bytes
from ..estimate.estimate import HOST_UNKNOWN, StepEstimate, estimate_step
from ..estimate.estimated_step import overrides_of, overrides_of_imbalance, plan_usual_imbalance
from ..estimate.roofline import least_step_seconds, roofline_seconds
from ..figures import StepFigures, registered_figures, text_of_figure
from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart

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
    if not isinstance(estimate.figures.step_seconds, Unknown):
        title = "estimated step"
        if usual := plan_usual_imbalance(plan):
            console.wrapped(_usual(usual))
            title = "as declared, with room for any imbalance"
        console.wrapped(f"{title}: {_time(estimate.figures)}")
    verdict: Line = [_verdict_of("", estimate.figures.peak_bytes, estimate.figures.limit_bytes)]
    if estimate.figures.host_bytes:
        host = _verdict_of("the host's memory: ", estimate.figures.host_bytes, estimate.figures.host_limit_bytes)
        verdict += ["; ", host]
    console.wrapped(*verdict, ", estimated")


def _usual(plan: Plan) -> str:
    """Returns a line about the step with room for the usual imbalance of experts."""
    found = estimate_step(plan).figures
    (limit,) = overrides_of_imbalance(plan.spec.moe.max_imbalance)
    return (f"estimated step with room for {plan.spec.moe.max_imbalance:g} times the mean rows of experts ({limit}, "
            f"which drops what is more), {text_of_figure(found, 'peak_bytes')} per chip: {_time(found)}")  # fmt: skip


def _verdict_of(what: str, needed: int | Unknown, limit: int | Unknown) -> Part:
    count = text_of(needed, human_bytes)
    if isinstance(limit, Unknown) or isinstance(needed, Unknown):
        return f"{what}{count} per chip, limit unknown", "yellow"
    fits = needed <= limit
    text = f"{what}{'fits' if fits else 'does not fit'}: {count} of {human_bytes(limit)} per chip"
    return text, "green" if fits else "bold red"


def _time(step: StepFigures) -> str:
    """Returns the time of a step as text, with the waits by mesh axes, the longest first."""
    waits = [(axes, seconds) for axes, seconds in step.exposed_by_axes.items() if axes != HOST]
    waited = sorted(waits, key=lambda one: -one[1])
    exposed = ", ".join(f"{human_seconds(seconds)} over {axes}" for axes, seconds in waited if seconds > 0)
    between = text_of(step.range_of(step.step_seconds), lambda ends: f" ({human_range(ends)}: {step.range_basis})", "")
    rate = text_of(step.tokens_per_second_per_chip, "{:,.0f}".format)
    of_host = step.exposed_host_seconds
    more = f", exposed copies to the host and back {human_seconds(of_host)}" if of_host else ""
    more += f", bubble {text_of_figure(step, 'bubble_seconds')}" if step.bubble_seconds else ""
    more += "".join(f", {one.heading} {text_of_figure(step, one.name)}" for one in registered_figures())
    mfu = text_of(step.mfu, lambda share: f", MFU {human_share(share)}", "")
    return (f"{text_of_figure(step, 'step_seconds')}{between}, {rate} tokens per second and chip{mfu}; compute "
            f"{text_of_figure(step, 'compute_seconds')}, exposed communication {exposed or 'none'}{more}")  # fmt: skip


def estimate_as_json(plan: Plan, estimate: StepEstimate) -> dict[str, Any]:
    """Returns the estimate for `plan.json`. assumed_overlap: overrides, if the overlap is left to a search."""
    usual, figures, per_chip = plan_usual_imbalance(plan), estimate.figures, plan.target.used_devices_per_chip
    limits: dict[str, Any] = {
        name: each_known(getattr(figures, name), lambda of_chip: of_chip // per_chip)
        for name in ("limit_bytes", "host_limit_bytes")
    }
    memory = asdict(estimate.memory) | {"peak_bytes": estimate.memory.peak_bytes}
    room = {}
    if usual:
        found = estimate_step(usual)
        room = {
            "overrides": list(overrides_of_imbalance(usual.spec.moe.max_imbalance)),
            "figures": found.figures,
            "peak_bytes_per_device": found.memory.peak_bytes,
            "time": _time_as_json(found.figures),
        }
    return {
        "assumed_overlap": overrides_of(estimate.overlap, plan.spec.overlap),
        "peak_memory_bytes_per_device": memory | limits | {"fits": figures.fits, "host_fits": figures.host_fits},
        "communication": [
            traffic_as_json(one) | {"dtype": one.dtype, "source": one.origin.what, "rule": one.rule, "bytes": one.bytes}
            for one in estimate.communication
        ],
        "roofline": estimate.roofline,
        "roofline_seconds": roofline_seconds(estimate.roofline),
        "bound_seconds": least_step_seconds(plan),
        "time": _time_as_json(figures),
        **({"usual_imbalance": room} if room else {}),
        "unknown_primitives": [asdict(one) for one in estimate.unknown],
    }


def _time_as_json(figures: StepFigures) -> dict[str, Any] | Unknown:
    """Returns the seconds of a step under the keys that plan.json has had for them (`steady_keys`)."""
    if isinstance(figures.step_seconds, Unknown):
        return figures.step_seconds
    return {"seconds": figures.step_seconds, "range_seconds": figures.range_of(figures.step_seconds),
            "compute_seconds": figures.compute_seconds, "exposed_seconds": figures.exposed_by_axes,
            "bubble_seconds": figures.bubble_seconds}  # fmt: skip


def unknown_primitives(plan: Plan, estimate: StepEstimate) -> tuple[UnknownPrimitive, ...]:
    """Returns each unknown primitive once: the model's, then those that only the backward pass or the optimizer has. In
    the step, JAX may attribute one to the line that calls it."""
    met = {(one.name, one.part, one.why) for one in plan.model_flops.unknown}
    return (*plan.model_flops.unknown, *(one for one in estimate.unknown if (one.name, one.part, one.why) not in met))


def _memory(plan: Plan, estimate: StepEstimate) -> Table:
    known, peak, figures = plan.memory, estimate.memory, estimate.figures
    per_chip = plan.target.used_devices_per_chip
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
    room = text_of(figures.limit_bytes, lambda limit: _room(figures.fits, limit // per_chip), "")
    rows.append((("peak, estimated", "bold"), (human_bytes(peak.peak_bytes), "bold"), room))
    if peak.host_bytes:
        share = ", a device's share of its host"
        room = text_of(figures.host_limit_bytes, lambda limit: _room(figures.host_fits, limit // per_chip) + share,
                       HOST_UNKNOWN)  # fmt: skip
        rows.append((("in the host's memory", "bold"), (human_bytes(peak.host_bytes), "bold"), room))
    return _titled("memory per device at the peak of a step", ("class", "bytes", ""), rows)


def _room(fits: bool | Unknown, limit: int) -> str:
    return f"{'fits' if fits else 'does not fit'} in {human_bytes(limit)}"


def traffic_as_json(one: Traffic) -> dict[str, Any]:
    """Returns a collective as plan.json has it, of an operation and of the whole step."""
    return {
        "kind": one.kind, "mesh_axes": one.mesh_axes, "group_size": one.group_size, "bytes_each": one.bytes_each,
        "count": one.count, "direction": one.origin.in_pass,
    }  # fmt: skip


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
    columns = ("part", "FLOPs", "memory traffic", "sent", "time", "bound by")
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
    numbers = ("bytes", "times", "sent per device", "FLOPs", "memory traffic", "sent", "time")
    columns = [Column(name, justify="right" if name in numbers else "left") for name in names]
    return Table(columns, rows, title)
