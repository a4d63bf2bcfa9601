"""Reads from a trace of `jax.profiler` what each device ran in each step. docs/profile.md lists the tried formats.

    /host:CPU        simulated devices: events on any thread, with the stats hlo_op, hlo_module, device_ordinal, run_id
    /device:TPU:N    the line XLA Modules, with an event for each run of a program, and the line XLA Ops
    /device:GPU:N    a line for each stream: events with the stats hlo_op and hlo_module

The other lines of a device are made from these (steps, names of frameworks), or repeat what a start and a done on the
line XLA Ops say (Async XLA Ops, which XLA's own reader skips too: xla/python/xplane_to_profile_instructions.cc).

Each moment of an execution is compute, exposed time of one collective, or neither. This is how the schedule is
simulated too (compiler/xla/schedule/simulate.py), so measured and predicted times mean the same: alone, a collective
takes from its start until it is done, or as long as its kernel runs; of this, the time in which no compute runs is
exposed, of the collective that began first where there are several.
"""

import re
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..core.format import be, counted
from ..core.traffic import COMPUTE, ComputeKind
from ..schema import Event
from ..xla.hlo import Module
from .planes import Plane, TraceLine, read_planes
from .prediction import PredictedCollective, Prediction

STEP_ANNOTATION = "train"  # the annotation around each step, with its number as step_num
Platform = Literal["cpu", "gpu", "tpu"]
_MADE = frozenset({
    "Async XLA Ops", "Framework Name Scope", "Framework Ops", "Launch Stats", "Source code", "Steps",
    "TensorFlow Name Scope", "TensorFlow Ops", "XLA Modules", "XLA Ops",
})  # fmt: skip
HOST, MODULES = "/host:CPU", "XLA Modules"
_TPU = "/device:TPU:"
_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)")
_NUMBER = re.compile(r"\(\d+\)$")


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One execution of an HLO instruction, or of a kernel of it, in nanoseconds of the trace."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Execution:
    """A step on a device. device: its number within its process. step: None if the trace does not name it. events: in
    the order of their starts."""

    process: int
    device: int
    step: int | None
    start: float
    end: float
    events: tuple[OpEvent, ...]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Trace:
    """The executions in a trace. notes: what is missing in it."""

    platform: Platform
    executions: tuple[Execution, ...]
    notes: tuple[str, ...] = ()


def read_trace(xspace: bytes, module: str, process: int = 0) -> Trace:
    """Returns the steps in a trace of one process, the content of its xplane.pb. module: the name of the program that a
    step runs. Raises PlanesError for bytes that are not a trace."""
    return trace_of(read_planes(xspace), module, process)


def trace_of(planes: Sequence[Plane], module: str, process: int = 0, once: Container[str] = ()) -> Trace:
    """Returns the steps in a trace of one process. module: the name of the program that a step runs, with its number,
    jit_step(12), where others have the same name. once: instructions that run once in each step, if they are known."""
    steps = _annotated_steps(planes)
    found: dict[int, list[Execution]] = {}
    platform: Platform = "cpu"
    for plane in planes:
        device = _DEVICE.fullmatch(plane.name)
        if device is None:
            continue
        platform = "tpu" if device[1] == "TPU" else "gpu"
        read = _on_tpu(plane, module) if platform == "tpu" else _on_gpu(plane, module, len(steps), once)
        found[int(device[2])] = list(read)
    if not found:
        found = _on_cpu(planes, module)
    notes, executions = list[str](), list[Execution]()
    for device, each in sorted(found.items()):
        ordered = sorted(each, key=lambda execution: execution.start)
        if ordered and steps and len(ordered) != len(steps):
            notes.append(
                f"process {process}, device {device}: {counted(len(ordered), 'execution')} of {len(steps)} traced steps"
            )
        if platform == "gpu" and not steps and ordered:
            often = counted(len(ordered), "time")
            notes.append(f"process {process}, device {device}: no step is annotated; operations that a step runs once "
                         f"ran {often}, so {counted(len(ordered), 'step')} {be(len(ordered))} taken")  # fmt: skip
        numbers: Sequence[int | None] = steps if len(ordered) == len(steps) else [None] * len(ordered)
        executions += [
            replace(one, process=process, device=device, step=step) for one, step in zip(ordered, numbers, strict=True)
        ]
    return Trace(platform, tuple(executions), tuple(notes))


