"""Llama 3 70B with tensor parallelism, compiled: fused microbatches beside parts of the batch that take turns.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/fused.py [--rows TEXT] [--show] [FILE]

All 80 layers, 8,192 tokens: tensor 4 on 256 chips of v5p, tensor 8 on 256 H100. Each row takes some minutes
(compiled_rows.py).
"""

import sys
from pathlib import Path

from compiled_rows import Facts, Overrides, Rows, exposed_over, gib, kept_rows, markdown, run_rows, step_facts

KEPT = Path(__file__).with_suffix(".jsonl")
MODEL: Overrides = (
    "model=llama3_70b", "sharding=fsdp_tensor", "sequence_length=8192", "data=synthetic", "remat=full",
    "num_microbatches=4", "on_out_of_memory=try",
)  # fmt: skip
PLACES: dict[str, Overrides] = {
    "v5p, tensor 4": ("target=v5p-512", "mesh.fsdp=64", "mesh.tensor=4", "global_batch_size=512"),
    "h100, tensor 8": ("target=h100-256", "mesh.fsdp=32", "mesh.tensor=8", "global_batch_size=256"),
}
LOOPS: dict[str, Overrides] = {
    "plain": ("overlap=xla",),
    "batch split": ("overlap=xla", "overlap.layers.batch_split=2"),
    "fused": ("overlap=fused",),
    "fused, batch split": ("overlap=fused", "overlap.layers.batch_split=2"),
}
ROWS: dict[str, Overrides] = {
    f"{place}, {loop}": (*MODEL, *overrides, *how)
    for place, overrides in PLACES.items()
    for loop, how in LOOPS.items()
}  # fmt: skip


def facts_of(report: Facts) -> Facts:
    keys = ("predicted_seconds", "exposed_fraction", "predicted_mfu")
    return {"tensor_exposed_seconds": exposed_over(report, "tensor")} | step_facts(report, *keys)


def table(kept: Rows) -> str:
    columns = ("place, loop", "exposed over tensor", "all exposed", "step", "MFU", "memory of a chip")
    return markdown(columns, (_cells(name, facts) for name, facts in kept_rows(ROWS, kept)))


def _cells(name: str, facts: Facts) -> list[str]:
    share, mfu = (f"{facts[key]:.1%}" for key in ("exposed_fraction", "predicted_mfu"))
    step = f"{facts['predicted_seconds']:.2f} s"
    return [name, f"{facts['tensor_exposed_seconds']:.2f} s", share, step, mfu, f"{gib(facts['peak_bytes'])} GiB"]


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, KEPT, ROWS, facts_of, table))
