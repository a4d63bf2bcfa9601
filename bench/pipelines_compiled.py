"""Pipelines of four stages, compiled with each schedule: bubble, exposed communication, memory and time of a step.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/pipelines_compiled.py [--rows TEXT] [--show]

Llama 3 70B with all 80 layers, 8,192 tokens, on 128 chips of v5p, on 256 H100, and on four slices of v5p with a stage
on each, whose activations go over the data-center network; and a cut of Llama 3 405B as it ran on 8,192 H100: its
layers, eight on a stage, but 4 stages instead of 16 and 2 replicas instead of 64. Last, layers of Llama 3 8B without
recomputation, two on a stage, on 8 chips of v5p. Each row takes some minutes (compiled_rows.py).
"""

import sys
from pathlib import Path

from compiled_rows import Facts, Overrides, Rows, gib, kept_rows, markdown, run_rows, step_facts

KEPT = Path(__file__).with_suffix(".jsonl")
MODEL: Overrides = (
    "model=llama3_70b", "sharding=fsdp_tensor", "sequence_length=8192", "data=synthetic", "remat=full",
    "mesh.stage=4", "overlap=xla", "on_out_of_memory=try",
)  # fmt: skip
PLACES: dict[str, Overrides] = {
    "v5p": ("target=v5p-256", "mesh.fsdp=8", "mesh.tensor=4"),
    "h100": ("target=h100-256", "mesh.fsdp=8", "mesh.tensor=8"),
    "over DCN": ("target=v5p-64", "target.num_slices=4", "mesh.fsdp=8", "mesh.tensor=4"),
}
CUT: Overrides = (
    "model=llama3_405b", "model.num_layers=32", *MODEL[1:], "target=h100-64", "mesh.fsdp=2", "mesh.tensor=8",
    "num_microbatches=16", "global_batch_size=32",
)  # fmt: skip
SAVED: Overrides = (
    "model=llama3_8b", "model.num_layers=8", "model.vocab_size=8192", "sharding=fsdp", "sequence_length=4096",
    "data=synthetic", "remat=none", "mesh.stage=4", "mesh.fsdp=2", "overlap=xla", "on_out_of_memory=try",
    "target=v5p-16", "num_microbatches=16", "global_batch_size=32",
)  # fmt: skip
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v", "gpipe", "zb_h1", "dualpipe_v")
MICROBATCHES = (16,)
ROWS: dict[str, Overrides] = {
    f"{place}, {schedule}, {number}": (
        *MODEL, *overrides, f"pipeline={schedule}", f"num_microbatches={number}", f"global_batch_size={8 * number}",
    )
    for number in MICROBATCHES
    for schedule in SCHEDULES
    for place, overrides in PLACES.items()
} | {
    "h100, cut of 405B, 1f1b, 16": (*CUT, "pipeline=1f1b"),
    "h100, cut of 405B, interleaved_1f1b of 8 chunks, 16": (*CUT, "pipeline=interleaved_1f1b", "pipeline.num_chunks=8"),
} | {
    f"v5p, 8B without recomputation, {schedule} in {form} ticks, 16": (
        *SAVED, f"pipeline={schedule}", f"pipeline.ticks={form}",
    )
    for schedule, form in (("1f1b", "multi"), ("1f1b", "unit"), ("zb_h1", "unit"), ("zb_h2", "multi"), ("zb_v", "unit"))
}  # fmt: skip


def facts_of(report: Facts) -> Facts:
    return step_facts(report, "predicted_seconds", "exposed_fraction", "bubble_fraction", "predicted_mfu")


def table(kept: Rows) -> str:
    columns = ("place, schedule, microbatches", "bubble", "exposed", "step", "MFU", "memory of a chip")
    return markdown(columns, (_cells(name, facts) for name, facts in kept_rows(ROWS, kept)))


def _cells(name: str, facts: Facts) -> list[str]:
    memory = f"{gib(facts['peak_bytes'])} GiB"
    if facts["predicted_seconds"] is None:  # the TPU compiler gives no program that does not fit
        return [name, *["not compiled"] * 4, memory]
    bubble, exposed, mfu = (f"{facts[key]:.1%}" for key in ("bubble_fraction", "exposed_fraction", "predicted_mfu"))
    return [name, bubble, exposed, f"{facts['predicted_seconds']:.2f} s", mfu, memory]


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, KEPT, ROWS, facts_of, table))
