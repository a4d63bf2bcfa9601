"""`pipeline.max_bubble`: what it lets through, and what it says of the rest."""

import pytest

from conftest import plan_of
from meshloom.compiler.analysis.lint import TOO_MUCH_BUBBLE, find_too_much_bubble
from meshloom.compiler.core.known import Unknown, each_known
from support import reports

STAGED = ("mesh.stage=2", "num_microbatches=4", "model.num_layers=4")


def waiting(share: float | Unknown):
    seconds = each_known(share, lambda known: 10 * known)
    return reports.fits()[0].compiled.model_copy(update={"bubble_fraction": share, "bubble_seconds": seconds})


def bubble_finding(plan, step):
    return find_too_much_bubble(plan.spec.pipeline.max_bubble, plan.pipeline, step)


def test_only_a_bubble_above_the_limit_is_a_finding():
    plan = plan_of(*STAGED, "pipeline.max_bubble=0.2")
    assert bubble_finding(plan, waiting(0.2)) is None
    assert bubble_finding(plan_of(*STAGED), waiting(0.9)) is None
    found = bubble_finding(plan, waiting(0.21))
    assert found is not None
    assert found.rule == TOO_MUCH_BUBBLE
    assert "21.0 %" in found.what
    assert "num_microbatches=4" in found.fix


def test_a_bubble_that_is_not_known_does_not_meet_a_limit():
    found = bubble_finding(plan_of(*STAGED, "pipeline.max_bubble=0.2"), waiting(Unknown("no table")))
    assert found is not None
    assert "not known" in found.what


@pytest.mark.parametrize("setting", ["schedule=gpipe", "max_bubble=0.1"])
def test_a_setting_without_stages_is_told(setting):
    plan = plan_of(f"pipeline.{setting}")
    assert [problem.where for problem in plan.warnings] == [f"pipeline.{setting.split('=')[0]}"]
    assert bubble_finding(plan, waiting(0.9)) is None
