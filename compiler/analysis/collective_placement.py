"""The placement of a compiled program's collectives: mesh axes, links, and the time that each takes alone."""

from dataclasses import dataclass

from ..core.collectives import LinkKind
from ..target.axis_segments import TORUS_AXES
from ..target.device_links import link_of_devices, send_between
from ..target.interconnect_tiers import LINK_KINDS, GroupSpan, link_of_spans
from ..target.links import Link, collective_seconds
from ..target.placement import Placement
from ..target.uneven_groups import uneven_seconds
from ..xla.schedule.steps import Collective

NO_GROUPS = "the program does not name its group of devices"
NO_LINKS = "the target's links are not known"


@dataclass(frozen=True)
class CollectivePlacement:
    """The placement of one collective. mesh_axes: the axes along which its groups lie, empty if the program does not
    say. links: the links that it keeps busy, each direction of a torus axis separately: 'ICI x+'. why: why
    alone_seconds is unknown. is_certain: False if groups of no regular shape were priced by one order of sending."""

    mesh_axes: tuple[str, ...]
    group_size: int
    kind: LinkKind
    links: tuple[str, ...]
    alone_seconds: float | None
    why: str | None = None
    is_certain: bool = True


def place_collective(collective: Collective, placement: Placement) -> CollectivePlacement:
    """Returns the placement of a collective over all of its groups at once."""
    if collective.num_slices is not None:
        return _across_slices(collective, collective.num_slices, placement)
    groups = collective.groups
    if not groups:
        return CollectivePlacement((), 1, placement.link_of(()).kind, (), None, NO_GROUPS)
    if collective.kind in ("collective-permute", "send"):
        return _sent(collective, placement)
    axes, size = placement.axes_of(groups[0]), len(groups[0])
    whole = placement.link_of(axes)
    if not placement.is_known:
        return CollectivePlacement(axes, size, whole.kind, (whole.kind,), None, NO_LINKS)
    link = whole if size == whole.group_size else link_of_devices(placement, groups)
    if link is None:
        sent = uneven_seconds(collective.kind, collective.num_bytes, placement, groups)
        links = tuple(map(_name, sent.tracks))
        return CollectivePlacement(axes, size, sent.kind, links, sent.seconds, is_certain=False)
    seconds = collective_seconds(collective.kind, collective.num_bytes, size, link.over(collective.num_axes))
    return CollectivePlacement(axes, size, link.kind, _links_of(link), seconds)


def _sent(collective: Collective, placement: Placement) -> CollectivePlacement:
    """Returns the placement of a permute, whose groups are pairs: along all axes that any pair crosses."""
    names = tuple(placement.sizes)
    crossed = {axis for pair in collective.groups for axis in placement.axes_of(pair)}
    axes = tuple(name for name in names if name in crossed)
    size = placement.group_size(axes)
    if not placement.is_known:
        return CollectivePlacement(axes, size, "memory", ("memory",), None, NO_LINKS)
    sent = send_between(placement, collective.groups, collective.num_bytes)
    return CollectivePlacement(axes, size, sent.kind, tuple(map(_name, sent.tracks)), sent.seconds)


def _across_slices(collective: Collective, num_slices: int, placement: Placement) -> CollectivePlacement:
    """Returns the placement of a collective of each device with those at its place in other slices."""
    if not placement.is_known:
        return CollectivePlacement((), num_slices, "DCN", ("DCN",), None, NO_LINKS)
    crossing = {
        axis: [part.size for part in parts if part.physical == "DCN"] for axis, parts in placement.parts.items()
    }
    if num_slices == placement.target.num_slices:
        axes = tuple(axis for axis, sizes in crossing.items() if sizes)
    else:  # the program does not say which slices: an axis that crosses as many, if there is one
        alike = [axis for axis, sizes in crossing.items() if sizes == [num_slices]]
        axes = tuple(alike) if len(alike) == 1 else ()
    link = link_of_spans({"DCN": GroupSpan(num_slices, 1, 1, 1, is_ring=False)}, placement.target)
    seconds = collective_seconds(collective.kind, collective.num_bytes, num_slices, link)
    return CollectivePlacement(axes, num_slices, "DCN", ("DCN",), seconds)


def _links_of(link: Link) -> tuple[str, ...]:
    lines = (line.name for level in link.levels for line in level.lines)
    return tuple(_name(name + way) for name in lines for way in (("+", "-") if name in TORUS_AXES else ("",)))


def _name(track: str) -> str:
    """Returns the name of a link: 'x+' -> 'ICI x+', 'DCN' -> 'DCN'."""
    kind = LINK_KINDS[track.rstrip("+-")]
    return track if kind == track else f"{kind} {track}"
