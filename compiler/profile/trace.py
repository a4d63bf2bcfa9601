"""Reads from a trace of `jax.profiler` what each device ran in each step. docs/profile.md lists the tried formats.

    /host:CPU        simulated devices: events on any thread, with the stats hlo_op, hlo_module, device_ordinal, run_id
    /device:TPU:N    the line XLA Modules, with an event for each run of a program, and the line XLA Ops
    /device:GPU:N    a line for each stream: events with the stats hlo_op and hlo_module

The other lines of a device are made from these (steps, names of frameworks), or repeat what a start and a done on the
line XLA Ops say (Async XLA Ops, which XLA's own reader skips too: xla/python/xplane_to_profile_instructions.cc).
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.profiler import ProfileData

from ..core.format import counted

STEP_ANNOTATION = "train"  # the annotation around each step, with its number as step_num
Platform = Literal["cpu", "gpu", "tpu"]
_MADE = frozenset({
    "Async XLA Ops", "Framework Name Scope", "Framework Ops", "Launch Stats", "Source code", "Steps",
    "TensorFlow Name Scope", "TensorFlow Ops", "XLA Modules", "XLA Ops",
})  # fmt: skip
_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)")


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
    step runs. Raises RuntimeError for bytes that are not a trace."""
    planes = list(ProfileData.from_serialized_xspace(xspace).planes)
    steps = _annotated_steps(planes)
    found: dict[int, list[Execution]] = {}
    platform: Platform = "cpu"
    for plane in planes:
        device = _DEVICE.fullmatch(plane.name)
        if device is None:
            continue
        platform = "tpu" if device[1] == "TPU" else "gpu"
        read = _on_tpu(plane, module) if platform == "tpu" else _on_gpu(plane, module, len(steps))
        found[int(device[2])] = list(read)
    if not found:
        found = _on_cpu(planes, module)
    notes, executions = list[str](), list[Execution]()
    for device, each in sorted(found.items()):
        ordered = sorted(each, key=lambda execution: execution.start)
        if ordered and len(ordered) != len(steps):
            notes.append(
                f"process {process}, device {device}: {counted(len(ordered), 'execution')} of {len(steps)} traced steps"
            )
        numbers: Sequence[int | None] = steps if len(ordered) == len(steps) else [None] * len(ordered)
        executions += [
            replace(one, process=process, device=device, step=step) for one, step in zip(ordered, numbers, strict=True)
        ]
    return Trace(platform, tuple(executions), tuple(notes))


def _annotated_steps(planes: Iterable[Any]) -> list[int]:
    """Returns the numbers of the steps that the host dispatched."""
    events = (event for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events)
    found = (dict(event.stats).get("step_num") for event in events if event.name == STEP_ANNOTATION)
    return sorted(int(step) for step in found if step is not None)


def _on_cpu(planes: Iterable[Any], module: str) -> dict[int, list[Execution]]:
    """Returns the executions of simulated devices. They share threads, so each event names its device and its run."""
    runs: dict[tuple[int, Any], list[OpEvent]] = {}
    for plane in planes:
        for line in plane.lines if plane.name == "/host:CPU" else ():
            for event, stats in _of_module(line, module):
                key = int(stats.get("device_ordinal", 0)), stats.get("run_id")
                runs.setdefault(key, []).append(_op(event, stats))
    found: dict[int, list[Execution]] = {}
    for (device, _), events in runs.items():
        found.setdefault(device, []).append(_execution(events))
    return found


def _on_tpu(plane: Any, module: str) -> Iterator[Execution]:
    """Returns the executions of a core: the events within each run of the program."""
    lines = {line.name: line for line in plane.lines}
    modules = lines["XLA Modules"].events if "XLA Modules" in lines else ()
    windows = sorted((e.start_ns, e.end_ns) for e in modules if e.name.split("(")[0] == module)
    starts = [start for start, _ in windows]
    within: list[list[OpEvent]] = [[] for _ in windows]
    for event in lines["XLA Ops"].events if "XLA Ops" in lines else ():
        at = bisect_right(starts, event.start_ns) - 1
        if at >= 0 and event.start_ns < windows[at][1]:
            within[at].append(_op(event, dict(event.stats)))
    for (start, end), events in zip(windows, within, strict=True):
        yield replace(_execution(events, start), end=end)


def _on_gpu(plane: Any, module: str, num_steps: int) -> Iterator[Execution]:
    """Returns the executions of a GPU. Kernels do not name their execution, so one begins with the first operation that
    each step runs once."""
    streams = (line for line in plane.lines if line.name not in _MADE)
    kernels = sorted(
        (_op(event, stats) for line in streams for event, stats in _of_module(line, module)),
        key=lambda event: event.start,
    )
    counts = Counter(event.name for event in kernels)
    first = next((event.name for event in kernels if counts[event.name] == num_steps), None)
    begins = [place for place, event in enumerate(kernels) if event.name == first]
    for begin, end in zip(begins, [*begins[1:], len(kernels)], strict=True):
        yield _execution(kernels[begin:end])


def _of_module(line: Any, module: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Returns the events of a program's operations, with their stats."""
    for event in line.events:
        stats = dict(event.stats)
        if stats.get("hlo_module") == module and "hlo_op" in stats:
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
