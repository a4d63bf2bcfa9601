"""The steps of a program in time: one compute unit, and links that collectives take one after the other.

An asynchronous collective begins when it is started and its links are free, and runs beside the compute that follows;
where its end is waited for before it has come, the wait is *exposed*. Of a loop the first two trips are simulated, and
the second stands for all that follow: what the first left on the links is gone by then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .steps import Branches, Collective, Compute, ComputeKind, Done, Loop, Start, Step

Loops = tuple[tuple[str, int | None], ...]  # names and trips of those around a step, the outermost first


@dataclass(frozen=True)
class Priced:
    """alone_seconds: of a collective that has its links for itself; None where it is not known. links: the names of
    those that it takes."""

    alone_seconds: float | None
    links: tuple[str, ...]


@dataclass
class CollectiveTotals:
    """One collective over all its executions in a step."""

    collective: Collective
    count: int = 0
    alone_seconds: float | None = 0.0
    exposed_seconds: float = 0.0
    hidden_behind: dict[str, float] = field(default_factory=dict)  # seconds by the name of what ran meanwhile
    loops: Loops = ()

    def add(self, count: int, alone_seconds: float | None) -> None:
        """So many executions more, of this time each."""
        self.count += count
        if self.alone_seconds is not None:
            self.alone_seconds = None if alone_seconds is None else self.alone_seconds + count * alone_seconds


@dataclass(frozen=True)
class Segment:
    """A stretch of time on one track."""

    track: str
    name: str
    kind: str
    start_seconds: float
    seconds: float


@dataclass
class Simulation:
    """seconds: of a step. unpriced: names of operations that count as no time. unknown_loops: whose trips count as one.
    segments: for a timeline; of a loop the first two trips, and the rest as one."""

    seconds: float = 0.0
    compute_seconds: dict[ComputeKind, float] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    collectives: dict[str, CollectiveTotals] = field(default_factory=dict)
    priced_by: dict[str, int] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def simulate(steps: tuple[Step, ...], price: Callable[[Collective], Priced]) -> Simulation:
    """Run the steps once."""
    clock = _Clock(price)
    clock.run(steps, weight=1, loops=(), is_shown=True)
    clock.finish()
    clock.result.seconds = clock.now
    return clock.result


@dataclass
class _InFlight:
    collective: Collective
    totals: CollectiveTotals
    weight: int
    start: float
    end: float


class _Clock:
    def __init__(self, price: Callable[[Collective], Priced]):
        self.now, self.result, self._price = 0.0, Simulation(), price
        self._free: dict[str, float] = {}  # when each link is free again
        self._flying: dict[str, _InFlight] = {}

    def run(self, steps: tuple[Step, ...], *, weight: int, loops: Loops, is_shown: bool) -> None:
        """weight: how often what is run here happens in a step."""
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step, weight, is_shown)
            elif isinstance(step, Start):
                self._start(step.collective, weight, loops, is_shown)
            elif isinstance(step, Done):
                self._done(step.name, is_shown)
            elif isinstance(step, Loop):
                self._loop(step, weight, loops, is_shown)
            else:
                self._longest(step, weight, loops, is_shown)

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for name in list(self._flying):
            self._done(name, is_shown=True)

    def _compute(self, step: Compute, weight: int, is_shown: bool) -> None:
        result = self.result
        result.priced_by[step.priced_by] = result.priced_by.get(step.priced_by, 0) + weight
        if step.seconds is None:
            result.unpriced.append(step.name)
            return
        begin, self.now = self.now, self.now + step.seconds
        result.compute_seconds[step.kind] = result.compute_seconds.get(step.kind, 0.0) + weight * step.seconds
        for flying in self._flying.values():
            together = min(flying.end, self.now) - max(flying.start, begin)
            if together > 0:
                behind = flying.totals.hidden_behind
                behind[step.name] = behind.get(step.name, 0.0) + flying.weight * together
        if is_shown:
            result.segments.append(Segment("compute", step.name, step.kind, begin, step.seconds))

    def _start(self, collective: Collective, weight: int, loops: Loops, is_shown: bool) -> None:
        priced = self._price(collective)
        totals = self.result.collectives.setdefault(collective.name, CollectiveTotals(collective, loops=loops))
        totals.add(weight, alone := priced.alone_seconds)
        start = max([self.now, *(self._free.get(link, 0.0) for link in priced.links)])
        end = start + (alone or 0.0)
        self._free.update(dict.fromkeys(priced.links, end))
        self._flying[collective.name] = _InFlight(collective, totals, weight, start, end)
        if is_shown and alone:
            for link in priced.links:
                self.result.segments.append(Segment(link, collective.name, collective.kind, start, alone))

    def _done(self, name: str, is_shown: bool) -> None:
        flying = self._flying.pop(name, None)
        if flying is None or flying.end <= self.now:
            return
        wait = flying.end - self.now
        flying.totals.exposed_seconds += flying.weight * wait
        self.result.exposed_seconds += flying.weight * wait
        if is_shown:
            self.result.segments.append(Segment("compute", f"waits for {name}", "exposed", self.now, wait))
        self.now = flying.end

    def _loop(self, loop: Loop, weight: int, loops: Loops, is_shown: bool) -> None:
        if loop.num_trips is None:
            self.result.unknown_loops.append(loop.name)
        trips = 1 if loop.num_trips is None else loop.num_trips
        within = (*loops, (loop.name, loop.num_trips))
        if trips == 0:
            return
        self.run(loop.body, weight=weight, loops=within, is_shown=is_shown)
        if trips == 1:
            return
        begin = self.now
        self.run(loop.body, weight=weight * (trips - 1), loops=within, is_shown=is_shown)
        rest = (self.now - begin) * (trips - 2)
        if is_shown and rest > 0:
            self.result.segments.append(
                Segment("compute", f"{loop.name}: {trips - 2} more trips", "loop", self.now, rest)
            )
        self.now += rest
        self._free = {link: time + rest for link, time in self._free.items()}

    def _longest(self, step: Branches, weight: int, loops: Loops, is_shown: bool) -> None:
        """Which branch runs is not known before: the one that takes the longest by itself."""
        alone = [simulate(branch, self._price).seconds for branch in step.branches]
        if alone:
            longest = step.branches[alone.index(max(alone))]
            self.run(longest, weight=weight, loops=loops, is_shown=is_shown)
