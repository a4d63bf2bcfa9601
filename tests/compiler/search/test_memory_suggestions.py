"""What makes a step fit, against the compiled program's own memory."""

from functools import cache

import pytest

from conftest import SMALL
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.search.candidates import UNTIMED, suggest_changes
from support.programs import programs_of

LONG = (*SMALL, "sequence_length=256", "global_batch_size=16", "model.num_layers=4")


@cache  # tests change the same declarations
def planned(*overrides: str) -> Plan[RunSpec]:
    return read_spec(Request((*LONG, *overrides)), then=plan_run)


def compiled_bytes(plan: Plan[RunSpec]) -> int:
    stats = programs_of(plan)["train"].memory_analysis()
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes


def seconds_of(plan: Plan[RunSpec]) -> float:
    return (estimate_step(plan).figures.step_seconds or 0.0) / plan.spec.tokens_per_step


def test_the_cheapest_that_fits_comes_first():
    """Neither changes what is trained, so that nothing that does is suggested."""
    plan = planned("target=h100-8")
    needed = estimate_step(plan).memory.peak_bytes
    changes = suggest_changes(plan, needed, needed - 1000, lambda more: planned("target=h100-8", *more))
    assert [change.overrides for change in changes] == [("remat=minimal",), ("num_microbatches=2",)]
    assert all(change.fits for change in changes)
    own = seconds_of(plan)
    slower = [seconds_of(planned("target=h100-8", *each.overrides)) / own - 1 for each in changes]
    assert [change.slower_fraction for change in changes] == pytest.approx(slower)
    assert slower == sorted(slower)


@pytest.mark.ci
def test_the_time_of_fewer_tokens_is_that_of_a_token():
    plan = planned("target=h100-8")
    changes = suggest_changes(plan, 2**40, 0, lambda more: planned("target=h100-8", *more))
    slower = {change.overrides: change.slower_fraction for change in changes}
    half = seconds_of(planned("target=h100-8", "global_batch_size=8"))
    assert slower[("global_batch_size=8",)] == pytest.approx(half / seconds_of(plan) - 1)
    assert half > seconds_of(plan)


@pytest.mark.ci
def test_without_the_times_of_a_target_changes_come_in_the_order_of_what_they_cost():
    plan = planned()
    needed = estimate_step(plan).memory.peak_bytes
    changes = suggest_changes(plan, needed, needed - 1000, lambda more: planned(*more))
    assert [change.overrides for change in changes] == [("remat=minimal",), ("num_microbatches=2",)]
    assert {change.slower_fraction for change in changes} == {Unknown(UNTIMED)}


@pytest.mark.ci
def test_where_no_change_is_enough_several_are():
    """A limit that is just above what all single changes leave."""
    plan = planned()
    needed = estimate_step(plan).memory.peak_bytes
    singles = suggest_changes(plan, needed, 0, lambda more: planned(*more))
    assert not any(change.fits for change in singles)
    limit = needed - max(change.saved_bytes for change in singles) - 1
    together, *others = suggest_changes(plan, needed, limit, lambda more: planned(*more))
    assert together.fits
    assert len(together.overrides) > 1
    assert tuple(others) == singles
    assert estimate_step(planned(*together.overrides)).memory.peak_bytes == needed - together.saved_bytes <= limit


@pytest.mark.ci
def test_what_is_promised_is_saved_in_the_compiled_program():
    plan = planned()
    before = compiled_bytes(plan)
    for change in suggest_changes(plan, 2**40, 0, lambda more: planned(*more))[:2]:
        assert compiled_bytes(planned(*change.overrides)) < before, change


@pytest.mark.ci
def test_a_change_that_the_declaration_does_not_allow_is_left_out():
    plan = planned("optimizer.b2=0.999", "remat=full")
    changes = suggest_changes(plan, 2**40, 0, lambda more: planned("remat=full", "optimizer.b2=0.999", *more))
    offered = [change.overrides for change in changes]
    assert ("optimizer.moment_dtype=bfloat16",) not in offered
    assert ("remat=full",) not in offered
    assert ("optimizer=adafactor",) not in offered, "b2 is no key of it"
