"""Shows a pipeline's table on a terminal, a line for each stage.

stage 0  F0 F1 F2+BW0 F3+BW1 .. 2 more ticks
stage 1     F0 F1+BW0 F2+BW1
"""

from collections.abc import Iterator

from ..core.console import Line
from ..core.format import counted, human_bytes
from ..estimate.stage_buffers import WHAT, StageBuffer, bytes_in_use
from ..pipeline.table import PipelineOp, PipelineTable, Slot

MOST_STAGES = 16
STYLES = {
    PipelineOp.FORWARD: "blue",
    PipelineOp.RECOMPUTE: "dim",
    PipelineOp.INPUT_GRADIENT: "cyan",
    PipelineOp.BACKWARD: "cyan",
    PipelineOp.WEIGHT_GRADIENT: "green",
}


def pipeline_lines(table: PipelineTable, width: int) -> list[Line]:
    """Returns the lines of a table, with as many ticks as the width has room for. A later chunk is behind a dot."""
    stages = range(min(table.placement.num_stages, MOST_STAGES))
    names = [f"  stage {stage}" for stage in stages]
    room = width - len(names[-1]) - len(_more(table.num_ticks))
    lines: list[Line] = [[name.ljust(len(names[-1]))] for name in names]
    for tick, row in enumerate(table.rows):
        cells = [[(slot_text(slot), STYLES[slot.op]) for slot in row[stage]] for stage in stages]
        lengths = [sum(len(text) for text, _ in cell) + len(cell) - 1 if cell else 0 for cell in cells]
        room -= 1 + max(lengths)
        if room < 0:
            lines[0].append((_more(table.num_ticks - tick), "dim"))
            break
        for line, cell, length in zip(lines, cells, lengths, strict=True):
            line.append(" ")
            for number, part in enumerate(cell):
                line += ["+", part] if number else [part]
            line.append(" " * (max(lengths) - length))
    for line in lines:
        while isinstance(line[-1], str) and not line[-1].strip():
            line.pop()
    if (left := table.placement.num_stages - MOST_STAGES) > 0:
        lines.append([(f"  .. {counted(left, 'more stage')}", "dim")])
    return lines


def memory_lines(buffers: tuple[StageBuffer, ...]) -> Iterator[str]:
    """Yields what each buffer of the stages holds and takes, and what each stage uses of them."""
    for each in buffers:
        slots, of_one = counted(each.num_slots, "slot"), human_bytes(each.slot_bytes)
        used = ", ".join(map(str, each.in_use))
        yield f"{each.name}, {WHAT[each.name]}: {slots} of {of_one} on each stage; in use by stage: {used}"
    if buffers:
        allocated = human_bytes(sum(each.allocated_bytes for each in buffers))
        used = ", ".join(map(human_bytes, bytes_in_use(buffers)))
        yield f"buffers: {allocated} on each stage; in use at most, by stage: {used}"


def slot_text(slot: Slot) -> str:
    """Returns a slot as `F0`, or as `F0.1` for the second chunk."""
    return f"{slot.op}{slot.microbatch}" + (f".{slot.chunk}" if slot.chunk else "")


def _more(count: int) -> str:
    return f" .. {counted(count, 'more tick')}"
