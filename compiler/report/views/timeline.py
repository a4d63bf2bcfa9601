"""Renders the predicted step in Chrome's trace format, which Perfetto and chrome://tracing open.

    events  (compute, matmul, 0-3 ms), (ICI x, all-gather, 1-2 ms)
    ->      one process, a thread for each track, a slice for each event in microseconds; and an arrow from each
            collective to the compute that hides most of it

Slices of one thread have to nest, so what overlaps on a track is put on further threads: "ICI x", "ICI x (2)". Each
stage of a pipeline is a process of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, get_args

from ...core.traffic import COMPUTE, ComputeKind, TransferKind
from ...schema import Event, Report

DIRECTIONS = ("forward", "backward")
COLLECTIVES, COMPUTES = frozenset(get_args(TransferKind)), frozenset(get_args(ComputeKind))


@dataclass(frozen=True)
class Slice:
    """An event in whole nanoseconds, on the lane of its track where it overlaps no other."""

    event: Event
    start_ns: int
    end_ns: int
    lane: str


@dataclass(frozen=True)
class Hidden:
    """The cover of one collective: the time in which compute runs, and the slices that run, the longest first."""

    hidden_ns: int
    behind: tuple[Slice, ...]


@dataclass(frozen=True)
class View:
    """A stretch of the step that the page shows at first."""

    name: str
    start_ns: int
    end_ns: int


def by_stage(events: Sequence[Event]) -> tuple[tuple[Event, ...], ...]:
    """Returns the events of each stage of a pipeline that has some, in order; without a pipeline, all events."""
    stages = sorted({event.stage for event in events if event.stage is not None})
    return tuple(tuple(event for event in events if event.stage == stage) for stage in stages) or (tuple(events),)


def left_out(events: Sequence[Event]) -> range:
    """Returns the stages of a pipeline that have no events: those between the first few and the last few."""
    stages = sorted({event.stage for event in events if event.stage is not None})
    return next((range(one + 1, other) for one, other in pairwise(stages) if other > one + 1), range(0))


def layer_views(events: Sequence[Event]) -> tuple[View, ...]:
    """Returns one iteration of the longest loop of the forward pass, and one of the backward pass: a layer each. It is
    the iteration before those that are left out, or else the second one. Empty if no loop names its pass."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.loop and event.track == COMPUTE:
            seconds[event.loop] = seconds.get(event.loop, 0.0) + event.seconds
    views = []
    for direction in DIRECTIONS:
        loops = [loop for loop in seconds if loop.endswith(f", {direction}")]
        if loops:
            views.append(_iteration(max(loops, key=lambda loop: seconds[loop]), events))
    return tuple(sorted(views, key=lambda view: view.start_ns))


def _iteration(loop: str, events: Sequence[Event]) -> View:
    own = [event for event in events if event.loop == loop and event.track == COMPUTE]
    left_out = [event.iteration for event in own if event.kind == "loop"]
    shown = {event.iteration for event in own if event.kind != "loop"}
    chosen = left_out[0] - 1 if left_out and left_out[0] > 1 else 2 if 2 in shown else min(shown)
    # A loop within a loop runs again; the view shows its first run.
    first = next(i for i, event in enumerate(own) if event.iteration == chosen and event.kind != "loop")
    last = first
    while last + 1 < len(own) and own[last + 1].iteration == chosen and own[last + 1].kind != "loop":
        last += 1
    start, end = own[first].start_seconds, own[last].start_seconds + own[last].seconds
    return View(f"{loop}, iteration {chosen}", round(start * 1e9), round(end * 1e9))


def lay_out(events: Sequence[Event]) -> tuple[Slice, ...]:
    """Returns slices in the order of tracks (compute first, then as they come) and of time."""
    tracks = sorted(dict.fromkeys(event.track for event in events), key=lambda track: track != COMPUTE)
    return tuple(s for track in tracks for s in _lanes([event for event in events if event.track == track]))


