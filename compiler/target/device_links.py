"""Finds the links that arbitrary groups of devices use, from the places of the devices. A compiler's groups need not be
a mesh axis: they may be halves of an axis, a hierarchy of groups, or pairs that send to each other.

    v5e-16 (4 x 4), groups of 2 along x: {0, 1}, {2, 3}, ...  ->  ICI x, a line of 2
    v5e-256 in 2 slices, {12 chips of one, 4 of the other}    ->  DCN for what the 4 receive from outside, then a ring
                                                                  through the members within each slice
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product

from ..core.traffic import CollectiveKind, LinkKind
from ..spec.target_spec import TorusSpec
from .axis_segments import LINK_KINDS, TORUS_AXES, GroupSpan, link_of_spans, rates_of
from .links import Link
from .placement import Placement, physical_sizes

DeviceGroups = Sequence[Sequence[int]]
Coordinates = tuple[int, ...]
Box = tuple[tuple[int, ...], ...]  # the places that a group has along each physical axis
Hop = tuple[str, Coordinates, int]  # along a physical axis, from a place; which way on a torus, else 0
WAYS = {1: "+", -1: "-", 0: ""}
Inside = dict[int, list[int]]  # members by slice or node


def link_of_devices(placement: Placement, groups: DeviceGroups) -> Link | None:
    """Returns the link of collectives over all these groups at once; the slowest one if the groups lie differently.
    None if a group is not a box of the torus or the nodes, or if their sizes differ (`uneven_seconds` prices those).
    groups: positions in the mesh."""
    boxes = [_box([placement.places[position] for position in group]) for group in groups]
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes) or len(set(map(len, groups))) > 1:
        return None
    rows_of = _rows(placement, known)
    links = {link_of_spans(dict(rows), placement.target) for rows in {tuple(rows_of(box).items()) for box in known}}
    return min(links, key=lambda link: (link.bytes_per_second or math.inf, -link.latency_seconds))


@dataclass(frozen=True)
class Sent:
    """The price of pairs that send at once. tracks: the physical axes that they use, on a torus with the direction:
    x+."""

    seconds: float
    kind: LinkKind  # of the slowest
    tracks: tuple[str, ...]


def send_between(placement: Placement, pairs: DeviceGroups, num_bytes: float) -> Sent:
    """Returns the price of all pairs (from, to) sending at once, this many bytes each: on a torus along x, then y, then
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
        seconds = max(seconds, rates[name].transfer_seconds(count * num_bytes))
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
    """Returns a function from a box to its spans, given all groups that send at the same time."""
    sizes = physical_sizes(placement.target)
    names, network, shape = tuple(sizes), placement.target.network, placement.target.shape or ()
    rings = dict(zip(TORUS_AXES, network.wraps(shape), strict=False)) if isinstance(network, TorusSpec) else {}
    on_line: Counter[tuple[int, Coordinates]] = Counter()  # groups on a line of the torus
    on_link: Counter[tuple[int, Coordinates, int]] = Counter()

    def arc_of(box: Box, axis: int) -> list[int]:
        # Along the shortest stretch of the axis that holds them all: 0, 1, 15 on a ring of 16 are 15, 16, 17.
        members, size = box[axis], sizes[names[axis]]
        if not rings[names[axis]]:
            return list(members)
        gaps = [(after - place) % size for place, after in zip(members, (*members[1:], members[0]), strict=True)]
        first = (max(range(len(gaps)), key=lambda i: (gaps[i], i)) + 1) % len(gaps)  # after the longest gap
        return [*members[first:], *(place + size for place in members[:first])]

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
    """Yields the lines along an axis on which a box has members, as their places along the other axes."""
    return product(*(places for i, places in enumerate(box) if i != axis))


def _links(arc: list[int], size: int) -> Iterator[int]:
    """Yields the links between the first and the last member, each named by the place before it."""
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


