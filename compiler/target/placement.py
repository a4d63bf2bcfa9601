"""Places the mesh on the torus of each slice or in the nodes, and across them: the links that each mesh axis uses.

    v5e-256, fsdp=64 tensor=4  ->  fsdp: ICI x (4 of 16, every 4th, wraps) x ICI y (16, wraps); tensor: ICI x (4 of 16)

Only replica, stage, data and fsdp cross slices; axis_segments.py places axes within one. docs/targets.md says why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from meshloom.models.config import divisors

from ..core.errors import ConfigError, Problem
from ..core.traffic import AxisGroups
from ..spec.target_spec import SwitchSpec, TorusSpec
from .axis_segments import (
    TORUS_AXES,
    AxisSegment,
    declared_blocks,
    lay_in_nodes,
    lay_on_torus,
    link_of_spans,
    rates_of,
    span_of_segments,
    traffic_of,
)
from .links import Link
from .target import TargetPlan

ACROSS_SLICES = ("replica", "stage", "data", "fsdp")  # tried in this order
DEVICES = "devices"  # the one axis of a target's own order


@dataclass(frozen=True)
class Placement:
    """A mesh on its links. parts: the segments of each mesh axis of more than one device, outermost first; empty if
    links are unknown. is_of_mesh: False for the devices of a target in its own order, which form one axis without a
    meaning. rings: axes that are a declared block of chips; their devices follow each other around it, each next to the
    last."""

    sizes: Mapping[str, int]  # of the mesh
    target: TargetPlan
    parts: Mapping[str, tuple[AxisSegment, ...]]
    is_of_mesh: bool = True
    rings: frozenset[str] = frozenset()

    @property
    def is_known(self) -> bool:
        """Returns False for simulated devices and for attached devices of unknown shape, which JAX orders."""
        return self.target.network is not None and self.target.shape is not None

    def describe(self) -> dict[str, str]:
        """Returns the links of each axis: {'fsdp': 'ICI x (16, wraps) x ICI y (16, wraps)'}; simulated devices use host
        memory."""
        used = [axis for axis, size in self.sizes.items() if size > 1]
        return {axis: " x ".join(map(str, self.parts[axis])) if self.is_known else "memory" for axis in used}

    def link_of(self, axes: Sequence[str], groups: AxisGroups | None = None) -> Link:
        """Returns the link of a collective over the devices along these mesh axes. groups: as of `DeviceTraffic`."""
        axes = [axis for axis in axes if self.sizes[axis] > 1]
        if not self.is_known:
            return Link("memory", (), note="simulated, or of unknown links")
        parts = [part for axis in axes for part in self.parts[axis]]
        if groups is not None:
            parts = _within_groups(parts, groups)
        names = physical_sizes(self.target)
        along = {name: [part for part in parts if part.physical == name] for name in names}
        return link_of_spans({name: span_of_segments(own) for name, own in along.items() if own}, self.target)

    def warnings(self) -> tuple[Problem, ...]:
        """Returns a warning if weights are gathered across slices."""
        slices, segments = self.target.num_slices, self.parts.get("fsdp", ()) if self.is_of_mesh else ()
        if all(part.physical != "DCN" for part in segments):
            return ()
        share = rates_of(self.target)["DCN"].bytes_per_second
        waits = "gathers of weights wait for the network of the hosts"
        what = f"fsdp crosses slices: {waits}, {share / 1e9:.4g} GB/s per device"
        return (Problem("mesh.fsdp", what, f"use sharding=hsdp mesh.replica={slices} if a slice holds the weights"),)

    def group_size(self, axes: Sequence[str]) -> int:
        """Returns the number of devices along these mesh axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def axes_of(self, group: Sequence[int]) -> tuple[str, ...]:
        """Returns the mesh axes along which a group of devices lies. group: positions in the mesh's row-major order."""
        names = tuple(self.sizes)
        coordinates = np.unravel_index(np.asarray(group), tuple(self.sizes.values()))
        return tuple(name for name, at in zip(names, coordinates, strict=True) if len(set(at.tolist())) > 1)

    def ordered(self, devices: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Returns the devices as the array of `jax.sharding.Mesh`, placed as planned.

        Raises ConfigError if their shape is not the target's.
        """
        at = _places(devices, self.target)
        mesh = np.empty(len(self.places), dtype=object)
        mesh[:] = [at[place] for place in self.places]
        return mesh.reshape(tuple(self.sizes.values()))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Returns the place of each device of the mesh, in its row-major order, along each of `physical_sizes`."""
        found = []
        for index in np.ndindex(tuple(self.sizes.values())):
            place = dict.fromkeys(physical_sizes(self.target), 0)
            for axis, number in zip(self.sizes, index, strict=True):
                for part in reversed(self.parts.get(axis, ())):  # the innermost part varies fastest
                    number, digit = divmod(number, part.size)
                    if axis in self.rings and number % 2:  # every second row of a block is walked backwards
                        digit = part.size - 1 - digit
                    place[part.physical] += digit * part.stride
            found.append(tuple(place.values()))
        return tuple(found)


def _within_groups(parts: Sequence[AxisSegment], groups: AxisGroups) -> list[AxisSegment]:
    """Returns the segments, outermost first, that groups of the devices along them span."""
    found, inner = list[AxisSegment](), 1
    for part in reversed(parts):
        outer = inner * part.size
        first, last = max(inner, groups.stride), min(outer, groups.stride * groups.size)
        if first < last:
            stride, wraps = part.stride * (first // inner), part.wraps and last == outer
            found.insert(0, replace(part, size=last // first, stride=stride, wraps=wraps))
        inner = outer
    if math.prod(part.size for part in found) != groups.size:
        raise ValueError(f"groups of {groups.size} (stride {groups.stride}) do not divide {parts}")
    return found


def plan_placement(sizes: Mapping[str, int], target: TargetPlan, order: Sequence[str] = ()) -> Placement:
    """Returns the placement of a mesh on all of the target's devices. order: mesh axes, first the one whose devices are
    to lie nearest to each other; an entry may give the axis's block of chips (expert:2x2). The other axes follow by
    their traffic. Raises ConfigError if no mesh axis can cross slices, or if a block is not possible."""
    sizes = MappingProxyType(dict(sizes))
    if target.network is None or target.shape is None:
        return Placement(sizes, target, {})
    inner, crossing = _across(sizes, target) if isinstance(target.network, TorusSpec) else (dict(sizes), {})
    if isinstance(target.network, TorusSpec):
        num_cores = cast(Any, target.chip).num_devices
        parts = lay_on_torus(inner, target.network, target.shape, num_cores, traffic_of(order), declared_blocks(order))
    elif declared_blocks(order):
        what = f"{target.name} has no torus, on which an axis could be a block of chips"
        raise ConfigError([Problem("device_order", what, "name mesh axes without blocks")])
    else:
        parts = lay_in_nodes(inner, target.shape, traffic_of(order))
    joined = {axis: (*crossing.get(axis, ()), *parts.get(axis, ())) for axis, size in sizes.items() if size > 1}
    return Placement(sizes, target, MappingProxyType(joined), rings=frozenset(declared_blocks(order)))


def square_block(placement: Placement, axis: str) -> tuple[int, int] | None:
    """Returns the most nearly square block of chips along x and y that an axis could be, if the axis lies along one
    axis of the torus."""
    target, segments = placement.target, placement.parts[axis]
    is_along_one = [part.physical in TORUS_AXES for part in segments] == [True]
    if target.shape is None or not isinstance(target.network, TorusSpec) or not is_along_one:
        return None
    size, (x, y) = segments[0].size, target.shape[:2]
    blocks = [(n, size // n) for n in divisors(size) if 1 < n < size and x % n == 0 and y % (size // n) == 0]
    return min(blocks, key=max, default=None)


def plan_own_order(target: TargetPlan) -> Placement:
    """Returns the target's devices in its own order, in which JAX numbers them: cores of a chip, then chips along x, y
    and z, then slices; for GPUs those of a node, then nodes."""
    sizes = MappingProxyType({DEVICES: target.num_devices})
    if target.network is None or target.shape is None:
        return Placement(sizes, target, {}, is_of_mesh=False)
    places = physical_sizes(target)
    rings = dict[str, bool]()
    if isinstance(target.network, TorusSpec):
        rings = dict(zip(TORUS_AXES, target.network.wraps(target.shape), strict=False))
    fastest = ("core", "NVLink", *TORUS_AXES, "NIC", "DCN")
    parts = [AxisSegment(name, places[name], 1, places[name], wraps=rings.get(name, False))
             for name in fastest if places.get(name, 1) > 1]  # fmt: skip
    return Placement(sizes, target, MappingProxyType({DEVICES: tuple(reversed(parts))}), is_of_mesh=False)


def _across(sizes: Mapping[str, int], target: TargetPlan) -> tuple[dict[str, int], dict[str, tuple[AxisSegment, ...]]]:
    """Returns the part of each mesh axis within a slice, and the part across slices: replica=4 over 2 slices -> 2, DCN
    (2)."""
    left, inner, crossing = target.num_slices, dict(sizes), {}
    for axis in ACROSS_SLICES:
        if (count := math.gcd(inner[axis], left)) > 1:
            stride = left // count
            crossing[axis] = (AxisSegment("DCN", count, stride, target.num_slices, wraps=False),)
            inner[axis] //= count
            left = stride
    if left > 1:
        shown = ", ".join(f"{axis}={sizes[axis]}" for axis in ACROSS_SLICES)
        what = f"no axis that can cross the {target.num_slices} slices is a multiple of {target.num_slices}: {shown}"
        fix = f"set mesh.replica={target.num_slices}, as sharding=hsdp does, or target.num_slices=1"
        raise ConfigError([Problem("mesh", what, fix)])
    return inner, crossing


def physical_sizes(target: TargetPlan) -> dict[str, int]:
    """Returns the sizes of the physical axes, slowest first."""
    shape = target.shape or ()
    if isinstance(target.network, SwitchSpec):
        return dict(zip(("NIC", "NVLink"), shape, strict=True))
    torus = dict(zip(TORUS_AXES, shape, strict=False))
    return {"DCN": target.num_slices, **torus, "core": target.devices_per_chip}


def _places(devices: Sequence[Any], target: TargetPlan) -> dict[tuple[int, ...], Any]:
    """Returns the devices by their places along the physical axes."""
    sizes = tuple(physical_sizes(target).values())
    if isinstance(target.network, SwitchSpec):
        in_order = sorted(devices, key=lambda device: (device.process_index, device.id))
        places = dict(zip(np.ndindex(sizes), in_order, strict=False))
    else:
        slices = {number: i for i, number in enumerate(sorted({getattr(d, "slice_index", 0) for d in devices}))}
        num_axes = len(target.shape or ())
        low = [min(device.coords[i] for device in devices) for i in range(num_axes)]
        places = {
            (
                slices[getattr(device, "slice_index", 0)],
                *(device.coords[i] - low[i] for i in range(num_axes)),
                device.core_on_chip,
            ): device
            for device in devices
        }
    if len(devices) != math.prod(sizes) or set(places) != set(np.ndindex(sizes)):
        what = f"the {len(devices)} devices do not have the shape of {target.name}, {'x'.join(map(str, sizes))}"
        raise ConfigError([Problem("target", what, "name the target with its shape, such as v5p:4x4x8")])
    return places
