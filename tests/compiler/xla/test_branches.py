"""Conditionals within the branches of conditionals."""

import pytest

from meshloom.compiler.xla.schedule.simulate import Priced, simulate
from meshloom.compiler.xla.schedule.steps import Branches, Compute, Step


def test_nested_branches_cost_time_in_proportion_to_their_number():
    """Of 60 levels, each tried anew at all levels around it, there would be 3 ** 60 runs. The longer branch counts."""
    steps: tuple[Step, ...] = ()
    for level in range(60):
        longer = (*steps, Compute(f"c{level}", "other", 2.0, "bytes", ""))
        steps = (Branches(f"b{level}", (longer, (*steps, Compute(f"d{level}", "other", 1.0, "bytes", "")))),)
    result = simulate(steps, lambda _: Priced(0.0, ()))
    assert result.seconds == pytest.approx(2 * 60)
    assert {each.branch for each in result.segments} == {f"b{level}" for level in range(60)}
