"""Runs the steps of a program in time: one compute unit, and links that serve transfers in the program's order.

An asynchronous collective begins when it is started and all its links are free of those started before it, and runs
beside the compute that follows. Where its end is waited for before it has come, compute stands still; that time is
*exposed*, of the collective that was on the links: the awaited one, or those that it queued behind. So each moment of
a step is compute, or exposed time of one collective, and no collective is exposed for longer than it takes.

All times are maxima and sums of durations in an order that the program fixes. So nothing that takes longer, and no end
that is waited for earlier, can make a step faster: with links that are shared evenly it can. docs/schedule.md.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ...core.traffic import COMPUTE, ComputeKind, Placed
from .steps import Branches, Collective, Compute, Done, Loop, Start, Step

SMALLEST_SECONDS = 1e-12  # smaller times are rounding errors


@dataclass(frozen=True)
class Taken:
    """A branch, by the share of executions that run it; None: the share is not known, and the branch counts always. by:
    who says so."""

    share: float | None
    by: str = "as chosen"

    def __str__(self) -> str:
        if self.share is None:
            return "counts as always taken; --taken says how often"
        return f"{'always taken' if self.share == 1 else f'taken in {100 * self.share:.3g} %'}, {self.by}"


Loops = tuple[tuple[str, int | Taken | None], ...]  # the loops around a step, by name, the outermost first


@dataclass
class CollectiveTotals:
    """The totals of one collective over all its executions in a step. hidden_behind: the compute that ran during its
    time, in seconds by name. The part of its time that is neither there nor exposed passed while compute waited for
    another collective."""

    collective: Collective
    loops: Loops
    count: float = 0
    alone_seconds: float | None = 0.0
    exposed_seconds: float = 0.0
    hidden_behind: dict[str, float] = field(default_factory=dict)

    @property
    def hidden_seconds(self) -> float | None:
        """Returns the hidden part of the time alone, with rounding error removed."""
        if self.alone_seconds is None:
            return None
        hidden = self.alone_seconds - self.exposed_seconds
        return hidden if hidden > SMALLEST_SECONDS * self.count else 0.0

    def add(self, count: float, alone_seconds: float | None) -> None:
        """Adds so many executions of this time each."""
        self.count += count
        if self.alone_seconds is not None:
            self.alone_seconds = None if alone_seconds is None else self.alone_seconds + count * alone_seconds


@dataclass(frozen=True)
class Segment:
    """A stretch of time on one track, on which nothing overlaps. name: the instruction that runs, or that is waited
    for, or the loop whose last trips are not shown. trip: the trip of the innermost loop around it."""

    track: str
    name: str
    kind: str
    start_seconds: float
    seconds: float
    trip: "Trip | None" = None
    branch: tuple[str, Taken] | None = None  # the innermost conditional around it, and the branch
    stage: int | None = None  # of a pipeline


@dataclass(frozen=True)
class Trip:
    """One iteration of a loop, or several that are alike. index: the number of the first, from 0."""

    loop: str
    index: int  # from 0
    num_alike: int = 1


@dataclass(frozen=True)
class StageTime:
    """The time of one stage of a pipeline in a step: compute, waits for communication, and waits for other stages."""

    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float


@dataclass
class Simulation:
    """The result of a simulation.

    seconds: the time of a step. operations: the seconds of compute by name, over all executions. stages: the time of
    each stage of a pipeline, of which all other times are means; () where there is one. bounded: by name, the
    seconds by which the compiler's estimates are longer than the prices. unpriced: by name, the kernels that may take
    longer. unknown_loops: the loops whose trips count as one. segments: the timeline. It shows the first trips of a
    loop and the rest as one, and each branch with a share as one that runs; so it may end after the step does on
    average. Of a pipeline it shows the first and the last stages and ticks.
    """

    seconds: float = 0.0
    compute_seconds: dict[ComputeKind, float] = field(default_factory=dict)
    operations: dict[str, float] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    stages: tuple["StageTime", ...] = ()
    collectives: dict[str, CollectiveTotals] = field(default_factory=dict)
    priced_by: dict[str, float] = field(default_factory=dict)
    bounded: dict[str, float] = field(default_factory=dict)
    unpriced: dict[str, str] = field(default_factory=dict)
    unknown_loops: set[str] = field(default_factory=set)
    segments: list[Segment] = field(default_factory=list)

    @property
    def bubble_seconds(self) -> float:
        """Returns the time in which a stage waits for others, on average."""
        return sum(each.bubble_seconds for each in self.stages) / max(1, len(self.stages))


def simulate(steps: tuple[Step, ...], price: Callable[[Collective], Placed]) -> Simulation:
    """Runs the steps once."""
    clock = Clock(price)
    clock.run(steps, weight=1, loops=(), is_shown=True)
    clock.finish()
    clock.result.seconds = clock.seconds
    return clock.result


@dataclass(frozen=True)
class Picked:
    """The branch of a conditional that runs, by its place, and how often it does."""

    place: int
    taken: Taken


@dataclass(frozen=True)
class _Transfer:
    """One execution of a collective. behind: the transfer whose end it had to wait for in a queue."""

    collective: Collective
    loops: Loops
    begin: float
    end: float
    behind: "_Transfer | None"


@dataclass
class Spent:
    """The time that a clock has spent, times its weights: on compute, and on waits for communication and for other
    clocks."""

    compute: float = 0.0
    exposed: float = 0.0
    others: float = 0.0


class Clock:
    """Runs steps in time. spent: what the time was spent on, over all executions. _now: the time without the trips that
    are represented by others, which are _skipped. _shown: the seconds by which segments are later than on average,
    because a branch before them is shown as taken."""

    def __init__(
        self,
        price: Callable[[Collective], Placed],
        pick: Callable[[Branches], "Picked | None"] = lambda _: None,
        result: Simulation | None = None,
        stage: int | None = None,
    ):
        """pick: returns the branch of a conditional that runs; None where that is not known. result: the totals to add
        to. stage: the stage of a pipeline whose time it is."""
        self.result, self.spent, self._stage = result or Simulation(), Spent(), stage
        self._price, self._pick = price, pick
        self._now = self._skipped = self._shown = 0.0
        self._trip: Trip | None = None
        self._flying: dict[str, _Transfer] = {}
        self._last_on: dict[str, _Transfer] = {}  # by link
        self._branch_of: tuple[str, Taken] | None = None
        self._ends: dict[Hashable, float] = {}  # of branches; each is tried once with the same transfers in flight

    @property
    def seconds(self) -> float:
        return self._now + self._skipped

    def run(self, steps: tuple[Step, ...], *, weight: float, loops: Loops, is_shown: bool) -> None:
        """Runs steps with a weight: how often they happen in a training step."""
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step, weight, is_shown)
            elif isinstance(step, Start):
                self.start(step.collective, weight=weight, loops=loops, is_shown=is_shown)
            elif isinstance(step, Done):
                self._done(step.name, weight, is_shown)
            elif isinstance(step, Loop):
                self._loop(step, weight, loops, is_shown)
            elif step.branches:
                self._branch(step, weight, loops, is_shown)

    def finish(self, *, weight: float = 1, is_shown: bool = True) -> None:
        """Waits for all collectives in flight."""
        for name in list(self._flying):
            self._done(name, weight, is_shown)

    def free_at(self, collective: Collective) -> float:
        """Returns the time at which a collective that is started now can begin."""
        busy = (self._last_on[link].end for link in self._price(collective).links if link in self._last_on)
        return max([self._now, *busy]) + self._skipped

    def end_of(self, steps: tuple[Step, ...]) -> float:
        """Returns the time at which these would end."""
        return self._end_of(steps) - self._now + self.seconds

    def forget_ends(self) -> None:
        """Forgets when branches ended, which is to be found anew where others are picked."""
        self._ends.clear()

    def enter(self, loop: str, trip: int) -> None:
        """Begins an iteration of a loop, from 0, that somebody else runs."""
        self._trip = Trip(loop, trip)

    def leave(self) -> None:
        """Ends such a loop."""
        self._trip = None

    def show_left_out(self, trips: Trip, since: float) -> None:
        """Shows iterations of such a loop as one: those that ran from a time until now."""
        self._trip = trips
        self._show(COMPUTE, trips.loop, "loop", since - self._skipped, self._now)

    def show_end(self, step_seconds: float) -> None:
        """Shows the wait for other clocks after the last step, until the step ends on all of them."""
        self._show(COMPUTE, "", "bubble", self._now, step_seconds - self._skipped)

    def _compute(self, step: Compute, weight: float, is_shown: bool) -> None:
        result = self.result
        result.priced_by[step.priced_by] = result.priced_by.get(step.priced_by, 0) + weight
        if step.unknown:
            result.unpriced[step.name] = step.unknown
        if step.seconds is None:
            return
        result.operations[step.name] = result.operations.get(step.name, 0.0) + weight * step.seconds
        if step.estimated_seconds is not None:
            over = weight * (step.estimated_seconds - step.seconds)
            result.bounded[step.name] = result.bounded.get(step.name, 0.0) + over
        begin, self._now = self._now, self._now + step.seconds
        self.spent.compute += weight * step.seconds
        for transfer in self._flying.values():
            meanwhile = min(self._now, transfer.end) - max(begin, transfer.begin)
            if meanwhile > 0:
                behind = self._totals(transfer).hidden_behind
                behind[step.name] = behind.get(step.name, 0.0) + weight * meanwhile
        result.compute_seconds[step.kind] = result.compute_seconds.get(step.kind, 0.0) + weight * step.seconds
        if is_shown:
            self._show(COMPUTE, step.name, step.kind, begin, self._now)

    def start(
        self,
        collective: Collective,
        *,
        weight: float,
        loops: Loops,
        is_shown: bool,
        ready: float = 0.0,
        is_awaited: bool = True,
    ) -> None:
        """Starts a collective, which begins when its links are free, and not before it is ready on other clocks.
        is_awaited: False where what waits for it has nothing to wait for."""
        priced = self._price(collective)
        busy = [self._last_on[link] for link in priced.links if link in self._last_on]
        last = max(busy, key=lambda transfer: transfer.end, default=None)
        behind = last if last is not None and last.end > self._now else None
        begin = max(behind.end if behind else self._now, ready - self._skipped)
        transfer = _Transfer(collective, loops, begin, begin + (priced.alone_seconds or 0.0), behind)
        self._totals(transfer).add(weight, priced.alone_seconds)
        if is_awaited:
            self._flying[collective.name] = transfer
        self._last_on |= dict.fromkeys(priced.links, transfer)
        if is_shown:
            for link in priced.links:
                self._show(link, collective.name, collective.kind, begin, transfer.end)

    def _done(self, name: str, weight: float, is_shown: bool) -> None:
        """Waits for a collective; does nothing if it is not in flight."""
        transfer, begin = self._flying.pop(name, None), self._now
        if transfer is None or transfer.end <= begin:
            return
        self._now = transfer.end
        waited, others, until = transfer, 0.0, transfer.end
        while waited is not None and waited.end > begin:
            others += until - waited.end  # that one was ready, and a transfer after it was not on another clock
            until = max(begin, waited.begin)
            self._totals(waited).exposed_seconds += weight * (waited.end - until)
            waited = waited.behind
        others += until - begin
        self.result.exposed_seconds += weight * (self._now - begin - others)
        self.spent.exposed += weight * (self._now - begin - others)
        self.spent.others += weight * others
        if is_shown:
            self._show(COMPUTE, name, "bubble", begin, begin + others)
            self._show(COMPUTE, name, "exposed", begin + others, self._now)

    def _loop(self, loop: Loop, weight: float, loops: Loops, is_shown: bool) -> None:
        """Runs iterations until one begins in the same state as the one before it, which then represents all the
        rest."""
        if loop.num_trips is None:
            self.result.unknown_loops.add(loop.name)
        left, before = 1 if loop.num_trips is None else loop.num_trips, None
        outer, num_done = self._trip, 0
        while left:
            state, begin = self._state(), self.seconds
            num_alike = left if _is_same(state, before) else 1
            within = (*loops, (loop.name, loop.num_trips))
            self._trip = Trip(loop.name, num_done)
            self.run(loop.body, weight=weight * num_alike, loops=within, is_shown=is_shown)
            left, num_done, before = left - num_alike, num_done + 1, state
            if num_alike > 1:
                end, rest = self._now, (self.seconds - begin) * (num_alike - 1)
                self._trip = Trip(loop.name, num_done, num_alike - 1)
                if is_shown:
                    self._show(COMPUTE, loop.name, "loop", end, end + rest)
                self._skipped += rest
        self._trip = outer

    def _branch(self, step: Branches, weight: float, loops: Loops, is_shown: bool) -> None:
        """Runs one branch of a conditional. Without a share it is the branch that ends last. With a share, the rest of
        the executions run the branch that ends first, and each takes its share of the time; the branch that ends last
        is shown, as in a step that runs it."""
        if (picked := self._pick(step)) is not None:
            within = (*loops, (step.name, picked.taken))
            return self.run(step.branches[picked.place], weight=weight, loops=within, is_shown=is_shown)
        ordered = sorted(step.branches, key=self._end_of)
        runs = ((ordered[-1], Taken(step.share)),)
        if step.share is not None and ordered[0] is ordered[-1]:
            runs = ((ordered[-1], Taken(1.0)),)  # both are the same
        elif step.share is not None:
            runs = (*runs, (ordered[0], Taken(1 - step.share)))
        outer, shown_until = self._branch_of, None
        for branch, taken in runs:
            if taken.share == 0:
                continue
            begin, self._branch_of = self.seconds, (step.name, taken)
            share, is_first = 1.0 if taken.share is None else taken.share, shown_until is None
            within = (*loops, self._branch_of)
            self.run(branch, weight=weight * share, loops=within, is_shown=is_shown and is_first)
            shown_until = self.seconds + self._shown if shown_until is None else shown_until
            self._skipped -= (1 - share) * (self.seconds - begin)
        if is_shown and shown_until is not None:
            self._shown = shown_until - self.seconds
        self._branch_of = outer

    def _state(self) -> dict[str, float]:
        """Returns the state that later steps depend on: how long links are busy, and collectives in flight."""
        ends = {f"link {link}": each.end for link, each in self._last_on.items()}
        ends |= {name: each.end for name, each in self._flying.items()}
        return {name: end - self._now for name, end in ends.items() if end - self._now > SMALLEST_SECONDS}

    def _end_of(self, steps: tuple[Step, ...]) -> float:
        """Returns the time at which these would end."""
        busy = frozenset((link, each.end) for link, each in self._last_on.items())
        key = (id(steps), self._now, busy, frozenset((name, each.end) for name, each in self._flying.items()))
        if key not in self._ends:
            trial = Clock(self._price, self._pick)
            trial._now, trial._flying, trial._last_on = self._now, dict(self._flying), dict(self._last_on)
            trial._ends = self._ends
            trial.run(steps, weight=1, loops=(), is_shown=False)
            self._ends[key] = trial.seconds
        return self._ends[key]

    def _totals(self, transfer: _Transfer) -> CollectiveTotals:
        found = self.result.collectives.get(transfer.collective.name)
        if found is None:
            found = CollectiveTotals(transfer.collective, transfer.loops)
            self.result.collectives[transfer.collective.name] = found
        return found

    def _show(self, track: str, name: str, kind: str, begin: float, end: float) -> None:
        if end > begin:
            start = begin + self._skipped + self._shown
            found = Segment(track, name, kind, start, end - begin, self._trip, self._branch_of, self._stage)
            self.result.segments.append(found)


def _is_same(state: dict[str, float], before: dict[str, float] | None) -> bool:
    if before is None or state.keys() != before.keys():
        return False
    return all(abs(left - before[name]) <= SMALLEST_SECONDS for name, left in state.items())
