"""Tables whose rows take long: each row is kept as a line of JSON, so that none is made twice.

A script has its rows, what it keeps of each (`facts_of`) and how a table is made of what is kept. `Table` is one of
`rows.py`: declarations that are estimated or compiled. `results.py` prints all of these tables.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError
from meshloom.compiler.core.known import known
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.spec.overlap_spec import OverlapConfig
from meshloom.models.adapter import ADAPTER

Overrides = tuple[str, ...]
Facts = dict[str, Any]
Rows = dict[Overrides, Facts]
NOT_COMPILED = "not compiled"
SUMS = ("reduce-scatter", "all-reduce")
OF_STEP = {  # the figures that are kept of a step
    "predicted_seconds": "step_seconds", "compute_seconds": "compute_seconds", "exposed_seconds": "exposed_seconds",
    "exposed_fraction": "exposed_fraction", "bubble_fraction": "bubble_fraction", "predicted_mfu": "mfu",
    "peak_bytes": "peak_bytes", "limit_bytes": "limit_bytes", "fits": "fits",
}  # fmt: skip


def parser_of(description: str | None, kept: Path) -> argparse.ArgumentParser:
    """Returns the parser of a script with rows: the file that keeps them, and which of them are made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, kept)
    return parser


def add_options(parser: argparse.ArgumentParser, kept: Path | None) -> None:
    parser.add_argument("file", nargs="?", type=Path, default=kept)
    parser.add_argument("--rows", default="", metavar="TEXT", help="make only those with this text in their name")
    parser.add_argument("--show", action="store_true", help="print what is kept, make nothing")


def make_rows(
    given: argparse.Namespace,
    rows: Iterable[tuple[str, Overrides]],
    facts_of: Callable[[Facts], Facts],
    make: Callable[[Overrides], tuple[Facts, float | None]] | None = None,
) -> int:
    """Makes the requested rows that are not kept yet, and returns how many failed. make: returns a report, of which
    facts_of says what is kept, and its seconds; `compile_report` by default."""
    kept = read_kept(given.file)
    asked = [] if given.show else [row for row in rows if given.rows.lower() in row[0].lower()]
    todo = [(name, overrides) for name, overrides in asked if overrides not in kept]
    num_failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not todo) as progress:
        task = progress.add_task("", total=len(todo))
        for name, overrides in todo:
            progress.update(task, description=name)
            try:
                report, seconds = (make or compile_report)(overrides)
            except subprocess.CalledProcessError as error:  # the command has said why
                told = f"{NOT_COMPILED}, exit code {error.returncode}: {name}: {' '.join(overrides)}"
                print(told, file=sys.stderr)
                num_failed += 1
            else:
                keep(given.file, name, overrides, facts_of(report) | ({"seconds": seconds} if seconds else {}))
            progress.advance(task)
    return num_failed


def compile_report(overrides: Overrides) -> tuple[Facts, float]:
    """Returns report.json of the command, and the seconds that it took. Raises CalledProcessError if there is none."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "meshloom", "compile", *overrides, f"hydra.run.dir={run_dir}"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, DOES_NOT_FIT):
            done.check_returncode()
        report = json.loads(Path(run_dir, "report.json").read_text())
    return report, round(time.perf_counter() - start, 1)


def kept_rows(rows: Mapping[str, Overrides], kept: Rows) -> Iterator[tuple[str, Facts]]:
    """Yields the rows that are kept, with their names."""
    yield from ((name, kept[overrides]) for name, overrides in rows.items() if overrides in kept)


def read_lines(path: Path) -> list[Facts]:
    """Returns what a file keeps, a line each; nothing if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_kept(path: Path) -> Rows:
    """Returns the rows of a file by what they were compiled from."""
    return {tuple(row["overrides"]): row for row in read_lines(path)}


def keep(path: Path, name: str, overrides: Overrides, facts: Facts) -> None:
    """Keeps one more row."""
    with path.open("a") as file:
        file.write(json.dumps({"name": name, "overrides": overrides} | facts) + "\n")


def versions_of(report: Facts) -> str:
    return f"jax {report['build']['jax']}, {report['build']['plugin']}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def estimated(overrides: Overrides) -> Facts:
    """Returns what `meshloom explain` knows of a declaration: bytes of a chip; gathered and reduced, bytes of full
    arrays. why_not: why it cannot be declared."""
    jax.config.update("jax_platforms", "cpu")
    try:
        return read_spec(Request(overrides), then=_estimate)
    except ConfigError as error:
        return {"why_not": error.problems[0].what}


