"""The links that arbitrary groups of devices use, from the devices' places: a compiler's groups need not be a mesh
axis. They may be halves of an axis, a hierarchy of groups, or pairs that send to each other.

    v5e-16 (4 x 4), groups of 2 along x: {0, 1}, {2, 3}, ...  ->  ICI x, a line of 2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from ..core.collectives import LinkKind
from ..spec.target_spec import TorusSpec
from .axis_segments import TORUS_AXES
from .interconnect_tiers import LINK_KINDS, GroupSpan, link_of_spans, rates_of
from .links import Link
from .placement import Placement, physical_sizes

DeviceGroups = Sequence[Sequence[int]]
Coordinates = tuple[int, ...]
Box = tuple[tuple[int, ...], ...]  # the places that a group has along each physical axis
Hop = tuple[str, Coordinates, int]  # along a physical axis, from a place; which way on a torus, else 0
WAYS = {1: "+", -1: "-", 0: ""}


def link_of_devices(placement: Placement, groups: DeviceGroups) -> Link | None:
    """Returns the link of collectives over all these groups at once; the slowest if groups lie differently. None if one
    is not a box of the torus or the nodes, or their sizes differ (uneven_groups.py). groups: positions in the mesh."""
    boxes = [_box([placement.places[position] for position in group]) for group in groups]
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes) or len(set(map(len, groups))) > 1:
        return None
    rows_of = _rows(placement, known)
    links = {link_of_spans(dict(rows), placement.target) for rows in {tuple(rows_of(box).items()) for box in known}}
    return min(links, key=lambda link: (link.bytes_per_second or math.inf, -link.latency_seconds))


@dataclass(frozen=True)
class Sent:
    """The time of a collective-permute. tracks: the physical axes that it uses, on a torus with the direction: x+."""

    seconds: float
    kind: LinkKind  # of the slowest
    tracks: tuple[str, ...]


def send_between(placement: Placement, pairs: DeviceGroups, num_bytes: float) -> Sent:
    """Returns the time of all pairs (from, to) sending at once, this many bytes each: on a torus along x, then y, then
    z, the shorter way around. The busiest link decides."""
    names = tuple(physical_sizes(placement.target))
    loads: Counter[Hop] = Counter()
    hops: Counter[str] = Counter()  # of the longest way along each axis
    for source, to in pairs:
        start, end = (dict(zip(names, placement.places[position], strict=True)) for position in (source, to))
        links = list(_way(placement, start, end))
        loads.update(links)
        hops |= Counter(name for name, _, _ in links)
    rates, seconds, latency = rates_of(placement.target), 0.0, 0.0
    for (name, _, _), count in loads.items():
        seconds = max(seconds, count * num_bytes / rates[name].bytes_per_second)
    for name, count in hops.items():
        latency += count * rates[name].seconds
    slowest = min(hops, key=lambda name: rates[name].bytes_per_second, default=names[-1])
    tracks = tuple(sorted({name + WAYS[way] for name, _, way in loads}))
    return Sent(seconds + latency, LINK_KINDS[slowest], tracks)


def _box(places: Sequence[Coordinates]) -> Box | None:
    """Returns the group's places along each axis; None unless the group is all combinations of them."""
    along = tuple(tuple(sorted(set(values))) for values in zip(*places, strict=True))
    return along if math.prod(map(len, along)) == len(set(places)) else None


