"""Draws a pipeline's table, and the chips of a target.

A table is drawn as papers do: a row for each stage, time across, and the number of the microbatch in each operation.

F is blue, B and BW are teal, W is green and R is grey; later chunks are paler. Where seconds are known, operations are
as long as they take; else F, R, B and W are alike, and BW is twice as long. A long table has its middle left out, and
one of many stages its last ones; the picture says so.

A torus is drawn as its planes of x and y, one for each z and slice; nodes as rows of their GPUs. Along each mesh axis,
the group of the first device is drawn. Groups of two mesh axes have one device in common, so each chip has the colour
of one axis at most, but for the first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from ...core.format import counted, human_seconds, human_share
from ...pipeline.makespan import SlotTime, TableTime, time_table
from ...pipeline.table import PipelineOp, PipelineTable
from ...target.placement import Placement, physical_sizes

MOST_STAGES, MOST_WIDTH = 32, 1080  # pixels: of time
ROW, GAP, LEFT, CUT, LEGEND = 18, 3, 58, 34, 30
DIGIT = 6.2  # pixels that a digit takes
LONGEST_UNIT = 26  # pixels of a forward operation at most

UNIT_SECONDS = {
    PipelineOp.FORWARD: 1.0,
    PipelineOp.RECOMPUTE: 1.0,
    PipelineOp.INPUT_GRADIENT: 1.0,
    PipelineOp.WEIGHT_GRADIENT: 1.0,
    PipelineOp.BACKWARD: 2.0,
}
_NAMES = {
    PipelineOp.FORWARD: "forward",
    PipelineOp.RECOMPUTE: "recompute",
    PipelineOp.INPUT_GRADIENT: "backward, input",
    PipelineOp.WEIGHT_GRADIENT: "backward, weights",
    PipelineOp.BACKWARD: "backward",
}
# Variables are those of a page's style sheet, which has a dark form; a picture by itself has the colours after them.
PIPELINE_STYLE = """\
.pipeline text { font: 10px system-ui, "Liberation Sans", sans-serif; fill: var(--dim, #5b6570); }
.pipeline .idle { fill: var(--soft, #f3f5f7); }
.pipeline .op-f { fill: var(--blue, #0072b2); }
.pipeline .op-r { fill: var(--grey, #8b96a1); }
.pipeline .op-b, .pipeline .op-bw { fill: var(--teal, #2b8c99); }
.pipeline .op-w { fill: var(--lime, #9bb83c); }
.pipeline text.in { text-anchor: middle; fill: var(--inside, #fff); }
.pipeline text.in.w { fill: #101214; }
.pipeline text.in.pale { fill: var(--ink, #1a1d21); }
@media print { .pipeline { max-width: 100%; height: auto; } }
"""


@dataclass(frozen=True)
class _Scale:
    """Seconds to pixels. first, last: the seconds before and after which all is drawn; in between it is left out."""

    total: float
    pixels: float
    first: float
    last: float

    @property
    def is_cut(self) -> bool:
        return self.first < self.last

    @property
    def width(self) -> float:
        return self.x(self.total)

    def shows(self, slot: SlotTime) -> bool:
        return not self.is_cut or slot.end <= self.first or slot.begin >= self.last

    def x(self, seconds: float) -> float:
        if not self.is_cut or seconds <= self.first:
            return seconds * self.pixels
        return self.first * self.pixels + CUT + max(0.0, seconds - self.last) * self.pixels


def pipeline_picture(table: PipelineTable, time: TableTime | None = None, *, has_style: bool = True) -> str:
    """Returns the picture of a table as SVG. time: its time, where seconds are known. has_style: False in a page whose
    style sheet has `PIPELINE_STYLE`."""
    is_recomputed = PipelineOp.RECOMPUTE in table.ops  # else it may still happen inside B
    units = UNIT_SECONDS if is_recomputed else {**UNIT_SECONDS, PipelineOp.RECOMPUTE: 0.0}
    drawn = time or time_table(table, lambda op, stage, chunk: units[op])
    stages = min(table.placement.num_stages, MOST_STAGES)
    scale = _scale(table, drawn)
    height = stages * (ROW + GAP)
    slots = [slot for slot in drawn.slots if slot.stage < stages and scale.shows(slot)]
    parts = [
        *(f'<text x="0" y="{_middle(stage)}">stage {stage}</text>' for stage in range(stages)),
        *_idle(scale, stages),
        *(part for slot in slots for part in _operation(slot, table, scale, time is not None)),
        *_legend(table, height + 14),
        *_notes(table, scale, drawn, time, height + LEGEND),
    ]
    width, whole = max(LEFT + scale.width + 2, 420), height + LEGEND + 20
    label = f"{table.name}: {counted(table.placement.num_stages, 'stage')}, {counted(table.num_ticks, 'tick')}"
    return (
        f'<svg class="pipeline" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}"'
        f' width="{width:.0f}" height="{whole}" viewBox="0 0 {width:.0f} {whole}">\n'
        + (f"<style>\n{PIPELINE_STYLE}</style>\n" if has_style else "")
        + "\n".join(parts)
        + "\n</svg>"
    )


def _scale(table: PipelineTable, time: TableTime) -> _Scale:
    """Returns the scale at which the number of a microbatch fits into a forward operation, where that can be."""
    forward = [slot.end - slot.begin for slot in time.slots if slot.slot.op == PipelineOp.FORWARD]
    shortest = min((each for each in forward if each > 0), default=1.0)
    least = DIGIT * len(str(table.num_microbatches - 1)) + 3
    fits = MOST_WIDTH / time.seconds if time.seconds else 1.0
    pixels = max(least / shortest, min(fits, LONGEST_UNIT / shortest))
    if time.seconds * pixels <= MOST_WIDTH:
        return _Scale(time.seconds, pixels, time.seconds, time.seconds)
    half = (MOST_WIDTH - CUT) / 2 / pixels
    return _Scale(time.seconds, pixels, half, time.seconds - half)


def _top(stage: int) -> int:
    return stage * (ROW + GAP)


def _middle(stage: int) -> float:
    return _top(stage) + ROW / 2 + 3.5


def _idle(scale: _Scale, stages: int) -> Iterator[str]:
    for stage in range(stages):
        ends = [(0.0, scale.first), (scale.last, scale.total)] if scale.is_cut else [(0.0, scale.total)]
        for begin, end in ends:
            x = scale.x(begin) if begin else 0.0
            width = (end - begin) * scale.pixels
            yield f'<rect class="idle" x="{LEFT + x:.1f}" y="{_top(stage)}" width="{width:.1f}" height="{ROW}"/>'


def _operation(slot: SlotTime, table: PipelineTable, scale: _Scale, is_timed: bool) -> Iterator[str]:
    of, name = slot.slot, slot.slot.op.lower()
    x, width = LEFT + scale.x(slot.begin), (slot.end - slot.begin) * scale.pixels
    took = f", {human_seconds(slot.end - slot.begin)}" if is_timed else ""
    title = f"<title>tick {slot.tick}: {of}{took}</title>"
    opacity = 0.6 - 0.3 * (of.chunk - 1) / max(1, table.placement.num_chunks - 2)
    pale = f' fill-opacity="{opacity:.2f}"' if of.chunk else ""
    shape = f'x="{x:.1f}" y="{_top(slot.stage)}" width="{max(width - 0.8, 0.4):.1f}" height="{ROW}"'
    yield f'<rect class="op-{name}"{pale} {shape}>{title}</rect>'
    if width >= DIGIT * len(str(of.microbatch)) + 1:
        classes = f"in {name}{' pale' if of.chunk else ''}"
        yield f'<text class="{classes}" x="{x + width / 2:.1f}" y="{_middle(slot.stage)}">{of.microbatch}</text>'


def _legend(table: PipelineTable, y: int) -> Iterator[str]:
    x = float(LEFT)
    for op in sorted(table.ops, key=lambda op: op.place):
        text = f"{op}: {_NAMES[op]}"
        yield f'<rect class="op-{op.lower()}" x="{x:.0f}" y="{y - 8}" width="10" height="10"/>'
        yield f'<text x="{x + 14:.0f}" y="{y + 1}">{text}</text>'
        x += 14 + 6 * len(text) + 14
    if table.placement.num_chunks > 1:
        yield f'<text x="{x:.0f}" y="{y + 1}">later chunks are paler</text>'


def _notes(table: PipelineTable, scale: _Scale, drawn: TableTime, time: TableTime | None, y: int) -> Iterator[str]:
    if time is None:
        lengths = "as if all operations took alike" + (", and BW twice" if PipelineOp.BACKWARD in table.ops else "")
    else:
        lengths = human_seconds(time.seconds)
    notes = [lengths, f"bubble {human_share(drawn.bubble / drawn.seconds if drawn.seconds else 0.0)} of the time"]
    if scale.is_cut:
        hidden = sorted(set(range(table.num_ticks)) - {slot.tick for slot in drawn.slots if scale.shows(slot)})
        which = f", ticks {hidden[0]} to {hidden[-1]} of {table.num_ticks}," if hidden else ""
        notes.append(f"the middle{which} is left out")
    if (more := table.placement.num_stages - MOST_STAGES) > 0:
        notes.append(f"{counted(more, 'more stage')} left out")
    yield f'<text x="{LEFT}" y="{y + 8}">{"; ".join(notes)}</text>'


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
    panels = list[Panel]()
    for at, cells in found.items():
        title = ", ".join(f"{'slice' if name == 'DCN' else name} {n}" for name, n in zip(outer, at, strict=True))
        panels.append(Panel(title, tuple(cell for cell in cells if cell.y < shown * CELL)))
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
