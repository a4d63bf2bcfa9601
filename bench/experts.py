"""Mixtral 8x7B on a v5p-128, Qwen 3 30B-A3B on a v6e-256 and DeepSeek-V3 on a v5p-2048, compiled: what of their
exchanges stays exposed.

    pip install -e '.[tpu]' && python bench/experts.py [--rows TEXT] [--show] [FILE]

Two of their layers with experts, as all are alike; each row takes some four minutes (compiled_rows.py).
"""

import sys
from pathlib import Path

from compiled_rows import Facts, Overrides, Rows, exposed_over, gib, kept_rows, markdown, run_rows, step_facts

KEPT = Path(__file__).with_suffix(".jsonl")
COMMON = ("sharding=fsdp_expert", "moe.max_imbalance=2", "data=synthetic", "remat=full", "overlap=prefetch")
MIXTRAL: Overrides = (
    "model=mixtral_8x7b", "model.num_layers=2", "target=v5p-128", "sharding=fsdp_expert", "mesh.fsdp=16",
    "mesh.expert=4", "moe.max_imbalance=2", "global_batch_size=256", "sequence_length=2048", "data=synthetic",
    "remat=full", "overlap=prefetch",
)  # fmt: skip
QWEN3: Overrides = (
    "model=qwen3_30b_a3b", "model.num_layers=2", "target=v6e-256", "mesh.fsdp=32", "mesh.expert=8",
    "global_batch_size=512", "sequence_length=4096", *COMMON,
)  # fmt: skip
DEEPSEEK: Overrides = (  # a dense layer and two with experts
    "model=deepseek_v3", "model.num_layers=3", "model.num_dense_layers=1", "target=v5p-2048", "mesh.fsdp=32",
    "mesh.expert=32", "global_batch_size=4096", "sequence_length=4096", *COMMON,
)  # fmt: skip
CHUNKS: Overrides = ("overlap.flag_presets=[sparse_core,async_exchange]", "moe.num_chunks=2")
HALVES: Overrides = (  # of a device's sequences, in place of chunks of its tokens
    "overlap.flag_presets=[sparse_core,async_exchange]", "overlap.layers.batch_split=2",
)  # fmt: skip
ROWS: dict[str, Overrides] = {
    "ragged": (*MIXTRAL, "overlap.flag_presets=[sparse_core]", "parallel.experts=ragged"),
    "ragged, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=ragged"),
    "padded, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=padded"),
    "gathered, 2 chunks": (*MIXTRAL, *CHUNKS, "parallel.experts=gathered"),
    "qwen3, gathered": (*QWEN3, *CHUNKS, "parallel.experts=gathered"),
    "deepseek, gathered": (*DEEPSEEK, *CHUNKS, "parallel.experts=gathered"),
    "deepseek, gathered, batch split": (*DEEPSEEK, *HALVES, "parallel.experts=gathered"),
}  # fmt: skip


def facts_of(report: Facts) -> Facts:
    keys = ("predicted_seconds", "exposed_fraction", "predicted_mfu")
    return {"exchange_exposed_seconds": exposed_over(report, "expert")} | step_facts(report, *keys)


def table(kept: Rows) -> str:
    columns = ("exchange", "exchanges exposed", "step", "all exposed", "MFU", "peak")
    return markdown(columns, (_cells(name, facts) for name, facts in kept_rows(ROWS, kept)))


def _cells(name: str, facts: Facts) -> list[str]:
    exchanged, step = facts["exchange_exposed_seconds"], facts["predicted_seconds"]
    shares = [f"{facts[key]:.1%}" for key in ("exposed_fraction", "predicted_mfu")]
    return [name, f"{exchanged * 1e3:.1f} ms", f"{step * 1e3:,.0f} ms", *shares, f"{gib(facts['peak_bytes'])} GiB"]


if __name__ == "__main__":
    sys.exit(run_rows(__doc__, KEPT, ROWS, facts_of, table))
