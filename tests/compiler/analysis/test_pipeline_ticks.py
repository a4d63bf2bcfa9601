"""The ticks that the reading of a compiled pipeline takes from the plan."""

from conftest import plan_of
from meshloom.compiler.analysis import compiled_step
from support.recorded import recorded_text


def test_a_program_is_read_by_the_ticks_and_the_stages_of_its_plan(monkeypatch):
    """In a V of 4 stages the first chunk of stage s is virtual stage s, and the second one 7 - s."""
    given = []
    monkeypatch.setattr(compiled_step, "analyse_schedule", lambda *_, stages: given.append(stages))
    words = ("pipeline=zb_v", "mesh.stage=4", "mesh.fsdp=2", "num_microbatches=8", "model.num_layers=8")
    plan = plan_of(*words)
    compiled_step.read_text(recorded_text("pipeline_shared"), plan, ())
    compiled_step.read_text(recorded_text("pipeline_shared"), plan_of(), ())
    staged, without = given
    assert without is None
    assert plan.pipeline is not None
    assert list(staged.kinds) == [0] * 8
    assert list(staged.stage_of) == [0, 0, 1, 1, 2, 2, 3, 3], "stage is the slower axis of the mesh"
    for row, slots_of in zip(staged.rows, plan.pipeline.table.rows, strict=True):
        for stage, (read, slots) in enumerate(zip(row, slots_of, strict=True)):
            assert list(read) == [(str(each.op), 7 - stage if each.chunk else stage) for each in slots]