def _lanes(events: Sequence[Event]) -> list[Slice]:
    """Returns each event on the first free lane."""
    free_at: list[int] = []
    slices = []
    for event in sorted(events, key=lambda event: (event.start_seconds, -event.seconds)):
        start, end = round(event.start_seconds * 1e9), round((event.start_seconds + event.seconds) * 1e9)
        lane = next((i for i, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[lane : lane + 1] = [end]
        slices.append(Slice(event, start, end, event.track if lane == 0 else f"{event.track} ({lane + 1})"))
    return slices


def hidden_behind(slices: Sequence[Slice]) -> tuple[Hidden | None, ...]:
    """Returns, for each slice of a collective, the compute that runs at the same time."""
    compute = sorted((s for s in slices if s.event.kind in COMPUTES), key=lambda s: s.start_ns)
    starts = [s.start_ns for s in compute]

    def behind(collective: Slice) -> Hidden:
        first = max(0, bisect_right(starts, collective.start_ns) - 1)
        last = bisect_right(starts, collective.end_ns)
        shared = [(min(s.end_ns, collective.end_ns) - max(s.start_ns, collective.start_ns), s)
                  for s in compute[first:last]]  # fmt: skip
        shared = sorted(((ns, s) for ns, s in shared if ns > 0), key=lambda pair: -pair[0])
        return Hidden(sum(ns for ns, _ in shared), tuple(s for _, s in shared))

    return tuple(behind(s) if s.event.kind in COLLECTIVES else None for s in slices)


def chrome_trace(report: Report, events: Sequence[Event]) -> dict[str, Any]:
    """Returns `timeline.json`."""
    title = f"{report.program.model} on {report.target.name}: one chip, predicted"
    if missing := left_out(events):
        title += f"; stages {missing[0]} to {missing[-1]} are left out"
    arrows, rows = count(1), []
    for process, own in enumerate(by_stage(events), start=1):
        stage = own[0].stage if own else None
        name = title if stage is None else f"stage {stage} of {title}"
        rows += [row | {"pid": process} for row in _process(name, process, lay_out(own), arrows)]
    fingerprint = report.build.fingerprint if report.build else None
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"fingerprint": fingerprint}}


def _process(name: str, process: int, slices: Sequence[Slice], arrows: Iterator[int]) -> list[dict[str, Any]]:
    """Returns the rows of one process. arrows: the numbers of arrows, which no two processes share."""
    threads = {lane: index for index, lane in enumerate(dict.fromkeys(s.lane for s in slices), start=1)}
    hidden = hidden_behind(slices)
    rows = _metadata("process", name, process)
    for lane, thread in threads.items():
        rows += [row | {"tid": thread} for row in _metadata("thread", lane, thread)]
    rows += [_slice(s, threads[s.lane], by) for s, by in zip(slices, hidden, strict=True)]
    rows += [
        {"ph": "C", "name": "memory", "ts": s.start_ns / 1e3, "args": {"bytes": s.event.live_bytes}}
        for s in slices
        if s.event.live_bytes is not None
    ]
    for collective, by in zip(slices, hidden, strict=True):
        if by and by.behind:
            rows += _arrow(next(arrows), collective, by.behind[0], threads)
    return rows


def _metadata(what: str, name: str, place: int) -> list[dict[str, Any]]:
    """Returns the name of a process or of a thread, and its place in the order."""
    return [{"ph": "M", "name": f"{what}_name", "args": {"name": name}},
            {"ph": "M", "name": f"{what}_sort_index", "args": {"sort_index": place}}]  # fmt: skip


def _slice(s: Slice, thread: int, hidden: Hidden | None) -> dict[str, Any]:
    args = dict(s.event.arguments)
    if s.event.instruction:
        args["instruction"] = s.event.instruction
    if hidden is not None:
        args |= {
            "hidden_us": hidden.hidden_ns / 1e3,
            "hidden_behind": list(dict.fromkeys(behind.event.name for behind in hidden.behind)),
        }
    return {"ph": "X", "name": s.event.name, "cat": s.event.kind, "tid": thread,
            "ts": s.start_ns / 1e3, "dur": (s.end_ns - s.start_ns) / 1e3, "args": args}  # fmt: skip


def _arrow(number: int, collective: Slice, behind: Slice, threads: dict[str, int]) -> list[dict[str, Any]]:
    """Returns a time at which both run, since the ends of an arrow have to lie within their slices."""
    at = max(collective.start_ns, behind.start_ns) / 1e3
    common = {"name": "hidden behind", "cat": "overlap", "id": number, "ts": at}
    return [common | {"ph": "s", "tid": threads[collective.lane]},
            common | {"ph": "f", "bp": "e", "tid": threads[behind.lane]}]  # fmt: skip
