"""A pipeline's schedule as data: what each stage runs in each tick.

    stage 0   F0  F1      F2+BW0  F3+BW1  ..       a column is a tick, and F2+BW0 are two slots of one tick
    stage 1       F0+BW0  F1+BW1  ..

The layers are cut into *virtual stages* that follow each other. A stage holds one of them, or several, which are its
*chunks*. In a tick a stage runs at most one operation of each kind, in the order F, R, B or BW, W. Activations and
their gradients go to neighbours between ticks.

`pack_ticks` puts the order of each stage's operations into ticks. All stages run their ticks side by side: between
neighbours a tick takes as long as the longer one. So there are two forms. In *multi* ticks a stage runs several
operations, a forward and a backward one beside a neighbour that does the same; in *unit* ticks it runs one, which is
right where all operations take about as long. `find_violations` says why a table cannot run, or does not do all of the
work once.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from ..core.format import counted


class PipelineOp(StrEnum):
    """An operation on one microbatch and the layers of one chunk. A table has either `BACKWARD`, or
    `INPUT_GRADIENT` and `WEIGHT_GRADIENT`. Without `RECOMPUTE`, what is recomputed belongs to the backward pass."""

    FORWARD = "F"
    RECOMPUTE = "R"
    INPUT_GRADIENT = "B"
    WEIGHT_GRADIENT = "W"
    BACKWARD = "BW"

    @property
    def place(self) -> int:
        """Returns the place within a tick. Two operations of the same place cannot be in one tick."""
        return _PLACES[self]

    @property
    def takes_gradient(self) -> bool:
        """Returns True if it reads the gradient of its chunk's result, and makes that of its input."""
        return self in (PipelineOp.INPUT_GRADIENT, PipelineOp.BACKWARD)


_PLACES = {
    PipelineOp.FORWARD: 0,
    PipelineOp.RECOMPUTE: 1,
    PipelineOp.INPUT_GRADIENT: 2,
    PipelineOp.BACKWARD: 2,
    PipelineOp.WEIGHT_GRADIENT: 3,
}


@dataclass(frozen=True)
class StagePlacement:
    """Where virtual stages are. is_v: chunks go up and down the stages in turn; else each goes up.

    loop, 3 stages, 2 chunks: 0 1 2 | 0 1 2        V: 0 1 2 | 2 1 0
    """

    num_stages: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_virtual(self) -> int:
        return self.num_stages * self.num_chunks

    def stage(self, virtual: int) -> int:
        """Returns the stage that holds a virtual stage."""
        chunk, place = divmod(virtual, self.num_stages)
        return self.num_stages - 1 - place if self._goes_down(chunk) else place

    def chunk(self, virtual: int) -> int:
        """Returns the index of a virtual stage among the chunks of its physical stage."""
        return virtual // self.num_stages

    def virtual(self, stage: int, chunk: int) -> int:
        """Returns the virtual stage of a chunk of a physical stage."""
        return chunk * self.num_stages + (self.num_stages - 1 - stage if self._goes_down(chunk) else stage)

    def direction(self, virtual: int) -> int:
        """Returns how the result of a virtual stage gets to the next one: 1 by a permute to the stage above (from the
        last one to the first), -1 to the stage below, 0 if both are on the same stage. Its gradient comes back the
        other way. On two stages the numbers of the stages alone do not tell 1 from -1."""
        if self.stage(virtual) == self.stage(virtual + 1):
            return 0
        return -1 if self._goes_down(self.chunk(virtual)) else 1

    def _goes_down(self, chunk: int) -> bool:
        return self.is_v and chunk % 2 == 1


def microbatches(number: int) -> str:
    """Returns a count of microbatches as text."""
    return counted(number, "microbatch", "microbatches")


@dataclass(frozen=True)
class Slot:
    """One operation in a tick of a stage. chunk: of the stage."""

    op: PipelineOp
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op} of microbatch {self.microbatch} in chunk {self.chunk}"


@dataclass(frozen=True)
class PipelineWork:
    """One operation of a schedule, wherever it runs. virtual: the virtual stage."""

    op: PipelineOp
    virtual: int
    microbatch: int


@dataclass(frozen=True)
class PipelineTable:
    """A schedule. rows: by tick and stage, the slots in the order in which they run."""

    name: str
    placement: StagePlacement
    num_microbatches: int
    rows: tuple[tuple[tuple[Slot, ...], ...], ...]

    @property
    def num_ticks(self) -> int:
        return len(self.rows)

    @cached_property
    def ops(self) -> frozenset[PipelineOp]:
        return frozenset(slot.op for _, _, slot in self.slots())

    def slots(self) -> Iterator[tuple[int, int, Slot]]:
        """Yields each slot with its tick and its stage, in the order in which they run."""
        for tick, row in enumerate(self.rows):
            for stage, slots in enumerate(row):
                for slot in slots:
                    yield tick, stage, slot

    def work(self, stage: int, slot: Slot) -> PipelineWork:
        return PipelineWork(slot.op, self.placement.virtual(stage, slot.chunk), slot.microbatch)

    @cached_property
    def ticks(self) -> dict[PipelineWork, int]:
        """The tick of each operation."""
        return {self.work(stage, slot): tick for tick, stage, slot in self.slots()}

    @cached_property
    def last_forward(self) -> dict[int, int]:
        """The microbatch that F ends on the last virtual stage, by tick: the head can run then."""
        last = self.placement.num_virtual - 1
        ends = (work for work in self.ticks if work.op == PipelineOp.FORWARD and work.virtual == last)
        return {self.ticks[work]: work.microbatch for work in ends}

    def dependencies(self, work: PipelineWork) -> Iterator[tuple[PipelineWork, bool]]:
        """Yields what an operation needs, and whether that has to be from an earlier tick: what another stage sends."""
        return dependencies(work, self.placement.num_virtual, self.ops)


