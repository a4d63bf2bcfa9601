"""Puts the order of each stage's operations into ticks.

All stages run their ticks side by side: between neighbours a tick takes as long as the longer one. So there are two
forms. In *multi* ticks a stage runs several operations, a forward and a backward one beside a neighbour that does the
same; in *unit* ticks it runs one, which is right where all operations take about as long.
"""

from collections.abc import Sequence
from enum import StrEnum

from .table import PipelineTable, PipelineWork, Slot, StagePlacement, dependencies

Order = Sequence[Slot]  # of one stage


class TickForm(StrEnum):
    """How many operations a stage runs in a tick: one of each kind that follow each other in its order, or one."""

    MULTI = "multi"
    UNIT = "unit"


def pack_ticks(name: str, placement: StagePlacement, orders: Sequence[Order], form: TickForm) -> PipelineTable:
    """Returns the table in which each operation is in the first tick that the order of its stage and what it needs
    from others allow. Raises ValueError if an order waits for itself."""
    ops = frozenset(slot.op for order in orders for slot in order)
    done: dict[PipelineWork, int] = {}
    at = [0] * len(orders)
    rows: list[tuple[tuple[Slot, ...], ...]] = []
    while any(start < len(order) for start, order in zip(at, orders, strict=True)):
        tick, row = len(rows), []
        for stage, order in enumerate(orders):
            slots: list[Slot] = []
            for place in range(at[stage], len(order)):
                slot = order[place]
                work = PipelineWork(slot.op, placement.virtual(stage, slot.chunk), slot.microbatch)
                if slots and (form == TickForm.UNIT or slots[-1].op.place >= slot.op.place):
                    break
                needs = dependencies(work, placement.num_virtual, ops)
                if any(done.get(need, tick + 1) > tick - is_earlier for need, is_earlier in needs):
                    break
                done[work] = tick
                slots.append(slot)
            at[stage] += len(slots)
            row.append(tuple(slots))
        if not any(row):
            stage = next(s for s, order in enumerate(orders) if at[s] < len(order))
            waiting = orders[stage][at[stage]]
            raise ValueError(f"{name}: on stage {stage}, {waiting} waits for what never runs before it")
        rows.append(tuple(row))
    num_microbatches = 1 + max(slot.microbatch for order in orders for slot in order)
    return PipelineTable(name, placement, num_microbatches, tuple(rows))