def uneven_seconds(kind: CollectiveKind, num_bytes: float, placement: Placement, groups: DeviceGroups) -> Sent:
    """Returns the time of a collective over all these groups at once, which fill no box of the torus or the nodes.
    groups: positions in the mesh. num_bytes: the bytes of the full array, as in `collective_seconds`.

    Members are grouped by slice, or by node. What has to come from outside is bound by the place with the fewest
    members; within a place the parts go around a ring of its members, both ways, in the order of their places. The
    busiest link of all groups decides. A compiler may know a faster order: the time is that of one that always exists.
    """
    is_torus = isinstance(placement.target.network, TorusSpec)
    far = "DCN" if is_torus else "NIC"
    split = [_inside(placement, group, far) for group in groups]
    sum_or_max, times = (sum if is_torus else max), 2 if kind == "all-reduce" else 1
    if kind == "all-to-all":
        inner = [_exchanged(placement, split, num_bytes / len(groups[0]) ** 2)]
        outside = max((_outside(each) for each in split), default=0.0) * num_bytes / len(groups[0])
    else:
        inner = [_passed_around(placement, split, num_bytes)]
        outside = max(_received(each) for each in split) * num_bytes
    rate = rates_of(placement.target)[far]
    crossing = outside / rate.bytes_per_second + rate.seconds if outside else 0.0
    network, is_near = placement.target.network, any(each.tracks for each in inner)
    call = network.call_seconds if isinstance(network, TorusSpec) and is_near else 0.0
    seconds = call + times * sum_or_max([crossing, *(each.seconds for each in inner)])
    tracks = {track for each in inner for track in each.tracks} | ({far} if outside else set())
    return Sent(seconds, LINK_KINDS[far] if outside else inner[0].kind, tuple(sorted(tracks)))


def _inside(placement: Placement, group: Sequence[int], far: str) -> Inside:
    index = tuple(physical_sizes(placement.target)).index(far)
    found: Inside = {}
    for position in sorted(group, key=lambda position: _snake(placement, position)):
        found.setdefault(placement.places[position][index], []).append(position)
    return found


def _snake(placement: Placement, position: int) -> tuple[int, ...]:
    """Returns a sort key that walks a torus row by row, every second row backwards: neighbours follow each other."""
    names = tuple(physical_sizes(placement.target))
    place = dict(zip(names, placement.places[position], strict=True))
    rows = [place[name] for name in reversed(TORUS_AXES) if name in place]
    turned = [at if sum(rows[:i]) % 2 == 0 else -at for i, at in enumerate(rows)]
    return (*turned, *(place[name] for name in names if name not in TORUS_AXES))


def _received(inside: Inside) -> float:
    """Returns the share of the array that each device receives from outside, for the place with the fewest members."""
    total = sum(map(len, inside.values()))
    return max((total - len(members)) / total / len(members) for members in inside.values())


def _outside(inside: Inside) -> float:
    """Returns the share of its own part that a device sends to other places."""
    total = sum(map(len, inside.values()))
    return max((total - len(members)) / total for members in inside.values())


def _passed_around(placement: Placement, split: Sequence[Inside], num_bytes: float) -> Sent:
    """Returns the time in which each place's members pass the whole array around, half of it each way."""
    rings = [members for inside in split for members in inside.values() if len(members) > 1]
    if not rings:
        return Sent(0.0, LINK_KINDS[_near(placement)], ())
    longest = max(map(len, rings))
    once = send_between(placement, list(_neighbours(rings)), 0.0)
    sent = send_between(placement, list(_neighbours(rings)), num_bytes * (longest - 1) / longest / 2)
    return Sent(sent.seconds + (longest // 2 - 1) * once.seconds, sent.kind, sent.tracks)


def _exchanged(placement: Placement, split: Sequence[Inside], num_bytes: float) -> Sent:
    """Returns the time in which all members of each place send to one another, this many bytes each."""
    pairs = [pair for inside in split for members in inside.values() for pair in permutations(members, 2)]
    return send_between(placement, pairs, num_bytes) if pairs else Sent(0.0, LINK_KINDS[_near(placement)], ())


def _neighbours(rings: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for ring in rings:
        for member, following in zip(ring, (*ring[1:], ring[0]), strict=True):
            yield from ((member, following), (following, member))


def _near(placement: Placement) -> str:
    return "x" if isinstance(placement.target.network, TorusSpec) else "NVLink"
