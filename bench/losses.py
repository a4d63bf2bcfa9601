"""Trains a small decoder with matmuls of each type, over four seeds, and compares the loss with bfloat16's.

    python bench/losses.py [--rows TEXT] [--minutes N]

A row is a run of 2,000 steps on one simulated device, whose operands are rounded as the type says and multiplied in
float32 (`precision.emulate=true`): its mean training loss over the last 100, and its processor seconds. Rows are kept
in bench/losses.jsonl, so a command that was stopped goes on.
"""

from functools import cache
from pathlib import Path
from typing import Any

from small_runs import SEEDS, Row, compared, median_seconds, names_in_order, programs_of, run_command, train_small

KEPT = Path(__file__).with_suffix(".jsonl")
BASE = "bfloat16"
ROWS: dict[str, tuple[str, ...]] = {
    BASE: ("precision=bfloat16",),
    "fp8": ("precision=fp8", "precision.emulate=true"),
    "int8": ("precision=int8", "precision.emulate=true"),
    "fp8, history 16": (
        "precision=fp8",
        "precision.emulate=true",
        "precision.matmuls=[{match: null, forward: fp8, gradients: fp8_e5m2, history: 16}]",
    ),
    "fp8, the head too": (
        "precision=fp8",
        "precision.emulate=true",
        "precision.matmuls=[{match: head/*, forward: fp8, gradients: fp8_e5m2}, "
        "{match: null, forward: fp8, gradients: fp8_e5m2}]",
    ),
}


@cache
def _programs(name: str) -> Any:
    return programs_of(ROWS[name])


def table(rows: list[Row]) -> str:
    """Returns a row for each type: the loss against bfloat16 of the same seed."""
    lines = ["| precision | loss against bfloat16, seeds 0 to 3 | mean | processor seconds |", "|---|---|---|---|"]
    for name in names_in_order(rows, ROWS):
        shown, mean = compared(rows, name, BASE)
        lines.append(f"| {name} | {shown} | {mean} | {median_seconds(rows, name):.0f} |")
    return "\n".join(lines)


def main() -> None:
    asked = [(name, seed) for seed in SEEDS for name in ROWS]
    run_command(__doc__, KEPT, asked, lambda name, seed: train_small(_programs(name), ROWS[name], seed), table)


if __name__ == "__main__":
    main()
