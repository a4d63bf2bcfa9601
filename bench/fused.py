"""Llama 3 70B with tensor parallelism, compiled: fused microbatches beside parts of the batch that take turns.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/fused.py [--rows TEXT] [--show] [FILE]

All 80 layers, 8,192 tokens: tensor 4 on 256 chips of v5p, tensor 8 on 256 H100. Each row takes some minutes
(compiled_rows.py).
"""

import sys
from pathlib import Path

from compiled_rows import Facts, Overrides, Rows, gib, make_rows, markdown, parser_of, read_kept, versions_of

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
    step = report["step"]
    over_tensor = [each["exposed_seconds"] for each in report["collectives"] if each["mesh_axes"] == ["tensor"]]
    return {
        "tensor_exposed_seconds": sum(each or 0.0 for each in over_tensor),
        **{key: step[key] for key in ("predicted_seconds", "exposed_fraction", "predicted_mfu")},
        "peak_bytes": report["memory"]["peak_bytes_per_chip"],
        "versions": versions_of(report),
    }


def table(kept: Rows) -> str:
    columns = ("place, loop", "exposed over tensor", "all exposed", "step", "MFU", "memory of a chip")
    found = ((name, kept[overrides]) for name, overrides in ROWS.items() if overrides in kept)
    return markdown(columns, (_cells(name, facts) for name, facts in found))


def _cells(name: str, facts: Facts) -> list[str]:
    share, mfu = (f"{facts[key]:.1%}" for key in ("exposed_fraction", "predicted_mfu"))
    step = f"{facts['predicted_seconds']:.2f} s"
    return [name, f"{facts['tensor_exposed_seconds']:.2f} s", share, step, mfu, f"{gib(facts['peak_bytes'])} GiB"]


def main() -> int:
    given = parser_of(__doc__, KEPT).parse_args()
    num_missing = make_rows(given, ROWS.items(), facts_of)
    print(table(read_kept(given.file)))
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
