"""Which links each mesh axis uses: the mesh laid onto the torus of each slice, or into the nodes, and across them.

    v5e-256, fsdp=64 tensor=4  ->  fsdp: ICI x (4 of 16, every 4th, wraps) x ICI y (16, wraps); tensor: ICI x (4 of 16)

Only replica, stage and data cross slices; axis_parts.py lays what is in one. docs/targets.md says why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from .axis_parts import TORUS_AXES, Part, lay_in_nodes, lay_on_torus
from .links import Level, Line, Link
from .problems import ConfigError, Problem
from .report import Link as LinkKind
from .target import TargetPlan
from .target_spec import SwitchSpec, TorusSpec

ACROSS_SLICES = ("replica", "stage", "data")  # tried in this order


@dataclass(frozen=True)
class Placement:
    """parts: of each mesh axis of more than one device, outermost first; empty where nothing is known of the links."""

    sizes: Mapping[str, int]  # of the mesh
    target: TargetPlan
    parts: Mapping[str, tuple[Part, ...]]

    @property
    def is_known(self) -> bool:
        """False for simulated devices, and attached ones of no known shape: JAX orders them."""
        return self.target.network is not None and self.target.shape is not None

    def describe(self) -> dict[str, str]:
        """{'fsdp': 'ICI x (16, wraps) x ICI y (16, wraps)'}; simulated devices share the host's memory."""
        used = [axis for axis, size in self.sizes.items() if size > 1]
        return {axis: " x ".join(map(str, self.parts[axis])) if self.is_known else "memory" for axis in used}

    def link_of(self, axes: Sequence[str]) -> Link:
        """What a collective over the devices along these mesh axes uses."""
        axes = [axis for axis in axes if self.sizes[axis] > 1]
        if not self.is_known:
            return Link("memory", (), is_pipelined=False, note="simulated, or of unknown links")
        parts = [part for axis in axes for part in self.parts[axis]]
        network = self.target.network
        levels = _torus_levels(parts, self.target, network) if isinstance(network, TorusSpec) else _switch_levels(parts, cast(SwitchSpec, network))  # fmt: skip  # noqa: E501
        nearest: LinkKind = "ICI" if isinstance(network, TorusSpec) else "NVLink"
        kind = levels[-1].kind if levels else nearest
        return Link(kind, levels, is_pipelined=isinstance(network, SwitchSpec), note=" x ".join(map(str, parts)))

    def axes_of(self, group: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes along which a group of devices lies. group: positions in the mesh's row-major order."""
        names = tuple(self.sizes)
        coordinates = np.unravel_index(np.asarray(group), tuple(self.sizes.values()))
        return tuple(name for name, at in zip(names, coordinates, strict=True) if len(set(at.tolist())) > 1)

    def ordered(self, devices: Sequence[Any]) -> np.ndarray[Any, Any]:
        """The devices as the array of `jax.sharding.Mesh`, such that each mesh axis lies where this says.

        Raises ConfigError where they are not shaped as the target.
        """
        at = _places(devices, self.target)
        dimensions = _physical_sizes(self.target)
        mesh = np.empty(tuple(self.sizes.values()), dtype=object)
        for index in np.ndindex(mesh.shape):
            place = dict.fromkeys(dimensions, 0)
            for axis, number in zip(self.sizes, index, strict=True):
                for part in reversed(self.parts.get(axis, ())):  # the innermost part counts fastest
                    number, digit = divmod(number, part.size)
                    place[part.physical] += digit * part.stride
            mesh[index] = at[tuple(place.values())]
        return mesh


def plan_placement(sizes: Mapping[str, int], target: TargetPlan) -> Placement:
    """Lay a mesh of as many devices as the target has. Raises ConfigError for slices that no mesh axis can cross."""
    sizes = MappingProxyType(dict(sizes))
    if target.network is None or target.shape is None:
        return Placement(sizes, target, {})
    inner, crossing = _across(sizes, target) if isinstance(target.network, TorusSpec) else (dict(sizes), {})
    if isinstance(target.network, TorusSpec):
        parts = lay_on_torus(inner, target.network, target.shape, cast(Any, target.chip).num_devices)
    else:
        parts = lay_in_nodes(inner, target.shape)
    joined = {axis: (*crossing.get(axis, ()), *parts.get(axis, ())) for axis, size in sizes.items() if size > 1}
    return Placement(sizes, target, MappingProxyType(joined))


def _across(sizes: Mapping[str, int], target: TargetPlan) -> tuple[dict[str, int], dict[str, tuple[Part, ...]]]:
    """What is left in a slice of each mesh axis, and what crosses slices: replica=4 over 2 slices -> 2, DCN (2)."""
    left, inner, crossing = target.num_slices, dict(sizes), {}
    for axis in ACROSS_SLICES:
        if (count := math.gcd(inner[axis], left)) > 1:
            stride = left // count
            crossing[axis] = (Part("DCN", count, stride, target.num_slices, wraps=False),)
            inner[axis] //= count
            left = stride
    if left > 1:
        shown = ", ".join(f"{axis}={sizes[axis]}" for axis in ACROSS_SLICES)
        what = f"{target.num_slices} slices, and no axis that may cross them is a multiple: {shown}"
        fix = f"set mesh.replica={target.num_slices}, as sharding=hsdp does with 2, or target.num_slices=1"
        raise ConfigError([Problem("mesh", what, fix)])
    return inner, crossing


def _physical_sizes(target: TargetPlan) -> dict[str, int]:
    """Sizes of the physical axes, slowest first."""
    shape = target.shape or ()
    if isinstance(target.network, SwitchSpec):
        return dict(zip(("NIC", "NVLink"), shape, strict=True))
    torus = dict(zip(TORUS_AXES, shape, strict=False))
    return {"DCN": target.num_slices, **torus, "core": target.chip.num_devices if target.chip else 1}


def _places(devices: Sequence[Any], target: TargetPlan) -> dict[tuple[int, ...], Any]:
    """Devices by where they are along the physical axes."""
    sizes = tuple(_physical_sizes(target).values())
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
        what = f"the {len(devices)} devices are not shaped as {target.name}: {'x'.join(map(str, sizes))}"
        raise ConfigError([Problem("target", what, "name the target as it is, such as v5p:4x4x8")])
    return places


def _torus_levels(parts: Sequence[Part], target: TargetPlan, network: TorusSpec) -> tuple[Level, ...]:
    per_chip = target.chip.num_devices if target.chip else 1
    core = [part for part in parts if part.physical == "core"]
    levels = []
    if core:
        die_bytes_per_second = cast(float, network.core_bytes_per_second)
        levels.append(_switch("ICI", core, die_bytes_per_second, network.hop_seconds))
    lines = tuple(
        _line([part for part in parts if part.physical == name], network, per_chip)
        for name in TORUS_AXES
        if any(part.physical == name for part in parts)
    )
    if lines:
        levels.append(Level("ICI", lines, is_switch=False))
    if across := [part for part in parts if part.physical == "DCN"]:
        share = network.host_bytes_per_second / (math.prod(network.chips_per_host) * per_chip)
        levels.append(_switch("DCN", across, share, network.host_seconds))
    return tuple(levels)


def _line(parts: Sequence[Part], network: TorusSpec, per_chip: int) -> Line:
    """The members of a group along one torus axis, which may be parts of several mesh axes: [4, every 4th] and [4] are
    16 side by side. Groups between which they lie send over the same links, and so do the other devices of a chip."""
    outer = max(parts, key=lambda part: part.stride)
    size = math.prod(part.size for part in parts)
    spacing = outer.stride * outer.size // size  # hops between members, and groups on each link
    bandwidth = network.link_bytes_per_second / spacing / per_chip
    num_hops = spacing * (size // 2 if outer.wraps else size - 1)
    return Line(
        name=outer.physical,
        size=size,
        bytes_per_second=bandwidth * (2 if outer.wraps else 1),
        neighbour_bytes_per_second=bandwidth,
        gather_seconds=num_hops * network.hop_seconds,
        neighbour_seconds=spacing * network.hop_seconds,
    )


def _switch_levels(parts: Sequence[Part], network: SwitchSpec) -> tuple[Level, ...]:
    near = [part for part in parts if part.physical == "NVLink"]
    far = [part for part in parts if part.physical == "NIC"]
    per_chip = network.node_bytes_per_second / network.chips_per_node
    levels = []
    if near:
        levels.append(_switch("NVLink", near, network.chip_bytes_per_second, network.chip_seconds))
    if far:
        levels.append(_switch("NIC", far, per_chip, network.node_seconds))
    return tuple(levels)


def _switch(kind: LinkKind, parts: Sequence[Part], bytes_per_second: float, seconds: float) -> Level:
    """All members of a group reach each other at once; small messages spread like a tree."""
    size = math.prod(part.size for part in parts)
    line = Line(
        name=parts[0].physical,
        size=size,
        bytes_per_second=bytes_per_second,
        neighbour_bytes_per_second=bytes_per_second,
        gather_seconds=math.ceil(math.log2(size)) * seconds,
        neighbour_seconds=seconds,
    )
    return Level(kind, (line,), is_switch=True)
