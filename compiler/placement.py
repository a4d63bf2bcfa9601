"""Which links each mesh axis uses: the mesh laid onto the torus of each slice, or into the nodes, and across them.

    v5e-256, fsdp=64 tensor=4  ->  fsdp: ICI x (16, wraps) x ICI y (4 of 16, every 4th, wraps); tensor: ICI y (4 of 16)

Axes with the most traffic lie innermost: behind one switch, or on chips side by side. An axis gets whole axes of the
torus where that is possible, which are rings. Only replica, stage and data cross slices. docs/targets.md says why.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from .links import Level, Line, Link
from .problems import ConfigError, Problem
from .report import Link as LinkKind
from .target import TargetPlan
from .target_spec import Shape, SwitchSpec, TorusSpec

# How much is moved over a mesh axis, roughly, as against the others: activations of every layer, weights of every layer
# once or twice, gradients once a step, activations between stages.
TRAFFIC = {"tensor": 64, "expert": 32, "context": 16, "fsdp": 8, "data": 4, "stage": 2, "replica": 1}
ACROSS_SLICES = ("replica", "stage", "data")  # tried in this order
_TORUS_AXES = "xyz"


@dataclass(frozen=True)
class Part:
    """What of a mesh axis lies along one physical axis: `size` members, each `stride` behind the one before."""

    physical: str  # x, y, z, core, DCN, NVLink, NIC
    size: int
    stride: int
    num_places: int  # along the physical axis
    wraps: bool  # the members are a ring: all of a wrapped axis, or every n-th of it

    def __str__(self) -> str:
        kind = "ICI " if self.physical in (*_TORUS_AXES, "core") else ""
        of = f" of {self.num_places}" if self.size < self.num_places else ""
        every = f", every {_ordinal(self.stride)}" if self.stride > 1 else ""
        return f"{kind}{self.physical} ({self.size}{of}{every}{', wraps' if self.wraps else ''})"


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
        parts = _on_torus(inner, target.network, target.shape, cast(Any, target.chip).num_devices)
    else:
        parts = _in_nodes(inner, target.shape)
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


def _on_torus(
    sizes: Mapping[str, int], network: TorusSpec, shape: Shape, num_cores: int
) -> dict[str, tuple[Part, ...]]:
    """Parts of each mesh axis within a slice: as few as possible, the most bandwidth where there is most traffic."""
    axes = sorted((axis for axis, size in sizes.items() if size > 1), key=lambda axis: -TRAFFIC[axis])
    left = dict(sizes)
    core: dict[str, tuple[Part, ...]] = {}
    if num_cores > 1:  # devices of a chip have the fastest link of all
        first = next(axis for axis in axes if left[axis] % num_cores == 0)
        core[first] = (Part("core", num_cores, 1, num_cores, wraps=False),)
        left[first] //= num_cores
    wraps = network.wraps(shape)
    best = min(_layouts([left[axis] for axis in axes], shape), key=lambda layout: _cost(layout, axes, shape, wraps))
    return {axis: (*_parts(best, i, shape, wraps), *core.get(axis, ())) for i, axis in enumerate(axes)}


Layout = tuple[tuple[int, ...], ...]  # for each mesh axis, innermost first: how many of its members along x, y, z


def _layouts(sizes: Sequence[int], shape: Shape) -> Iterator[Layout]:
    """All ways to write each size as a product over the torus axes, such that the torus is filled."""
    if not sizes:
        if math.prod(shape) == 1:
            yield ()
        return
    for factors in product(*([n for n in range(1, size + 1) if size % n == 0] for size in shape)):
        if math.prod(factors) == sizes[0]:
            rest = tuple(size // factor for size, factor in zip(shape, factors, strict=True))
            for others in _layouts(sizes[1:], rest):
                yield (factors, *others)


def _parts(layout: Layout, index: int, shape: Shape, wraps: Sequence[bool]) -> tuple[Part, ...]:
    """Of one mesh axis: whole and outer parts first."""
    parts = []
    for i, size in enumerate(shape):
        count, stride = layout[index][i], math.prod(inner[i] for inner in layout[:index])
        if count > 1:
            parts.append(Part(_TORUS_AXES[i], count, stride, size, wraps=wraps[i] and count * stride == size))
    return tuple(parts)


def _cost(layout: Layout, axes: Sequence[str], shape: Shape, wraps: Sequence[bool]) -> tuple[float, ...]:
    """Parts in all; then time, as traffic over bandwidth in links; then what is laid along later axes of the torus."""
    parts = [_parts(layout, index, shape, wraps) for index in range(len(axes))]
    seconds = sum(
        TRAFFIC[axis] / sum((2 if part.wraps else 1) / part.stride for part in own)
        for axis, own in zip(axes, parts, strict=True)
        if own
    )
    return (sum(map(len, parts)), seconds, *(-factor for factors in layout for factor in factors))


def _in_nodes(sizes: Mapping[str, int], shape: Shape) -> dict[str, tuple[Part, ...]]:
    """Parts of each mesh axis: those with the most traffic fill the node."""
    num_nodes, per_node = shape
    parts: dict[str, tuple[Part, ...]] = {}
    inside = outside = 1
    for axis in sorted((axis for axis, size in sizes.items() if size > 1), key=lambda axis: -TRAFFIC[axis]):
        near = math.gcd(sizes[axis], per_node // inside)
        far = sizes[axis] // near
        behind_switch = Part("NVLink", near, inside, per_node, wraps=False)
        over_network = Part("NIC", far, outside, num_nodes, wraps=False)
        parts[axis] = tuple(part for part in (over_network, behind_switch) if part.size > 1)
        inside, outside = inside * near, outside * far
    return parts


def _physical_sizes(target: TargetPlan) -> dict[str, int]:
    """Sizes of the physical axes, slowest first."""
    shape = target.shape or ()
    if isinstance(target.network, SwitchSpec):
        return dict(zip(("NIC", "NVLink"), shape, strict=True))
    torus = dict(zip(_TORUS_AXES, shape, strict=False))
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
        for name in _TORUS_AXES
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


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
