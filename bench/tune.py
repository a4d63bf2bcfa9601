"""Checks that what `meshloom tune` proposes fits when it is compiled, that what it calls too large does not, and that
its order is that of the schedules.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/tune.py [--rows TEXT] [--compile N] [FILE]

Each row is searched by the command without compiling. Then the first N of its answer are compiled for hardware that is
not there, with the overlap that their estimate rests on, and with --too-large the smallest candidate whose estimate is
above a device's memory (compiled_rows.py).
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

from compiled_rows import Facts, Overrides, Rows, gib, make_rows, markdown, parser_of, read_kept, versions_of

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


ROWS = (  # each kind of chip, and each size of model on a TPU and a GPU
    Row("llama3_8b", "v5e-256", 512, 8192),
    Row("llama3_8b", "v5p-128", 256, 8192),
    Row("llama3_8b", "v6e-64", 256, 8192),
    Row("llama3_8b", "h100-64", 256, 8192),
    Row("llama3_8b", "tpu7x-128", 256, 8192),
    Row("gemma2_9b", "v6e-64", 128, 8192),
    Row("llama3_70b", "v6e-256", 512, 4096),
    Row("llama3_70b", "h100-256", 512, 8192),
    Row("llama3_405b", "tpu7x-1024", 1024, 8192),
    Row("llama3_405b", "h100-1024", 1024, 8192),
)


def search(row: Row) -> dict[str, Any]:
    """Returns the best of a row, the smallest that does not fit, and the seconds that the search took. Raises
    CalledProcessError if the command fails."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "tune", *row.overrides, f"hydra.run.dir={run_dir}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds = round(time.perf_counter() - start, 1)
        answer = json.loads(Path(run_dir, "tune.json").read_text())
        priced = [json.loads(line) for line in Path(run_dir, "sweep.jsonl").read_text().splitlines()]
    refused = [one for one in priced if one["status"] == "does_not_fit"]
    return {
        "num_candidates": answer["num_candidates"],
        "best": [_kept(row, one) for one in answer["best"][:MOST_COMPILED]],
        "too_large": smallest_too_large(row, refused),
        "search_seconds": seconds,
    }


def _kept(row: Row, one: dict[str, Any]) -> dict[str, Any]:
    """Returns what is kept of a candidate; bytes of a device."""
    figures, per_chip = one["figures"], 2 if "tpu7x" in row.target else 1
    return {
        "overrides": one["overrides"],
        "compile_overrides": one["compile_overrides"],
        "compute_seconds": figures["compute_seconds"],
        "exposed_seconds": figures["exposed_by_axes"],
        "peak_bytes": figures["peak_bytes"] // per_chip,
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
    names = ("exposed_seconds", "peak_bytes", "limit_bytes", "fits")
    step = report["compiled"]
    return {
        "predicted_seconds": step["step_seconds"],
        **{name: step[name] for name in names},
        "versions": versions_of(report),
    }


def table(kept: Rows) -> str:
    columns = (
        "model, target, batch", "candidates", "the first", "step estimated", "compiled", "GiB estimated", "compiled",
        "fits", "too large: GiB estimated", "compiled",
    )  # fmt: skip
    return markdown(columns, (_cells(row, kept[row.overrides], kept) for row in ROWS if row.overrides in kept))


def _cells(row: Row, answer: Facts, kept: Rows) -> list[str]:
    first, too_large = answer["best"][0], answer["too_large"]
    own = kept.get(as_compiled(row, first))
    per_chip = 2 if "tpu7x" in row.target else 1  # its devices: reports count memory by chip
    chosen = " ".join(filter(None, map(_short, first["overrides"])))
    refused = kept.get(as_compiled(row, too_large)) if too_large else None
    return [
        row.name,
        f"{answer['num_candidates']:,}",
        f"`{chosen}`",
        _seconds(first["compute_seconds"] + sum(first["exposed_seconds"].values())),
        _seconds(own["predicted_seconds"]) if own else "",
        gib(first["peak_bytes"]),
        _gib(own, per_chip),
        "" if own is None else "yes" if own["fits"] else "no",
        gib(too_large["peak_bytes"]) if too_large else "none",
        _gib(refused, per_chip) + (", fits" if refused and refused["fits"] else ""),
    ]


def _short(text: str) -> str:
    """An override as the table has it: 'mesh.fsdp=64' -> 'fsdp=64'; '' for what all rows have, or changes nothing."""
    is_whole = text.startswith("mesh.") and text.endswith("=1")
    return "" if is_whole or text.startswith(("sharding", "overlap")) else text.removeprefix("mesh.")


def _gib(compiled: dict[str, Any] | None, per_chip: int) -> str:
    return gib(compiled["peak_bytes"] / per_chip) if compiled and compiled["peak_bytes"] else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def main() -> int:
    parser = parser_of(__doc__, KEPT)
    parser.add_argument("--compile", type=int, default=1, help="the first N of each answer")
    parser.add_argument("--too-large", action="store_true", help="compile what does not fit by the estimate, too")
    given = parser.parse_args()
    rows = {row.overrides: row for row in ROWS}
    searched = ((row.name, overrides) for overrides, row in rows.items())
    make_rows(given, searched, dict, make=lambda overrides: (search(rows[overrides]), None))
    num_missing = make_rows(given, candidates_of(read_kept(given.file), given), facts_of)
    print(table(read_kept(given.file)))
    return int(num_missing > 0)


def candidates_of(kept: Rows, given: argparse.Namespace) -> list[tuple[str, Overrides]]:
    """Returns what is compiled of the answers: the first of all, the second of all, and so on."""
    answers = [(row, kept[row.overrides]) for row in ROWS if row.overrides in kept]
    found = [
        (row, answer["best"][n]) for n in range(given.compile) for row, answer in answers if n < len(answer["best"])
    ]
    if given.too_large:
        found += [(row, answer["too_large"]) for row, answer in answers if answer["too_large"]]
    return [(row.name, as_compiled(row, one)) for row, one in found]


if __name__ == "__main__":
    sys.exit(main())
