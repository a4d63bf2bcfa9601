"""Splits the layers of a model over the virtual stages of a pipeline.

    126 layers, 16 stages                7 8 8 .. 8 7     the ends, which have the embedding and the head, have fewer
    3 dense layers and 5 of experts, 4   2 0 | 1 1 | 0 2 | 0 2

The stacks of a model are one list of layers, and a virtual stage runs some that follow each other. Virtual stages with
as many layers of each stack are of one *kind*: a slot of a tick has a branch for each kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from .table import StagePlacement

Counts = tuple[int, ...]  # of layers, by stack


@dataclass(frozen=True)
class StageLayers:
    """The layers of each virtual stage. stacks: the model's stacks, in order. counts: by virtual stage and stack, the
    number of layers."""

    placement: StagePlacement
    stacks: tuple[str, ...]
    counts: tuple[Counts, ...]

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """The number of layers of each virtual stage."""
        return tuple(map(sum, self.counts))

    @cached_property
    def kinds(self) -> tuple[Counts, ...]:
        """The counts that virtual stages have, in the order in which they come first."""
        return tuple(dict.fromkeys(self.counts))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """The place of each virtual stage's counts among the kinds."""
        return tuple(map(self.kinds.index, self.counts))

    def room(self, stack: str) -> int:
        """Returns the most layers of a stack that a virtual stage has. Each chunk has room for as many."""
        return max(counts[self.stacks.index(stack)] for counts in self.counts)

    def first(self, stack: str, virtual: int) -> int:
        """Returns the number in its stack of the first layer of a virtual stage."""
        return sum(counts[self.stacks.index(stack)] for counts in self.counts[:virtual])

    def rows(self, stack: str) -> np.ndarray:
        """Returns the number in its stack of the layer at each place of each stage, int32 (stages, chunks x room); the
        number of all layers where there is none."""
        room, placement, of_stack = self.room(stack), self.placement, self.stacks.index(stack)
        num_layers = self.first(stack, placement.num_virtual)
        found = np.full((placement.num_stages, placement.num_chunks, room), num_layers, np.int32)
        for virtual, counts in enumerate(self.counts):
            first = self.first(stack, virtual)
            own = found[placement.stage(virtual), placement.chunk(virtual)]
            own[: counts[of_stack]] = range(first, first + counts[of_stack])
        return found.reshape(placement.num_stages, -1)


def layers_of(sizes: Mapping[str, int], placement: StagePlacement, totals: Sequence[int]) -> StageLayers:
    """Returns the layers of virtual stages that run so many of them.

    sizes: the number of layers of each stack. totals: of each virtual stage. Raises ValueError if they are not the
    layers of the model.
    """
    if len(totals) != placement.num_virtual or sum(totals) != sum(sizes.values()):
        raise ValueError(f"{tuple(totals)} are no {sum(sizes.values())} layers of {placement.num_virtual} parts")
    ends = [0, *accumulate(totals)]
    of_stacks = [0, *accumulate(sizes.values())]

    def count(virtual: int, stack: int) -> int:
        begin, end = max(ends[virtual], of_stacks[stack]), min(ends[virtual + 1], of_stacks[stack + 1])
        return max(0, end - begin)

    counts = (tuple(count(k, s) for s in range(len(sizes))) for k in range(placement.num_virtual))
    return StageLayers(placement, tuple(sizes), tuple(counts))


def split_evenly(num_layers: int, placement: StagePlacement, fewer_on_last: int = 0) -> tuple[int, ...]:
    """Returns the number of layers of each virtual stage: as many on each as can be. Where they do not divide, stages
    in the middle have one more.

    fewer_on_last: layers that the last virtual stage gives to the others, at most all but one.
    """
    num_virtual, last = placement.num_virtual, placement.num_virtual - 1
    of_last = max(1, num_layers // num_virtual - fewer_on_last)
    others = last if fewer_on_last else num_virtual
    least, left = divmod(num_layers - (of_last if fewer_on_last else 0), others)
    totals = [least] * others + [of_last] * (num_virtual - others)
    of_stage = [0] * placement.num_stages
    for virtual, total in enumerate(totals):
        of_stage[placement.stage(virtual)] += total
    for _ in range(left):
        free = (k for k in range(others) if totals[k] == least)
        chosen = min(free, key=lambda k: (of_stage[placement.stage(k)], k == last, k == 0, k))
        totals[chosen] += 1
        of_stage[placement.stage(chosen)] += 1
    return tuple(totals)
