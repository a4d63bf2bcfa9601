"""XLA's scheduler for GPUs hides what one trip of a loop sends, which it places from the end of the trip.

    works      queries  attention  out  up   gate  down
    gathers    gate --------------| down--------|     up, out, queries: before the first work

It goes backwards from the last work. A collective ends just before the work that reads its result, and begins before as
many works as last as long as the scheduler expects it to; no other is on its way meanwhile, or three others with the
preset `concurrent`. Of several that wait, the one that is read last goes first. Those that are left when the works are
at an end run before them, one after another. Compiled programs of llama3_8b and llama2_70b for 8 to 128 GPUs
have this order (docs/estimate.md).
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
    works: Sequence[Numbers],
    flights: Sequence[Flight],
    expected: Sequence[Numbers] | None = None,
    *,
    at_once: int = 1,
) -> list[Numbers]:
    """Returns the seconds of each flight that no work hides. works: the seconds of each, of each declaration. expected:
    as long as the scheduler expects each work to last, in the unit of `Flight.expected`; None: as long as it does.
    at_once: how many may be on their way at once, over the same links."""
    if not flights:
        return []
    order = sorted(range(len(flights)), key=lambda number: (flights[number].last, number), reverse=True)
    queue = [flights[number] for number in order]
    expected = works if expected is None else expected
    to_pass = np.array(np.broadcast_arrays(*(one.expected for one in queue)), float)
    exposed = np.array(np.broadcast_arrays(*(np.broadcast_to(one.seconds, to_pass.shape[1:]) for one in queue)), float)
    first, last = (np.array(each)[:, None] for each in zip(*((one.first, one.last) for one in queue), strict=True))
    waits, flying = np.ones_like(to_pass, bool), np.zeros_like(to_pass, bool)
    for place in reversed(range(len(works))):
        flying &= first <= place
        free = waits & (last > place) & (first <= place)
        begun = free & (np.cumsum(free, axis=0) <= at_once - flying.sum(axis=0))
        waits &= ~begun
        flying |= begun
        sent = np.where(flying, exposed, 0.0)
        exposed -= np.clip(works[place] - (np.cumsum(sent, axis=0) - sent), 0.0, sent)  # one after another on the links
        to_pass -= np.where(flying, expected[place], 0.0)
        flying &= to_pass > 0.0
    by_flight = dict(zip(order, exposed, strict=True))
    return [by_flight[number] for number in range(len(flights))]
