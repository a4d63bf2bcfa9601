"""What holds of every schedule, over random ones: compute, collectives on several links, loops in loops, branches.

Durations are multiples of 1/1024 s, and sums of them exact, so that no comparison needs a tolerance.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshloom.compiler.core.traffic import Placed
from meshloom.compiler.xla.schedule.simulate import Simulation, simulate
from meshloom.compiler.xla.schedule.steps import Branches, Collective, Compute, Done, Loop, Start, Step
from support.schedules import collectives_of

LINKS = ("x", "y", "DCN")
seconds = st.integers(0, 40).map(lambda n: n / 1024)


@dataclass(frozen=True)
class Program:
    steps: tuple[Step, ...]
    prices: Mapping[str, Placed]

    def run(self) -> Simulation:
        return simulate(self.steps, lambda collective: self.prices[collective.name])


@st.composite
def programs(draw: Callable, *, with_branches: bool = True) -> Program:
    prices: dict[str, Placed] = {}

    def collective() -> Collective:
        name = f"c{len(prices)}"
        links = tuple(sorted(draw(st.sets(st.sampled_from(LINKS), min_size=1))))
        prices[name] = Placed(draw(seconds), links)
        return Collective(name, "all-gather", 0, "bf16", (), True, "", "", "", ())

    def body(depth: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        waiting: list[str] = []
        kinds = ["compute", "start", "done", "sync"] + ["loop", "branches"][: 1 + with_branches] * (depth > 0)
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=7)):
            if kind == "compute":
                steps.append(Compute(f"f{len(steps)}", "other", draw(seconds), "cycles", ""))
            elif kind == "start":
                each = collective()
                steps.append(Start(each))
                waiting.append(each.name)
            elif kind == "sync":
                each = collective()
                steps += [Start(each), Done(each.name)]
            elif kind == "done" and waiting:
                steps.append(Done(waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
            elif kind == "loop":
                steps.append(Loop(f"l{depth}", draw(st.integers(0, 5)), body(depth - 1)))
            elif kind == "branches":
                steps.append(Branches(f"b{depth}", (body(depth - 1), body(depth - 1))))
        left = draw(st.permutations(waiting))
        return (*steps, *map(Done, left))

    return Program(body(2), prices)


def unrolled(steps: tuple[Step, ...]) -> Iterator[Compute | Start | Done]:
    for step in steps:
        if isinstance(step, Loop):
            for _ in range(step.num_trips or 0):
                yield from unrolled(step.body)
        else:
            assert not isinstance(step, Branches)
            yield step


def longest_path(program: Program) -> float:
    """The step by its constraints alone, relaxed until nothing moves: what each moment may not come before."""
    after: list[tuple[int, int, float]] = []  # (moment, a moment that it comes after, by so much)
    moment, count = 0, 1
    ends: dict[str, int] = {}
    last_on: dict[str, int] = {}
    for step in unrolled(program.steps):
        if isinstance(step, Start):
            priced = program.prices[step.collective.name]
            end = count
            count += 1
            after.append((end, moment, priced.alone_seconds or 0.0))
            after += [(end, last_on[link], priced.alone_seconds or 0.0) for link in priced.links if link in last_on]
            last_on |= dict.fromkeys(priced.links, end)
            ends[step.collective.name] = end
            continue
        following = count
        count += 1
        after.append((following, moment, (step.seconds or 0.0) if isinstance(step, Compute) else 0.0))
        if isinstance(step, Done):
            after.append((following, ends[step.name], 0.0))
        moment = following
    times = [0.0] * count
    is_moving = True
    while is_moving:
        is_moving = False
        for one, other, by in after:
            if times[other] + by > times[one]:
                times[one], is_moving = times[other] + by, True
    return max(times)


@settings(max_examples=200)
@given(programs(with_branches=False))
def test_a_step_is_the_longest_path_through_its_constraints(program):
    assert program.run().seconds == longest_path(program)


@settings(max_examples=200)
@given(programs())
def test_time_is_conserved(program):
    result = program.run()
    assert result.seconds == sum(result.compute_seconds.values()) + result.exposed_seconds
    assert result.exposed_seconds == sum(each.exposed_seconds for each in result.collectives.values())
    for name, each in result.collectives.items():
        assert each.alone_seconds == each.count * program.prices[name].alone_seconds
        assert each.hidden_seconds is not None
        assert each.hidden_seconds >= 0
        assert each.hidden_seconds + each.exposed_seconds == each.alone_seconds
        assert sum(each.hidden_behind.values()) <= each.hidden_seconds


@pytest.mark.ci
@settings(max_examples=200)
@given(programs(), st.data())
def test_a_longer_link_time_never_makes_a_step_faster(program, data):
    names = sorted(program.prices)
    longer = {name: data.draw(seconds) for name in data.draw(st.sets(st.sampled_from(names)) if names else st.just([]))}
    slowed = {
        name: replace(each, alone_seconds=each.alone_seconds + longer.get(name, 0.0))
        for name, each in program.prices.items()
    }
    assert replace(program, prices=slowed).run().seconds >= program.run().seconds


def at_once(steps: tuple[Step, ...], names: set[str]) -> tuple[Step, ...]:
    """Moves the end of each of these collectives right behind its start."""
    moved: list[Step] = []
    for step in steps:
        if isinstance(step, Start) and step.collective.name in names:
            moved += [step, Done(step.collective.name)]
        elif isinstance(step, Loop):
            moved.append(replace(step, body=at_once(step.body, names)))
        elif isinstance(step, Branches):
            moved.append(replace(step, branches=tuple(at_once(branch, names) for branch in step.branches)))
        elif not (isinstance(step, Done) and step.name in names):
            moved.append(step)
    return tuple(moved)


@pytest.mark.ci
@settings(max_examples=200)
@given(programs(), st.data())
def test_removing_overlap_never_makes_a_step_faster(program, data):
    names = sorted(each.name for each in collectives_of(program.steps))
    removed = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
    assert replace(program, steps=at_once(program.steps, removed)).run().seconds >= program.run().seconds


def test_with_links_shared_evenly_a_longer_link_time_could_make_a_step_faster():
    """Why links serve in order. `b` waits for `a` to be over, a second at most; shared, it would slow `c` down, which
    is waited for before the compute that hides `b`: 12 s with a = 0, 11 with a = 1. In order it is 11 and 11."""

    def step(a: float) -> float:
        prices = {"c": Placed(1.0, ("x",)), "a": Placed(a, ("y",)), "b": Placed(10.0, ("x",))}
        c, a_, b = (Collective(name, "all-gather", 0, "bf16", (), True, "", "", "", ()) for name in "cab")
        compute = Compute("f", "other", 10.0, "cycles", "")
        steps = (Start(c), Start(a_), Done("a"), Start(b), Done("c"), compute, Done("b"))
        return simulate(steps, lambda collective: prices[collective.name]).seconds

    assert step(0.0) == step(1.0) == pytest.approx(11)
