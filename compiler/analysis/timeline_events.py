"""Turns a simulated schedule into the events of a timeline, each named by what it does for the model.

all-gather-start.3 on ICI x, of layers/mlp/up_EM    ->  "gather mlp/up"
fusion.973, a matmul in the scope matmul=mlp_up     ->  "matmul mlp_up"
compute stands still for all-gather-start.3         ->  "waits for gather mlp/up"
a stage has nothing to do until another one sends   ->  "waits for other stages"
while.215, 30 iterations that are not shown         ->  "layers, forward: 30 more iterations"
while.9, ticks of a pipeline that are not shown     ->  "ticks: 6 more iterations"
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.format import counted
from ..core.known import Unknown
from ..core.scopes import MATMUL, OperationName
from ..core.traffic import COMPUTE
from ..schema import CollectiveReport, Event
from ..xla.schedule.simulate import Segment
from ..xla.schedule.stage_clocks import slot_of
from ..xla.schedule.steps import Branches, Compute, Loop, Step, every
from .program_memory import PeakMemory

ROLES = {
    "all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce", "all-to-all": "exchange",
    "collective-permute": "permute", "collective-broadcast": "broadcast", "send": "send",
    "copy-to-device": "from host", "copy-to-host": "to host",
}  # fmt: skip
_AXES_OF_NAME = re.compile(r"_[A-Z]+$")


def schedule_events(
    segments: Sequence[Segment], steps: tuple[Step, ...], collectives: Iterable[CollectiveReport]
) -> tuple[Event, ...]:
    """Returns an event for each segment. A collective that uses both directions of a torus axis is one event, on the
    axis' own track."""
    computes = {each.name: each for each in every(steps, Compute)}
    reports = {each.name: each for each in collectives}
    by_name = {loop.name: loop for loop in every(steps, Loop)}
    loops = {name: _loop_name(loop) for name, loop in by_name.items()}
    there = {(each.stage, each.track, each.name, each.start_seconds) for each in segments}

    def event(segment: Segment, track: str) -> Event:
        trip = segment.trip
        arguments = _arguments(segment, computes, reports)
        if trip is not None and segment.kind != "loop":
            arguments["iteration"] = f"{trip.index + 1} of {by_name[trip.loop].num_trips or 'an unknown number'}"
        if segment.branch:
            arguments["branch"] = "of {}, {}".format(*segment.branch)
        return Event(
            track=track,
            stage=segment.stage,
            name=_name(segment, computes, reports, loops),
            instruction=segment.name,
            kind=segment.kind,
            start_seconds=segment.start_seconds,
            seconds=segment.seconds,
            loop=loops[trip.loop] if trip else "",
            iteration=trip.index + 1 if trip else 0,
            arguments=arguments,
        )

    events = []
    for each in segments:
        axis, way = each.track[:-1], each.track[-1]
        is_both = {(each.stage, f"{axis}{sign}", each.name, each.start_seconds) for sign in "+-"} <= there
        if not (is_both and way == "-"):
            events.append(event(each, axis if is_both else each.track))
    return tuple(events)


def with_memory(events: Iterable[Event], peak: PeakMemory | Unknown) -> tuple[Event, ...]:
    """Returns the events with the memory that is in use while each computes. peak: the peak of their program. Stages of
    a pipeline run one program in the same memory, so those of the first have it."""
    if isinstance(peak, Unknown):
        return tuple(events)
    found = peak.bytes_during
    return tuple(
        each.model_copy(update={"live_bytes": found[each.instruction]})
        if each.track == COMPUTE
        and each.kind not in ("exposed", "bubble")
        and each.instruction in found
        and not each.stage
        else each
        for each in events
    )


def name_of_collective(collective: CollectiveReport) -> str:
    """Returns the name of a collective on the timeline: "reduce mlp/up" for the reduce-scatter of layers/mlp/up_EM,
    backward."""
    origin = collective.origin
    if origin.parameter and not origin.others:
        parts = origin.parameter.split("/")
        origin = replace(origin, parameter="/".join((*parts[-2:-1], _AXES_OF_NAME.sub("", parts[-1]))))
    return f"{ROLES[collective.kind]} {origin.what}"


def _name(
    segment: Segment,
    computes: Mapping[str, Compute],
    collectives: Mapping[str, CollectiveReport],
    loops: Mapping[str, str],
) -> str:
    if segment.kind == "loop":
        num = segment.trip.num_alike if segment.trip else 0
        return f"{loops[segment.name]}: {counted(num, 'more iteration')}"
    if segment.kind == "bubble":
        return "waits for other stages"
    if collective := collectives.get(segment.name):
        return f"{'waits for ' if segment.kind == 'exposed' else ''}{name_of_collective(collective)}"
    name = OperationName(computes[segment.name].op_name)
    if segment.kind == "attention":
        return "attention"
    if segment.kind == "matmul":
        return f"matmul {name.fact(MATMUL) or name.own.rpartition('/')[0] or segment.name}"
    if name.is_update:
        return "optimizer"
    return name.last or segment.name


def _arguments(
    segment: Segment, computes: Mapping[str, Compute], collectives: Mapping[str, CollectiveReport]
) -> dict[str, Any]:
    if collective := collectives.get(segment.name):
        return {
            "source": collective.source,
            "bytes": collective.bytes // collective.count,
            "over": " + ".join(collective.mesh_axes),
            "link": collective.link,
        }
    if segment.name in computes and (op_name := computes[segment.name].op_name):
        name = OperationName(op_name)
        return {"of": name.own, "pass": name.in_pass}
    return {}


def _loop_name(loop: Loop) -> str:
    """Returns the name of a loop, "layers, forward": the scope that most of its operations name, and their pass. One
    over slots of a pipeline is "ticks"."""
    if any(slot_of(each) for each in every(loop.body, Branches)):
        return "ticks"
    names = [OperationName(step.op_name) for step in loop.body if isinstance(step, Compute) and step.op_name]
    found = Counter(
        (name.of_loop or loop.name, ("backward" if name.in_pass == "recomputed" else name.in_pass)) for name in names
    )
    if not found:
        return loop.name
    (scope, direction), _ = found.most_common(1)[0]
    return f"{scope}, {direction}"
