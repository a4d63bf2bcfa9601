"""1F1B beside GPipe, compiled for v5p: how much more memory a chip takes, by the slots of the tables and compiled.

    pip install -e '.[tpu]' && python bench/pipelines_memory.py [--rows TEXT] [--show] [FILE]

Four layers of width 512 over four stages of two chips, 2,048 tokens, full remat: a slot holds the input of a chunk and
that of its one layer, or a gradient of the chunk's result. Each row takes some minutes (compiled_rows.py).
"""

import sys
from pathlib import Path

from compiled_rows import Facts, Overrides, Rows, kept_rows, markdown, run_rows, step_facts

from meshloom.compiler.pipeline.buffers import LoweredTable, lower_table
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.ticks import TickForm

KEPT = Path(__file__).with_suffix(".jsonl")
STAGES, WIDTH, LENGTH, SEQUENCES = 4, 512, 2048, 2  # sequences of a microbatch on a chip
MODEL: Overrides = (
    "model=tiny", f"model.embed_dim={WIDTH}", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=128",
    "model.mlp_dim=1024", "target=v5p-16", f"mesh.stage={STAGES}", "mesh.fsdp=2", "sharding=fsdp", "data=synthetic",
    "remat=full", "overlap=xla", f"sequence_length={LENGTH}",
)  # fmt: skip
SHAPES = {f"{schedule}, {number}": (schedule, number) for schedule in ("1f1b", "gpipe") for number in (8, 16)}
ROWS: dict[str, Overrides] = {
    name: (
        *MODEL, f"pipeline={schedule}", "pipeline.ticks=multi", f"num_microbatches={number}",
        f"global_batch_size={2 * SEQUENCES * number}",
    )
    for name, (schedule, number) in SHAPES.items()
}  # fmt: skip
X = SEQUENCES * LENGTH * WIDTH * 2  # bytes of the input of a layer, in bfloat16


def _lowered(name: str) -> LoweredTable:
    schedule, number = SHAPES[name]
    return lower_table(build_table(schedule, STAGES, 1, number, TickForm.MULTI))


def _bytes_of_slots(name: str) -> int:
    return X * (2 * _lowered(name).num_x + _lowered(name).num_gradients)


def table(kept: Rows) -> str:
    found = dict(kept_rows(ROWS, kept))
    first = next(iter(found), "")
    columns = (
        "schedule, microbatches", "slots of inputs, gradients", "memory of a chip", f"more than {first}, by slots",
        "compiled",
    )  # fmt: skip
    return markdown(columns, (_cells(name, facts, first, found[first]) for name, facts in found.items()))


def _cells(name: str, facts: Facts, first: str, of_first: Facts) -> list[str]:
    lowered, peak = _lowered(name), facts["peak_bytes"]
    more = _bytes_of_slots(name) - _bytes_of_slots(first), peak - of_first["peak_bytes"]
    slots = f"{lowered.num_x}, {lowered.num_gradients}"
    return [name, slots, *(f"{each / 2**20:.1f} MiB" for each in (peak, *more))]


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, KEPT, ROWS, step_facts, table))
