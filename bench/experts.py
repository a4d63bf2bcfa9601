"""Mixtral 8x7B on a v5p-128, Qwen 3 30B-A3B on a v6e-256 and DeepSeek-V3 on a v5p-2048, compiled: what of their
exchanges stays exposed.

    pip install -e '.[tpu]' && python bench/experts.py [--rows TEXT] [--show] [FILE]

Two of their layers with experts, as all are alike; each row takes some four minutes. What was found is kept in FILE
(bench/experts.jsonl), a line for each, so that a run that was stopped goes on where it was. Prints a table in Markdown.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from compiled_rows import Overrides, add_row, read_kept

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


def facts_of(report: dict[str, Any]) -> dict[str, Any]:
    step, build = report["step"], report["build"]
    exchanged = [each["exposed_seconds"] for each in report["collectives"] if each["mesh_axes"] == ["expert"]]
    return {
        "exchange_exposed_seconds": sum(exchanged),
        "predicted_seconds": step["predicted_seconds"],
        "exposed_fraction": step["exposed_fraction"],
        "predicted_mfu": step["predicted_mfu"],
        "peak_bytes": report["memory"]["peak_bytes_per_chip"],
        "versions": f"jax {build['jax']}, {build['plugin']}",
    }


def table_row(name: str, facts: dict[str, Any]) -> str:
    cells = (name, f"{facts['exchange_exposed_seconds'] * 1e3:.1f} ms", f"{facts['predicted_seconds'] * 1e3:.0f} ms",
             f"{facts['exposed_fraction']:.1%}", f"{facts['predicted_mfu']:.1%}",
             f"{facts['peak_bytes'] / 2**30:.1f} GiB")  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="exchanges of experts, compiled")
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--rows", default="", help="only those with this text in their name")
    parser.add_argument("--show", action="store_true", help="only print the results that are kept")
    arguments = parser.parse_args()
    rows = {name: overrides for name, overrides in ROWS.items() if arguments.rows in name}
    for name, overrides in rows.items():
        if not arguments.show and overrides not in read_kept(arguments.file):
            print(f"compiling: {name}", file=sys.stderr, flush=True)
            add_row(arguments.file, name, overrides, facts_of)
    kept = read_kept(arguments.file)
    print("| exchange | exchanges exposed | step | all exposed | MFU | peak |\n|---|---|---|---|---|---|")
    for name, overrides in rows.items():
        if overrides in kept:
            print(table_row(name, kept[overrides]))


if __name__ == "__main__":
    main()
