"""The lines of a profile, whichever file they are in, and the programs in it.

    HOST.xplane.pb       an XSpace: planes of devices and hosts; programs in the plane /host:metadata
    HOST.trace.json.gz   the same lines in Chrome's trace format, without programs

`jax.profiler.ProfileData` reads lines and events. It does not give the stats of an event's metadata, where profilers
put the program (tsl/profiler/protobuf/xplane.proto), so these are read by their numbers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax.profiler import ProfileData

from ..core.wire import WireError, first_text, integers, submessages


class TraceEvent(Protocol):
    """An event of a line, in nanoseconds."""

    @property
    def name(self) -> str: ...
    @property
    def start_ns(self) -> float: ...
    @property
    def end_ns(self) -> float: ...
    @property
    def stats(self) -> Iterable[tuple[str, Any]]: ...


class TraceLine(Protocol):
    """A line of a plane: a stream, a thread, or what a profiler made of them."""

    @property
    def name(self) -> str: ...
    @property
    def events(self) -> Iterable[TraceEvent]: ...


class Plane(Protocol):
    """A device or a host, with its properties."""

    @property
    def name(self) -> str: ...
    @property
    def lines(self) -> Iterable[TraceLine]: ...
    @property
    def stats(self) -> Iterable[tuple[str, Any]]: ...


class PlanesError(ValueError):
    """The content is not that of a profile."""


@dataclass(frozen=True)
class ProfiledProgram:
    """A program in a profile. name: with its number, jit_step(12). proto: its HloProto."""

    name: str
    proto: memoryview


# Fields of XSpace, XPlane, XEventMetadata, XStatMetadata and XStat; values of a map are in its field 2.
_PLANES, _PLANE_NAME, _EVENT_METADATA, _STAT_METADATA, _MAP_VALUE = 1, 2, 4, 5, 2
_ID, _NAME, _STATS, _STAT_ID, _STAT_BYTES = 1, 2, 5, 1, 6
_METADATA_PLANE, _PROGRAM_STAT = "/host:metadata", "hlo proto"


def read_planes(xspace: bytes) -> list[Plane]:
    """Returns the planes of an XSpace. Raises PlanesError for bytes that are not whole."""
    try:
        return list(ProfileData.from_serialized_xspace(xspace).planes)
    except RuntimeError as error:
        raise PlanesError(str(error).splitlines()[0]) from None


def is_xspace(content: bytes) -> bool:
    """Returns whether bytes are an XSpace: its first messages are planes, whose names are paths."""
    try:
        return any(first_text(plane, _PLANE_NAME).startswith("/") for plane in submessages(content, _PLANES))
    except WireError:
        return False


def programs_in(xspace: bytes) -> list[ProfiledProgram]:
    """Returns the programs in an XSpace. Raises PlanesError for bytes that are not whole."""
    try:
        return [
            each
            for plane in submessages(xspace, _PLANES)
            if first_text(plane, _PLANE_NAME) == _METADATA_PLANE
            for each in _programs(plane)
        ]
    except WireError as error:
        raise PlanesError(str(error)) from None


def _programs(plane: memoryview) -> Iterator[ProfiledProgram]:
    stats = {}
    for entry in submessages(plane, _STAT_METADATA):
        for one in submessages(entry, _MAP_VALUE):
            stats[next(integers(one, _ID), 0)] = first_text(one, _NAME).lower().replace("_", " ")
    for entry in submessages(plane, _EVENT_METADATA):
        for program in submessages(entry, _MAP_VALUE):
            for stat in submessages(program, _STATS):
                if stats.get(next(integers(stat, _STAT_ID), 0)) == _PROGRAM_STAT:
                    for proto in submessages(stat, _STAT_BYTES):
                        yield ProfiledProgram(first_text(program, _NAME), proto)


@dataclass(frozen=True, slots=True)
class _Event:
    name: str
    start_ns: float
    end_ns: float
    args: Mapping[str, Any]

    @property
    def stats(self) -> Iterable[tuple[str, Any]]:
        return self.args.items()


@dataclass(frozen=True)
class _Line:
    name: str
    events: list[_Event] = field(default_factory=list)


@dataclass(frozen=True)
class _Plane:
    name: str
    threads: dict[Any, _Line] = field(default_factory=dict)
    stats: tuple[tuple[str, Any], ...] = ()

    @property
    def lines(self) -> Iterable[_Line]:
        return self.threads.values()


def read_json_planes(text: str | bytes) -> list[Plane]:
    """Returns the planes of a trace in Chrome's format, as `jax.profiler` and XProf write it. Raises PlanesError for
    another text."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PlanesError(f"its JSON is not whole: {error}") from None
    rows = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise PlanesError("its JSON has no traceEvents")
    events = [row for row in rows if isinstance(row, dict)]
    planes: dict[Any, _Plane] = {}
    for row in events:
        if row.get("ph") == "M" and row.get("name") == "process_name":
            name = str(_args(row).get("name", ""))
            planes[row.get("pid")] = _Plane(name.split(" ")[0] if name.startswith("/") else name)
    for row in events:
        plane = planes.setdefault(row.get("pid"), _Plane(""))
        if row.get("ph") == "M" and row.get("name") == "thread_name":
            plane.threads[row.get("tid")] = _Line(str(_args(row).get("name", "")))
    for row in events:
        if row.get("ph") == "X" and isinstance(row.get("ts"), int | float):
            line = planes[row.get("pid")].threads.setdefault(row.get("tid"), _Line(""))
            start, lasted = row["ts"] * 1e3, row.get("dur", 0)
            if not isinstance(lasted, int | float):
                raise PlanesError(f"an event has a dur that is no number: {lasted!r}")
            line.events.append(_Event(str(row.get("name", "")), start, start + lasted * 1e3, _args(row)))
    return list(planes.values())


def _args(row: Mapping[str, Any]) -> Mapping[str, Any]:
    args = row.get("args")
    return args if isinstance(args, dict) else {}
