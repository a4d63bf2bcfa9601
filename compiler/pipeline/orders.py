"""Writes the order in which each stage runs its operations, as the papers give it.

    1F1B, stage 1 of 3:    F0 F1 BW0 F2 BW1 ..          ZB-H1:    F0 F1 B0 F2 B1 W0 F3 B2 W1 ..

Orders say nothing of time: `pack_ticks` puts them into ticks.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from .table import PipelineOp, Slot
from .ticks import Order

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
