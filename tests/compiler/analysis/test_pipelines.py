"""What a report says of a compiled pipeline: the bubble beside compute and exposed communication."""

import pytest

from conftest import plan_of
from meshloom.compiler.analysis import compiled_step
from meshloom.compiler.analysis.program_devices import ProgramDevices, stages_of
from meshloom.compiler.analysis.schedule_analysis import NOTHING_DECLARED, Declared, analyse_program
from meshloom.compiler.target.placement import plan_own_order
from meshloom.compiler.xla.hlo import HloError, parse_module
from meshloom.compiler.xla.schedule.stage_clocks import StagedDevices
from support.pipelines import DEVICES, GPIPE, ONE_F_ONE_B, STAGES, Rows
from support.programs import target_of
from support.recorded import recorded_text

NO_PIPELINE = NOTHING_DECLARED


def declared(rows: Rows) -> Declared:
    stages = StagedDevices(rows, [0] * STAGES, DEVICES, len(DEVICES))
    return Declared(
        NO_PIPELINE.paths, NO_PIPELINE.planned, NO_PIPELINE.work, NO_PIPELINE.ops, NO_PIPELINE.kinds, stages
    )


def devices() -> ProgramDevices:
    return ProgramDevices(plan_own_order(target_of("v5p:2x2x2")))


@pytest.mark.parametrize(("name", "rows"), [("1f1b", ONE_F_ONE_B), ("gpipe", GPIPE)])
def test_compute_exposed_and_bubble_are_the_step(name, rows):
    module = parse_module(recorded_text(f"pipeline_{name}"))
    found = analyse_program(module, devices(), declared(rows))
    step = found.step
    assert step.step_seconds
    parts = (step.compute_seconds, step.exposed_seconds, step.bubble_seconds)
    assert sum(part or 0.0 for part in parts) == pytest.approx(step.step_seconds)
    assert step.bubble_fraction == pytest.approx((step.bubble_seconds or 0.0) / step.step_seconds)
    assert 0.1 < (step.bubble_fraction or 0.0) < 3 / 11, "of the slots alone it would be 3 / 11"
    whole = analyse_program(module, devices()).step
    assert (whole.bubble_seconds, whole.bubble_fraction) == (0, 0)
    assert (whole.step_seconds or 0.0) > 1.1 * step.step_seconds
    waits = {each.name: each.seconds for each in found.events if each.kind == "bubble"}
    assert set(waits) == {"waits for other stages"}
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    wanted = "once" if name == "1f1b" else "in a branch of conditional.9 (taken in 36.4 %, by the pipeline's table)"
    assert gathers[0].where.endswith(wanted)
    assert {each.confidence for each in found.collectives} == {"high"}


def test_other_ticks_than_the_programs_are_an_error():
    with pytest.raises(HloError, match="has 22 ticks"):
        analyse_program(parse_module(recorded_text("pipeline_1f1b")), devices(), declared(GPIPE))


def test_the_stage_of_a_device_is_its_place_on_the_mesh():
    sizes = {"data": 1, "stage": 2, "fsdp": 2, "tensor": 1}
    assert stages_of(sizes) == (0, 0, 1, 1)
    assert stages_of(sizes, (3, 1, 2, 0)) == (1, 0, 1, 0)
    assert stages_of({"replica": 2, "stage": 2}) == (0, 1, 0, 1)


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