def _rows(placement: Placement, boxes: Sequence[Box]) -> Callable[[Box], dict[str, GroupSpan]]:
    """Returns a function of a box to its rows, given all groups that send at the same time."""
    sizes = physical_sizes(placement.target)
    names, network, shape = tuple(sizes), placement.target.network, placement.target.shape or ()
    rings = dict(zip(TORUS_AXES, network.wraps(shape), strict=False)) if isinstance(network, TorusSpec) else {}
    on_line: Counter[tuple[int, Coordinates]] = Counter()  # groups on a line of the torus
    on_link: Counter[tuple[int, Coordinates, int]] = Counter()

    def arc_of(box: Box, axis: int) -> list[int]:
        return _arc(box[axis], sizes[names[axis]], wraps=rings[names[axis]])

    for box in boxes:
        for axis in _torus_axes(names, box):
            links = list(_links(arc_of(box, axis), sizes[names[axis]]))
            for line in _lines(box, axis):
                on_line[axis, line] += 1
                on_link.update((axis, line, link) for link in links)

    def rows_of(box: Box) -> dict[str, GroupSpan]:
        rows = {name: GroupSpan(len(box[i]), 1, 1, 1, is_ring=False) for i, name in enumerate(names) if len(box[i]) > 1}
        for axis in _torus_axes(names, box):
            name, arc, lines = names[axis], arc_of(box, axis), list(_lines(box, axis))
            meet = max(on_link[axis, line, link] for line in lines for link in _links(arc, sizes[name]))
            around = max(on_line[axis, line] for line in lines)
            # Both ways around is faster where less than twice as many groups meet there.
            rows[name] = _around(arc, sizes[name], around) if rings[name] and around < 2 * meet else _along(arc, meet)
        return rows

    return rows_of


def _along(arc: list[int], num_sharing: int) -> GroupSpan:
    spacing = max(after - place for place, after in pairwise(arc))
    return GroupSpan(len(arc), num_sharing, spacing, arc[-1] - arc[0], is_ring=False)


def _around(arc: list[int], size: int, num_sharing: int) -> GroupSpan:
    spacing = max(after - place for place, after in pairwise((*arc, arc[0] + size)))
    reach = max(min((b - a) % size, (a - b) % size) for a in arc for b in arc)
    return GroupSpan(len(arc), num_sharing, spacing, reach, is_ring=True)


def _torus_axes(names: Sequence[str], box: Box) -> list[int]:
    return [i for i, name in enumerate(names) if name in TORUS_AXES and len(box[i]) > 1]


def _lines(box: Box, axis: int) -> Iterator[Coordinates]:
    """Yields the lines along an axis that a box has members on: their places along the other axes."""
    return product(*(places for i, places in enumerate(box) if i != axis))


def _arc(members: tuple[int, ...], size: int, *, wraps: bool) -> list[int]:
    """Returns the members in order along the shortest stretch of the axis that has them all: of a ring of 16 (0, 1, 15)
    is 15, 16, 17."""
    if not wraps:
        return list(members)
    gaps = [(after - place) % size for place, after in zip(members, (*members[1:], members[0]), strict=True)]
    first = (max(range(len(gaps)), key=lambda i: (gaps[i], i)) + 1) % len(gaps)  # after the longest gap
    return [*members[first:], *(place + size for place in members[:first])]


def _links(arc: list[int], size: int) -> Iterator[int]:
    """Yields the links between its first and its last member, each named by the place before it."""
    return (place % size for place in range(arc[0], arc[-1]))


def _way(placement: Placement, start: dict[str, int], end: dict[str, int]) -> Iterator[Hop]:
    """Yields the hops from one device to another."""
    network, sizes = placement.target.network, physical_sizes(placement.target)
    slow, near = ("DCN", "core") if isinstance(network, TorusSpec) else ("NIC", "NVLink")
    if start[slow] != end[slow]:
        yield slow, tuple(start.values()), 0  # its own share
        return
    if isinstance(network, TorusSpec):
        rings = dict(zip(TORUS_AXES, network.wraps(placement.target.shape or ()), strict=False))
        at = dict(start)
        for name in (name for name in TORUS_AXES if name in sizes):
            size = sizes[name]
            there, back = (end[name] - at[name]) % size, (at[name] - end[name]) % size
            step = 1 if (there <= back if rings[name] else end[name] > at[name]) else -1
            while at[name] != end[name]:
                chip = tuple(place for axis, place in at.items() if axis != "core")
                yield name, chip, step
                at[name] = (at[name] + step) % size
        start = at
    if start[near] != end[near]:
        yield near, tuple(start.values()), 0
