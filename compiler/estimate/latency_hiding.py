"""The order in which XLA's schedulers place the collectives of one trip of a loop, and the time that it leaves exposed.

**For GPUs** the trip is placed from its end:

    works      queries  attention  out  up   gate  down
    gathers    gate --------------| down--------|     up, out, queries: before the first work

The scheduler goes backwards from the last work. A collective ends just before the work that reads its result, and
begins before as many works as last as long as the scheduler expects it to; no other is on its way meanwhile, or three
others with the preset `concurrent`. Of several that wait, the one that is read last goes first. Those that are left
when the works are at an end run before them, one after another, and after what the scheduler then still expects to be
on its way, if there is room for more: in line, as the links serve them (xla/schedule/simulate.py). Compiled programs of
llama3_8b and llama2_70b for 8 to 128 GPUs have this order (docs/estimate.md).

**For TPUs** each begins as soon as it may, any number at once, and waits for the links in line. Where the trip stalls
for a collective that nothing hides, such as tokens on their way to their experts, the gathers that are read later
begin: not before, as the scheduler places starts where it has nothing else to place. Compiled programs of deepseek_v3
and llama3_70b for Ironwood and of deepseek_v3 for v5p have this order (docs/estimate.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .program_costs import Numbers


@dataclass(frozen=True)
class Flight:
    """A collective of a trip. seconds: alone, of each declaration. expected: as long as the scheduler expects it to
    last, in seconds or in kernels. first, last: the works beside which it may run, by their places; last is not among
    them. moves: whether it moves data, and sums none."""

    seconds: Numbers
    expected: Numbers
    first: int
    last: int
    moves: bool = True


@dataclass(frozen=True)
class Stall:
    """A wait of a trip for a collective that no work hides. seconds: of each declaration. place: of the work that it
    precedes."""

    seconds: Numbers
    place: int


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
    order = _last_read_first(flights)
    queue = [flights[number] for number in order]
    begins, ends = _places(queue, works if expected is None else expected, at_once)
    seconds = np.array([np.broadcast_to(one.seconds, begins.shape[1:]) for one in queue], float)
    return _by_number(order, waited_in_line(works, seconds, begins, ends))


def _last_read_first(flights: Sequence[Flight]) -> list[int]:
    """Returns the numbers of flights by when their results are read, the last first."""
    return sorted(range(len(flights)), key=lambda number: (flights[number].last, number), reverse=True)


def _by_number(order: Sequence[int], waited: Sequence[Numbers]) -> list[Numbers]:
    """Undoes the order of a queue."""
    by_flight = dict(zip(order, waited, strict=True))
    return [by_flight[number] for number in range(len(order))]


def _places(queue: Sequence[Flight], expected: Sequence[Numbers], at_once: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the instants at which each flight begins and is waited for, of each declaration. queue: the flights; the
    first is read last. expected: of each work, as for `exposed_in_order`.

    A work at a place follows instant place + 2. Flights that no work is left to hide begin at instant 1. Those that the
    scheduler still expects to be on their way then begin at instant 0, if others may begin meanwhile."""
    to_pass = np.array(np.broadcast_arrays(*(one.expected for one in queue), *expected)[: len(queue)], float)
    first, last = (np.array(each)[:, None] for each in zip(*((one.first, one.last) for one in queue), strict=True))
    waits, flying = np.ones_like(to_pass, bool), np.zeros_like(to_pass, bool)
    begins, ends = np.full(to_pass.shape, 1), np.full(to_pass.shape, 2)
    for place in reversed(range(len(expected))):
        flying &= first <= place
        free = waits & (last > place) & (first <= place)
        begun = free & (np.cumsum(free, axis=0) <= at_once - flying.sum(axis=0))
        waits &= ~begun
        flying |= begun
        begins[flying], ends[begun] = place + 2, place + 3
        to_pass -= np.where(flying, expected[place], 0.0)
        flying &= to_pass > 0.0
    begins[flying & (first == 0) & (flying.sum(axis=0) < at_once)] = 0
    return begins, ends


def exposed_as_ready(works: Sequence[Numbers], flights: Sequence[Flight], stalls: Sequence[Stall]) -> list[Numbers]:
    """Returns the seconds of each flight that no work hides. Each begins as soon as it may; a gather that is read after
    a stall begins with the stall. Flights are on their way during stalls, too."""
    if not flights:
        return []
    in_line = [(one.place, 0, one.seconds) for one in stalls] + [(place, 1, one) for place, one in enumerate(works)]
    in_line.sort(key=lambda each: each[:2])
    at_work = {place: number for number, (place, is_work, _) in enumerate(in_line) if is_work}
    first_at = {place: number for number, (place, *_) in reversed(list(enumerate(in_line)))}
    # What is ready begins before what has to be there is waited for: two instants of no work each.
    line = [np.zeros(()), *(one for *_, seconds in in_line for one in (seconds, np.zeros(())))]
    order = _last_read_first(flights)
    queue = [flights[number] for number in order]
    begins, ends = list[int](), list[int]()
    for one in queue:
        passed = (each.place for each in stalls if one.moves and one.first < each.place <= one.last)
        begins.append(2 * first_at.get(max([one.first, *passed]), len(in_line)))
        ends.append(2 * at_work.get(one.last, len(in_line)) + 1)
    shape = np.broadcast_shapes(*(np.shape(each) for each in (*line, *(one.seconds for one in queue))))
    seconds = np.array([np.broadcast_to(one.seconds, shape) for one in queue], float)
    begin, end = (np.broadcast_to(np.reshape(each, (-1, *[1] * len(shape))), seconds.shape) for each in (begins, ends))
    return _by_number(order, waited_in_line(line, seconds, begin + 2, end + 2))


def waited_in_line(
    works: Sequence[Numbers], seconds: np.ndarray, begins: np.ndarray, ends: np.ndarray
) -> Sequence[Numbers]:
    """Returns the seconds of each flight for which works wait, where the links serve one after another: what waits for
    a flight waits for those before it in line, too. seconds, begins, ends: of each flight and declaration."""
    now, free = np.zeros(seconds.shape[1:]), np.zeros(seconds.shape[1:])
    exposed, served_from, served_to = (np.zeros_like(seconds) for _ in range(3))
    for instant in range(len(works) + 3):
        ready = np.maximum(now, np.max(np.where(ends == instant, served_to, 0.0), axis=0))
        exposed += np.clip(np.minimum(served_to, ready) - np.maximum(served_from, now), 0.0, None)
        now = ready
        for number in reversed(range(len(seconds))):
            begun = begins[number] == instant
            served_from[number] = np.where(begun, np.maximum(now, free), served_from[number])
            served_to[number] = np.where(begun, served_from[number] + seconds[number], served_to[number])
            free = np.where(begun, served_to[number], free)
        if 0 <= instant - 2 < len(works):
            now = now + works[instant - 2]
    return list(exposed)