def measured_programs(planes: Sequence[Plane]) -> dict[str, float]:
    """Returns the seconds that each program ran on any device, the longest first. A name has the program's number where
    the trace gives it: jit_step(12)."""
    found: dict[str, float] = {}
    devices = [plane for plane in planes if _DEVICE.fullmatch(plane.name)]
    for plane in devices or [plane for plane in planes if plane.name == HOST]:
        for line in plane.lines:
            if plane.name.startswith(_TPU):
                if line.name == MODULES:
                    for event in line.events:
                        _add(found, event.name, event.end_ns - event.start_ns)
            elif line.name not in _MADE:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_module" in stats and "hlo_op" in stats:
                        _add(found, _numbered(stats), event.end_ns - event.start_ns)
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def accelerators(hosts: Iterable[Iterable[Plane]]) -> set[str]:
    """Returns TPU or GPU, for the devices that were traced on any host; simulated devices have no plane."""
    return {device[1] for planes in hosts for plane in planes if (device := _DEVICE.fullmatch(plane.name))}


def device_kinds(planes: Iterable[Plane]) -> tuple[str, ...]:
    """Returns the kinds of the devices as the profiler names them: ("TPU v5p",); empty where it does not."""
    named = (dict(plane.stats).get("device_type_string") for plane in planes if _DEVICE.fullmatch(plane.name))
    return tuple(dict.fromkeys(str(name) for name in named if name))


def compute_capabilities(planes: Iterable[Plane]) -> tuple[tuple[int, int], ...]:
    """Returns the compute capabilities of the GPUs; empty where the profiler does not name them."""
    named = [dict(plane.stats) for plane in planes if _DEVICE.fullmatch(plane.name)]
    keys = "compute_cap_major", "compute_cap_minor"
    return tuple(dict.fromkeys((int(of[keys[0]]), int(of[keys[1]])) for of in named if keys[0] in of and keys[1] in of))


def base_name(module: str) -> str:
    """Returns the name of a program without its number: jit_step(12) -> jit_step."""
    return _NUMBER.sub("", module)


def _numbered(stats: Mapping[str, Any]) -> str:
    number = stats.get("program_id")
    return str(stats["hlo_module"]) if number is None else f"{stats['hlo_module']}({number})"


def _is_named(name: str, module: str) -> bool:
    """Returns whether a program's name in a trace is a name without a number, or the same number."""
    return module in (name, base_name(name))


def _annotated_steps(planes: Iterable[Plane]) -> list[int]:
    """Returns the numbers of the steps that the host dispatched."""
    events = (event for plane in planes if plane.name == HOST for line in plane.lines for event in line.events)
    found = (dict(event.stats).get("step_num") for event in events if event.name == STEP_ANNOTATION)
    return sorted(int(step) for step in found if step is not None)


def _on_cpu(planes: Iterable[Plane], module: str) -> dict[int, list[Execution]]:
    """Returns the executions of simulated devices. They share threads, so each event names its device and its run."""
    runs: dict[tuple[int, Any], list[OpEvent]] = {}
    for plane in planes:
        for line in plane.lines if plane.name == HOST else ():
            for event, stats in _of_module(line, module):
                key = int(stats.get("device_ordinal", 0)), stats.get("run_id")
                runs.setdefault(key, []).append(_op(event, stats))
    found: dict[int, list[Execution]] = {}
    for (device, _), events in runs.items():
        found.setdefault(device, []).append(_execution(events))
    return found


