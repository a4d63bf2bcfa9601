"""Lowers a table to integers for each tick and stage, which one loop over ticks reads, with slots of its buffers.

    forward, recompute, backward, weight     the branch that the stage runs of F, R, B or BW, W: 0 for none, and one
                                             more than the kind of its chunk's layers; with *_microbatch and *_chunk
    forward_is_first, forward_is_last,       whether the chunk is the model's first or last one: it has the embedding or
    backward_is_first                        the head
    x_of_forward                             F reads its input there; as the model's first, it writes it there
    gradient_of_head                         as the model's last, F writes the gradient of its result there
    x_of_recompute, residuals_of_recompute   R reads its input, and writes what B or BW reads
    x_of_backward or residuals_of_backward   what B or BW reads: the input, or what R wrote
    gradient_of_backward                     the gradient of the result, which it reads
    cut_of_backward, cut_of_weight           B writes what W reads
    x_of_weight                              where what F saved is, which W reads too, if the table has no R
    x_arrives_from_below, _from_above        where what the tick's F made on a neighbour is put at the end of the tick,
    x_stays                                  or what the stage's own F made, if it holds the next chunk too
    gradient_arrives_from_above, _from_below, gradient_stays     the same of the B or BW of the tick before, after F

    head, head_microbatch                    by tick alone: whether the model's last chunk runs F, and of what, for a
                                             head that all stages share

A table has the columns of its operations, and of the ways that its placement has. Slots are integers (ticks, stages);
where there is nothing to read or write, it is the slot after the last one. A slot is used again once what it held has
been read for the last time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .table import PipelineOp, PipelineTable, PipelineWork, Slot, TickForm, pack_ticks

_Column = np.ndarray[Any, np.dtype[Any]]

# What runs in a tick, in this order. Arrivals are writes.
_PHASES = ("F", "gradient arrives", "R", "B", "W", "x arrives")
_PHASE_OF = {
    PipelineOp.FORWARD: 0,
    PipelineOp.RECOMPUTE: 2,
    PipelineOp.INPUT_GRADIENT: 3,
    PipelineOp.BACKWARD: 3,
    PipelineOp.WEIGHT_GRADIENT: 4,
}
_GRADIENT_ARRIVES, _X_ARRIVES = 1, 5

COLUMN_OF = {
    PipelineOp.FORWARD: "forward",
    PipelineOp.RECOMPUTE: "recompute",
    PipelineOp.INPUT_GRADIENT: "backward",
    PipelineOp.BACKWARD: "backward",
    PipelineOp.WEIGHT_GRADIENT: "weight",
}
_WAYS = {1: "arrives_from_below", 0: "stays", -1: "arrives_from_above"}


@dataclass(frozen=True)
class LoweredTable:
    """columns: by name, (ticks, stages). of_head: those by tick alone, (ticks,). num_*: slots that a stage needs at
    most, of inputs of chunks, of gradients of their results, of what B leaves to W, and of what R leaves to B or BW."""

    columns: dict[str, _Column]
    of_head: dict[str, _Column]
    num_x: int
    num_gradients: int
    num_cuts: int
    num_residuals: int


@dataclass(frozen=True)
class _Live:
    """An array of a stage: the times at which it is written and read last."""

    stage: int
    begin: int
    end: int


_Place = tuple[int, int]  # a virtual stage and a microbatch


def lower_table(table: PipelineTable, kinds: Sequence[int] | None = None) -> LoweredTable:
    """Returns the columns of a table without violations. kinds: of each virtual stage, by its layers (stage_layers.py);
    None if all are alike."""
    slots, sizes = dict[str, dict[_Place, int]](), dict[str, int]()
    for buffer, arrays in _live(table).items():
        slots[buffer], used = _allocate(arrays)
        sizes[buffer] = max(used.values(), default=0)
    shape = (table.num_ticks, table.placement.num_stages)
    columns: dict[str, _Column] = {}
    for name, tick, stage, value in _entries(table, kinds or [0] * table.placement.num_virtual):
        buffer, place = value if isinstance(value, tuple) else ("", None)
        if name not in columns:
            columns[name] = np.full(shape, sizes.get(buffer, 0), np.bool_ if isinstance(value, bool) else np.int32)
        columns[name][tick, stage] = value if place is None else slots[buffer][place]
    is_on, microbatch = np.zeros(table.num_ticks, np.bool_), np.zeros(table.num_ticks, np.int32)
    for tick, ended in table.last_forward.items():
        is_on[tick], microbatch[tick] = True, ended
    of_head = {"head": is_on, "head_microbatch": microbatch}
    return LoweredTable(columns, of_head, sizes["x"], sizes["gradient"], sizes["cut"], sizes["residuals"])


def slots_in_use(table: PipelineTable) -> dict[str, tuple[int, ...]]:
    """Returns for each buffer the most slots that each stage has in use at once. All stages have room for as many as
    the one with most, as they run one program."""
    used = {buffer: _allocate(arrays)[1] for buffer, arrays in _live(table).items()}
    return {buffer: tuple(each[stage] for stage in range(table.placement.num_stages)) for buffer, each in used.items()}


def buffer_bytes(table: PipelineTable, slot_bytes: Mapping[str, float]) -> float:
    """Returns the bytes of all buffers on each stage. slot_bytes: of a slot of each buffer."""
    return sum(max(slots) * slot_bytes[buffer] for buffer, slots in slots_in_use(table).items())


def forward_only(table: PipelineTable) -> PipelineTable:
    """Returns the table that runs forward alone, for evaluation."""
    orders: list[list[Slot]] = [[] for _ in range(table.placement.num_stages)]
    for _, stage, slot in table.slots():
        if slot.op == PipelineOp.FORWARD:
            orders[stage].append(slot)
    return pack_ticks(table.name, table.placement, orders, TickForm.UNIT)


def _live(table: PipelineTable) -> dict[str, dict[_Place, _Live]]:
    """Returns the arrays of each buffer, with the times at which they are in use."""
    placement, ops, last = table.placement, table.ops, table.placement.num_virtual - 1
    live: dict[str, dict[_Place, _Live]] = {buffer: {} for buffer in ("x", "gradient", "cut", "residuals")}
    backward = _backward_of(ops)
    x_readers = (PipelineOp.RECOMPUTE, PipelineOp.WEIGHT_GRADIENT, PipelineOp.BACKWARD, PipelineOp.FORWARD)
    x_reader = next(op for op in x_readers if op in ops)

    def time(op: PipelineOp, virtual: int, microbatch: int, phase: int | None = None, later: int = 0) -> int:
        tick = table.ticks[PipelineWork(op, virtual, microbatch)] + later
        return tick * len(_PHASES) + (_PHASE_OF[op] if phase is None else phase)

    for work in table.ticks:
        k, m = work.virtual, work.microbatch

        def lives(begin: int, end: int, k: int = k) -> _Live:
            return _Live(placement.stage(k), begin, end)

        if work.op == PipelineOp.FORWARD:
            begin = time(work.op, k - 1, m, _X_ARRIVES) if k else time(work.op, k, m)
            live["x"][k, m] = lives(begin, time(x_reader, k, m))
        elif work.op == PipelineOp.WEIGHT_GRADIENT:
            live["cut"][k, m] = lives(time(PipelineOp.INPUT_GRADIENT, k, m), time(work.op, k, m))
        elif work.op == PipelineOp.RECOMPUTE and backward is not None:
            live["residuals"][k, m] = lives(time(work.op, k, m), time(backward, k, m))
        elif work.op.takes_gradient:
            begin = time(work.op, k + 1, m, _GRADIENT_ARRIVES, 1) if k < last else time(PipelineOp.FORWARD, k, m)
            live["gradient"][k, m] = lives(begin, time(work.op, k, m))
    return live


def _backward_of(ops: frozenset[PipelineOp]) -> PipelineOp | None:
    return next((op for op in ops if op.takes_gradient), None)


def _allocate(arrays: dict[_Place, _Live]) -> tuple[dict[_Place, int], Counter[int]]:
    """Returns a slot for each array, such that none is written before what it held was read last; and by stage the
    number of slots that it needs."""
    slots: dict[_Place, int] = {}
    used: defaultdict[int, list[int]] = defaultdict(list)  # by stage, the time at which each slot is read last
    for place, live in sorted(arrays.items(), key=lambda item: (item[1].begin, item[0])):
        ends = used[live.stage]
        found = next((at for at, end in enumerate(ends) if end < live.begin), len(ends))
        ends[found : found + 1] = [live.end]
        slots[place] = found
    return slots, Counter({stage: len(ends) for stage, ends in used.items()})


_Value = bool | int | tuple[str, _Place]  # the last is a slot of a buffer


def _entries(table: PipelineTable, kinds: Sequence[int]) -> Iterator[tuple[str, int, int, _Value]]:
    """Yields what is in the columns: name, tick, stage and value."""
    last = table.placement.num_virtual - 1
    for tick, stage, slot in table.slots():
        k, m = table.placement.virtual(stage, slot.chunk), slot.microbatch
        name = COLUMN_OF[slot.op]
        yield name, tick, stage, 1 + kinds[k]
        yield f"{name}_microbatch", tick, stage, m
        yield f"{name}_chunk", tick, stage, slot.chunk
        for column, value in _of_slot(slot.op, k, last, m, table.ops):
            yield column, tick, stage, value
        yield from _arrivals(table, tick, slot.op, k, m)


def _of_slot(
    op: PipelineOp, virtual: int, last: int, microbatch: int, ops: frozenset[PipelineOp]
) -> Iterator[tuple[str, _Value]]:
    place = virtual, microbatch
    if op == PipelineOp.FORWARD:
        yield "forward_is_first", virtual == 0
        yield "forward_is_last", virtual == last
        yield "x_of_forward", ("x", place)
        if virtual == last and _backward_of(ops):
            yield "gradient_of_head", ("gradient", place)
    elif op == PipelineOp.RECOMPUTE:
        yield "x_of_recompute", ("x", place)
        yield "residuals_of_recompute", ("residuals", place)
    elif op == PipelineOp.WEIGHT_GRADIENT:
        yield "cut_of_weight", ("cut", place)
        if PipelineOp.RECOMPUTE not in ops:
            yield "x_of_weight", ("x", place)
    else:
        yield "backward_is_first", virtual == 0
        read = "residuals" if PipelineOp.RECOMPUTE in ops else "x"
        yield f"{read}_of_backward", (read, place)
        yield "gradient_of_backward", ("gradient", place)
        if op == PipelineOp.INPUT_GRADIENT:
            yield "cut_of_backward", ("cut", place)


def _arrivals(
    table: PipelineTable, tick: int, op: PipelineOp, virtual: int, microbatch: int
) -> Iterator[tuple[str, int, int, _Value]]:
    """Yields where what an operation made is put: an activation at the end of the tick, a gradient in the next one."""
    placement = table.placement
    if op == PipelineOp.FORWARD and virtual < placement.num_virtual - 1:
        way, to = _WAYS[placement.direction(virtual)], virtual + 1
        yield f"x_{way}", tick, placement.stage(to), ("x", (to, microbatch))
    elif op.takes_gradient and virtual:
        way, to = _WAYS[-placement.direction(virtual - 1)], virtual - 1
        yield f"gradient_{way}", tick + 1, placement.stage(to), ("gradient", (to, microbatch))
