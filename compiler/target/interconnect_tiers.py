"""Derives the link of a group from its members along each physical axis. Pure arithmetic.

v5e-256, x: 4 members, every 4th, a ring -> ICI, one line of 2 * 45 / 4 GB/s
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ..core.collectives import LinkKind
from ..spec.target_spec import SwitchSpec, TorusSpec
from .axis_segments import TORUS_AXES, AxisSegment
from .links import InterconnectTier, Link, LinkLine
from .target import TargetPlan

# Physical axes of each kind of link.
LINK_KINDS: dict[str, LinkKind] = {**dict.fromkeys(TORUS_AXES, "ICI"), "core": "ICI", "DCN": "DCN", "NVLink": "NVLink", "NIC": "NIC"}  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Rate:
    """The rate of a link. bytes_per_second: one way, of one link of a torus, or of one device into a switch. seconds:
    latency of a hop."""

    bytes_per_second: float
    seconds: float


@dataclass(frozen=True)
class GroupSpan:
    """Members of a group along one physical axis.

    num_sharing: groups that send over the busiest of its links, itself among them. spacing, reach: hops to the next
    member, and to the farthest. is_ring: the members send both ways around.
    """

    size: int
    num_sharing: int
    spacing: int
    reach: int
    is_ring: bool


def span_of_segments(parts: Sequence[AxisSegment]) -> GroupSpan:
    """Returns the row of whole mesh axes: [4, every 4th] and [4] are 16 neighbours. The chips between two members
    belong to other groups, which send over the same links."""
    outer = max(parts, key=lambda part: part.stride)
    size = math.prod(part.size for part in parts)
    spacing = outer.stride * outer.size // size
    return GroupSpan(size, spacing, spacing, spacing * (size // 2 if outer.wraps else size - 1), outer.wraps)


def link_of_spans(rows: Mapping[str, GroupSpan], target: TargetPlan) -> Link:
    """Returns the link. rows: by physical axis, with more than one member each."""
    rates, is_torus = rates_of(target), isinstance(target.network, TorusSpec)
    near, far = ("core", "DCN") if is_torus else ("NVLink", "NIC")
    lines = [_line(name, rows[name], rates[name], target) for name in TORUS_AXES if name in rows]
    levels = (
        *([_switch(near, rows[near], rates[near])] if near in rows else []),
        *([InterconnectTier("ICI", tuple(lines), is_switch=False)] if lines else []),
        *([_switch(far, rows[far], rates[far])] if far in rows else []),
    )
    return Link(levels[-1].kind if levels else LINK_KINDS[near], levels, is_pipelined=not is_torus, note="")


def rates_of(target: TargetPlan) -> dict[str, Rate]:
    """Returns rates by physical axis. For DCN and NICs a device has its share of its host's or node's bandwidth."""
    network = target.network
    if isinstance(network, TorusSpec):
        devices_per_host = math.prod(network.chips_per_host) * target.devices_per_chip
        return {
            "DCN": Rate(network.host_bytes_per_second / devices_per_host, network.host_seconds),
            **dict.fromkeys(TORUS_AXES, Rate(network.link_bytes_per_second, network.hop_seconds)),
            "core": Rate(network.core_bytes_per_second or math.inf, network.hop_seconds),
        }
    switch = cast(SwitchSpec, network)
    share, node_bytes_per_second = switch.collective_share, switch.node_bytes_per_second
    return {
        "NIC": Rate(share * node_bytes_per_second / switch.chips_per_node, switch.node_seconds),
        "NVLink": Rate(share * switch.chip_bytes_per_second, switch.chip_seconds),
    }


def _line(name: str, row: GroupSpan, rate: Rate, target: TargetPlan) -> LinkLine:
    """Returns the line of a row; devices of a chip share its links."""
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
    """Returns the level of a switch: all members reach each other at once, and small messages spread like a tree."""
    line = LinkLine(
        name=name,
        size=row.size,
        bytes_per_second=rate.bytes_per_second,
        neighbour_bytes_per_second=rate.bytes_per_second,
        gather_seconds=math.ceil(math.log2(row.size)) * rate.seconds,
        neighbour_seconds=rate.seconds,
    )
    return InterconnectTier(LINK_KINDS[name], (line,), is_switch=True)
