"""Checks that a table can run, and does all of the work once."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.format import counted
from .table import PipelineOp, PipelineTable, PipelineWork, Slot, microbatches


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


def find_violations(table: PipelineTable, max_in_flight: int | None = None) -> tuple[Violation, ...]:
    """Returns all that is wrong with a table: what it names and does not have, operations twice or never, two of one
    place in a tick, before what they need, and more in flight than is allowed on any stage."""
    shape = tuple(_of_shape(table))
    if shape:
        return shape
    found = [*_of_ticks(table), *_of_operations(table)]
    if not found:
        found += _of_needs(table)
    if max_in_flight is not None:
        found += _of_flight(table, max_in_flight)
    return tuple(found)


def count_in_flight(table: PipelineTable) -> tuple[tuple[int, ...], ...]:
    """Returns by stage, after each operation of its own, the microbatches of its chunks that have gone forward and are
    not yet done: with W too, where there is one."""
    last = {PipelineOp.BACKWARD, PipelineOp.WEIGHT_GRADIENT}
    counts: list[list[int]] = [[] for _ in range(table.placement.num_stages)]
    for _, stage, slot in table.slots():
        before = counts[stage][-1] if counts[stage] else 0
        counts[stage].append(before + (slot.op == PipelineOp.FORWARD) - (slot.op in last))
    return tuple(map(tuple, counts))


def max_in_flight_of(table: PipelineTable) -> tuple[int, ...]:
    """Returns by stage the most microbatches of its chunks in flight."""
    return tuple(max(counts, default=0) for counts in count_in_flight(table))


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


def _of_flight(table: PipelineTable, most: int) -> Iterator[Violation]:
    """Yields the first tick of each stage that has more in flight."""
    done, counts = set[int](), [iter(each) for each in count_in_flight(table)]
    for tick, stage, _ in table.slots():
        count = next(counts[stage])
        if count > most and stage not in done:
            done.add(stage)
            yield Violation(tick, stage, f"{microbatches(count)} in flight, more than {most}")
