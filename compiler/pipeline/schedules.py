"""The schedules that have a name: the order in which each stage runs its operations, as the papers give it.

    gpipe        F0 F1 F2 F3 BW0 BW1 ..       all forward, then all backward
    1f1b         F0 F1 BW0 F2 BW1 ..          alternate, so few microbatches are in flight
    interleaved  F0.0 F0.1 F1.0 F1.1 ..       several chunks a stage: shorter ramps
    zero bubble  F0 B0 F1 B1 W0 ..            gradients of weights wait for a gap

Orders say nothing of time: `pack_ticks` puts them into ticks. In unit ticks all operations should take about as long.
There BW, of twice the time, is B and W, except in gpipe, whose stages seldom run F beside BW.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.format import counted
from .table import Order, PipelineOp, PipelineTable, Slot, StagePlacement, TickForm, microbatches, pack_ticks

FORWARD, RECOMPUTE, BACKWARD = PipelineOp.FORWARD, PipelineOp.RECOMPUTE, PipelineOp.BACKWARD
INPUT_GRADIENT, WEIGHT_GRADIENT = PipelineOp.INPUT_GRADIENT, PipelineOp.WEIGHT_GRADIENT


def alternating(
    num_stages: int, num_chunks: int, num_microbatches: int, *, group: int, warm_up: Callable[[int], int]
) -> list[Order]:
    """Returns orders that alternate forward and backward operations after a warm-up of forward ones.

    group: microbatches that go through one chunk before they go through the next one. warm_up: by stage.
    """
    chunks = range(num_chunks)
    forward = [Slot(FORWARD, *place) for place in _in_groups(chunks, num_microbatches, group)]
    backward = [Slot(BACKWARD, *place) for place in _in_groups(chunks[::-1], num_microbatches, group)]
    orders: list[Order] = []
    for stage in range(num_stages):
        first = min(warm_up(stage), len(forward))
        order, rest = forward[:first], forward[first:]
        for at, slot in enumerate(backward):
            order += [*rest[at : at + 1], slot]
        orders.append(order)
    return orders


def _in_groups(chunks: Sequence[int], num_microbatches: int, group: int) -> list[tuple[int, int]]:
    microbatches = range(num_microbatches)
    groups = [microbatches[first : first + group] for first in range(0, num_microbatches, group)]
    return [(chunk, microbatch) for each in groups for chunk in chunks for microbatch in each]


def split_backward(order: Order) -> Order:
    """Returns the order with each joint backward operation as B and W."""
    parts = {BACKWARD: (INPUT_GRADIENT, WEIGHT_GRADIENT)}
    return [Slot(op, slot.chunk, slot.microbatch) for slot in order for op in parts.get(slot.op, (slot.op,))]


def with_recompute(order: Order) -> Order:
    """Returns the order with a recomputation just before each B or BW: it can run while the gradient is awaited."""
    return [
        Slot(op, slot.chunk, slot.microbatch)
        for slot in order
        for op in ((RECOMPUTE, slot.op) if slot.op.takes_gradient else (slot.op,))
    ]


def zero_bubble(
    num_stages: int, num_microbatches: int, *, warm_up: Callable[[int], int], without_w: Callable[[int], int]
) -> list[Order]:
    """Returns orders of one chunk that run W late, in what would be waits: by stage the forward operations before the
    first B, and the pairs of B and F before the first W (Qi et al., "Zero Bubble Pipeline Parallelism", 2024)."""
    orders: list[Order] = []
    for stage in range(num_stages):
        pen = _Pen(num_microbatches)
        pen.write("F0", warm_up(stage))
        pen.write("B0 F0", without_w(stage))
        pen.write("B0 W F0", num_microbatches)
        orders.append(pen.finished(num_microbatches))
    return orders


def zb_v(num_stages: int, num_microbatches: int) -> list[Order]:
    """Returns the orders of ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024). Fewer microbatches
    than 2p - 1 run as the first ones of so many."""
    orders: list[Order] = []
    total = max(num_microbatches, 2 * num_stages - 1)
    for stage in range(num_stages):
        above = num_stages - 1 - stage
        pen = _Pen(total)
        pen.write("F0", 2 * above + 1)
        pen.write("F1 F0", stage)
        pen.write("F1 B1 W", above + 1)
        pen.write("F0 B0 W F1 B1 W", total - num_stages)
        pen.write("B0 B1", stage)
        pen.write("B0 W", above + 1)
        orders.append(pen.finished(num_microbatches))
    return orders


def dualpipe_v(num_stages: int, num_microbatches: int) -> list[Order]:
    """Returns the orders of DualPipe-V: DualPipe (DeepSeek-V3, 2024), cut in half, so each layer is stored once."""
    orders: list[Order] = []
    for stage in range(num_stages):
        above = num_stages - 1 - stage
        pen = _Pen(num_microbatches)
        pen.write("F0", 2 * above)
        pen.write("F0 F1", stage + 1)
        pen.write("B1 W F1", above)
        pen.write("F0 B1 W F1 B0 W", num_microbatches - 2 * num_stages + stage + 1)
        pen.write("B1 W F1 B0 W", above)
        joint, late = divmod(stage + 1, 2)
        pen.write("B1 W B0 W", joint)
        pen.write("B1 W B0", late)
        pen.write("B1 B0", joint)
        pen.write("W B0", above)
        orders.append(pen.finished(num_microbatches))
    return orders


class _Pen:
    """Writes an order. Each operation runs on the next microbatch of its chunk, if there is one; W on what has waited
    longest since its B."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.slots: list[Slot] = []
        self.written: Counter[str] = Counter()
        self.waiting: deque[Slot] = deque()

    def write(self, pattern: str, times: int) -> None:
        for each in pattern.split() * times:
            if each == "W":
                if self.waiting:
                    of = self.waiting.popleft()
                    self.slots.append(Slot(WEIGHT_GRADIENT, of.chunk, of.microbatch))
            elif self.written[each] < self.num_microbatches:
                slot = Slot(PipelineOp(each[0]), int(each[1:]), self.written[each])
                self.written[each] += 1
                self.slots.append(slot)
                if slot.op == INPUT_GRADIENT:
                    self.waiting.append(slot)

    def finished(self, num_microbatches: int) -> Order:
        """Returns what was written of so many microbatches, with the W that are left."""
        self.write("W", len(self.waiting))
        return [slot for slot in self.slots if slot.microbatch < num_microbatches]


