"""Draws the chips of a target, and the group of devices that the first one belongs to along each mesh axis.

A torus is drawn as its planes of x and y, one for each z and slice; nodes as rows of their GPUs. Groups of two mesh
axes have one device in common, so each chip has the colour of one axis at most, but for the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...target.placement import Placement, physical_sizes

MOST_PANELS, MOST_ROWS = 16, 32
CELL = 12  # pixels


@dataclass(frozen=True)
class Cell:
    """A chip in the group of a mesh axis. colour: a class of the style sheet."""

    x: int  # pixels
    y: int
    colour: str


@dataclass(frozen=True)
class Panel:
    """A plane of chips. title: "slice 1, z 3"; empty if there is only one plane."""

    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class MeshPicture:
    """The picture of a mesh. axes: name, size, place and colour of each mesh axis. num_left_out: the number of panels
    left out, and of rows in each."""

    width: int
    height: int
    panels: tuple[Panel, ...]
    axes: tuple[tuple[str, int, str, str], ...]
    num_panels_left_out: int
    num_rows_left_out: int


def mesh_picture(placement: Placement) -> MeshPicture | None:
    """Returns the picture; None if the links between devices are unknown."""
    if not placement.is_known or not placement.is_of_mesh:
        return None
    sizes = physical_sizes(placement.target)
    across, down = ("x", "y") if "x" in sizes else ("NVLink", "NIC")
    outer = [name for name in sizes if name not in (across, down, "core") and sizes[name] > 1]
    colours = {axis: f"axis-{n}" for n, axis in enumerate((a for a, size in placement.sizes.items() if size > 1), 1)}

    found: dict[tuple[int, ...], list[Cell]] = {at: [] for at in np.ndindex(*(sizes[name] for name in outer))}
    # The first device comes last: it lies on each axis, as other cores of its chip may.
    shared = [(place, colour) for axis, colour in colours.items() for place in _group(placement, axis)[1:]]
    for place, colour in (*shared, (placement.places[0], "first")):
        at = dict(zip(sizes, place, strict=True))
        found[tuple(at[name] for name in outer)].append(Cell(at[across] * CELL, at.get(down, 0) * CELL, colour))

    rows = sizes.get(down, 1)
    shown = min(rows, MOST_ROWS)
    panels = [
        Panel(_title(outer, at), tuple(cell for cell in cells if cell.y < shown * CELL)) for at, cells in found.items()
    ]
    describe = placement.describe()
    return MeshPicture(
        width=sizes[across] * CELL,
        height=shown * CELL,
        panels=tuple(panels[:MOST_PANELS]),
        axes=tuple((axis, placement.sizes[axis], describe[axis], colour) for axis, colour in colours.items()),
        num_panels_left_out=max(0, len(panels) - MOST_PANELS),
        num_rows_left_out=rows - shown,
    )


def _group(placement: Placement, axis: str) -> list[tuple[int, ...]]:
    """Returns the places of the devices along an axis that have the first place along all other axes."""
    names = list(placement.sizes)
    stride = math.prod(list(placement.sizes.values())[names.index(axis) + 1 :])
    return [placement.places[n * stride] for n in range(placement.sizes[axis])]


def _title(outer: Sequence[str], at: tuple[int, ...]) -> str:
    return ", ".join(f"{'slice' if name == 'DCN' else name} {n}" for name, n in zip(outer, at, strict=True))