def dependencies(
    work: PipelineWork, num_virtual: int, ops: frozenset[PipelineOp]
) -> Iterator[tuple[PipelineWork, bool]]:
    """Yields what an operation needs in a schedule of these operations, and whether that has to be from an earlier
    tick: what another stage sends."""

    def same(op: PipelineOp, virtual: int = work.virtual) -> PipelineWork:
        return PipelineWork(op, virtual, work.microbatch)

    if work.op == PipelineOp.FORWARD:
        if work.virtual:
            yield same(PipelineOp.FORWARD, work.virtual - 1), True
    elif work.op == PipelineOp.RECOMPUTE:
        yield same(PipelineOp.FORWARD), False
    elif work.op == PipelineOp.WEIGHT_GRADIENT:
        yield same(PipelineOp.INPUT_GRADIENT), False
    else:
        yield same(PipelineOp.RECOMPUTE if PipelineOp.RECOMPUTE in ops else PipelineOp.FORWARD), False
        if work.virtual < num_virtual - 1:
            yield same(work.op, work.virtual + 1), True


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


@dataclass(frozen=True)
class Violation:
    """An error in a table. tick: where it is; None for an error of the whole table."""

    tick: int | None
    stage: int
    what: str

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.what}" if self.tick is None else f"{self.place}: {self.what}"

    @property
    def place(self) -> str:
        return f"tick {self.tick}, stage {self.stage}"


def find_violations(table: PipelineTable) -> tuple[Violation, ...]:
    """Returns all that is wrong with a table: what it names and does not have, operations twice or never, two of one
    place in a tick, and before what they need."""
    if shape := tuple(_of_shape(table)):
        return shape
    return (*_of_ticks(table), *_of_operations(table)) or tuple(_of_needs(table))


def max_in_flight_of(table: PipelineTable) -> tuple[int, ...]:
    """Returns by stage the most microbatches of its chunks that have gone forward and are not yet done: with W too,
    where there is one."""
    last = {PipelineOp.BACKWARD, PipelineOp.WEIGHT_GRADIENT}
    counts, most = [0] * table.placement.num_stages, [0] * table.placement.num_stages
    for _, stage, slot in table.slots():
        counts[stage] += (slot.op == PipelineOp.FORWARD) - (slot.op in last)
        most[stage] = max(most[stage], counts[stage])
    return tuple(most)


def _of_shape(table: PipelineTable) -> Iterator[Violation]:
    num_stages, num_chunks = table.placement.num_stages, table.placement.num_chunks
    for tick, row in enumerate(table.rows):
        if len(row) != num_stages:
            yield Violation(tick, min(len(row), num_stages), f"the tick has {counted(len(row), 'stage')}")
    for tick, stage, slot in table.slots():
        if not 0 <= slot.chunk < num_chunks:
            yield Violation(tick, stage, f"{slot}: the stage has {counted(num_chunks, 'chunk')}")
        if not 0 <= slot.microbatch < table.num_microbatches:
            yield Violation(tick, stage, f"{slot}: the table has {microbatches(table.num_microbatches)}")


def _of_ticks(table: PipelineTable) -> Iterator[Violation]:
    for tick, row in enumerate(table.rows):
        for stage, slots in enumerate(row):
            for before, slot in itertools.pairwise(slots):
                if before.op.place == slot.op.place:
                    yield Violation(tick, stage, f"{before} and {slot} are of one kind: a tick runs one of each")
                elif before.op.place > slot.op.place:
                    yield Violation(tick, stage, f"{slot} follows {before}: a tick runs F, R, B or BW, W")


def _of_operations(table: PipelineTable) -> Iterator[Violation]:
    """Yields what runs twice, what does not run, and operations that do not go together."""
    split = {PipelineOp.INPUT_GRADIENT, PipelineOp.WEIGHT_GRADIENT}
    if PipelineOp.BACKWARD in table.ops and table.ops & split:
        for tick, stage, slot in table.slots():
            if slot.op in split:
                yield Violation(tick, stage, f"{slot}: the table has BW too; either all is split or nothing")
        return
    backward = split if table.ops & split else {PipelineOp.BACKWARD}
    kinds = {PipelineOp.FORWARD, *backward} | (table.ops & {PipelineOp.RECOMPUTE})
    placement, first = table.placement, dict[PipelineWork, int]()
    for tick, stage, slot in table.slots():
        before = first.setdefault(table.work(stage, slot), tick)
        if before != tick:
            yield Violation(tick, stage, f"{slot} has already run in tick {before}")
    for op in sorted(kinds, key=lambda op: op.place):
        for virtual in range(placement.num_virtual):
            stage, chunk = placement.stage(virtual), placement.chunk(virtual)
            missing = [m for m in range(table.num_microbatches) if PipelineWork(op, virtual, m) not in first]
            if missing:
                others = f" and of {len(missing) - 1} more" if len(missing) > 1 else ""
                yield Violation(None, stage, f"{Slot(op, chunk, missing[0])}{others} never runs")


def _of_needs(table: PipelineTable) -> Iterator[Violation]:
    placement = table.placement
    for tick, stage, slot in table.slots():
        for need, is_earlier in table.dependencies(table.work(stage, slot)):
            at = table.ticks[need]
            if at > tick - is_earlier:
                other, chunk = placement.stage(need.virtual), placement.chunk(need.virtual)
                where = f" on stage {other}" if other != stage else ""
                needs = f"{need.op} of chunk {chunk}{where}{' in an earlier tick' if is_earlier else ''}"
                yield Violation(tick, stage, f"{slot} needs {needs}, which runs in tick {at}")
