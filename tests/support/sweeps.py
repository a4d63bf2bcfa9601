"""Sweeps as they lie on disk, with the figures that a test wants."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from meshloom.compiler.figures import StepWork
from meshloom.runtime.rundir.folders import ROWS_FILE, SWEEP_FILE
from meshloom.runtime.sweep.rows import SWEEP_VERSION, Figures, Row, SweepFile

GIB = 2**30


def figures(**changed: Any) -> Figures:
    """Figures of a compiled point: 80 % compute, of a chip with 16 GiB."""
    step = changed.get("step_seconds", 1.0)
    values = {
        "basis": "schedule", "model": "llama3_8b", "target": "v5e-16", "chip": "v5e", "num_chips": 16,
        "mesh": "fsdp=16", "global_batch_size": 16, "num_microbatches": 1, "tokens_per_step": 65536,
        "step_seconds": step, "compute_seconds": 0.8 * step, "exposed_seconds": 0.2 * step, "bubble_seconds": 0.0,
        "peak_bytes": 8 * GIB, "limit_bytes": 16 * GIB, "fits": True,
    }  # fmt: skip
    values |= changed
    work = StepWork(values["tokens_per_step"], 4, values["num_chips"], 10.0)
    given = {name: value for name, value in dict(Figures(**values)).items() if name in changed}
    return Figures(**values).rated(work).model_copy(update=given)


def point(index: int, swept: dict[str, Any], *, status: str = "done", **changed: Any) -> Row:
    """A row; `figures=` is given where it has others than one second a step."""
    values: dict[str, Any] = {
        "index": index, "overrides": tuple(f"{key}={value}" for key, value in swept.items()), "swept": swept,
        "status": status, "directory": ",".join(f"{key}={value}" for key, value in swept.items()),
        "figures": figures() if status == "done" else None, "why": None if status == "done" else "it had to",
    }  # fmt: skip
    return Row(**(values | changed))


def sweep_file(
    rows: Sequence[Row], *, command: Literal["explain", "compile", "train", "tune"] = "compile", **changed: Any
) -> SweepFile:
    """Returns what a sweep over the keys of these rows says of itself."""
    keys = dict.fromkeys(key for row in rows for key in row.swept)
    axes = {
        key: list({repr(row.swept[key]): row.swept[key] for row in rows if key in row.swept}.values()) for key in keys
    }
    values: dict[str, Any] = {
        "schema_version": SWEEP_VERSION, "command": command, "overrides": ("model=llama3_8b",), "axes": axes,
        "num_points": len(rows), "objective": "step_seconds", "versions": {"jax": "0.10.2"},
    }  # fmt: skip
    return SweepFile(**(values | changed))


def write_sweep(directory: Path, rows: Sequence[Row], file: SweepFile | None = None) -> Path:
    """Writes the files of a sweep as its engine does. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SWEEP_FILE).write_text((file or sweep_file(rows)).model_dump_json(indent=1) + "\n")
    (directory / ROWS_FILE).write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return directory
