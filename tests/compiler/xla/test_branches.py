"""Conditionals within the branches of conditionals."""

import pytest

from meshloom.compiler.analysis.timeline_events import schedule_events
from meshloom.compiler.xla.schedule.simulate import Priced, simulate
from meshloom.compiler.xla.schedule.steps import Branches, Compute, Loop, Step


def test_nested_branches_cost_time_in_proportion_to_their_number():
    """Of 60 levels, each tried anew at all levels around it, there would be 3 ** 60 runs. The longer branch counts."""
    steps: tuple[Step, ...] = ()
    for level in range(60):
        longer = (*steps, Compute(f"c{level}", "other", 2.0, "bytes", ""))
        steps = (Branches(f"b{level}", (longer, (*steps, Compute(f"d{level}", "other", 1.0, "bytes", "")))),)
    result = simulate(steps, lambda _: Priced(0.0, ()))
    assert result.seconds == pytest.approx(2 * 60)
    assert {each.branch and each.branch[0] for each in result.segments} == {f"b{level}" for level in range(60)}


@pytest.mark.parametrize(
    ("share", "shown", "words"),
    [
        (None, ["a", "long", "z"], "counts as always taken; --taken says how often"),
        (1.0, ["a", "long", "z"], "always taken, as chosen"),
        (0.0, ["a", "short", "z"], "always taken, as chosen"),
        (0.1, ["a", "long", "z"], "taken in 10 %, as chosen"),
    ],
)
def test_a_timeline_shows_the_branch_of_a_step_that_takes_it(share, shown, words):
    """10 s in one branch, 2 s in the other: what follows begins where the branch that is shown ends."""
    seconds = {"a": 1.0, "long": 10.0, "short": 2.0, "z": 3.0}
    a, long, short, z = (Compute(name, "other", seconds[name], "bytes", "") for name in seconds)
    steps: tuple[Step, ...] = (a, Branches("c", ((long,), (short,)), share), z)
    events = schedule_events(simulate(steps, lambda _: Priced(0.0, ())).segments, steps, ())
    begins = [sum(seconds[name] for name in shown[:n]) for n in range(3)]
    found = [(each.instruction, each.start_seconds, each.seconds) for each in events]
    assert found == [(name, pytest.approx(begin), seconds[name]) for name, begin in zip(shown, begins, strict=True)]
    assert [each.arguments.get("branch") for each in events] == [None, f"of c, {words}", None]


def test_iterations_that_are_left_out_begin_after_those_that_are_shown_as_taken():
    """Of 5 iterations of 10 s in half of the executions, the first two are shown; the rest take 5 s each."""
    body: tuple[Step, ...] = (Branches("c", ((Compute("x", "other", 10.0, "bytes", ""),), ()), 0.5),)
    result = simulate((Loop("l", 5, body), Compute("z", "other", 1.0, "bytes", "")), lambda _: Priced(0.0, ()))
    assert result.seconds == pytest.approx(5 * 5 + 1)
    found = [(each.name, each.start_seconds, each.seconds) for each in result.segments]
    assert [name for name, _, _ in found] == ["x", "x", "l", "z"]
    assert [begin for _, begin, _ in found] == pytest.approx([0, 10, 20, 40 - 5])
    assert found[2][2] == pytest.approx(3 * 5)