def _on_tpu(plane: Plane, module: str) -> Iterator[Execution]:
    """Returns the executions of a core: the events within each run of the program."""
    lines = {line.name: line for line in plane.lines}
    modules = lines[MODULES].events if MODULES in lines else ()
    windows = sorted((e.start_ns, e.end_ns) for e in modules if _is_named(e.name, module))
    starts = [start for start, _ in windows]
    within: list[list[OpEvent]] = [[] for _ in windows]
    for event in lines["XLA Ops"].events if "XLA Ops" in lines else ():
        at = bisect_right(starts, event.start_ns) - 1
        if at >= 0 and event.start_ns < windows[at][1]:
            within[at].append(_op(event, {}))  # the name is enough, and stats take as long again
    for (start, end), events in zip(windows, within, strict=True):
        yield replace(_execution(events, start), end=end)


def _on_gpu(plane: Plane, module: str, num_steps: int, once: Container[str]) -> Iterator[Execution]:
    """Returns the executions of a GPU. Kernels do not name their execution, so one begins with the first operation that
    each step runs once."""
    streams = (line for line in plane.lines if line.name not in _MADE)
    kernels = sorted(
        (_op(event, stats) for line in streams for event, stats in _of_module(line, module)),
        key=lambda event: event.start,
    )
    counts = Counter(event.name for event in kernels)
    if num_steps not in counts.values():
        num_steps = _steps_by_counts(counts, once)
    first = next((event.name for event in kernels if counts[event.name] == num_steps), None)
    begins = [place for place, event in enumerate(kernels) if event.name == first]
    for begin, end in zip(begins, [*begins[1:], len(kernels)], strict=True):
        yield _execution(kernels[begin:end])


def _steps_by_counts(counts: Mapping[str, int], once: Container[str]) -> int:
    """Returns the number of steps in which operations ran so often, where the trace does not say it. It is that of most
    operations that run once in a step. Where these are not known, loops run their operations in each step several
    times, so it is the least number that a share of all operations have."""
    if known := Counter(number for name, number in counts.items() if name in once):
        return known.most_common(1)[0][0]
    found = Counter(counts.values())
    return min((number for number, share in found.items() if share >= _LEAST_SHARE * len(counts)), default=0)


def _of_module(line: TraceLine, module: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns the events of a program's operations, with their stats."""
    for event in line.events:
        stats = dict(event.stats)
        if "hlo_module" in stats and "hlo_op" in stats and _is_named(_numbered(stats), module):
            yield event, stats


def _op(event: Any, stats: dict[str, Any]) -> OpEvent:
    """Returns an event under the name of its instruction; TPUs may give the whole text: '%dot.1 = bf16[8]{0}
    dot(...'."""
    name = str(stats.get("hlo_op") or event.name)
    return OpEvent(name.split(" = ")[0].lstrip("%"), event.start_ns, event.end_ns)


def _execution(events: list[OpEvent], start: float | None = None) -> Execution:
    ordered = tuple(sorted(events, key=lambda event: (event.start, -event.end)))
    begin = ordered[0].start if start is None else start
    return Execution(0, 0, None, begin, max((e.end for e in ordered), default=begin), ordered)


def measured_trips(module: Module, loops: Iterable[str], executions: Sequence[Execution]) -> dict[str, int]:
    """Returns the iterations of loops for which the program does not say them: how often what they repeat ran, for each
    time that they ran. Loops that did not run are left out."""
    found = {}
    for computation in module.computations.values():
        for loop in computation.instructions:
            if loop.name in loops and loop.body in module.computations:
                inside = {each.name for each in module.computations[loop.body].instructions}
                counts = [Counter(event.name for event in each.events) for each in executions]
                ran = [max((count[name] for name in inside), default=0) / max(1, count[loop.name]) for count in counts]
                if (trips := round(statistics.median(ran))) > 0:
                    found[loop.name] = trips
    return found


_LEAST_SHARE = 0.05  # of a program's operations, which ran as often, for it to be the number of its steps
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
