"""A pipeline's schedule as data: what each stage runs in each tick.

    stage 0   F0  F1      F2+BW0  F3+BW1  ..       a column is a tick, and F2+BW0 are two slots of one tick
    stage 1       F0+BW0  F1+BW1  ..

The layers are cut into *virtual stages* that follow each other. A stage holds one of them, or several, which are its
*chunks*. In a tick a stage runs at most one operation of each kind, in the order F, R, B or BW, W. Activations and
their gradients go to neighbours between ticks.
"""

from collections.abc import Iterator
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
    tick."""

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