Requirement = tuple[str, str]  # what is wrong, and the fix


@dataclass(frozen=True)
class ScheduleKind:
    """A named schedule.

    orders: of all stages, from the numbers of stages, chunks and microbatches. is_v: chunks go up and down. num_chunks:
    of a stage; None if it is declared. splits_backward: it has B and W in any form. needs_groups: microbatches come in
    groups of one for each stage. min_per_stage: microbatches that each stage needs at least.
    """

    name: str
    orders: Callable[[int, int, int, TickForm], list[Order]]
    is_v: bool = False
    splits_backward: bool = False
    num_chunks: int | None = 1
    needs_groups: bool = False
    min_per_stage: int = 0

    def splits(self, form: TickForm, *, recomputes: bool = False) -> bool:
        """Returns True if a table of this form has B and W, and not BW."""
        return self.splits_backward or (form == TickForm.UNIT and (recomputes or self.name != "gpipe"))

    def requirement(self, num_stages: int, num_chunks: int, num_microbatches: int) -> Requirement | None:
        """Returns what the schedule needs and does not get, with a fix; None if it can run."""
        there = microbatches(num_microbatches)
        if self.num_chunks is None and num_chunks < 2:
            return f"{self.name} needs at least 2 chunks for each stage, not {num_chunks}", "set pipeline.num_chunks=2"
        if self.num_chunks is not None and num_chunks != self.num_chunks:
            what = f"{self.name} has {counted(self.num_chunks, 'chunk')} for each stage, not {num_chunks}"
            return what, f"set pipeline.num_chunks={self.num_chunks}"
        if self.needs_groups and num_microbatches % num_stages:
            above = -(-num_microbatches // num_stages) * num_stages
            what = f"{self.name} needs as many microbatches for each of {counted(num_stages, 'stage')}, and has {there}"
            return what, f"use num_microbatches={above}, or pipeline=interleaved_1f1b_breadth_first"
        if num_microbatches < (least := self.min_per_stage * num_stages):
            what = f"{self.name} needs at least {microbatches(least)} for {counted(num_stages, 'stage')}"
            return f"{what}, and has {there}", f"use num_microbatches={least}, fewer stages, or pipeline=zb_v"
        return None


def build_table(
    name: str, num_stages: int, num_chunks: int, num_microbatches: int, form: TickForm, recomputes: bool = False
) -> PipelineTable:
    """Returns the table of a named schedule. recomputes: what is recomputed is an operation of its own, R, and no part
    of B or BW. Raises ValueError if the schedule cannot run so."""
    kind = SCHEDULES[name]
    if (lacks := kind.requirement(num_stages, num_chunks, num_microbatches)) is not None:
        raise ValueError(lacks[0])
    orders = kind.orders(num_stages, num_chunks, num_microbatches, form)
    if kind.splits(form, recomputes=recomputes):
        orders = [split_backward(order) for order in orders]
    if recomputes:
        orders = [with_recompute(order) for order in orders]
    return pack_ticks(name, StagePlacement(num_stages, num_chunks, kind.is_v), orders, form)


def _interleaved(num_stages: int, num_chunks: int, num_microbatches: int, form: TickForm, group: int) -> list[Order]:
    """In multi ticks a microbatch takes two ticks for each stage above, there and back, and a stage runs one forward
    operation in each. In unit ticks of one chunk, one forward operation for each stage above keeps p in flight."""
    first, per_stage = (num_chunks - 1) * group, 1 if form == TickForm.UNIT and num_chunks == 1 else 2
    return alternating(
        num_stages,
        num_chunks,
        num_microbatches,
        group=group,
        warm_up=lambda stage: first + per_stage * (num_stages - 1 - stage),
    )


# Orders from the numbers of stages p, chunks v and microbatches m, and the form of ticks.
_KINDS = (
    ScheduleKind("gpipe", lambda p, v, m, form: alternating(p, 1, m, group=m, warm_up=lambda _: m)),
    ScheduleKind("1f1b", lambda p, v, m, form: _interleaved(p, v, m, form, group=p)),
    ScheduleKind(
        "interleaved_1f1b",
        lambda p, v, m, form: _interleaved(p, v, m, form, group=p),
        num_chunks=None,
        needs_groups=True,
    ),
    ScheduleKind(
        "interleaved_1f1b_breadth_first", lambda p, v, m, form: _interleaved(p, v, m, form, group=m), num_chunks=None
    ),
    ScheduleKind(
        "zb_h1",
        lambda p, v, m, form: zero_bubble(p, m, warm_up=lambda stage: p - stage, without_w=lambda stage: stage),
        splits_backward=True,
    ),
    ScheduleKind(
        "zb_h2",
        lambda p, v, m, form: zero_bubble(
            p, m, warm_up=lambda stage: 2 * (p - stage) - 1, without_w=lambda stage: 2 * stage
        ),
        splits_backward=True,
    ),
    ScheduleKind("zb_v", lambda p, v, m, form: zb_v(p, m), is_v=True, splits_backward=True, num_chunks=2),
    ScheduleKind(
        "dualpipe_v",
        lambda p, v, m, form: dualpipe_v(p, m),
        is_v=True,
        splits_backward=True,
        num_chunks=2,
        min_per_stage=2,
    ),
)
SCHEDULES: Mapping[str, ScheduleKind] = {kind.name: kind for kind in _KINDS}
