"""Computes the time that a collective takes alone on its group's links. Pure arithmetic; JAX is not imported.

n: size of the group. V: bytes of the full array; each device holds V / n of it before an all-gather and after a
reduce-scatter. W: bandwidth of one device into the links that the group uses. Formulas: "How to Scale Your Model",
https://jax-ml.github.io/scaling-book/sharding and /gpus; docs/targets.md derives them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.traffic import CollectiveKind, LinkKind
from .switch import Bytes, SwitchTimes

LARGE = 2**30  # bytes of an array that a rate is given for


@dataclass(frozen=True)
class LinkLine:
    """Members of a group along one axis of a torus, or behind one switch.

    bytes_per_second: W of one device. A ring sends both ways; the ends of a line receive one way only. Traffic of other
    groups on the same links is subtracted. neighbour_bytes_per_second: the bandwidth to the next member only.
    """

    name: str  # of the physical axis, such as x
    size: int
    bytes_per_second: float
    neighbour_bytes_per_second: float
    gather_seconds: float  # until a message reaches the farthest member
    neighbour_seconds: float


@dataclass(frozen=True)
class InterconnectTier:
    """Links of one kind in a group. Several lines are the axes of a torus, which carry parts of the data at once.

    num_at_once: lines that a gather uses at the same time; None: all. share_at_once: the share of their bandwidth that
    several reach. ring_ways: the ways in which a ring through all devices sends, where no line is a ring.
    """

    kind: LinkKind
    lines: tuple[LinkLine, ...]
    is_switch: bool
    num_at_once: int | None = None
    share_at_once: float = 1.0
    ring_ways: int = 2

    @property
    def size(self) -> int:
        return math.prod(line.size for line in self.lines)

    @property
    def bytes_per_second(self) -> float:
        """Returns W of a gather. If it uses only some of the lines at a time, W is that of the fastest of these, or
        that of a ring through the whole group where all lines together have as much. Lines none of which is a ring
        carry such a ring, too."""
        rates = sorted((line.bytes_per_second for line in self.lines), reverse=True)
        if len(rates) == 1:
            return rates[0]
        one_way = min(line.neighbour_bytes_per_second for line in self.lines)
        if not any(line.bytes_per_second > line.neighbour_bytes_per_second for line in self.lines):
            return min(sum(rates), self.ring_ways * one_way)
        used = rates if self.num_at_once is None else rates[: self.num_at_once]
        together = sum(used) * (self.share_at_once if len(used) > 1 else 1.0)
        return max(rates[0], together, 0.0 if len(used) == len(rates) else min(sum(rates), 2 * one_way))

    @property
    def latency_seconds(self) -> float:
        return sum(line.gather_seconds for line in self.lines)


@dataclass(frozen=True)
class Link:
    """The links of a collective over a group. levels: the tiers, the fastest first; empty if the links are unknown.

    times: the measured times of a group of GPUs, which its levels only name. call_seconds: until a collective on a
    torus moves data.
    """

    kind: LinkKind  # of the slowest level
    levels: tuple[InterconnectTier, ...]
    note: str  # why the links are unknown; else empty
    times: SwitchTimes | None = None
    call_seconds: float = 0.0

    def over(self, num_axes: int | None) -> Link:
        """Returns the link of a gather that uses this many axes of the torus at the same time; None means all."""
        levels = (level if level.is_switch else replace(level, num_at_once=num_axes) for level in self.levels)
        return replace(self, levels=tuple(levels))

    @property
    def group_size(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def bytes_per_second(self) -> float | None:
        """Returns a device's bandwidth in an all-gather over the whole group, V (n - 1) / n divided by its time; None
        if it is unknown."""
        if self.group_size == 1:
            return None
        size = float(LARGE) if self.times else 1.0
        seconds = self.times.seconds("all-gather", size) if self.times else _gathers(size, self)
        return size * (self.group_size - 1) / self.group_size / seconds

    @property
    def latency_seconds(self) -> float:
        if self.times is not None:
            return self.times.start_seconds()
        return self.call_seconds + sum(level.latency_seconds for level in self.levels)


def collective_seconds(kind: CollectiveKind, num_bytes: Bytes, group_size: int, link: Link) -> Bytes | None:
    """Returns the seconds that one collective takes alone; None if the bandwidth of its links is unknown.

    num_bytes: V, the bytes of the full array, or of each of several; for collective-permute and send, the bytes that
    one device sends. Raises ValueError if the group size differs from the link's.

    On a torus an all-gather takes V (n - 1) / n / W, a reduce-scatter the same, an all-reduce both. Latency is added,
    and once what a call takes to begin. Of GPUs the time was measured (switch.py).
    """
    if group_size == 1:
        return 0.0 * num_bytes
    if not link.levels:
        return None
    if group_size != link.group_size:
        raise ValueError(f"a group of {group_size} on the links of one of {link.group_size}")
    if link.times is not None:
        return link.times.seconds(kind, num_bytes)
    match kind:
        case "all-gather" | "reduce-scatter" | "collective-broadcast":
            return _gathers(num_bytes, link) + link.latency_seconds
        case "all-reduce":
            return 2 * (_gathers(num_bytes, link) + link.latency_seconds) - link.call_seconds
        case "all-to-all":
            return _exchanges(num_bytes, link) + link.latency_seconds
        case "collective-permute" | "send":
            lines = [line for level in link.levels for line in level.lines]
            each: list[Any] = [num_bytes / line.neighbour_bytes_per_second + line.neighbour_seconds for line in lines]
            slowest = np.maximum.reduce(each) if isinstance(num_bytes, np.ndarray) else max(each)
            return slowest + link.call_seconds


def _with_shares(link: Link) -> list[tuple[InterconnectTier, int]]:
    """Returns each level with the number of devices below it. Each of these devices has a part of the array, so the
    data that crosses the level is split."""
    sizes = [level.size for level in link.levels]
    return [(level, math.prod(sizes[:i])) for i, level in enumerate(link.levels)]


def _gathers(num_bytes: Any, link: Link) -> Any:
    """Returns the time of a gather over all levels, one after the other: ICI, then DCN."""
    return sum(
        num_bytes / num_below * (level.size - 1) / level.size / level.bytes_per_second
        for level, num_below in _with_shares(link)
    )


def _exchanges(num_bytes: Any, link: Link) -> Any:
    """Returns the time of an all-to-all over all levels: a device sends 1 / n of its V / n to each of the others.

    Along an axis of m chips a message goes m / 4 hops on average around a ring (both ways), and half of all messages
    cross the middle of a line (one way): either way V / n (m / 4) / W of that axis, all axes at the same time.
    """
    n, seconds = link.group_size, 0.0
    for level, num_below in _with_shares(link):
        share = num_bytes / n * num_below / n  # what a device sends to each block of the level
        if level.is_switch:
            seconds = seconds + share * (level.size - 1) / level.bytes_per_second
        else:
            slowest = max(level.size * line.size / 4 / line.bytes_per_second for line in level.lines)
            seconds = seconds + share * slowest
    return seconds
