"""Runs of a decoder of 140,608 parameters over four seeds, which benchmarks of types share: what a row is, how a
command goes on with rows that are kept, and how losses are compared with the runs of the same seed."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from compiled_rows import read_lines

import meshloom
from meshloom.compiler.xla.programs import build, lower
from meshloom.runtime.train.train import prepare

NUM_STEPS, NUM_LAST, SEEDS = 2000, 100, (0, 1, 2, 3)
OVERRIDES = (
    "target=cpu-1", "sharding=ddp", "model.num_layers=2", "model.embed_dim=64", "model.mlp_dim=192",
    "model.num_heads=4", "model.num_kv_heads=4", "global_batch_size=8", "sequence_length=64", "precision=float32",
    "checkpoint=disabled", f"num_steps={NUM_STEPS}", "evaluation.every_num_steps=1000000",
)  # fmt: skip
Row = dict[str, Any]


def programs_of(overrides: Iterable[str]) -> Any:
    """Returns the compiled programs of a declaration, which all seeds share: a seed decides the parameters and the
    data."""
    plan = prepare(meshloom.compose(*OVERRIDES, *overrides)).plan
    return build(lower(plan, plan.mesh.of_devices(jax.devices()[:1])))


def train_small(programs: Any, overrides: Iterable[str], seed: int) -> Row:
    """Returns a row: the mean training loss over the last steps, and what the run took."""
    started = time.process_time()
    job = prepare(meshloom.compose(*OVERRIDES, *overrides, f"seed={seed}"))
    params = jax.jit(job.plan.model.init)(jax.random.key(seed))
    state, batches, losses = programs["init"]() | {"params": params}, iter(job.data["train"]), []
    for _ in range(NUM_STEPS):
        batch = next(batches)
        placed = {key: jax.device_put(batch[key], x.sharding) for key, x in programs.batch.items()}
        state, metrics = programs["train"](state, placed)
        losses.append(metrics["loss"])
    last = float(np.mean([float(x) for x in losses[-NUM_LAST:]]))
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state["optimizer"]))
    return {"seed": seed, "loss": last if math.isfinite(last) else None, "bytes": num_bytes,
            "parameters": job.plan.num_parameters, "processor_seconds": round(time.process_time() - started, 1)}  # fmt: skip  # noqa: E501


def run_command(
    description: str | None, kept: Path, rows: Iterable[tuple[str, int]], run: Callable[[str, int], Row],
    table: Callable[[list[Row]], str],
) -> None:  # fmt: skip
    """Runs a script: makes those of its rows (names and seeds) that are asked for and not in its file, and prints the
    table of all that are."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this text in their name")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after this long")
    given = parser.parse_args()
    run_missing(kept, [(name, seed) for name, seed in rows if given.rows in name], run, given.minutes)
    print(table(read_lines(kept) if kept.exists() else []))


def run_missing(kept: Path, asked: Sequence[tuple[str, int]], run: Callable[[str, int], Row], minutes: float) -> None:
    """Appends to a file the rows of names and seeds that it lacks. minutes: start none after this long."""
    made = {(row["name"], row["seed"]) for row in (read_lines(kept) if kept.exists() else [])}
    missing, end = [each for each in asked if each not in made], time.monotonic() + 60 * minutes
    for at, (name, seed) in enumerate(missing):
        if time.monotonic() > end:
            break
        print(f"{at + 1} of {len(missing)}: {name}, seed {seed}", file=sys.stderr, flush=True)
        row = {"name": name} | run(name, seed)
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")


def compared(rows: Sequence[Row], name: str, base: str) -> tuple[str, str]:
    """Returns the losses of a row's seeds against those of another row, and their mean; the losses themselves of the
    row that others are compared with."""
    losses = {(row["name"], row["seed"]): row["loss"] for row in rows}
    found = [row for row in rows if row["name"] == name]
    if name == base:
        return ", ".join(f"{row['loss']:.4f}" for row in found), ""
    shares = [_against(row["loss"], losses.get((base, row["seed"]))) for row in found]
    known = [share for share in shares if share is not None]
    shown = ", ".join("diverged" if share is None else f"{share:+.2%}" for share in shares)
    return shown, f"{statistics.mean(known):+.2%}" if known else ""


def median_seconds(rows: Sequence[Row], name: str) -> float:
    """Returns the processor seconds of a row's runs."""
    return statistics.median(row["processor_seconds"] for row in rows if row["name"] == name)


def names_in_order(rows: Sequence[Row], names: Mapping[str, Any]) -> list[str]:
    """Returns the names that have rows, in the order in which they are declared."""
    found = {row["name"] for row in rows}
    return [name for name in names if name in found]


def _against(loss: float | None, base: float | None) -> float | None:
    return None if loss is None or base is None or loss > 2 * base else loss / base - 1
