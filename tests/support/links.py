"""Links whose collectives take times that can be computed in one's head."""

from collections.abc import Mapping, Sequence

from meshloom.compiler.core.partition_spec import Axes
from meshloom.compiler.core.traffic import AxisGroups
from meshloom.compiler.target.links import InterconnectTier, Link, LinkLine

LinksOf = dict[tuple[Axes, AxisGroups | None], Mapping[Link, Sequence[int]]]


def links_of(sizes: dict[Axes, int], rate: float, start: float = 0.0) -> LinksOf:
    """Links of groups of these sizes, as `LinkTimes` has them for one declaration.

    A gather of V bytes takes start + V / rate, an all-reduce twice as long; a permute of any size takes start.
    """
    return {(axes, None): {_link(size, rate, start): (0,)} for axes, size in sizes.items()}


def _link(size: int, rate: float, start: float) -> Link:
    line = LinkLine("x", size, rate * (size - 1) / size, float("inf"), start, start)
    return Link("ICI", (InterconnectTier("ICI", (line,), is_switch=False),), "")
