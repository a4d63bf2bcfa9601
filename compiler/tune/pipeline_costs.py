"""Prices the ticks and the buffers of a candidate with stages by its own table: they are no products of powers.

Candidates of one family (families.py) run the same operations in the same form of ticks, with the same layers on each
stage. Their tables differ in length, and so in the slots that buffers have.
"""

from dataclasses import replace

import numpy as np

from ..estimate.program_costs import Costs
from ..estimate.stage_buffers import allocated_slots
from ..parallel.pipeline_plan import PipelinePlan
from ..pipeline.buffers import COLUMN_OF, lower_table
from ..pipeline.makespan import TickSlot, ticks_of_head


def shape_of(pipeline: PipelinePlan | None) -> tuple[str, ...]:
    """Returns what the program of a pipeline depends on, beside the length of its table."""
    if pipeline is None:
        return ()
    table, layers = pipeline.table, pipeline.layers.totals
    form = "multi" if any(len(slots) > 1 for row in table.rows for slots in row) else "unit"
    return f"head={pipeline.head.place}", f"layers={layers}", f"ticks={form}", f"operations={sorted(table.ops)}"


def slots_of(pipeline: PipelinePlan | None) -> tuple[int, ...]:
    """Returns the slots of each kind of buffer; at least one each, also of a buffer that the table lacks."""
    if pipeline is None:
        return ()
    return tuple(max(1, number) for number in allocated_slots(pipeline.table).values())


def with_table(costs: Costs, pipeline: PipelinePlan | None) -> Costs:
    """Returns the costs of candidates with this pipeline, with the ticks of its table; without one, the costs."""
    loop = costs.shape.ticks
    if loop is None or pipeline is None:
        return costs
    table = pipeline.table
    columns = lower_table(table, pipeline.layers.kind_of).columns
    numbers, parts = costs.numbers.copy(), list(loop.parts)
    numbers[list(costs.shape.regions[loop.region][-1])] = table.num_ticks
    slots = [(place, part) for place, part in enumerate(parts) if isinstance(part, TickSlot)]
    chosen = [columns[COLUMN_OF[op]] for op in sorted(table.ops, key=lambda op: op.place)]
    num_loops = sum(not part.is_shared for _, part in slots) // len(chosen)
    if num_loops > 1:  # of each operation, one for each kind of chunk
        chosen = [column == kind for column in chosen for kind in range(1, 1 + num_loops)]
    of_slots = iter(chosen)
    for place, part in slots:
        of_part = np.array(ticks_of_head(table)) if part.is_shared else next(of_slots).astype(int)
        parts[place] = replace(part, chosen=tuple(map(tuple, of_part.tolist())))
        for number, branch in enumerate(part.branches):
            places, share = list(costs.shape.regions[branch[0]][-1]), (of_part == number).mean(axis=0)
            numbers[places] = share[: len(places), None]
    return Costs(replace(costs.shape, ticks=replace(loop, parts=tuple(parts))), numbers)
