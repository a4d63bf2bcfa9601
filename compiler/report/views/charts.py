"""Computes the geometry of the page's charts, in percent of their width and height; the template draws them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.format import human_bytes, human_count, human_seconds, human_share
from ...core.known import Unknown, each_known
from ...schema import Report, RooflinePart, total
from .facts import compute_by_kind, left_bytes

LEAST_INTENSITY = 0.01  # FLOPs per byte: parts that compute less only move data, and would stretch the plot


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar. colour: a class of the style sheet."""

    name: str
    value: str
    share: str
    start: float
    width: float
    colour: str


@dataclass(frozen=True)
class Mark:
    """A line across a bar."""

    name: str
    value: str
    at: float


@dataclass(frozen=True)
class StackedBar:
    """A bar of parts with marks. missing: the names of unknown parts."""

    segments: tuple[BarSegment, ...]
    marks: tuple[Mark, ...]
    missing: tuple[str, ...]


def memory_bar(report: Report) -> StackedBar:
    """Returns the memory of a chip: the parts of the peak, the rest, and the reserved part beyond the limit. Marks show
    the limit and the estimate without XLA."""
    memory, step = report.memory, report.compiled
    counts = [(name, count) for name, count in memory.breakdown.items() if count and name != "reserved"]
    parts = [(name.replace("_", " "), count, f"memory-{name}") for name, count in counts]
    rest = (step.peak_bytes or 0) - sum(count for name, count in counts if name != "code")
    if rest > 0:
        parts.append(("unclassified", rest, "memory-other"))
    left = left_bytes(report)
    if parts and left is not None and left > 0:
        parts.append(("left", left, "ground"))
    if parts and (reserved := memory.breakdown.get("reserved")):
        parts.append(("reserved", reserved, "memory-reserved"))
    missing = tuple(name for name, count in memory.breakdown.items() if isinstance(count, Unknown))
    estimate = each_known(report.estimated, lambda estimated: estimated.peak_bytes)
    marks = (("limit", step.limit_bytes), ("estimate without XLA", estimate))
    return _bar(parts, human_bytes, [(n, v) for n, v in marks if v], missing)


def step_bar(report: Report) -> StackedBar:
    """Returns the predicted step: compute by kind, exposed communication, then the bubble; a mark shows the
    roofline."""
    step = report.compiled
    parts = [(kind, seconds, kind) for kind, seconds in compute_by_kind(report)]
    of_host = step.exposed_host_seconds
    if step.exposed_seconds and step.exposed_seconds > of_host:
        parts.append(("exposed communication", step.exposed_seconds - of_host, "exposed"))
    if of_host:
        parts.append(("exposed copies to the host and back", of_host, "exposed"))
    if step.bubble_seconds:
        parts.append(("waits for other stages", step.bubble_seconds, "bubble"))
    marks = [("roofline", step.roofline_seconds)] if step.roofline_seconds else []
    return _bar(parts, human_seconds, marks, ())


def communication_bar(report: Report) -> StackedBar:
    """Returns the time of all collectives: hidden, then exposed."""
    hidden, exposed = (total(getattr(c, name) for c in report.collectives) for name in
                       ("hidden_seconds", "exposed_seconds"))  # fmt: skip
    if isinstance(hidden, Unknown) or isinstance(exposed, Unknown) or not hidden + exposed:
        return StackedBar((), (), ())
    return _bar([("hidden behind compute", hidden, "hidden"), ("exposed", exposed, "exposed")], human_seconds, [], ())


def _bar(
    parts: Sequence[tuple[str, float, str]],
    human: Callable[[Any], str],
    marks: Iterable[tuple[str, float]],
    missing: tuple[str, ...],
) -> StackedBar:
    marks = list(marks)
    filled = sum(value for _, value, _ in parts)
    whole = max([filled, *(value * 1.02 for _, value in marks)])
    segments, done = [], 0.0
    for name, value, colour in parts:
        segments.append(BarSegment(name, human(value), human_share(value / filled), 100 * done / whole,
                                100 * value / whole, colour))  # fmt: skip
        done += value
    return StackedBar(
        tuple(segments), tuple(Mark(n, human(v), 100 * v / whole) for n, v in marks) if whole else (), missing
    )


