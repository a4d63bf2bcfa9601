"""Assigns mesh axes to the physical axes of a torus, or of nodes of GPUs. Pure arithmetic.

Axes with the most traffic lie innermost: behind one switch, or on chips side by side. An axis gets whole axes of the
torus where that is possible, which are rings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from meshloom.models.numbers import divisors

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.format import counted
from ..spec.target_spec import ChipShape, TorusSpec

# How much is moved over a mesh axis, roughly, as against the others: activations of every layer, weights of every layer
# once or twice, gradients once a step, activations between stages.
TRAFFIC = {"tensor": 64, "expert": 32, "context": 16, "fsdp": 8, "data": 4, "stage": 2, "replica": 1}
TORUS_AXES = "xyz"
NO_BLOCKS: Mapping[str, ChipShape] = MappingProxyType({})


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
    """Returns the traffic of each mesh axis; those of a declared order are taken to have more than any other, the first
    the most."""
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
    """Returns the segments of each mesh axis within a slice: as few as possible, most bandwidth for most traffic.
    blocks: by axis, how many of its chips lie along x, y and z. Raises ConfigError for a block that cannot be."""
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
    """Raises ConfigError for blocks of another number of chips than their axes have, or that do not fit the torus.
    chips: of each mesh axis in a slice."""
    torus, problems = "x".join(map(str, shape)), list[Problem]()
    for axis, block in blocks.items():
        shown, num = f"{axis}:{'x'.join(map(str, block))}", math.prod(block)
        if num != chips[axis]:
            what = f"{shown} is a block of {num} chips, and {axis} has {counted(chips[axis], 'chip')} in a slice"
            fix = f"give a block of {chips[axis]} chips, or none" if chips[axis] > 1 else f"name {axis} without a block"
            problems.append(Problem("device_order", what, fix))
        elif len(block) > len(shape) or any(size % along for size, along in zip(shape, block, strict=False)):
            what = f"{shown} does not divide the torus of {torus} chips"
            problems.append(Problem("device_order", what, "give a block that divides it along each axis"))
    raise_if_any(problems)


ChipExtents = tuple[tuple[int, ...], ...]  # for each mesh axis, innermost first: how many of its members along x, y, z


def _layouts(sizes: Sequence[int], shape: ChipShape) -> Iterator[ChipExtents]:
    """Yields all ways to write each size as a product over the torus axes, such that the torus is filled."""
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
