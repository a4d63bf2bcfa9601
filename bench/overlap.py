"""Compares what `overlap=none`, `xla` and `auto` expose of a step, and its predicted time, by one simulator.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/overlap.py [--rows TEXT] [--layers 2] [FILE]

Each row is compiled by the command for hardware that need not be there: minutes for each program. What was found is
kept in FILE (bench/overlap.jsonl), a line for each compile, and not compiled again, so that a run that was stopped goes
on where it was. --layers cuts every model: the table in minutes, for a look. Prints a table in Markdown.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_rows import NOT_COMPILED, add_row, read_kept
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshloom.compiler.schema import TriedReport

KEPT = Path(__file__).with_suffix(".jsonl")
ALIKE = ("remat=full", "precision.gradient_reduction=bfloat16", "data=synthetic")
TENSOR_4 = ("sharding=fsdp_tensor", "mesh.tensor=4")
MODES = ("none", "xla", "auto")


@dataclass(frozen=True)
class Row:
    """sequences: of one chip. num_candidates: that auto compiles at most."""

    model: str
    target: str
    num_chips: int
    sequences: int
    length: int
    sharding: tuple[str, ...] = ("sharding=fsdp",)
    others: tuple[str, ...] = ()
    num_candidates: int = 4

    @property
    def name(self) -> str:
        split = "FSDP + tensor 4" if self.sharding == TENSOR_4 else "FSDP"
        return f"{self.model}, {self.target}, {split}, {self.sequences} x {self.length}"

    def overrides(self, mode: str, layers: int | None) -> tuple[str, ...]:
        search = (f"overlap.search.max_candidates={self.num_candidates}",) if mode == "auto" else ()
        cut = (f"model.num_layers={layers}",) if layers else ()
        return (f"model={self.model}", f"target={self.target}", *self.sharding, *ALIKE, *self.others, *cut,
                f"global_batch_size={self.sequences * self.num_chips}", f"sequence_length={self.length}",
                f"overlap={mode}", *search)  # fmt: skip


ROWS = (
    Row("llama2_7b", "v5e-256", 256, 4, 4096),
    Row("llama3_8b", "v5p-128", 64, 4, 4096),
    Row("llama3_8b", "v6e-64", 64, 4, 4096),
    Row("llama3_8b", "h100-64", 64, 2, 4096, num_candidates=12),
    Row("llama3_70b", "v5p-512", 256, 2, 4096),
    Row("llama3_70b", "v5p-512", 256, 2, 4096, TENSOR_4),
    Row("llama3_70b", "h100-512", 512, 2, 4096, num_candidates=12),
    # 16,384 tokens of a chip hide the matrices that cross meanwhile, 512 nearly, 128 cannot
    Row("linear_stack", "v5p-128", 64, 4, 4096, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("linear_stack", "v5p-128", 64, 1, 512, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("linear_stack", "v5p-128", 64, 1, 128, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("llama2_7b", "v5e-64", 64, 4, 2048),
    Row("llama3_8b", "v5p-128", 64, 4, 2048),
    Row("llama3_8b", "v6e-64", 64, 4, 2048),
    Row("llama2_70b", "v5p-256", 128, 2, 2048),
    Row("llama2_70b", "v5p-256", 128, 2, 2048, TENSOR_4),
)


def facts_of(report: dict[str, Any]) -> dict[str, Any]:
    step, build, memory = report["step"], report["build"], report["memory"]
    return {
        "predicted_seconds": step["predicted_seconds"],
        "exposed_fraction": step["exposed_fraction"],
        "predicted_mfu": step["predicted_mfu"],
        "peak_bytes_per_chip": memory["peak_bytes_per_chip"],
        "fits": memory["fits"],
        "link_seconds": sum(part["link_seconds"] or 0.0 for part in report["roofline"]),
        "compute_seconds": step["compute_seconds"],
        "tried": [_named(one) for one in report["search"]["tried"]] if report["search"] else None,
        "chosen": report["search"]["chosen"] if report["search"] else None,
        "versions": f"jax {build['jax']}, {build['plugin']}",
    }


def _named(tried: dict[str, Any]) -> dict[str, Any]:
    kept = ("predicted_seconds", "exposed_fraction", "peak_bytes_per_chip", "fits", "compile_seconds", "why_not")
    return {"name": TriedReport.model_validate_json(json.dumps(tried)).name} | {key: tried[key] for key in kept}


def table_row(row: Row, layers: int | None, kept: dict[tuple[str, ...], dict[str, Any]]) -> str | None:
    """None where nothing of the row is compiled yet but what it is compared with."""
    none, xla, auto = (kept.get(row.overrides(mode, layers)) for mode in MODES)
    if auto is None:
        return None
    chosen = auto["tried"][auto["chosen"]]
    share = auto["link_seconds"] / auto["compute_seconds"] if auto["compute_seconds"] else 0.0
    cells = (row.name, *map(_cell, (none, xla, chosen)), chosen["name"], f"{share:.2f}")
    return f"| {' | '.join(cells)} |"


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return NOT_COMPILED
    if one["predicted_seconds"] is None:
        return "does not fit" if one["fits"] is False else one.get("why_not") or "not known"
    memory = f"{one['peak_bytes_per_chip'] / 2**30:.1f} GiB"
    return f"{one['exposed_fraction']:.1%}, {one['predicted_seconds']:.3g} s, {memory}"


def main() -> int:
    """1 where a row could not be compiled."""
    parser = argparse.ArgumentParser(description="exposed communication of none, xla and auto")
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--rows", default="", help="only those with this text in their name")
    parser.add_argument("--layers", type=int, help="of every model")
    parser.add_argument("--show", action="store_true", help="print what is kept, compile nothing")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.rows in row.name]
    wanted = [(row, mode) for mode in reversed(MODES) for row in rows if not arguments.show]  # the slow baseline last
    kept = read_kept(arguments.file)
    todo = [(row, mode) for row, mode in wanted if row.overrides(mode, arguments.layers) not in kept]
    num_added = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not todo) as progress:
        task = progress.add_task("", total=len(todo))
        for row, mode in todo:
            progress.update(task, description=f"{row.name}: {mode}")
            num_added += add_row(arguments.file, row.name, row.overrides(mode, arguments.layers), facts_of)
            progress.advance(task)
    kept = read_kept(arguments.file)
    print("| model, target, sharding, sequences x length of a chip | none | xla | auto | chosen | link / compute |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if line := table_row(row, arguments.layers, kept):
            print(line)
    return int(num_added < len(todo))


if __name__ == "__main__":
    sys.exit(main())
