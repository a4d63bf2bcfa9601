"""Candidates of all searches are declarations: what one search says of its own is what the estimate says of it."""

import pytest

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_declared, estimate_step
from meshloom.compiler.search.candidates import Candidate, applied, estimate_allowed, overlap_candidates
from meshloom.compiler.tune.answer import estimate_spec
from meshloom.compiler.tune.space import Variant, find_candidates

DECLARED = (*SMALL, *LINEAR_STACK, "precision=bfloat16", "target=h100-16", "sharding=fsdp", "global_batch_size=32")


def replan(more: tuple[str, ...]):
    return read_spec(Request((*DECLARED, *more)), then=plan_run)


def test_a_candidate_of_a_space_is_what_its_overrides_declare():
    candidates, _ = find_candidates([Variant((("remat", "full"),), replan(("remat=full",)).spec)])
    found = estimate_allowed(candidates[-1], replan)
    assert found is not None
    assert found[1] == estimate_spec(candidates[-1].spec()).figures


@pytest.mark.ci
def test_a_candidate_of_overlap_search_is_what_its_overrides_declare():
    plan = replan(())
    for one in overlap_candidates(plan, estimate_declared(plan))[:3]:
        found = estimate_allowed(one, replan)
        assert found is not None
        assert found[1] == estimate_step(plan_run(applied(one.way, plan.spec))).figures


def test_a_candidate_that_the_declaration_does_not_allow_has_no_figures():
    assert estimate_allowed(Candidate(("global_batch_size=33",)), replan) is None
