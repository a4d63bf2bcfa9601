"""Prices collectives of GPUs from measured times: by kind, size of the group behind a switch, nodes, and bytes.

Between two measured sizes, and between two measured groups, the logarithm of the time is a line. Below the smallest
size the time stays, above the largest it grows at the last rate. A larger array never takes less. A group that is
smaller or larger than all that were measured takes the times of the nearest; above the largest number of nodes each
node more adds as much as it does to the smallest message.
"""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np

from ..core.format import counted, human_bytes
from ..core.traffic import PAIRS, CollectiveKind
from ..spec.measured_tables import CollectiveTable, NodeGroup

Bytes = TypeVar("Bytes", float, np.ndarray)

# Kinds that take as long as another one, of which times are known.
LIKE: Mapping[CollectiveKind, CollectiveKind] = {
    "collective-broadcast": "all-gather",
    "send": "collective-permute",
    "reduce-scatter": "all-gather",
}


@dataclass(frozen=True)
class TimeCurve:
    """Seconds by bytes. log_bytes, log_seconds: of the sizes that are known, ascending."""

    log_bytes: np.ndarray
    log_seconds: np.ndarray

    @property
    def start_seconds(self) -> float:
        """Returns the seconds of the smallest message."""
        return math.exp(self.log_seconds[0])

    @property
    def last_bytes_per_second(self) -> float:
        """Returns the rate between the two largest sizes."""
        sizes, seconds = np.exp(self.log_bytes[-2:]), np.exp(self.log_seconds[-2:])
        return float((sizes[1] - sizes[0]) / (seconds[1] - seconds[0]))

    def seconds(self, num_bytes: Bytes) -> Bytes:
        size = np.maximum(num_bytes, 1.0)
        within = np.exp(np.interp(np.log(size), self.log_bytes, self.log_seconds))
        beyond = np.maximum(size - math.exp(self.log_bytes[-1]), 0.0) / self.last_bytes_per_second
        return _as_given(within + beyond, num_bytes)


@dataclass(frozen=True)
class SwitchTimes:
    """The times of a group of GPUs: `near` of each of `far` nodes.

    inside, across: measured times behind one switch, and over several nodes. chip_bytes_per_second,
    nic_bytes_per_second: of one GPU into the switch, and into the network. at_once: the GPUs behind the switch that
    send at the same time, in groups like this one. latency: how much longer than measured the start takes, inside and
    across, by a calibration.
    """

    near: int
    far: int
    chip_bytes_per_second: float
    nic_bytes_per_second: float
    inside: CollectiveTable = field(repr=False)
    across: CollectiveTable = field(repr=False)
    at_once: int = 1
    latency: tuple[float, float] = (1.0, 1.0)

    def seconds(self, kind: CollectiveKind, num_bytes: Bytes) -> Bytes:
        """Returns the seconds of one collective alone. num_bytes: as in `collective_seconds`."""
        size = num_bytes / (self.near * self.far) if kind == "all-to-all" else num_bytes
        if self.far == 1:
            return self._behind_switch(kind, size)
        over_network = self._over_network(kind, size)
        if kind == "all-to-all" or self.near <= _most_near(self.across, kind):
            return over_network
        # More GPUs of a node than were measured: all of the array still reaches each of them behind the switch.
        return _as_given(np.maximum(over_network, self._behind_switch(kind, size)), num_bytes)

    def beyond_measured(self, kind: CollectiveKind, num_bytes: float) -> str:
        """Returns in words how the price of a group and an array differs from what was measured; empty if it does
        not."""
        table = self.across if self.far > 1 else self.inside
        size, most_bytes = num_bytes / (self.near * self.far if kind == "all-to-all" else 1), table.bytes[-1]
        rows, found = _rows(table, kind, self.at_once), list[str]()
        like = kind if kind in table.microseconds else LIKE[kind]
        if like != kind:
            found.append(f"the times of {like}")
        if kind not in PAIRS or (self.far == 1 and kind != "send"):  # a send has two devices, whatever its group
            of = " of a node" if self.far > 1 else ""
            found += _between_measured(self.near, {near for _, near in rows}, f"GPU{of}", f"GPUs{of}")
            found += _between_measured(self.far, {far for far, _ in rows}, "node", "nodes")
        if self.far == 1 and (nearest := table.nearest_at_once(like, self.at_once)) not in (None, self.at_once):
            found.append(f"{counted(self.at_once, 'GPU')} at once as {nearest}")
        if size > most_bytes:
            largest = human_bytes(int(most_bytes))
            found.append(f"arrays of {human_bytes(int(size))} at the rate of the largest measured, {largest}")
        return ", ".join(found)

    def start_seconds(self, kind: CollectiveKind = "all-gather") -> float:
        """Returns the seconds of the smallest message."""
        return self.seconds(kind, 1.0)

    @property
    def permute(self) -> TimeCurve:
        """Returns the times of a permute over the slowest links of the group."""
        sizes = np.exp(_curve(self.inside, "collective-permute", (1, max(self.near, 2)), self.at_once).log_bytes)
        seconds = self.seconds("collective-permute", sizes)
        return TimeCurve(np.log(sizes), np.log(seconds))

    def _behind_switch(self, kind: CollectiveKind, size: Bytes) -> Bytes:
        curve = _curve(self.inside, kind, (1, self.near), self.at_once)
        found = curve.seconds(size * (self.inside.chip_bytes_per_second / self.chip_bytes_per_second))
        return found + (self.latency[0] - 1) * curve.start_seconds

    def _over_network(self, kind: CollectiveKind, size: Bytes) -> Bytes:
        near = min(self.near, _most_near(self.across, kind))
        # A node with more GPUs than were measured has as many more adapters for the same array.
        share = 1.0 if kind in ("all-to-all", *PAIRS) else near / self.near
        curve = _curve(self.across, kind, (self.far, near))
        found = curve.seconds(size * share * (self.across.chip_bytes_per_second / self.nic_bytes_per_second))
        return found + (self.latency[1] - 1) * curve.start_seconds


