"""The steps of a program in time: one compute unit, and links that the collectives under way share evenly.

An asynchronous collective begins when it is started, and runs beside the compute that follows; where its end is waited
for before it has come, the wait is *exposed*. Of a loop the first two trips are simulated, and the second stands for
all that follow.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .steps import Branches, Collective, Compute, ComputeKind, Done, Loop, Start, Step

SMALLEST_SECONDS = 1e-12  # what is left of a collective below it is rounding
Loops = tuple[tuple[str, int | None], ...]  # names and trips of those around a step, the outermost first


@dataclass(frozen=True)
class Priced:
    """alone_seconds: of a collective that has its links for itself; None where it is not known, and it counts as none.
    links: the names of those that it takes."""

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
    """A stretch of time on one track; collectives that share a link overlap."""

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
    """left_seconds: of its time with the links for itself; None: it has come."""

    collective: Collective
    totals: CollectiveTotals
    weight: int
    links: tuple[str, ...]
    began: float
    left_seconds: float | None
    is_shown: bool


class _Clock:
    def __init__(self, price: Callable[[Collective], Priced]):
        self.now, self.result, self._price = 0.0, Simulation(), price
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
        begin = self.now
        for flying, seconds in self._pass(step.seconds).items():
            behind = self._flying[flying].totals.hidden_behind
            behind[step.name] = behind.get(step.name, 0.0) + self._flying[flying].weight * seconds
        result.compute_seconds[step.kind] = result.compute_seconds.get(step.kind, 0.0) + weight * step.seconds
        if is_shown:
            result.segments.append(Segment("compute", step.name, step.kind, begin, step.seconds))

    def _start(self, collective: Collective, weight: int, loops: Loops, is_shown: bool) -> None:
        priced = self._price(collective)
        totals = self.result.collectives.setdefault(collective.name, CollectiveTotals(collective, loops=loops))
        totals.add(weight, priced.alone_seconds)
        left = priced.alone_seconds or None
        self._flying[collective.name] = _InFlight(collective, totals, weight, priced.links, self.now, left, is_shown)

    def _done(self, name: str, is_shown: bool) -> None:
        if name not in self._flying:
            return
        begin, flying = self.now, self._flying[name]
        while flying.left_seconds is not None:
            self._pass(self._until_next())
        wait = self.now - begin
        del self._flying[name]
        flying.totals.exposed_seconds += flying.weight * wait
        self.result.exposed_seconds += flying.weight * wait
        if is_shown and wait:
            self.result.segments.append(Segment("compute", f"waits for {name}", "exposed", begin, wait))

    def _pass(self, seconds: float) -> dict[str, float]:
        """Time goes on; how long each collective was on its way meanwhile."""
        under_way: dict[str, float] = {}
        end = self.now + seconds
        while (rates := self._rates()) and self.now < end:
            part = min(end - self.now, self._until_next())
            for name, rate in rates.items():
                under_way[name] = under_way.get(name, 0.0) + part
                flying = self._flying[name]
                assert flying.left_seconds is not None
                flying.left_seconds -= part * rate
            self.now += part
            self._land()
        self.now = end
        return under_way

    def _until_next(self) -> float:
        """Seconds until the next collective has come, if nothing starts meanwhile."""
        left = ((self._flying[name].left_seconds or 0.0) / rate for name, rate in self._rates().items())
        return min(left)

    def _rates(self) -> dict[str, float]:
        """The share of its links that each collective under way has: that of the busiest of them."""
        active = {name: each for name, each in self._flying.items() if each.left_seconds is not None}
        users: dict[str, int] = {}
        for each in active.values():
            for link in each.links:
                users[link] = users.get(link, 0) + 1
        return {name: 1 / max([1, *(users[link] for link in each.links)]) for name, each in active.items()}

    def _land(self) -> None:
        for each in self._flying.values():
            if each.left_seconds is not None and each.left_seconds <= SMALLEST_SECONDS:
                each.left_seconds = None
                if each.is_shown:
                    self._show(each)

    def _show(self, flying: _InFlight) -> None:
        for link in flying.links:
            name, kind = flying.collective.name, flying.collective.kind
            self.result.segments.append(Segment(link, name, kind, flying.began, self.now - flying.began))

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
        rest, begin = (self.now - begin) * (trips - 2), self.now
        self._pass(rest)
        if is_shown and rest:
            segment = Segment("compute", f"{loop.name}: {trips - 2} more trips", "loop", begin, rest)
            self.result.segments.append(segment)

    def _longest(self, step: Branches, weight: int, loops: Loops, is_shown: bool) -> None:
        """Which branch runs is not known before: the one that takes the longest by itself."""
        alone = [simulate(branch, self._price).seconds for branch in step.branches]
        if alone:
            longest = step.branches[alone.index(max(alone))]
            self.run(longest, weight=weight, loops=loops, is_shown=is_shown)
