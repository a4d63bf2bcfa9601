"""XLA's scheduler for GPUs hides what one trip of a loop sends, which it places from the end of the trip.

    works      queries  attention  out  up   gate  down
    gathers    gate --------------| down--------|     up, out, queries: before the first work

It goes backwards from the last work. A collective ends just before the work that reads its result, and begins before as
many works as last as long as the scheduler expects it to; no other is on its way meanwhile, unless an option allows
several. Of several that wait, the one that is read last goes first. Those that are left when the works are at an end
run before them, one after another.
Compiled programs of llama3_8b and llama2_70b for 8 to 128 GPUs have this order (docs/estimate.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .program_costs import Numbers


@dataclass(frozen=True)
class Flight:
    """A collective of a trip. seconds: alone, of each declaration. expected: as long as the scheduler expects it to
    last, in seconds or in kernels. first, last: the works beside which it may run, by their places; last is not among
    them."""

    seconds: Numbers
    expected: Numbers
    first: int
    last: int


def exposed_in_order(
    works: Sequence[Numbers], flights: Sequence[Flight], expected: Sequence[Numbers] | None = None, at_once: int = 1
) -> list[Numbers]:
    """Returns the seconds of each flight that no work hides. works: the seconds of each, of each declaration. expected:
    as long as the scheduler expects each work to last, in the unit of `Flight.expected`; None: as long as it does.
    at_once: how many may be on their way at the same time."""
    if not flights:
        return []
    order = sorted(range(len(flights)), key=lambda number: flights[number].last)
    queue = [flights[number] for number in order]
    expected = works if expected is None else expected
    to_pass = np.array(np.broadcast_arrays(*(one.expected for one in queue)), float)
    first, last = (np.array(each)[:, None] for each in zip(*((one.first, one.last) for one in queue), strict=True))
    columns = np.arange(to_pass.shape[1])
    hidden, waits = np.zeros_like(to_pass), np.ones_like(to_pass, bool)
    slots = np.full((at_once, len(columns)), -1)  # those that are on their way, by their places in the queue
    for place in reversed(range(len(works))):
        for slot, flying in enumerate(slots):
            flying = np.where((flying >= 0) & (first[flying, 0] <= place), flying, -1)
            free = waits & (last > place) & (first <= place)
            flying = np.where((flying < 0) & free.any(axis=0), len(queue) - 1 - free[::-1].argmax(axis=0), flying)
            on_its_way = flying >= 0
            waits[flying[on_its_way], columns[on_its_way]] = False
            hidden[flying, columns] += np.where(on_its_way, works[place], 0.0)
            to_pass[flying, columns] -= np.where(on_its_way, expected[place], 0.0)
            slots[slot] = np.where(to_pass[flying, columns] <= 0.0, -1, flying)
    by_flight = dict(zip(order, hidden, strict=True))
    return [np.maximum(one.seconds - by_flight[number], 0.0) for number, one in enumerate(flights)]
