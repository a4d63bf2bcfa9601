"""The memory of compiled pipelines, against the slots of their tables."""

from functools import cache

import pytest

from conftest import plan_of
from meshloom.compiler.pipeline.buffers import lower_table
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import TickForm
from support.programs import programs_of

pytestmark = pytest.mark.ci

STAGES, LAYERS, SEQUENCES, LENGTH, WIDTH = 2, 2, 4, 128, 32
X = SEQUENCES * LENGTH * WIDTH * 4  # bytes of the input of a layer


@cache
def compiled_bytes(schedule, microbatches):
    """Returns the bytes of a compiled train step besides its arguments. A layer saves its input."""
    plan = plan_of(
        f"target=cpu-{STAGES}", f"mesh.stage={STAGES}", "sharding=ddp", "remat=full", f"pipeline={schedule}",
        "pipeline.ticks=multi", f"num_microbatches={microbatches}", f"global_batch_size={SEQUENCES * microbatches}",
        f"sequence_length={LENGTH}", f"model.embed_dim={WIDTH}", f"model.num_layers={STAGES * LAYERS}",
    )  # fmt: skip
    return programs_of(plan)["train"].memory_analysis().temp_size_in_bytes


def bytes_of_slots(schedule, microbatches):
    """Returns what the buffers of a table hold: the input of a chunk and of each of its layers, and gradients."""
    lowered = lower_table(build_table(schedule, STAGES, 1, microbatches, TickForm.MULTI))
    return X * ((1 + LAYERS) * lowered.num_x + lowered.num_gradients)


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 16), ("gpipe", 8), ("gpipe", 16)])
def test_a_compiled_pipeline_holds_as_much_as_its_slots_say(schedule, microbatches):
    """Against 1F1B of 8 microbatches: as much with twice the microbatches, and more by GPipe, for each of them."""
    more = bytes_of_slots(schedule, microbatches) - bytes_of_slots("1f1b", 8)
    found = compiled_bytes(schedule, microbatches) - compiled_bytes("1f1b", 8)
    assert found == pytest.approx(more, abs=X / 100)  # the table's integers, of more ticks
    # Slots of both buffers: 3 and 1 with 1F1B, and as many as there are microbatches with GPipe.
    assert more == {"1f1b": 0, "gpipe": X * ((1 + LAYERS) * (microbatches - 3) + microbatches - 1)}[schedule]