@dataclass(frozen=True)
class RooflinePoint:
    """A part of the step on the roofline plot. y_roof: the height of the roof above it. shape: shows the part's bound.
    is_label_above: alternates, so that labels of neighbours do not meet."""

    label: str
    name: str
    x: float
    y: float
    y_roof: float
    shape: str
    intensity: str
    rate: str
    is_label_above: bool


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class RooflinePlot:
    """A log-log plot: FLOPs per byte of HBM across, FLOP/s of one chip upwards. ridge: the point where the roof turns
    level."""

    points: tuple[RooflinePoint, ...]
    ridge_x: float
    ridge_y: float
    left_y: float  # the height of the roof at the left edge
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    peak: str
    bandwidth: str


def roofline_plot(report: Report) -> RooflinePlot | None:
    """Returns each part at the rate that its bound allows, and the whole step at the predicted rate; None if no peak is
    known."""
    peak, bandwidth = report.target.peak_flops_per_second, report.target.hbm_bytes_per_second
    counted = [(i, part, part.flops, part.hbm_bytes) for i, part in enumerate(report.roofline, start=1)
               if not isinstance(part.flops, Unknown) and not isinstance(part.hbm_bytes, Unknown)]  # fmt: skip
    known = [(str(i), part.name, flops, num_bytes, seconds, str(part.bound))
             for i, part, flops, num_bytes in counted if (seconds := _bound_seconds(part))]  # fmt: skip
    if report.compiled.step_seconds and known and len(counted) == len(report.roofline):
        known.append(("S", "the whole step, as predicted", sum(flops for _, _, flops, _ in counted),
                      sum(num_bytes for *_, num_bytes in counted), report.compiled.step_seconds, "step"))  # fmt: skip
    known = [row for row in known if row[3] and row[2] / row[3] >= LEAST_INTENSITY]
    known.sort(key=lambda row: (row[-1] == "step", row[2] / row[3]))
    if not peak or not bandwidth or not known:
        return None
    ridge = peak / bandwidth
    across = _Axis.around([ridge, *(flops / size for _, _, flops, size, _, _ in known)])
    upwards = _Axis.around([peak, *(flops / seconds for _, _, flops, _, seconds, _ in known)])
    points = [
        RooflinePoint(label, name, across.at(flops / size), 100 - upwards.at(flops / seconds),
              100 - upwards.at(min(peak, bandwidth * flops / size)), shape,
              human_count(flops / size, "").strip(), human_count(flops / seconds, "FLOP/s"), index % 2 == 0)
        for index, (label, name, flops, size, seconds, shape) in enumerate(known)
    ]  # fmt: skip
    return RooflinePlot(
        tuple(points), across.at(ridge), 100 - upwards.at(peak), 100 - upwards.at(10**across.low * bandwidth),
        across.ticks(""), upwards.ticks("FLOP/s", is_upwards=True),
        human_count(peak, "FLOP/s"), human_count(bandwidth, "B/s"),
    )  # fmt: skip


def _bound_seconds(part: RooflinePart) -> float | None:
    each = (part.flops_seconds, part.hbm_seconds, part.link_seconds)
    known = [s for s in each if not isinstance(s, Unknown)]
    return max(known, default=None)


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis over powers of ten, from low to high."""

    low: int
    high: int

    @classmethod
    def around(cls, values: Iterable[float]) -> "_Axis":
        logs = [math.log10(value) for value in values]
        return cls(math.floor(min(logs) - 0.2), math.ceil(max(logs) + 0.2))

    def at(self, value: float) -> float:
        return 100 * (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self, unit: str, *, is_upwards: bool = False) -> tuple[Tick, ...]:
        every = max(1, math.ceil((self.high - self.low) / 8))
        powers = range(self.low, self.high + 1, every)
        return tuple(
            Tick(100 - self.at(10.0**p) if is_upwards else self.at(10.0**p), _power(10.0**p, unit)) for p in powers
        )


def _power(value: float, unit: str) -> str:
    if value < 1:
        return f"{value:g} {unit}".strip()
    return human_count(value, unit).replace(".00", "").replace(".0", "").strip()
