"""Assigns mesh axes to the physical axes of a torus, or of nodes of GPUs, and derives the link of a group from its
members along each of them. Pure arithmetic.

    v5e-256, x: 4 members, every 4th, a ring  ->  ICI, one line of 2 * 45 / 4 GB/s

Axes with the most traffic lie innermost: behind one switch, or on chips side by side. An axis gets whole axes of the
torus where that is possible, which are rings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import cast

from meshloom.models.config import divisors

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import counted
from ..core.traffic import LinkKind
from ..spec.target_spec import ChipShape, SwitchSpec, TorusSpec
from .links import InterconnectTier, Link, LinkLine
from .switch import SwitchTimes, TimeCurve
from .target import TargetPlan

# The rough traffic of each mesh axis, relative to the others: activations of every layer, weights of every layer once
# or twice, gradients once a step, activations between stages.
TRAFFIC = {"tensor": 64, "expert": 32, "context": 16, "fsdp": 8, "data": 4, "stage": 2, "replica": 1}
TORUS_AXES = "xyz"
NO_BLOCKS: Mapping[str, ChipShape] = MappingProxyType({})
# Physical axes of each kind of link.
LINK_KINDS: dict[str, LinkKind] = {**dict.fromkeys(TORUS_AXES, "ICI"), "core": "ICI", "DCN": "DCN", "NVLink": "NVLink", "NIC": "NIC"}  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class AxisSegment:
    """The segment of a mesh axis along one physical axis: `size` members, each `stride` after the one before."""

    physical: str  # x, y, z, core, DCN, NVLink, NIC
    size: int
    stride: int
    num_places: int  # along the physical axis
    wraps: bool  # the members are a ring: all of a wrapped axis, or every n-th of it

    def __str__(self) -> str:
        kind = "ICI " if self.physical in (*TORUS_AXES, "core") else ""
        of = f" of {self.num_places}" if self.size < self.num_places else ""
        every = f", every {_ordinal(self.stride)}" if self.stride > 1 else ""
        return f"{kind}{self.physical} ({self.size}{of}{every}{', wraps' if self.wraps else ''})"


def declared_blocks(order: Sequence[str]) -> dict[str, ChipShape]:
    """Returns the blocks that a declared order gives axes: ("expert:2x2", "fsdp") -> {"expert": (2, 2)}."""
    entries = (entry.partition(":") for entry in order)
    return {axis: tuple(map(int, block.split("x"))) for axis, _, block in entries if block}


def traffic_of(order: Sequence[str]) -> dict[str, float]:
    """Returns the traffic of each mesh axis. Axes of a declared order count as having more traffic than all others, the
    first of them the most."""
    order = [entry.partition(":")[0] for entry in order]
    most = max(TRAFFIC.values())
    return {**TRAFFIC, **{axis: most * 2 ** (len(order) - place) for place, axis in enumerate(order)}}


def lay_on_torus(
    sizes: Mapping[str, int],
    network: TorusSpec,
    shape: ChipShape,
    num_cores: int,
    traffic: Mapping[str, float],
    blocks: Mapping[str, ChipShape] = NO_BLOCKS,
) -> dict[str, tuple[AxisSegment, ...]]:
    """Returns the segments of each mesh axis within a slice: as few as possible, with the most bandwidth for the most
    traffic. blocks: for each axis, the number of its chips along x, y and z. Raises ConfigError for a block that is not
    possible."""
    axes = sorted((axis for axis, size in sizes.items() if size > 1), key=lambda axis: -traffic[axis])
    left = dict(sizes)
    core: dict[str, tuple[AxisSegment, ...]] = {}
    if num_cores > 1:  # devices of a chip have the fastest link of all
        first = next(axis for axis in axes if left[axis] % num_cores == 0)
        core[first] = (AxisSegment("core", num_cores, 1, num_cores, wraps=False),)
        left[first] //= num_cores
    _check_blocks(left, shape, blocks)
    wraps = network.wraps(shape)
    layouts = [
        layout
        for layout in _layouts([left[axis] for axis in axes], shape)
        if all(layout[i] == _along(blocks[axis], shape) for i, axis in enumerate(axes) if axis in blocks)
    ]
    if not layouts:
        what = f"the blocks {', '.join(blocks)} leave the other mesh axes no way to fill the torus"
        raise ConfigError([Problem("device_order", what, "declare fewer blocks")])
    best = min(layouts, key=lambda layout: _cost(layout, axes, shape, wraps, traffic))
    return {axis: (*_parts(best, i, shape, wraps), *core.get(axis, ())) for i, axis in enumerate(axes)}


def _along(block: ChipShape, shape: ChipShape) -> tuple[int, ...]:
    """Returns the chips of a block along each axis of the torus; 2x2 on one of three axes is 2x2x1."""
    return (*block, *(1,) * (len(shape) - len(block)))


def _check_blocks(chips: Mapping[str, int], shape: ChipShape, blocks: Mapping[str, ChipShape]) -> None:
    """Raises ConfigError for blocks whose number of chips differs from their axis's, or that do not fit the torus.
    chips: the chips of each mesh axis in a slice."""
    torus, problems = "x".join(map(str, shape)), list[Problem]()
    for axis, block in blocks.items():
        shown, num = f"{axis}:{'x'.join(map(str, block))}", math.prod(block)
        if num != chips[axis]:
            has = f"{axis} has {counted(chips[axis], 'chip')} in a slice"
            what = f"{shown} is a block of {counted(num, 'chip')}, and {has}"
            fix = f"give a block of {chips[axis]} chips, or none" if chips[axis] > 1 else f"name {axis} without a block"
            problems.append(Problem("device_order", what, fix))
        elif len(block) > len(shape) or any(size % along for size, along in zip(shape, block, strict=False)):
            what = f"{shown} does not divide the torus of {torus} chips"
            problems.append(Problem("device_order", what, "give a block that divides it along each axis"))
    raise_if_any(problems)


ChipExtents = tuple[tuple[int, ...], ...]  # for each mesh axis, innermost first: its members along x, y, z


def _layouts(sizes: Sequence[int], shape: ChipShape) -> Iterator[ChipExtents]:
    """Yields all ways to write each size as a product over the torus axes that fill the torus."""
    if not sizes:
        if math.prod(shape) == 1:
            yield ()
        return
    for factors in product(*(divisors(size) for size in shape)):
        if math.prod(factors) == sizes[0]:
            rest = tuple(size // factor for size, factor in zip(shape, factors, strict=True))
            for others in _layouts(sizes[1:], rest):
                yield (factors, *others)


def _parts(layout: ChipExtents, index: int, shape: ChipShape, wraps: Sequence[bool]) -> tuple[AxisSegment, ...]:
    """Returns the segments of one mesh axis, whole and outer ones first."""
    parts = []
    for i, size in enumerate(shape):
        count, stride = layout[index][i], math.prod(inner[i] for inner in layout[:index])
        if count > 1:
            parts.append(AxisSegment(TORUS_AXES[i], count, stride, size, wraps=wraps[i] and count * stride == size))
    return tuple(parts)


def _cost(
    layout: ChipExtents, axes: Sequence[str], shape: ChipShape, wraps: Sequence[bool], traffic: Mapping[str, float]
) -> tuple[float, ...]:
    """Returns a sort key: the number of segments; then time, as traffic over link bandwidth; then use of later axes."""
    parts = [_parts(layout, index, shape, wraps) for index in range(len(axes))]
    seconds = sum(
        traffic[axis] / sum((2 if part.wraps else 1) / part.stride for part in own)
        for axis, own in zip(axes, parts, strict=True)
        if own
    )
    return (sum(map(len, parts)), seconds, *(-factor for factors in layout for factor in factors))


def lay_in_nodes(
    sizes: Mapping[str, int], shape: ChipShape, traffic: Mapping[str, float]
) -> dict[str, tuple[AxisSegment, ...]]:
    """Returns the segments of each mesh axis: the axes with the most traffic fill the node."""
    num_nodes, per_node = shape
    parts: dict[str, tuple[AxisSegment, ...]] = {}
    inside = outside = 1
    for axis in sorted((axis for axis, size in sizes.items() if size > 1), key=lambda axis: -traffic[axis]):
        near = math.gcd(sizes[axis], per_node // inside)
        far = sizes[axis] // near
        behind_switch = AxisSegment("NVLink", near, inside, per_node, wraps=False)
        over_network = AxisSegment("NIC", far, outside, num_nodes, wraps=False)
        parts[axis] = tuple(part for part in (over_network, behind_switch) if part.size > 1)
        inside, outside = inside * near, outside * far
    return parts


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True)
class Rate:
    """The rate of a link. bytes_per_second: one way, over one link of a torus, or from one device into a switch.
    seconds: the latency of a hop. measured: the times of a permute where they were measured."""

    bytes_per_second: float
    seconds: float
    measured: TimeCurve | None = None

    def transfer_seconds(self, num_bytes: float) -> float:
        """Returns the time of bytes that one device sends, without the latency."""
        if self.measured is not None:
            return self.measured.seconds(num_bytes) - self.seconds
        return num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class GroupSpan:
    """Members of a group along one physical axis.

    num_sharing: the number of groups, this one included, that send over its busiest link. spacing: hops to the next
    member. reach: hops to the farthest member. is_ring: whether the members send both ways around.
    """

    size: int
    num_sharing: int
    spacing: int
    reach: int
    is_ring: bool


def span_of_segments(parts: Sequence[AxisSegment]) -> GroupSpan:
    """Returns the span of whole mesh axes: [4, every 4th] and [4] are 16 neighbours. The chips between two members
    belong to other groups, which send over the same links."""
    outer = max(parts, key=lambda part: part.stride)
    size = math.prod(part.size for part in parts)
    spacing = outer.stride * outer.size // size
    return GroupSpan(size, spacing, spacing, spacing * (size // 2 if outer.wraps else size - 1), outer.wraps)


def link_of_spans(rows: Mapping[str, GroupSpan], target: TargetPlan) -> Link:
    """Returns the link of a group. rows: its spans by physical axis, of more than one member each."""
    rates, is_torus = rates_of(target), isinstance(target.network, TorusSpec)
    near, far = ("core", "DCN") if is_torus else ("NVLink", "NIC")
    lines = [_line(name, rows[name], rates[name], target) for name in TORUS_AXES if name in rows]
    times = None if is_torus else switch_times(target, rows)
    levels = (
        *([_switch(near, rows[near], rates[near])] if near in rows else []),
        *([_torus(tuple(lines), cast(TorusSpec, target.network))] if lines else []),
        *([_switch(far, rows[far], rates[far])] if far in rows else []),
    )
    is_near = any(level.kind == "ICI" for level in levels)
    call = target.network.call_seconds if isinstance(target.network, TorusSpec) and is_near else 0.0
    return Link(levels[-1].kind if levels else LINK_KINDS[near], levels, note="", times=times, call_seconds=call)


def _torus(lines: tuple[LinkLine, ...], network: TorusSpec) -> InterconnectTier:
    """Returns the tier of axes of a torus."""
    return InterconnectTier(
        kind="ICI",
        lines=lines,
        is_switch=False,
        share_at_once=network.axes_at_once,
        ring_ways=network.ring_ways,
    )


def switch_times(target: TargetPlan, rows: Mapping[str, GroupSpan]) -> SwitchTimes:
    """Returns the measured times of a group of GPUs. rows: its spans in the node and across nodes."""
    network, found = cast(SwitchSpec, target.network), target.calibration.links if target.calibration else {}
    near, far = (rows[name].size if name in rows else 1 for name in ("NVLink", "NIC"))
    slower = tuple(found[kind].latency if kind in found else 1.0 for kind in ("NVLink", "NIC"))
    return SwitchTimes(
        near=near,
        far=far,
        chip_bytes_per_second=network.chip_bytes_per_second,
        nic_bytes_per_second=network.nic_bytes_per_second,
        inside=network.collectives,
        across=network.across,
        at_once=target.shape[1] if target.shape else network.chips_per_node,
        latency=(slower[0], slower[1]),
    )


def rates_of(target: TargetPlan) -> dict[str, Rate]:
    """Returns the rate of each physical axis. Over DCN and NICs a device has its share of its host's or node's
    bandwidth."""
    network = target.network
    if isinstance(network, TorusSpec):
        devices_per_host = math.prod(network.chips_per_host) * target.devices_per_chip
        return {
            "DCN": Rate(network.host_bytes_per_second / devices_per_host, network.host_seconds),
            **dict.fromkeys(TORUS_AXES, Rate(network.link_bytes_per_second, network.hop_seconds)),
            "core": Rate(network.core_bytes_per_second or math.inf, network.hop_seconds),
        }
    pair = GroupSpan(2, 1, 1, 1, is_ring=False)
    of_pairs = {name: switch_times(target, {name: pair}).permute for name in ("NIC", "NVLink")}
    return {name: Rate(curve.last_bytes_per_second, curve.start_seconds, curve) for name, curve in of_pairs.items()}


def _line(name: str, row: GroupSpan, rate: Rate, target: TargetPlan) -> LinkLine:
    """Returns the line of a span; devices of a chip share its links."""
    bandwidth = rate.bytes_per_second / row.num_sharing / target.devices_per_chip
    return LinkLine(
        name=name,
        size=row.size,
        bytes_per_second=bandwidth * (2 if row.is_ring else 1),
        neighbour_bytes_per_second=bandwidth,
        gather_seconds=row.reach * rate.seconds,
        neighbour_seconds=row.spacing * rate.seconds,
    )


def _switch(name: str, row: GroupSpan, rate: Rate) -> InterconnectTier:
    """Returns the tier of a switch: all members reach each other at once, and small messages spread like a tree."""
    line = LinkLine(
        name=name,
        size=row.size,
        bytes_per_second=rate.bytes_per_second,
        neighbour_bytes_per_second=rate.bytes_per_second,
        gather_seconds=math.ceil(math.log2(row.size)) * rate.seconds,
        neighbour_seconds=rate.seconds,
    )
    return InterconnectTier(LINK_KINDS[name], (line,), is_switch=True)
