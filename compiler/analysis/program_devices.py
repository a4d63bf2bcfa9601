"""The devices of a program: where each lies on the target, and what a group of them is called.

A program numbers its devices itself. Those of a plan are in the order of the plan's mesh, and a group of them is named
by the mesh axes along which it lies. A program without a plan has neither: its devices are taken to be in the target's
own order unless it is known where they lie, and a group is named by sizes and strides of their numbers:

    {0, 1, 2, 3}                 4 (stride 1)
    {0, 4}                       2 (stride 4)
    {0, 1, 8, 9}                 2 (stride 8), 2 (stride 1)
    {0, 3, 4}                    3 (irregular)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..target.placement import Placement
from ..target.target import TargetPlan
from ..xla.schedule.steps import Collective
from .collective_placement import CollectivePlacement, place_collective

PAIRS = ("collective-permute", "send")  # kinds whose groups are pairs of a sender and a receiver


@dataclass(frozen=True)
class ProgramDevices:
    """order: of each device of the program its position in the placement; None: the same. mesh: the sizes of the
    program's own mesh axes, by name, over its devices in order; None: they have no names. is_assumed: nothing says that
    the devices lie so."""

    placement: Placement
    order: Sequence[int] | None = None
    mesh: Mapping[str, int] | None = None
    is_assumed: bool = False

    @property
    def target(self) -> TargetPlan:
        return self.placement.target

    def place(self, collective: Collective) -> CollectivePlacement:
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
        """Returns the devices of the program that are the first of each slice."""
        num_devices, num_slices = self.target.num_devices, self.target.num_slices
        firsts = range(0, num_devices, num_devices // num_slices)
        return tuple(firsts) if self.order is None else tuple(self.order.index(first) for first in firsts)

    def name(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Returns what groups of devices are called."""
        largest = max(groups, key=len)
        if self.mesh is not None:
            places = np.unravel_index(np.asarray(largest), tuple(self.mesh.values()))
            return tuple(name for name, at in zip(self.mesh, places, strict=True) if len(set(at.tolist())) > 1)
        factors = strides_of(largest)
        if factors is None:
            return (f"{len(largest)} (irregular)",)
        return tuple(f"{size} (stride {stride})" for size, stride in factors)


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
