"""Members of a group along each physical axis -> the link that they have together. Pure arithmetic.

v5e-256, x: 4 members, every 4th, a ring -> ICI, one line of 2 * 45 / 4 GB/s
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from .axis_parts import TORUS_AXES, Part
from .links import Level, Line, Link
from .report import Link as LinkKind
from .target import TargetPlan
from .target_spec import SwitchSpec, TorusSpec

# Physical axes of each kind of link.
LINK_KINDS: dict[str, LinkKind] = {**dict.fromkeys(TORUS_AXES, "ICI"), "core": "ICI", "DCN": "DCN", "NVLink": "NVLink", "NIC": "NIC"}  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Row:
    """Members of a group along one physical axis.

    num_sharing: groups that send over the busiest of its links, itself among them. spacing, reach: hops to the next
    member, and to the farthest. is_ring: the members send both ways around.
    """

    size: int
    num_sharing: int
    spacing: int
    reach: int
    is_ring: bool


def row_of_parts(parts: Sequence[Part]) -> Row:
    """Of whole mesh axes: [4, every 4th] and [4] are 16 side by side. The chips between two members are those of other
    groups, which send over the same links."""
    outer = max(parts, key=lambda part: part.stride)
    size = math.prod(part.size for part in parts)
    spacing = outer.stride * outer.size // size
    return Row(size, spacing, spacing, spacing * (size // 2 if outer.wraps else size - 1), outer.wraps)


def link_of_rows(rows: Mapping[str, Row], target: TargetPlan) -> Link:
    """rows: by physical axis, of more than one member each."""
    network = target.network
    if isinstance(network, TorusSpec):
        levels = _torus_levels(rows, target, network)
        return Link(levels[-1].kind if levels else "ICI", levels, is_pipelined=False, note="")
    levels = _switch_levels(rows, cast(SwitchSpec, network))
    return Link(levels[-1].kind if levels else "NVLink", levels, is_pipelined=True, note="")


def slices_bytes_per_second(target: TargetPlan, network: TorusSpec) -> float:
    """What one device can send to other slices: its share of its host's bandwidth."""
    return network.host_bytes_per_second / (math.prod(network.chips_per_host) * devices_per_chip(target))


def nodes_bytes_per_second(network: SwitchSpec) -> float:
    """What one GPU can send to other nodes."""
    return network.node_bytes_per_second / network.chips_per_node


def devices_per_chip(target: TargetPlan) -> int:
    return target.chip.num_devices if target.chip else 1


def _torus_levels(rows: Mapping[str, Row], target: TargetPlan, network: TorusSpec) -> tuple[Level, ...]:
    levels = []
    if core := rows.get("core"):
        levels.append(_switch("core", core.size, cast(float, network.core_bytes_per_second), network.hop_seconds))
    if lines := tuple(_line(name, rows[name], target, network) for name in TORUS_AXES if name in rows):
        levels.append(Level("ICI", lines, is_switch=False))
    if across := rows.get("DCN"):
        levels.append(_switch("DCN", across.size, slices_bytes_per_second(target, network), network.host_seconds))
    return tuple(levels)


def _line(name: str, row: Row, target: TargetPlan, network: TorusSpec) -> Line:
    """Devices of a chip share its links."""
    bandwidth = network.link_bytes_per_second / row.num_sharing / devices_per_chip(target)
    return Line(
        name=name,
        size=row.size,
        bytes_per_second=bandwidth * (2 if row.is_ring else 1),
        neighbour_bytes_per_second=bandwidth,
        gather_seconds=row.reach * network.hop_seconds,
        neighbour_seconds=row.spacing * network.hop_seconds,
    )


def _switch_levels(rows: Mapping[str, Row], network: SwitchSpec) -> tuple[Level, ...]:
    levels = []
    if near := rows.get("NVLink"):
        levels.append(_switch("NVLink", near.size, network.chip_bytes_per_second, network.chip_seconds))
    if far := rows.get("NIC"):
        levels.append(_switch("NIC", far.size, nodes_bytes_per_second(network), network.node_seconds))
    return tuple(levels)


def _switch(name: str, size: int, bytes_per_second: float, seconds: float) -> Level:
    """All members of a group reach each other at once; small messages spread like a tree."""
    line = Line(
        name=name,
        size=size,
        bytes_per_second=bytes_per_second,
        neighbour_bytes_per_second=bytes_per_second,
        gather_seconds=math.ceil(math.log2(size)) * seconds,
        neighbour_seconds=seconds,
    )
    return Level(LINK_KINDS[name], (line,), is_switch=True)
