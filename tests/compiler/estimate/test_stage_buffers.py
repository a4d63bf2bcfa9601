"""Buffers of a pipeline's stages: bytes of their slots by the shapes of the model, slots in use by hand."""

import io
import re
from functools import partial

import pytest

from conftest import plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.stage_buffers import StageBuffer, bytes_in_use
from meshloom.compiler.parallel.stage_times import x_bytes
from meshloom.compiler.report.explain import explain
from meshloom.compiler.report.views.page import render_page
from meshloom.compiler.schema import PipelineReport, StageBufferReport
from meshloom.compiler.step import train_step
from support import reports
from support.programs import schedule_of

STAGES, LAYERS, SEQUENCES, LENGTH, WIDTH = 2, 2, 4, 128, 32
X = SEQUENCES * LENGTH * WIDTH * 4  # bytes of the input of a layer


def buffers_of(*overrides):
    plan = plan_of(
        f"target=cpu-{STAGES}", f"mesh.stage={STAGES}", "sharding=ddp", "remat=full", "num_microbatches=8",
        f"global_batch_size={SEQUENCES * 8}", f"sequence_length={LENGTH}", f"model.embed_dim={WIDTH}",
        f"model.num_layers={STAGES * LAYERS}", *overrides,
    )  # fmt: skip
    estimate = estimate_step(plan)
    return plan, estimate, {each.name: each for each in estimate.stage_buffers}


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(("schedule", "in_use", "gradients"), [("1f1b", (3, 1), (1, 1)), ("gpipe", (8, 8), (1, 8))])
def test_slots_hold_inputs_of_chunks_and_of_layers(schedule, in_use, gradients):
    """With remat=full a layer saves its input alone. In 1F1B the first stage has a microbatch under way on the second
    one, there and back; in GPipe the last stage makes the gradients of all microbatches before it needs one."""
    _, _, found = buffers_of(f"pipeline={schedule}", "pipeline.ticks=multi")
    assert found == {
        "x": StageBuffer("x", max(in_use) + 1, X, in_use),
        "gradient": StageBuffer("gradient", max(gradients) + 1, X, gradients),
        "saved": StageBuffer("saved", max(in_use), LAYERS * X, in_use),
    }
    used = tuple((1 + LAYERS) * X * slots + X * of_results for slots, of_results in zip(in_use, gradients, strict=True))
    assert bytes_in_use(tuple(found.values())) == used


@pytest.mark.ci
def test_slots_are_split_as_the_partitioner_splits_what_is_in_them():
    """Tensor parallelism splits the length between layers."""
    tensor = ("sharding=fsdp_tensor", "mesh.tensor=2", f"target=cpu-{2 * STAGES}")
    plan, _, found = buffers_of(*tensor, "pipeline=1f1b", "pipeline.ticks=multi")
    assert {name: each.slot_bytes for name, each in found.items()} == {
        "x": X // 2, "gradient": X // 2, "saved": LAYERS * X // 2,
    }  # fmt: skip
    assert x_bytes(plan.sharding) == X // 2


@pytest.mark.ci
def test_sums_over_tensor_are_kept_in_shards_as_without_stages():
    """Both matmuls that contract what tensor splits return the length in shards; `minimal` saves one of them."""
    tensor = ("sharding=fsdp_tensor", "mesh.tensor=2", "remat=minimal")
    _, _, staged = buffers_of(*tensor, f"target=h100-{2 * STAGES}", "pipeline=1f1b", "pipeline.ticks=multi")
    whole = plan_of(
        *tensor, "target=h100-2", f"global_batch_size={SEQUENCES}", f"sequence_length={LENGTH}",
        f"model.embed_dim={WIDTH}", f"model.num_layers={LAYERS}",
    )  # fmt: skip
    assert staged["saved"].slot_bytes == estimate_step(whole).memory.activations


@pytest.mark.ci
@pytest.mark.parametrize("layers", [4, 5])  # alike on both stages; in five, one has a layer more
def test_slots_in_loops_of_one_trip_are_estimated_as_conditionals(layers, monkeypatch):
    plan = plan_of(
        "target=h100-4", "mesh.stage=2", "mesh.fsdp=2", "sharding=fsdp", "num_microbatches=4", "overlap=xla",
        f"model.num_layers={layers}",
    )  # fmt: skip
    pipeline = plan.pipeline
    assert pipeline is not None

    def estimated(*, by_loops):
        monkeypatch.setattr(train_step, "choose_schedule", partial(schedule_of, pipeline.table, by_loops=by_loops))
        found = estimate_step(plan)
        assert found.figures.step_seconds
        return found.memory.peak_bytes, found.figures.step_seconds, found.figures.bubble_seconds, found.communication

    memory, seconds, bubble, communication = estimated(by_loops=True)
    expected = estimated(by_loops=False)
    assert memory == pytest.approx(expected[0], rel=0.01)
    assert (seconds, bubble) == pytest.approx(expected[1:3], rel=1e-3)
    assert communication == expected[3]


def test_the_report_and_its_page_show_buffers_by_stage():
    """The page shows the first four and the last four of twelve stages."""
    buffers = tuple(
        StageBufferReport(name=name, what="of " + name, num_slots=12, slot_bytes=2**20, in_use_by_stage=tuple(
            range(12, 0, -1))) for name in ("x", "saved"))  # fmt: skip
    pipeline = PipelineReport(
        schedule="1f1b", num_stages=12, num_microbatches=24, in_flight_by_stage=tuple(range(12, 0, -1)),
        buffers=buffers, bytes_allocated=24 * 2**20, bytes_in_use_by_stage=tuple(2**21 * n for n in range(12, 0, -1)),
    )  # fmt: skip
    plan, _, _ = buffers_of("pipeline=1f1b", "pipeline.ticks=multi")
    report, events = reports.fits()
    page = render_page(report.model_copy(update={"pipeline": pipeline}), events, plan)
    assert re.findall(r"stage (\d+) uses", page) == ["0", "1", "2", "3", "8", "9", "10", "11"]
    assert "Stages 4 to 7 are left out" in page
    assert '<td class="num"><b>24.0 MiB</b></td><td class="num"><b>24.0 MiB</b></td>' in page
    assert page.count("of saved</td>") == 1


def test_what_waits_for_gradients_of_weights_is_a_buffer_that_later_stages_use_more():
    """Stage s of ZB-H1 lets s gradients of weights wait, and one is made."""
    plan, estimate, found = buffers_of("pipeline=zb_h1", "pipeline.ticks=unit")
    assert found["cut"].in_use == (1, 2)
    assert found["cut"].slot_bytes > 10 * LAYERS * X
    told = io.StringIO()
    explain(plan, Console(told, width=200), estimate)
    assert "cut, what gradients of inputs leave to those of weights: 2 slots of" in told.getvalue()
    assert "in use by stage: 1, 2" in told.getvalue()
