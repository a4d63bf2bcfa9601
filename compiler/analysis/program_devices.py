"""Places the devices and the collectives of a program on the target, and names groups of devices.

A program numbers its devices itself. Those of a plan are in the order of the plan's mesh, and a group of them is named
by the mesh axes along which it lies. A program without a plan has neither: its devices are assumed to be in the
target's own order unless their places are known, and a group is named by sizes and strides of their numbers:

    {0, 1, 2, 3}                 4 (stride 1)
    {0, 4}                       2 (stride 4)
    {0, 1, 8, 9}                 2 (stride 8), 2 (stride 1)
    {0, 3, 4}                    3 (irregular)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.partition_spec import STAGE
from ..core.traffic import HOST, HOST_COPIES, PAIRS, CollectiveKind, HostCopyKind, Placed
from ..spec.cost_model import cost_model
from ..target.axis_segments import LINK_KINDS, TORUS_AXES, GroupSpan, link_of_spans
from ..target.device_links import link_of_devices, send_between, uneven_seconds
from ..target.links import collective_seconds
from ..target.placement import Placement
from ..target.target import TargetPlan
from ..xla.schedule.steps import Collective

NO_GROUPS = "the program does not name its group of devices"
NO_LINKS = "the target's links are not known"


@dataclass(frozen=True)
class ProgramDevices:
    """The devices of a program on their target. order: the position of each device in the placement; None: the same
    order. mesh: the sizes of the program's own mesh axes, by name, over its devices in order; None: they have no names.
    is_assumed: whether the order of the devices is a guess."""

    placement: Placement
    order: Sequence[int] | None = None
    mesh: Mapping[str, int] | None = None
    is_assumed: bool = False

    @property
    def target(self) -> TargetPlan:
        return self.placement.target

    def place(self, collective: Collective) -> Placed:
        """Returns the placement of a collective of the program."""
        where = place_collective(self.reordered(collective), self.placement)
        if self.placement.is_of_mesh or not where.mesh_axes:
            return where
        groups = connected(collective.groups) if collective.kind in PAIRS else collective.groups
        if collective.num_slices is not None:
            groups = (self._across_slices(),)
        if not groups:
            return where
        size = max(map(len, groups))
        return replace(where, mesh_axes=self.name(groups), group_size=size)

    def reordered(self, collective: Collective) -> Collective:
        """Returns the collective with its groups in positions of the placement."""
        order = self.order
        if order is None:
            return collective
        return replace(
            collective, groups=tuple(tuple(order[device] for device in group) for group in collective.groups)
        )

    def _across_slices(self) -> tuple[int, ...]:
        """Returns the program's devices that are the first of each slice."""
        num_devices, num_slices = self.target.num_devices, self.target.num_slices
        firsts = range(0, num_devices, num_devices // num_slices)
        return tuple(firsts) if self.order is None else tuple(self.order.index(first) for first in firsts)

    def name(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Returns the names of groups of devices: mesh axes, or sizes and strides."""
        largest = max(groups, key=len)
        if self.mesh is not None:
            places = np.unravel_index(np.asarray(largest), tuple(self.mesh.values()))
            return tuple(name for name, at in zip(self.mesh, places, strict=True) if len(set(at.tolist())) > 1)
        factors = strides_of(largest)
        if factors is None:
            return (f"{len(largest)} (irregular)",)
        return tuple(f"{size} (stride {stride})" for size, stride in factors)


def stages_of(mesh_sizes: Mapping[str, int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Returns the stage of each device of a program on a mesh. order: the position in the mesh of each, if they
    differ."""
    sizes = tuple(mesh_sizes.values())
    stages = np.indices(sizes)[tuple(mesh_sizes).index(STAGE)].reshape(-1)
    return tuple(int(stages[each]) for each in order or range(len(stages)))


def strides_of(group: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Returns the group as nested (size, stride), the largest stride first: {0, 1, 8, 9} is ((2, 8), (2, 1)). None if
    it is not regular."""
    places = sorted(group)
    factors: list[tuple[int, int]] = []
    while len(places) > 1:
        stride = places[1] - places[0]
        size = next((n for n in range(1, len(places)) if places[n] - places[0] != n * stride), len(places))
        blocks = [places[start : start + size] for start in range(0, len(places), size)]
        if any([place - block[0] for place in block] != [n * stride for n in range(size)] for block in blocks):
            return None
        factors.append((size, stride))
        places = [block[0] for block in blocks]
    return tuple(reversed(factors))


def connected(pairs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that pairs connect: {0,1},{1,0},{2,3} -> (0, 1), (2, 3). Pairs of one device are
    left out."""
    group_of: dict[int, set[int]] = {}
    for source, to in pairs:
        joined = group_of.get(source, {source}) | group_of.get(to, {to})
        group_of.update(dict.fromkeys(joined, joined))
    groups = {min(group): tuple(sorted(group)) for group in group_of.values() if len(group) > 1}
    return tuple(groups[first] for first in sorted(groups))


def place_collective(collective: Collective, placement: Placement) -> Placed:
    """Returns the placement of a collective over all of its groups at once."""
    kind = collective.kind
    if kind in HOST_COPIES:
        return _with_host(kind, collective.num_bytes, placement.target)
    if collective.num_slices is not None:
        return _across_slices(kind, collective.num_bytes, collective.num_slices, placement)
    groups = collective.groups
    if not groups:
        return Placed(None, (), placement.link_of(()).kind, why=NO_GROUPS)
    if kind in PAIRS:
        # Groups are pairs: along all axes that any of them crosses.
        crossed = {axis for pair in collective.groups for axis in placement.axes_of(pair)}
        axes = tuple(name for name in placement.sizes if name in crossed)
        size = placement.group_size(axes)
        if not placement.is_known:
            return Placed(None, ("memory",), "memory", axes, size, NO_LINKS)
        sent = send_between(placement, collective.groups, collective.num_bytes)
        return Placed(sent.seconds, tuple(map(_name, sent.tracks)), sent.kind, axes, size)
    axes, size = placement.axes_of(groups[0]), len(groups[0])
    whole = placement.link_of(axes)
    if not placement.is_known:
        return Placed(None, (whole.kind,), whole.kind, axes, size, NO_LINKS)
    link = whole if size == whole.group_size else link_of_devices(placement, groups)
    if link is None:
        sent = uneven_seconds(kind, collective.num_bytes, placement, groups)
        links = tuple(map(_name, sent.tracks))
        return Placed(sent.seconds, links, sent.kind, axes, size, is_certain=False)
    seconds = collective_seconds(kind, collective.num_bytes, size, link.over(collective.num_axes))
    lines = (line.name for level in link.levels for line in level.lines)
    tracks = tuple(_name(name + way) for name in lines for way in (("+", "-") if name in TORUS_AXES else ("",)))
    is_interleaved = link.kind == "ICI" and collective.num_bytes <= cost_model().interleaved_bytes
    return Placed(seconds, () if is_interleaved else tracks, link.kind, axes, size)


def _with_host(kind: HostCopyKind, num_bytes: int, target: TargetPlan) -> Placed:
    """Returns the place of a copy between a device and its host, whose link carries both ways at once."""
    speed, way = target.host_bytes_per_second(kind), "in" if kind == "copy-to-device" else "out"
    seconds, why = (None, NO_LINKS) if speed is None else (num_bytes / speed, None)
    return Placed(seconds, (f"host link {way}",), "host link", (HOST,), why=why)


def _across_slices(kind: CollectiveKind, num_bytes: int, num_slices: int, placement: Placement) -> Placed:
    """Returns the placement of a collective between each device and those at the same place in other slices."""
    if not placement.is_known:
        return Placed(None, ("DCN",), "DCN", (), num_slices, NO_LINKS)
    crossing = {
        axis: [part.size for part in parts if part.physical == "DCN"] for axis, parts in placement.parts.items()
    }
    if num_slices == placement.target.num_slices:
        axes = tuple(axis for axis, sizes in crossing.items() if sizes)
    else:  # the program does not say which slices: use the axis that crosses this many, if there is one
        alike = [axis for axis, sizes in crossing.items() if sizes == [num_slices]]
        axes = tuple(alike) if len(alike) == 1 else ()
    link = link_of_spans({"DCN": GroupSpan(num_slices, 1, 1, 1, is_ring=False)}, placement.target)
    seconds = collective_seconds(kind, num_bytes, num_slices, link)
    return Placed(seconds, ("DCN",), "DCN", axes, num_slices)


def _name(track: str) -> str:
    """Returns the name of a link: 'x+' -> 'ICI x+', 'DCN' -> 'DCN'."""
    kind = LINK_KINDS[track.rstrip("+-")]
    return track if kind == track else f"{kind} {track}"
