"""Trains a small decoder with moments of each type, over four seeds, and compares the loss with float32 moments'.

    python bench/moments.py [--rows TEXT] [--minutes N]

A row is a run of 2,000 steps on one simulated device: its mean training loss over the last 100, and its processor
seconds. Rows are kept in bench/moments.jsonl, so a command that was stopped goes on; `results` prints their table. Two
rows have types that declarations refuse, as the reason why they do.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from compiled_rows import read_lines

import meshloom
from meshloom.compiler.optim import moments
from meshloom.compiler.optim.configs import LionConfig
from meshloom.compiler.xla.programs import build, lower
from meshloom.runtime.train.train import prepare

KEPT = Path(__file__).with_suffix(".jsonl")
NUM_STEPS, NUM_LAST, SEEDS = 2000, 100, (0, 1, 2, 3)
OVERRIDES = (
    "target=cpu-1", "sharding=ddp", "model.num_layers=2", "model.embed_dim=64", "model.mlp_dim=192",
    "model.num_heads=4", "model.num_kv_heads=4", "global_batch_size=8", "sequence_length=64", "precision=float32",
    "checkpoint=disabled", f"num_steps={NUM_STEPS}", "evaluation.every_num_steps=1000000",
)  # fmt: skip
ROWS: dict[str, tuple[str, ...]] = {
    "adamw float32": (),
    "adamw int8": ("optimizer.moment_dtype=int8",),
    "lion float32": ("optimizer=lion",),
    "lion float8": ("optimizer=lion", "optimizer.moment_dtype=float8"),
    "adamw float8, first alone": ("optimizer.first_moment_dtype=float8",),
    "adamw int8, second linear (refused)": ("optimizer.moment_dtype=int8",),
    "lion int8 (refused)": ("optimizer=lion", "optimizer.moment_dtype=int8"),
}


FIRST, LATER = [*ROWS][:4], [*ROWS][4:]  # those that are proposed, then those that are compared with them


@contextmanager
def accepted(name: str) -> Iterator[None]:
    """Lets the types of a row be declared that are refused."""
    is_linear = "linear" in name
    place, attribute, instead = (
        (moments, "SECOND", {"int8": "int8"}) if is_linear else (LionConfig, "refused_moments", {})
    )
    with mock.patch.object(place, attribute, instead):
        yield


@cache
def programs_of(name: str) -> Any:
    """Returns the compiled programs of a row, which all seeds share: a seed decides the parameters and the data."""
    with accepted(name):
        plan = prepare(meshloom.compose(*OVERRIDES, *ROWS[name])).plan
        return build(lower(plan, plan.mesh.of_devices(jax.devices()[:1])))


def run(name: str, seed: int) -> dict[str, Any]:
    """Returns a row: the loss at the end, and what the run took."""
    programs, started = programs_of(name), time.process_time()
    with accepted(name):
        job = prepare(meshloom.compose(*OVERRIDES, *ROWS[name], f"seed={seed}"))
    params = jax.jit(job.plan.model.init)(jax.random.key(seed))
    state, batches, losses = programs["init"]() | {"params": params}, iter(job.data["train"]), []
    for _ in range(NUM_STEPS):
        batch = next(batches)
        placed = {key: jax.device_put(batch[key], x.sharding) for key, x in programs.batch.items()}
        state, metrics = programs["train"](state, placed)
        losses.append(metrics["loss"])
    last = float(np.mean([float(x) for x in losses[-NUM_LAST:]]))
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state["optimizer"]))
    return {"name": name, "seed": seed, "loss": last if math.isfinite(last) else None, "bytes": num_bytes,
            "parameters": job.plan.num_parameters, "processor_seconds": round(time.process_time() - started, 1)}  # fmt: skip  # noqa: E501


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a row for each optimizer and type: the loss against float32 moments of the same seed."""
    losses = {(row["name"], row["seed"]): row["loss"] for row in rows}
    lines = ["| moments | bytes per parameter | loss against float32, seeds 0 to 3 | mean | processor seconds |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name in ROWS:
        found = [row for row in rows if row["name"] == name]
        if not found:
            continue
        base = f"{name.split()[0]} float32"
        shares = [_against(row["loss"], losses.get((base, row["seed"]))) for row in found]
        known = [share for share in shares if share is not None]
        shown = ", ".join("diverged" if share is None else f"{share:+.2%}" for share in shares)
        if name == base:
            shown = ", ".join(f"{row['loss']:.4f}" for row in found)
        average = f"{statistics.mean(known):+.2%}" if known and name != base else ""
        seconds = statistics.median(row["processor_seconds"] for row in found)
        per = found[0]["bytes"] / found[0]["parameters"]
        lines.append(f"| {name} | {per:.2f} | {shown} | {average} | {seconds:.0f} |")
    return "\n".join(lines)


def _against(loss: float | None, base: float | None) -> float | None:
    return None if loss is None or base is None or loss > 2 * base else loss / base - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only those with this text in their name")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start none after this long")
    given = parser.parse_args()
    kept = read_lines(KEPT) if KEPT.exists() else []
    made = {(row["name"], row["seed"]) for row in kept}
    asked = [(name, seed) for group in (FIRST, LATER) for seed in SEEDS for name in group]
    asked = [each for each in asked if given.rows in each[0] and each not in made]
    end = time.monotonic() + 60 * given.minutes
    for at, (name, seed) in enumerate(asked):
        if time.monotonic() > end:
            break
        print(f"{at + 1} of {len(asked)}: {name}, seed {seed}", file=sys.stderr, flush=True)
        row = run(name, seed)
        with KEPT.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(table(read_lines(KEPT) if KEPT.exists() else []))


if __name__ == "__main__":
    main()
