"""Lowers the order of a pipeline to integers for each tick and stage, with slots of its buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ..pipeline.table import PipelineOp

FORWARD, BACKWARD = PipelineOp.FORWARD, PipelineOp.BACKWARD

TickRows = Sequence[Sequence[Sequence[tuple[str, int]]]]  # [tick][stage] -> (operation, microbatch), F before BW


@dataclass(frozen=True)
class Columns:
    """int32 or bool arrays (ticks, stages). forward, backward: whether the slot runs. *_microbatch: on which.
    x_of_*, gradient_of_*: the buffer slot that it reads. x_arrives_at, gradient_arrives_at: the buffer slot that
    receives what arrives in the tick; that behind the last one where nothing does."""

    forward: np.ndarray
    backward: np.ndarray
    forward_microbatch: np.ndarray
    backward_microbatch: np.ndarray
    x_of_forward: np.ndarray
    x_of_backward: np.ndarray
    gradient_of_head: np.ndarray
    gradient_of_backward: np.ndarray
    x_arrives_at: np.ndarray
    gradient_arrives_at: np.ndarray

    @property
    def by_name(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def gpipe_rows(num_stages: int, num_microbatches: int) -> TickRows:
    """Returns the order in which all microbatches go forward before the first goes back."""
    return _rows(num_stages, num_microbatches, num_stages - 1 + num_microbatches)


def one_f_one_b_rows(num_stages: int, num_microbatches: int) -> TickRows:
    """Returns the order in which a microbatch goes back as soon as it has reached the last stage."""
    return _rows(num_stages, num_microbatches, num_stages - 1)


def _rows(num_stages: int, num_microbatches: int, first_backward: int) -> TickRows:
    """first_backward: the tick of the last stage's first backward slot."""
    num_ticks = first_backward + num_microbatches + num_stages - 1
    rows: list[list[list[tuple[str, int]]]] = [[[] for _ in range(num_stages)] for _ in range(num_ticks)]
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            rows[stage + microbatch][stage].append((FORWARD, microbatch))
            rows[first_backward + num_stages - 1 - stage + microbatch][stage].append((BACKWARD, microbatch))
    return rows


def lower_rows(rows: TickRows, num_stages: int, num_microbatches: int) -> tuple[Columns, int, int]:
    """Returns the columns, and the numbers of buffer slots for inputs of stages and for gradients of their results."""
    ticks = {
        (operation, stage, microbatch): tick
        for tick, row in enumerate(rows)
        for stage, slots in enumerate(row)
        for operation, microbatch in slots
    }
    last, stages, microbatches = num_stages - 1, range(num_stages), range(num_microbatches)
    never = len(rows)

    def runs(operation: str, stage: int, microbatch: int, otherwise: int = never) -> int:
        return ticks.get((operation, stage, microbatch), otherwise)

    # An array that arrives in a tick is written behind its slots, and one that is made there between F and BW.
    x_begins = [
        [2 * runs(FORWARD, s, i) if s == 0 else 2 * runs(FORWARD, s - 1, i) + 1 for i in microbatches] for s in stages
    ]
    x_ends = [[2 * runs(BACKWARD, s, i, runs(FORWARD, s, i)) + 1 for i in microbatches] for s in stages]
    g_begins = [
        [2 * runs(FORWARD, s, i) if s == last else 2 * runs(BACKWARD, s + 1, i) + 2 for i in microbatches]
        for s in stages
    ]
    g_ends = [[2 * runs(BACKWARD, s, i, -1) + 1 for i in microbatches] for s in stages]
    x_slots, num_x = _allocate(x_begins, x_ends)
    g_slots, num_g = _allocate(g_begins, g_ends)

    def column(of: Callable[[int, int], int], empty: int) -> np.ndarray:
        return np.array([[of(tick, s) if of(tick, s) >= 0 else empty for s in stages] for tick in range(len(rows))])

    at = {(tick, operation, stage): microbatch for (operation, stage, microbatch), tick in ticks.items()}

    def microbatch(operation: str) -> np.ndarray:
        return column(lambda tick, s: at.get((tick, operation, s), -1), -1)

    def slot(slots: list[list[int]], found: np.ndarray, trash: int) -> np.ndarray:
        return np.array([[slots[s][i] if i >= 0 else trash for s, i in enumerate(row)] for row in found], np.int32)

    forward, backward = microbatch(FORWARD), microbatch(BACKWARD)
    nothing = np.full_like(forward[:, :1], -1)
    arriving_x = np.concatenate([nothing, forward[:, :-1]], axis=1)
    sent_back = np.concatenate([np.full_like(backward[:1], -1), backward[:-1]])
    arriving_g = np.concatenate([sent_back[:, 1:], nothing], axis=1)
    of_head = np.concatenate([np.full_like(forward[:, :-1], -1), forward[:, -1:]], axis=1)
    columns = Columns(
        forward=forward >= 0,
        backward=backward >= 0,
        forward_microbatch=np.maximum(forward, 0).astype(np.int32),
        backward_microbatch=np.maximum(backward, 0).astype(np.int32),
        x_of_forward=slot(x_slots, forward, num_x),
        x_of_backward=slot(x_slots, backward, num_x),
        gradient_of_head=slot(g_slots, of_head, num_g),
        gradient_of_backward=slot(g_slots, backward, num_g),
        x_arrives_at=slot(x_slots, arriving_x, num_x),
        gradient_arrives_at=slot(g_slots, arriving_g, num_g),
    )
    return columns, num_x, num_g


def _allocate(begins: list[list[int]], ends: list[list[int]]) -> tuple[list[list[int]], int]:
    """Returns a slot for each (stage, microbatch), such that none is written before what it held was read last; and
    the number of slots of the stage that needs the most."""
    slots, num_slots = [[0] * len(row) for row in begins], 0
    for stage, (first, last) in enumerate(zip(begins, ends, strict=True)):
        free_from: list[int] = []
        for i in sorted(range(len(first)), key=lambda i: first[i]):
            found = next((at for at, end in enumerate(free_from) if end < first[i]), len(free_from))
            free_from[found:] = [last[i], *free_from[found + 1 :]]
            slots[stage][i] = found
        num_slots = max(num_slots, len(free_from))
    return slots, num_slots
