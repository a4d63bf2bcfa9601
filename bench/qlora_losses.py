"""Trains adapters over a base in few bits and over the base as it is, and compares the losses.

    python bench/qlora_losses.py [--rows TEXT] [--minutes N]

A base is the small decoder of small_runs.py, trained for 2,000 steps on synthetic text; adapters are trained over it
for 500 steps on the source of Python's standard library, from the weights of its run. A row is the mean training loss
over the last 100 steps. Rows are kept in bench/qlora_losses.jsonl, so a command that was stopped goes on.
"""

import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from small_runs import NUM_LAST, OVERRIDES, Row, compared, names_in_order, run_command

import meshloom

KEPT = Path(__file__).with_suffix(".jsonl")
BASE = "lora"
NUM_STEPS, SEEDS = 500, (0, 1)
END_ALONE = f"checkpoint.every_num_steps={10**6}"
INT8 = "adapter.base={element: int8, block: null, scales_block: null}"
ROWS: dict[str, tuple[str, ...]] = {
    BASE: ("adapter=lora",),
    "qlora (NF4, 64, 256)": ("adapter=qlora",),
    "lora over int8": ("adapter=lora", INT8),
}


def run(place: Path, name: str, seed: int) -> Row:
    """Returns a row. place: a folder for the runs; the base of a seed is trained once."""
    base, common = place / f"base{seed}", (*OVERRIDES, f"seed={seed}", "checkpoint=every_100", END_ALONE)
    if not base.exists():
        meshloom.train(*common, "data=synthetic", run_dir=base)
    started = time.process_time()
    words = (*common, "data=python_stdlib", f"num_steps={NUM_STEPS}", f"checkpoint.weights_from={base}", *ROWS[name])
    trained = meshloom.train(*words, run_dir=place / f"{name.split()[0]}{len(os.listdir(place))}")
    last = float(np.mean(trained.losses[-NUM_LAST:]))
    return {"seed": seed, "loss": last if math.isfinite(last) else None,
            "processor_seconds": round(time.process_time() - started, 1)}  # fmt: skip


def table(rows: list[Row]) -> str:
    """Returns a row for each base: the loss against adapters over the base as it is."""
    lines = ["| adapter | loss against LoRA, seed by seed | mean |", "|---|---|---|"]
    lines += [f"| {name} | {' | '.join(compared(rows, name, BASE))} |" for name in names_in_order(rows, ROWS)]
    return "\n".join(lines)


def main() -> None:
    asked = [(name, seed) for seed in SEEDS for name in ROWS]
    with tempfile.TemporaryDirectory() as place:
        run_command(__doc__, KEPT, asked, lambda name, seed: run(Path(place), name, seed), table)


if __name__ == "__main__":
    main()
