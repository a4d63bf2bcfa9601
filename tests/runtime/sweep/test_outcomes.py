"""The figures of one point of a sweep, from its estimate."""

from dataclasses import replace

import pytest

from conftest import plan_of
from meshloom.compiler.estimate.estimate import estimate_declared, time_figures
from meshloom.compiler.estimate.step_time import StepTime
from meshloom.runtime.sweep.outcomes import outcome_of_plan


@pytest.mark.parametrize(("bubble", "seconds"), [(None, 2.5), (0.5, 3.0)])
def test_a_points_step_is_compute_exposed_and_bubble(bubble, seconds):
    plan = plan_of("target=v5p-8", "precision=bfloat16", "sharding.on_replicated=allow")
    estimate = estimate_declared(plan)
    given = estimate.figures.model_copy(update=time_figures(plan.target, StepTime(2.0, {("stage",): 0.5}, bubble)))
    figures = outcome_of_plan(plan, replace(estimate, figures=given), None).figures
    assert figures is not None
    assert figures.step_seconds == seconds
    assert (figures.compute_seconds, figures.exposed_seconds, figures.bubble_seconds) == (2.0, 0.5, bubble or 0.0)
