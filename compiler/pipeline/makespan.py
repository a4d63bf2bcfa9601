"""The time of a pipeline's ticks, from the time of each slot on each stage: the makespan of its table.

    a tick:  permute dx, slot F, permute y, slot BW       dx flies beside F, and y beside BW

All stages run one program. A stage's slot takes as long as the branch that it runs in that tick; a permute begins when
its sender and its receiver are there, and both wait for it before the slot that needs it, or at the end of the tick. So
neighbours keep step, and a tick takes about as long as on the slowest of them.

An estimate times the parts of a traced step (`time_ticks`); a table by itself is timed from seconds of its operations
(`time_table`), by the same arithmetic.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.format import human_seconds, human_share
from .table import PipelineOp, PipelineTable, Slot, StagePlacement

Numbers = np.ndarray[Any, np.dtype[np.float64]]
AS_SHORT = 1.02  # times are predicted no better; of tables that differ by less, the one with less memory is chosen


@dataclass(frozen=True)
class TickSlot:
    """A slot of a tick. branches: the regions of each branch, by number. chosen: the branch that each stage runs, by
    tick. is_shared: all stages run it together."""

    branches: tuple[tuple[int, ...], ...]
    chosen: tuple[tuple[int, ...], ...]
    is_shared: bool = False


@dataclass(frozen=True)
class TickPermute:
    """A permute between stages. sources: the stages that send to each stage. full_bytes: the place of its bytes in the
    numbers. needed_by: the place of the slot that waits for it; None: the end of the tick."""

    sources: tuple[tuple[int, ...], ...]
    full_bytes: int
    needed_by: int | None = None

    @cached_property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        """Returns for each stage itself and the stages that it sends to or receives from."""
        partners = [{stage, *sources} for stage, sources in enumerate(self.sources)]
        for stage, sources in enumerate(self.sources):
            for source in sources:
                partners[source].add(stage)
        return tuple(tuple(sorted(each)) for each in partners)


TickPart = TickSlot | TickPermute


@dataclass(frozen=True)
class TickLoop:
    """The loop over ticks. region: its body, by number. parts: in the order of the program."""

    region: int
    parts: tuple[TickPart, ...]

    @property
    def regions(self) -> frozenset[int]:
        """Returns all regions that the loop runs, by number."""
        slots = (part for part in self.parts if isinstance(part, TickSlot))
        return frozenset({self.region, *(one for slot in slots for branch in slot.branches for one in branch)})

    @property
    def form(self) -> "TickLoop":
        """Returns the loop without what each stage runs in each tick, which depends on the length of its table."""
        return replace(self, parts=tuple(replace(p, chosen=()) if isinstance(p, TickSlot) else p for p in self.parts))

    @property
    def num_ticks(self) -> int:
        return max(len(part.chosen) for part in self.parts if isinstance(part, TickSlot))


def time_ticks(loop: TickLoop, seconds: Sequence[Numbers], rest: Numbers) -> Numbers:
    """Returns the time at which each stage ends its last tick, of each declaration: (stages, declarations).

    seconds: of each part; of a slot (branches, stages, declarations), of a permute (declarations). rest: of what else a
    tick does, (stages, declarations).
    """
    now = np.zeros_like(rest)
    for tick in range(loop.num_ticks):
        now = _ends_of_tick(loop, tick, now, seconds, rest)[-1]
    return now


def _ends_of_tick(loop: TickLoop, tick: int, now: Numbers, seconds: Sequence[Numbers], rest: Numbers) -> list[Numbers]:
    """Returns when each stage has ended each part of a tick, and the tick. A permute ends when it has been started."""
    stages, flying, ends = np.arange(len(now)), list[tuple[Numbers, int | None]](), list[Numbers]()
    for place, (part, taken) in enumerate(zip(loop.parts, seconds, strict=True)):
        if isinstance(part, TickPermute):
            begins = [now[list(partners)].max(axis=0) for partners in part.partners]
            flying.append((np.array(begins) + taken, part.needed_by))
        else:
            for arrives, needed_by in flying:
                now = np.maximum(now, arrives) if needed_by == place else now
            if part.is_shared:
                now = np.broadcast_to(now.max(axis=0), now.shape)
            now = now + taken[list(part.chosen[tick]), stages]
        ends.append(now)
    for arrives, _ in flying:
        now = np.maximum(now, arrives)
    return [*ends, now + rest]


OpSeconds = Callable[[PipelineOp, int, int], float]
"""The seconds of an operation on a stage and a chunk of it. R: what is recomputed, which BW and B do not include; a
table without R runs it in them."""


@dataclass(frozen=True)
class SlotTime:
    """When a slot runs, in seconds."""

    tick: int
    stage: int
    slot: Slot
    begin: float
    end: float


@dataclass(frozen=True)
class TableTime:
    """The time of a table, in seconds. seconds: until the last stage ends. ends: of each stage. work: of each stage
    alone. permutes: how much longer it takes than with permutes that take no time. slots: when each one runs."""

    seconds: float
    ends: tuple[float, ...]
    work: tuple[float, ...]
    permutes: float
    slots: tuple[SlotTime, ...]

    @property
    def bubble(self) -> float:
        """Returns how long a stage waits for others, beside permutes, on average."""
        return max(0.0, self.seconds - self.permutes - self.mean_work)

    @property
    def bubble_fraction(self) -> float:
        """Returns the bubble over the time of the table."""
        return self.bubble / self.seconds if self.seconds else 0.0

    @property
    def mean_work(self) -> float:
        return sum(self.work) / len(self.work)

    @property
    def bubble_of_work(self) -> float:
        """Returns the bubble as papers state it: over the work."""
        return self.bubble / self.mean_work if self.mean_work else 0.0


def time_table(
    table: PipelineTable,
    op_seconds: OpSeconds,
    permute_seconds: float = 0.0,
    tick_seconds: float = 0.0,
    head_seconds: float = 0.0,
) -> TableTime:
    """Returns the time of a table. permute_seconds: of one permute. tick_seconds: of what else a tick does.
    head_seconds: on each stage, of a head that all share, which `op_seconds` then lacks."""
    parts, ops = _parts_of(table, shares_head=head_seconds > 0)
    num_stages = table.placement.num_stages
    loop, rest = TickLoop(0, parts), np.full((num_stages, 1), tick_seconds)
    taken: dict[_Part, Numbers] = {op: _seconds_of(table, op, op_seconds) for op in table.ops}
    taken[_HEAD] = np.array([[[0.0]] * num_stages, [[head_seconds]] * num_stages])

    def ends(permute: float) -> list[list[Numbers]]:
        seconds = [np.array([permute]) if op == _PERMUTE else taken[op] for op in ops]
        now, found = np.zeros_like(rest), list[list[Numbers]]()
        for tick in range(table.num_ticks):
            found.append(_ends_of_tick(loop, tick, now, seconds, rest))
            now = found[-1][-1]
        return found

    found, without = ends(permute_seconds), ends(0.0)
    alone = table.num_ticks * tick_seconds + table.num_microbatches * head_seconds
    slots, work = list[SlotTime](), [alone] * num_stages
    for tick, stage, slot in table.slots():
        took = float(taken[slot.op][1 + slot.chunk, stage, 0])
        end = float(found[tick][ops.index(slot.op)][stage, 0])
        slots.append(SlotTime(tick, stage, slot, end - took, end))
        work[stage] += took
    last = found[-1][-1][:, 0]
    permutes = float(last.max() - without[-1][-1].max())
    return TableTime(float(last.max()), tuple(map(float, last)), tuple(work), permutes, tuple(slots))


_PERMUTE, _HEAD = "permute", "head"  # parts of a tick that are no operation of the table
_Part = str  # one of these, or a PipelineOp


def _parts_of(table: PipelineTable, *, shares_head: bool) -> tuple[tuple[TickPart, ...], list[_Part]]:
    """Returns the parts of a tick as the executor runs them, and what each is. shares_head: all stages run the head, in
    the ticks in which F ends on the last virtual stage."""
    ops = sorted(table.ops, key=lambda op: op.place)
    backward = [op for op in ops if op.takes_gradient]
    down = _permutes(table.placement, is_gradient=True) if backward else []
    up = _permutes(table.placement, is_gradient=False)
    head = [TickSlot((), ticks_of_head(table), is_shared=True)] if shares_head else []
    order = [*[_PERMUTE] * len(down), ops[0], *[_PERMUTE] * len(up), *[_HEAD] * len(head), *ops[1:]]
    down = [replace(each, needed_by=order.index(backward[0])) for each in down]
    chosen = {op: [[0] * table.placement.num_stages for _ in table.rows] for op in ops}
    for tick, stage, slot in table.slots():
        chosen[slot.op][tick][stage] = 1 + slot.chunk
    slots = [TickSlot((), tuple(map(tuple, chosen[op]))) for op in ops]
    return (*down, slots[0], *up, *head, *slots[1:]), order


def ticks_of_head(table: PipelineTable) -> tuple[tuple[int, ...], ...]:
    """Returns 1 for all stages in each tick in which F ends on the last virtual stage, and 0 in others."""
    return tuple((int(tick in table.last_forward),) * table.placement.num_stages for tick in range(table.num_ticks))


def _permutes(placement: StagePlacement, *, is_gradient: bool) -> list[TickPermute]:
    """Returns a permute for each way that results of virtual stages go, or their gradients."""
    ways: dict[int, set[tuple[int, int]]] = {}
    for virtual in range(placement.num_virtual - 1):
        here, there = placement.stage(virtual), placement.stage(virtual + 1)
        if way := placement.direction(virtual):
            ways.setdefault(way, set()).add((there, here) if is_gradient else (here, there))
    stages = range(placement.num_stages)
    return [
        TickPermute(tuple(tuple(source for source, to in sorted(pairs) if to == stage) for stage in stages), 0)
        for pairs in ways.values()
    ]


def _seconds_of(table: PipelineTable, op: PipelineOp, op_seconds: OpSeconds) -> Numbers:
    """Returns the seconds of a slot by branch, idle and then each chunk, and by stage: (branches, stages, 1)."""
    runs = [op]
    if op.takes_gradient and PipelineOp.RECOMPUTE not in table.ops:
        runs.append(PipelineOp.RECOMPUTE)
    stages = range(table.placement.num_stages)
    chunks = [
        [[sum(op_seconds(each, stage, chunk) for each in runs)] for stage in stages]
        for chunk in range(table.placement.num_chunks)
    ]
    return np.array([[[0.0]] * len(stages), *chunks])


@dataclass(frozen=True)
class ChosenTable:
    """The table that takes the least time, or hardly more and less memory, and why. label: which of the candidates."""

    label: str
    table: PipelineTable
    time: TableTime
    reason: str


def choose_table(
    candidates: Mapping[str, PipelineTable],
    op_seconds: Callable[[PipelineTable], OpSeconds],
    permute_seconds: float = 0.0,
    head_seconds: float = 0.0,
    num_bytes: Callable[[PipelineTable], float] = lambda _: 0.0,
    room_bytes: float = math.inf,
) -> ChosenTable:
    """Returns the candidate that takes the least memory of those whose time is within `AS_SHORT` of the shortest; of
    equal ones, the shortest. Those whose buffers have no room are left out, unless none has. op_seconds: of the
    operations of a table, which save for each other what others compute at once. num_bytes: of the buffers of a
    table."""
    times = {
        label: time_table(table, op_seconds(table), permute_seconds, head_seconds=head_seconds)
        for label, table in candidates.items()
    }
    sizes = {label: num_bytes(table) for label, table in candidates.items()}
    fit = [label for label, size in sizes.items() if size <= room_bytes] or list(candidates)
    least = min(times[label].seconds for label in fit)
    as_short = [label for label in fit if times[label].seconds <= AS_SHORT * least]
    label = min(as_short, key=lambda each: (sizes[each], times[each].seconds))
    best = times[label]
    others = "".join(f"; {each}: {human_seconds(time.seconds)}" for each, time in times.items() if each != label)
    bubble = f"{human_share(best.bubble_fraction)} of it bubble"
    reason = f"{label}: {human_seconds(best.seconds)}, {bubble}{others}"
    return ChosenTable(label, candidates[label], best, reason)
