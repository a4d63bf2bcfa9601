"""Accounts for the time of one execution: each moment is compute, exposed time of one collective, or neither.

This is how the schedule is simulated too (compiler/xla/schedule/simulate.py), so measured and predicted times mean the
same: alone, a collective takes from its start until it is done, or as long as its kernel runs; of this, the time in
which no compute runs is exposed, of the collective that began first where there are several.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.traffic import COMPUTE, ComputeKind
from ..schema import Event
from .prediction import PredictedCollective, Prediction
from .trace import Execution, OpEvent

LEAST_WAIT = 0.1  # share of a collective's time that its done has to wait, for its end to be that of its transfer


@dataclass(frozen=True)
class Span:
    """A stretch of time in which something runs, in nanoseconds. name: the compute instruction, or the collective.
    is_ended: for a collective, True if it is known when its transfer was done."""

    name: str
    start: float
    end: float
    is_ended: bool = True


@dataclass
class Account:
    """The seconds of one execution. compute, exposed: each moment once, by kind and by collective. operations,
    in_flight: by name, the sum of all executions of an instruction. waits: the times in which a collective was
    exposed."""

    compute: dict[ComputeKind, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    idle: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, float] = field(default_factory=dict)
    is_exact: dict[str, bool] = field(default_factory=dict)
    unmatched: dict[str, float] = field(default_factory=dict)
    waits: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Roles:
    """The roles of a program's instructions, by name. kinds: those that compute. begun: those that start a collective.
    ended: the collective that an instruction waits for. containers: those that only run others."""

    kinds: Mapping[str, ComputeKind]
    begun: Mapping[str, PredictedCollective]
    ended: Mapping[str, str]  # the collective that an instruction waits for
    containers: frozenset[str]


def roles_of(prediction: Prediction) -> Roles:
    """Returns the roles of a program's instructions."""
    return Roles(
        kinds={each.name: each.kind for each in prediction.compute},
        begun={each.report.name: each for each in prediction.collectives},
        ended={name: each.report.name for each in prediction.collectives for name in each.ends},
        containers=frozenset(prediction.containers),
    )


def account(execution: Execution, roles: Roles) -> Account:
    """Returns how the time of an execution was spent."""
    found = Account()
    compute, collectives = _spans(execution, roles, found)
    for span in compute:
        _add(found.operations, span.name, span.end - span.start)
        found.counts[span.name] = found.counts.get(span.name, 0) + 1
    for span in collectives:
        _add(found.in_flight, span.name, span.end - span.start)
        found.counts[span.name] = found.counts.get(span.name, 0) + 1
        found.is_exact[span.name] = span.is_ended and found.is_exact.get(span.name, True)
    _sweep(execution, compute, collectives, roles, found)
    return found


def _spans(execution: Execution, roles: Roles, found: Account) -> tuple[list[Span], list[Span]]:
    """Returns the compute and the collectives of an execution. Events of neither kind are added to
    `found.unmatched`."""
    compute: list[Span] = []
    starts: dict[str, list[OpEvent]] = {}
    dones: dict[str, list[OpEvent]] = {}
    for event in execution.events:
        if event.name in roles.begun:
            starts.setdefault(event.name, []).append(event)
        elif event.name in roles.ended:
            dones.setdefault(roles.ended[event.name], []).append(event)
        elif event.name in roles.kinds:
            compute.append(Span(event.name, event.start, event.end))
        elif event.name not in roles.containers:
            _add(found.unmatched, event.name, event.end - event.start)
    collectives = []
    for name, begun in starts.items():
        if name not in dones:  # it is synchronous, or a kernel on a stream
            collectives += [Span(name, event.start, event.end) for event in begun]
            continue
        for start, done in zip(begun, dones[name], strict=False):
            # Where a done did not wait, the transfer may have ended long before.
            waited = done.end - done.start >= LEAST_WAIT * (done.end - start.start)
            collectives.append(Span(name, start.start, max(start.end, done.end), is_ended=waited))
    return compute, collectives


def _sweep(execution: Execution, compute: list[Span], collectives: list[Span], roles: Roles, found: Account) -> None:
    """Gives each moment to the span that began first of those that run then, compute before collectives."""
    spans = [*compute, *collectives]
    edges = sorted(
        [(span.start, 1, place) for place, span in enumerate(spans)]
        + [(span.end, 0, place) for place, span in enumerate(spans)]
    )
    running: dict[int, None] = {}
    in_flight: dict[int, None] = {}

    def give(begin: float, end: float) -> None:
        if running:
            kind = roles.kinds[spans[next(iter(running))].name]
            found.compute[kind] = found.compute.get(kind, 0.0) + (end - begin) / 1e9
        elif in_flight:
            name = spans[next(iter(in_flight))].name
            _add(found.exposed, name, end - begin)
            if found.waits and found.waits[-1].name == name and found.waits[-1].end == begin:
                begin = found.waits.pop().start
            found.waits.append(Span(name, begin, end))
        else:
            found.idle += (end - begin) / 1e9

    at = execution.start
    for moment, is_start, place in edges:
        begin, end = max(at, execution.start), min(moment, execution.end)
        if end > begin:
            give(begin, end)
        at = max(at, moment)
        group = running if place < len(compute) else in_flight
        if is_start:
            group[place] = None
        else:
            group.pop(place, None)
    found.idle += max(0.0, execution.end - at) / 1e9


def execution_events(execution: Execution, roles: Roles) -> tuple[Event, ...]:
    """Returns an execution as a timeline: its compute, then its links."""
    found = Account()
    compute, collectives = _spans(execution, roles, found)
    _sweep(execution, compute, collectives, roles, found)

    def event(track: str, name: str, kind: str, span: Span) -> Event:
        start = max(0.0, span.start - execution.start) / 1e9
        return Event(
            track=track, name=name, kind=kind, start_seconds=start, seconds=(span.end - span.start) / 1e9, arguments={}
        )

    return (
        *(event(COMPUTE, span.name, roles.kinds[span.name], span) for span in compute),
        *(event(COMPUTE, f"waits for {span.name}", "exposed", span) for span in found.waits),
        *(
            event("collectives" if begun.link == "memory" else begun.link, span.name, begun.kind, span)
            for span in collectives
            for begun in [roles.begun[span.name].report]
        ),
    )


def _add(sums: dict[str, float], name: str, nanoseconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + nanoseconds / 1e9
