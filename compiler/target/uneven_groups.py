"""The time of collectives whose groups fill no box of the torus or the nodes, from the links that their members use.

    v5e-256 in 2 slices, {12 chips of one, 4 of the other}  ->  what the 4 receive from outside over DCN, then a ring
    through the members within each slice

Members are grouped by slice, or by node. What has to come from outside is bound by the place with the fewest members;
within a place the parts go around a ring of its members, both ways, in the order of their places. The busiest link of
all groups decides. A compiler may know a faster order: the time is of one that always exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from ..core.collectives import CollectiveKind
from ..spec.target_spec import TorusSpec
from .axis_segments import TORUS_AXES
from .device_links import DeviceGroups, Sent, send_between
from .interconnect_tiers import LINK_KINDS, rates_of
from .placement import Placement, physical_sizes

Inside = dict[int, list[int]]  # members by slice or node


def uneven_seconds(kind: CollectiveKind, num_bytes: float, placement: Placement, groups: DeviceGroups) -> Sent:
    """Returns the time of a collective over all these groups at once. groups: positions in the mesh. num_bytes: of the
    full array, as of `links.collective_seconds`."""
    is_torus = isinstance(placement.target.network, TorusSpec)
    far = "DCN" if is_torus else "NIC"
    split = [_inside(placement, group, far) for group in groups]
    sum_or_max, times = (sum if is_torus else max), 2 if kind == "all-reduce" else 1
    if kind == "all-to-all":
        inner = [_exchanged(placement, split, num_bytes / len(groups[0]) ** 2)]
        outside = max((_outside(each) for each in split), default=0.0) * num_bytes / len(groups[0])
    else:
        inner = [_around(placement, split, num_bytes)]
        outside = max(_received(each) for each in split) * num_bytes
    rate = rates_of(placement.target)[far]
    crossing = outside / rate.bytes_per_second + rate.seconds if outside else 0.0
    seconds = times * sum_or_max([crossing, *(each.seconds for each in inner)])
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
    """Returns the share of the array that each device of the place with the fewest members receives from outside."""
    total = sum(map(len, inside.values()))
    return max((total - len(members)) / total / len(members) for members in inside.values())


def _outside(inside: Inside) -> float:
    """Returns the share of its own part that a device sends to other places."""
    total = sum(map(len, inside.values()))
    return max((total - len(members)) / total for members in inside.values())


def _around(placement: Placement, split: Sequence[Inside], num_bytes: float) -> Sent:
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