def _as_given(seconds: Any, num_bytes: Bytes) -> Bytes:
    """Returns seconds as a float for one size, as an array for several."""
    found: Any = seconds if isinstance(num_bytes, np.ndarray) else float(seconds)
    return found


def _between_measured(size: int, measured: Set[int], one: str, many: str) -> Iterator[str]:
    """Yields in words from which sizes of a group the price of another one is."""
    below = [each for each in measured if each < size]
    above = [each for each in measured if each > size]
    if size not in measured and below and above:
        yield f"{counted(size, one, many)} between {max(below)} and {min(above)}"
    elif size not in measured:
        yield f"{counted(size, one, many)} as {max(below, default=0) or min(above)}"


@cache
def _rows(table: CollectiveTable, kind: CollectiveKind, at_once: int = 1) -> dict[NodeGroup, tuple[float, ...]]:
    return table.seconds(kind, at_once) or table.seconds(LIKE[kind], at_once)


@cache
def _most_near(table: CollectiveTable, kind: CollectiveKind) -> int:
    return max(near for _, near in _rows(table, kind))


@cache
def _curve(table: CollectiveTable, kind: CollectiveKind, group: NodeGroup, at_once: int = 1) -> TimeCurve:
    """Returns the curve of a group: between the groups that were measured the time is a power of their size."""
    rows = {each: np.log(row) for each, row in _rows(table, kind, at_once).items()}
    nodes, near = group
    of_near = {size: _between({n: row for (n, m), row in rows.items() if m == size}, nodes)
               for size in sorted({m for _, m in rows})}  # fmt: skip
    return TimeCurve(np.log(np.array(table.bytes)), _between(of_near, near, grows=False))


def _between(rows: Mapping[int, np.ndarray], size: int, *, grows: bool = True) -> np.ndarray:
    """Returns the row of a size. grows: whether the start grows above the largest, as much for each as between the two
    largest."""
    known = sorted(rows)
    if size in rows:
        return rows[size]
    if size < known[0] or len(known) == 1:
        return rows[known[0]]
    if size > known[-1]:
        low, high = known[-2:]
        starts = [math.exp(rows[each][0]) for each in (low, high)]
        each = max(starts[1] - starts[0], 0.0) / (high - low) if grows else 0.0
        return np.log(np.exp(rows[high]) + each * (size - high))
    low, high = max(each for each in known if each < size), min(each for each in known if each > size)
    weight = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
    return (1 - weight) * rows[low] + weight * rows[high]
