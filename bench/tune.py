"""Whether what `meshloom tune` proposes fits when it is compiled, and whether its order is that of the schedules.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/tune.py [--rows TEXT] [--compile N] [FILE]

Each row is searched by the command without compiling; then the first N of its answer are compiled for hardware that is
not there, with the flag presets that their estimate rests on. What was found is kept in FILE (bench/tune.jsonl), a line
for each search and each compile, so that a run that was stopped goes on where it was. Prints a table in Markdown.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_rows import Overrides, add_row, keep, read_kept

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
    """Returns the best of a row, with the seconds that it took; None where the command fails and has said why."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "tune", *row.overrides, f"hydra.run.dir={run_dir}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            return None
        answer = json.loads(Path(run_dir, "tune.json").read_text())
    kept = {"num_candidates": answer["num_candidates"], "best": answer["best"][:MOST_COMPILED]}
    return kept | {"search_seconds": round(time.perf_counter() - start, 1)}


def as_compiled(row: Row, one: dict[str, Any]) -> Overrides:
    """Returns the overrides of one of the best: with its flag presets, and without a search for others."""
    presets = f"overlap.flag_presets=[{','.join(one['flag_presets'])}]"
    typed = [text for text in row.overrides if not text.startswith("tune.")]
    return (*typed, *one["overrides"], "overlap.search=null", presets)


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


def table_row(row: Row, answer: dict[str, Any], compiled: list[dict[str, Any] | None]) -> str:
    first = answer["best"][0]
    own = compiled[0] if compiled else None
    known = [one["predicted_seconds"] for one in compiled if one and one["fits"] and one["predicted_seconds"]]
    step = f"{own['predicted_seconds']:.2f} s" if own and own["predicted_seconds"] else "" if own is None else "none"
    behind = f"{own['predicted_seconds'] / min(known) - 1:.1%}" if own and own["predicted_seconds"] and known else ""
    per_chip = 2 if "tpu7x" in row.target else 1  # its devices: reports count memory by chip
    peak = f"{own['peak_bytes'] / per_chip / 2**30:.1f}" if own and own["peak_bytes"] else ""
    fits = "" if own is None else "yes" if own["fits"] else "no"
    chosen = " ".join(text for text in first["overrides"] if not text.startswith(("sharding", "overlap")))
    cells = (row.name, f"{answer['num_candidates']:,}", f"{answer['search_seconds']:.0f} s", f"`{chosen}`",
             f"{first['compute_seconds'] + sum(first['exposed_seconds'].values()):.2f} s", step,
             f"{first['peak_bytes'] / 2**30:.1f}", peak, fits, f"{behind} of {len(known)}" * bool(known))  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="answers of `meshloom tune`, compiled")
    parser.add_argument("file", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--rows", default="", help="only those with this text in their name")
    parser.add_argument("--compile", type=int, default=1, help="the first N of each answer")
    parser.add_argument("--show", action="store_true", help="only print the results that are kept")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.rows in row.name]
    for row in rows:
        if not arguments.show and row.overrides not in read_kept(arguments.file):
            print(f"searching: {row.name}", file=sys.stderr, flush=True)
            if (answer := search(row)) is not None:
                keep(arguments.file, row.name, row.overrides, answer)
    kept = read_kept(arguments.file)
    for place in range(arguments.compile):
        for row in rows:
            best = kept[row.overrides]["best"] if row.overrides in kept else []
            if arguments.show or place >= len(best) or as_compiled(row, best[place]) in kept:
                continue
            print(f"compiling: {row.name}, number {place + 1}", file=sys.stderr, flush=True)
            add_row(arguments.file, row.name, as_compiled(row, best[place]), facts_of)
    kept = read_kept(arguments.file)
    print("| model, target, batch | candidates | searched in | the first | estimated | compiled | GiB estimated | "
          "compiled | fits | behind the best compiled |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if (answer := kept.get(row.overrides)) is not None:
            compiled = [kept.get(as_compiled(row, one)) for one in answer["best"]]
            print(table_row(row, answer, [one for n, one in enumerate(compiled) if n == 0 or one]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
