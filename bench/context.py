"""The table of docs/context.md: ring, all-gather and Ulysses by the length of sequences, on three machines.

    pip install -e '.[test]' && python bench/context.py [--compiled]

Each row is an estimate (`meshloom explain`, seconds each), kept in bench/context.jsonl as soon as it is there: a run
goes on where the last one ended. --compiled: also compiles each with two layers, minutes each, for its schedule.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import compiled_rows
import jax

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.spec.spec import RunSpec

KEPT = Path(__file__).with_suffix(".jsonl")
TARGETS = ("v5p-128", "v6e-64", "h100-64")  # 64 chips each
LENGTHS = {32_768: 8, 131_072: 8, 524_288: 32}  # tokens, and the devices that share a sequence
STRATEGIES = ("ring", "all_gather", "ulysses")
COMMON = ("model=llama3_8b", "sharding=fsdp_context", "remat=full", "overlap=prefetch", "data=synthetic")


@dataclass(frozen=True)
class Row:
    """kernel: of attention. exposed_context_seconds: what is waited for over the axis context alone, of keys, values or
    heads. why_not: why there is no such row."""

    kernel: str = ""
    step_seconds: float | None = None
    exposed_context_seconds: float | None = None
    exposed_seconds: float | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    why_not: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of docs/context.md.")
    parser.add_argument("--compiled", action="store_true", help="also compile each with two layers")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    known = compiled_rows.read_kept(KEPT)
    for target in TARGETS:
        for length, context in LENGTHS.items():
            for strategy in STRATEGIES:
                overrides = overrides_of(target, length, context, strategy)
                name = f"{target}, {length // 1024}k, {strategy}"
                if overrides not in known:
                    known[overrides] = asdict(estimated(overrides))
                    compiled_rows.keep(KEPT, name, overrides, known[overrides])
                print(line_of(name, known[overrides]), flush=True)
                small = (*overrides, "model.num_layers=2")
                if arguments.compiled and small not in known:
                    compiled_rows.add_row(KEPT, name, small, facts_of)


def overrides_of(target: str, length: int, context: int, strategy: str) -> tuple[str, ...]:
    fsdp = 64 // context
    mesh = (f"mesh.fsdp={fsdp}", f"mesh.context={context}", f"global_batch_size={fsdp}")
    return (*COMMON, f"target={target}", *mesh, f"sequence_length={length}", f"parallel.context={strategy}")


def estimated(overrides: tuple[str, ...]) -> Row:
    def estimate(spec: RunSpec) -> Row:
        plan = plan_run(spec)
        found = estimate_step(plan)
        assert found.time is not None
        return Row(
            kernel=plan.operation("attention").chosen.name,
            step_seconds=found.time.seconds,
            exposed_context_seconds=found.time.exposed.get(("context",), 0.0),
            exposed_seconds=found.time.exposed_seconds,
            peak_bytes=found.memory.peak_bytes,
            limit_bytes=found.memory.limit_bytes,
        )

    try:
        return read_spec(Request(overrides), then=estimate)
    except ConfigError as error:
        return Row(why_not=error.problems[0].what)


def facts_of(report: dict[str, Any]) -> dict[str, Any]:
    step, memory = report["step"], report["memory"]
    return {"step": step, "peak_bytes": memory["peak_bytes_per_chip"], "fits": memory["fits"]}


def line_of(name: str, row: dict[str, Any]) -> str:
    """A line of a table in Markdown."""
    cells = [*name.split(", "), row["kernel"]]
    if row["why_not"]:
        return f"| {' | '.join(cells)} | {row['why_not']} |"
    step, peak, limit = row["step_seconds"], row["peak_bytes"] / 2**30, row["limit_bytes"] / 2**30
    fits = "" if peak <= limit else " (does not fit)"
    cells += [f"{step:.3g} s", f"{100 * row['exposed_context_seconds'] / step:.1f} %", f"{peak:.1f} GiB{fits}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
