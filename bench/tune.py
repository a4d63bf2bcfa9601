"""Checks that what `meshloom tune` proposes fits when it is compiled, that what it calls too large does not, and that
its order is that of the schedules.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/tune.py [--rows TEXT] [--compile N] [FILE]

Each row is searched by the command without compiling. Then the first N of its answer are compiled for hardware that is
not there, with the overlap that their estimate rests on, and with --too-large the smallest candidate whose estimate is
above a device's memory. What was found is saved in FILE (bench/tune.jsonl), a line for each search and each compile, so
that a run that was stopped continues. Prints a table in Markdown.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_rows import Overrides, add_row, keep, read_kept

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import assume_overlap, overrides_of
from meshloom.runtime.processes.devices import plan_without_devices

KEPT = Path(__file__).with_suffix(".jsonl")
MOST_COMPILED = 5  # of an answer
SPACE = ("data=synthetic", "tune.groups.sharding=[fsdp_tensor]")


@dataclass(frozen=True)
class Row:
    """sequences: of the global batch."""

    model: str
    target: str
    sequences: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.target}, {self.sequences} x {self.length}"

    @property
    def overrides(self) -> Overrides:
        return (f"model={self.model}", f"target={self.target}", f"global_batch_size={self.sequences}",
                f"sequence_length={self.length}", *SPACE)  # fmt: skip


ROWS = (
    Row("llama3_8b", "v5e-256", 512, 8192),
    Row("llama3_8b", "v5p-128", 256, 8192),
    Row("llama3_8b", "v6e-64", 256, 8192),
    Row("llama3_8b", "h100-64", 256, 8192),
    Row("llama3_8b", "tpu7x-128", 256, 8192),
    Row("llama2_7b", "v5e-64", 256, 4096),
    Row("llama2_7b", "v5p-64", 256, 4096),
    Row("llama2_7b", "v6e-256", 1024, 4096),
    Row("qwen3_8b", "v6e-256", 1024, 4096),
    Row("qwen3_8b", "h100-128", 512, 4096),
    Row("gemma2_9b", "v5p-128", 256, 8192),
    Row("gemma2_9b", "v6e-64", 128, 8192),
    Row("llama2_70b", "v5p-256", 256, 4096),
    Row("llama2_70b", "v6e-256", 512, 4096),
    Row("llama2_70b", "v5e-256", 256, 4096),
    Row("llama3_70b", "v5p-512", 512, 4096),
    Row("llama3_70b", "v6e-256", 512, 4096),
    Row("llama3_70b", "h100-256", 512, 8192),
    Row("llama3_70b", "h100-512", 1024, 4096),
    Row("llama3_70b", "tpu7x-256", 512, 8192),
    Row("llama3_405b", "v5p-2048", 2048, 8192),
    Row("llama3_405b", "h100-1024", 1024, 8192),
    Row("llama3_405b", "tpu7x-1024", 1024, 8192),
)


def search(row: Row) -> dict[str, Any] | None:
    """Returns the best of a row, the smallest that does not fit, and the seconds that the search took; None where the
    command fails and has said why."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "tune", *row.overrides, f"hydra.run.dir={run_dir}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            return None
        seconds = round(time.perf_counter() - start, 1)
        answer = json.loads(Path(run_dir, "tune.json").read_text())
        priced = [json.loads(line) for line in Path(run_dir, "sweep.jsonl").read_text().splitlines()]
    refused = [one for one in priced if one["status"] == "does_not_fit"]
    return {
        "num_candidates": answer["num_candidates"],
        "best": answer["best"][:MOST_COMPILED],
        "too_large": smallest_too_large(row, refused),
        "search_seconds": seconds,
    }


