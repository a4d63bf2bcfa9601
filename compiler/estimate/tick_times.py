"""The time of a pipeline's ticks, from the time of each slot on each stage: the makespan of its table.

    a tick:  permute dx, slot F, permute y, slot BW       dx flies beside F, and y beside BW

All stages run one program. A stage's slot takes as long as the branch that it runs in that tick; a permute begins when
its sender and its receiver are there, and is waited for before the slot after next, or at the end of the tick. The
order of slots and permutes, and the branch of each stage in each tick, are those of the traced step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


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
    numbers."""

    sources: tuple[tuple[int, ...], ...]
    full_bytes: int


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


def time_ticks(loop: TickLoop, seconds: Sequence[Numbers], rest: Numbers) -> Numbers:
    """Returns the time at which each stage ends its last tick, of each declaration: (stages, declarations).

    seconds: of each part; of a slot (branches, stages, declarations), of a permute (declarations). rest: of what else a
    tick does, (stages, declarations).
    """
    num_ticks = max(len(part.chosen) for part in loop.parts if isinstance(part, TickSlot))
    now, stages = np.zeros_like(rest), np.arange(len(rest))
    for tick in range(num_ticks):
        flying: list[tuple[Numbers, int]] = []  # the ends of permutes, and the slots that have begun since
        for part, taken in zip(loop.parts, seconds, strict=True):
            if isinstance(part, TickPermute):
                begins = [now[[stage, *sources]].max(axis=0) for stage, sources in enumerate(part.sources)]
                flying.append((np.array(begins) + taken, 0))
                continue
            for ends, _ in (each for each in flying if each[1]):
                now = np.maximum(now, ends)
            flying = [(ends, 1) for ends, passed in flying if not passed]
            if part.is_shared:
                now = np.broadcast_to(now.max(axis=0), now.shape)
            now = now + taken[list(part.chosen[tick]), stages]
        for ends, _ in flying:
            now = np.maximum(now, ends)
        now = now + rest
    return now