def _estimate(spec: RunSpec) -> Facts:
    plan = plan_run(spec)
    found, memory = estimate_step(plan), plan.memory
    step, sent = found.figures, found.communication
    return {
        "why_not": "", "kernel": plan.operation("attention").chosen.name,
        "base": memory.parameters - memory.adapters, "adapters": memory.adapters, "optimizer": memory.optimizer,
        "peak_bytes": found.memory.peak_bytes, "limit_bytes": known(found.figures.limit_bytes),
        "num_trained": plan.num_trained_parameters, "flops": plan.model_flops_per_step,
        "gathered": sum(one.bytes for one in sent if one.kind == "all-gather"),
        "reduced": sum(one.bytes for one in sent if one.kind in SUMS),
        "tokens": spec.tokens_per_step, "num_chips": plan.target.num_chips, "jax": jax.__version__,
        "step_seconds": known(step.step_seconds), "bubble_seconds": known(step.bubble_seconds),
        "exposed": step.exposed_by_axes if step.step_seconds else None,
    }  # fmt: skip


def compiled(report: Facts) -> Facts:
    """Returns what is kept of report.json: figures of the step, and what was estimated of them in the same process; of
    each kind of collective the number and the bytes of its full arrays; of_base: the bytes of sums of gradients that
    are not of adapters."""
    step, memory, search = report["compiled"], report["memory"], report["search"]
    kinds, exposed, of_base = dict[str, list[int]](), dict[str, float](), 0
    for one in report["collectives"]:
        total, axes = kinds.setdefault(one["kind"], [0, 0]), "+".join(one["mesh_axes"] or ["unknown"])
        total[0], total[1] = total[0] + one["count"], total[1] + one["bytes"]
        exposed[axes] = exposed.get(axes, 0.0) + (one["exposed_seconds"] or 0.0)
        is_sum = one["kind"] in SUMS and "backward" in one["source"]
        of_base += one["bytes"] if is_sum and f"/{ADAPTER}/" not in one["source"] else 0
    estimated = report["estimated"] or {}
    return {key: step[name] for key, name in OF_STEP.items()} | {
        f"estimated_{part}": estimated.get(f"{part}_seconds") for part in ("step", "compute", "exposed")
    } | {
        "breakdown": memory["breakdown"], "exposed_over": exposed, "kinds": kinds,
        "of_base": of_base, "link_seconds": sum(part["link_seconds"] or 0.0 for part in report["roofline"]),
        "tried": [_tried(each) for each in search["tried"]] if search else None,
        "chosen": search["chosen"] if search else None, "versions": versions_of(report),
    }  # fmt: skip


def _tried(one: Facts) -> Facts:
    way = OverlapConfig.model_validate_json(json.dumps({key: one[key] for key in OverlapConfig.model_fields}))
    kept = {key: one["figures"][name] for key, name in OF_STEP.items()}
    return {"name": way.name, "compile_seconds": one["compile_seconds"], "why_not": one["why_not"]} | kept


def percent(key: str) -> Callable[[Facts], str]:
    return lambda row: "not compiled" if row[key] is None else f"{row[key]:.1%}"


def step(row: Facts) -> str:  # the TPU compiler gives no program that does not fit
    return "not compiled" if row["predicted_seconds"] is None else f"{row['predicted_seconds']:.2f} s"


def memory(row: Facts) -> str:
    return f"{gib(row['peak_bytes'])} GiB"


def fitting(row: Facts, unit: str = "") -> str:
    fits = row.get("fits", row.get("limit_bytes") is None or row["peak_bytes"] <= (row["limit_bytes"] or 0))
    return f"{gib(row['peak_bytes'])}{unit}{'' if fits else ' (does not fit)'}"


def short_seconds(key: str) -> Callable[[Facts], str]:
    return lambda row: f"{row[key]:.3g} s" if row[key] else ""


Cell = Callable[[Facts], str]


@dataclass(frozen=True)
class Table:
    """Declarations, and a table of what is kept of them. table: given what is kept, prints what `columns`, a cell by
    heading, cannot. is_estimated: whether no compiler runs."""

    rows: Mapping[str, Overrides]
    first: str = ""
    columns: Mapping[str, Cell] | None = None
    table: Callable[[Rows], str] | None = None
    is_estimated: bool = False

    def markdown(self, kept: Rows) -> str:
        if self.columns is None:
            assert self.table is not None
            return self.table(kept)
        cells = ([name, *(cell(row) for cell in self.columns.values())] for name, row in kept_rows(self.rows, kept))
        return markdown([*self.first.split(" | "), *self.columns], cells)