def smallest_too_large(row: Row, refused: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the candidate whose estimate is the first above the memory of a device; None if there is none."""
    for one in sorted(refused, key=lambda one: one["figures"]["peak_bytes"]):
        spec = read_spec(Request((*typed(row), *one["overrides"])), then=lambda spec: spec)
        plan_without_devices(spec.target)
        plan = plan_run(spec)
        peak, memory = estimate_step(plan).memory.peak_bytes, plan.target.hbm_bytes_per_device
        assert memory is not None
        if peak > memory:
            compiled_by = [*one["overrides"], *overrides_of(assume_overlap(plan), spec.overlap)]
            return {"overrides": one["overrides"], "compile_overrides": compiled_by, "peak_bytes": peak}
    return None


def typed(row: Row) -> Overrides:
    """Returns what declares the row, without what concerns the search alone."""
    return tuple(text for text in row.overrides if not text.startswith("tune."))


def as_compiled(row: Row, one: dict[str, Any]) -> Overrides:
    """Returns the overrides of a candidate with the overlap that its estimate rests on, without a search."""
    return (*typed(row), *one["compile_overrides"])


def facts_of(report: dict[str, Any]) -> dict[str, Any]:
    step, memory, build = report["step"], report["memory"], report["build"]
    return {
        "predicted_seconds": step["predicted_seconds"],
        "exposed_seconds": step["exposed_seconds"],
        "peak_bytes": memory["peak_bytes_per_chip"],
        "limit_bytes": memory["limit_bytes_per_chip"],
        "fits": memory["fits"],
        "versions": f"jax {build['jax']}, {build['plugin']}",
    }


def table_row(row: Row, answer: dict[str, Any], kept: dict[Overrides, dict[str, Any]]) -> str:
    first, too_large = answer["best"][0], answer["too_large"]
    compiled = [kept.get(as_compiled(row, one)) for one in answer["best"]]
    own = compiled[0]
    known = [one["predicted_seconds"] for one in compiled if one and one["fits"] and one["predicted_seconds"]]
    step = f"{own['predicted_seconds']:.2f} s" if own and own["predicted_seconds"] else "" if own is None else "none"
    behind = f"{own['predicted_seconds'] / min(known) - 1:.1%}" if own and own["predicted_seconds"] and known else ""
    per_chip = 2 if "tpu7x" in row.target else 1  # its devices: reports count memory by chip
    fits = "" if own is None else "yes" if own["fits"] else "no"
    chosen = " ".join(filter(None, map(_short, first["overrides"])))
    refused = kept.get(as_compiled(row, too_large)) if too_large else None
    cells = (row.name, f"{answer['num_candidates']:,}", f"{answer['search_seconds']:.0f} s", f"`{chosen}`",
             f"{first['compute_seconds'] + sum(first['exposed_seconds'].values()):.2f} s", step,
             f"{first['peak_bytes'] / 2**30:.1f}", _gib(own, per_chip), fits,
             f"{behind} of {len(known)}" * (len(known) > 1),
             f"{too_large['peak_bytes'] / 2**30:.1f}" if too_large else "none",
             _gib(refused, per_chip) + (", fits" if refused and refused["fits"] else ""))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _short(text: str) -> str:
    """An override as the table has it: 'mesh.fsdp=64' -> 'fsdp=64'; '' for what all rows have, or changes nothing."""
    is_whole = text.startswith("mesh.") and text.endswith("=1")
    return "" if is_whole or text.startswith(("sharding", "overlap")) else text.removeprefix("mesh.")


def _gib(compiled: dict[str, Any] | None, per_chip: int) -> str:
    return f"{compiled['peak_bytes'] / per_chip / 2**30:.1f}" if compiled and compiled["peak_bytes"] else ""


def compile_row(file: Path, row: Row, one: dict[str, Any], what: str) -> None:
    if as_compiled(row, one) not in read_kept(file):
        print(f"compiling: {row.name}, {what}", file=sys.stderr, flush=True)
        add_row(file, row.name, as_compiled(row, one), facts_of)


def main() -> int:
    parser = argparse.ArgumentParser(description="answers of `meshloom tune`, compiled")
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--rows", default="", help="only those with this text in their name")
    parser.add_argument("--compile", type=int, default=1, help="the first N of each answer")
    parser.add_argument("--too-large", action="store_true", help="compile what does not fit by the estimate, too")
    parser.add_argument("--show", action="store_true", help="only print the results that are saved")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.rows in row.name]
    for row in rows:
        if not arguments.show and row.overrides not in read_kept(arguments.file):
            print(f"searching: {row.name}", file=sys.stderr, flush=True)
            if (answer := search(row)) is not None:
                keep(arguments.file, row.name, row.overrides, answer)
    answers = {row: kept for row in rows if (kept := read_kept(arguments.file).get(row.overrides)) is not None}
    for place in range(0 if arguments.show else arguments.compile):
        for row, answer in answers.items():
            if place < len(answer["best"]):
                compile_row(arguments.file, row, answer["best"][place], f"number {place + 1}")
    for row, answer in answers.items() if arguments.too_large and not arguments.show else ():
        if answer["too_large"]:
            compile_row(arguments.file, row, answer["too_large"], "too large")
    kept = read_kept(arguments.file)
    print("| model, target, batch | candidates | searched in | the first | estimated | compiled | GiB estimated | "
          "compiled | fits | behind the best compiled | too large: GiB estimated | compiled |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row, answer in answers.items():
        print(table_row(row, answer, kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
