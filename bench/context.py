"""Ring, all-gather and Ulysses by the length of sequences, on three machines (docs/results/context.md).

    pip install -e '.[test]' && python bench/context.py [--compiled]

Each row is an estimate (`meshloom explain`, seconds each; compiled_rows.py). --compiled: also compiles each with two
layers, minutes each, for its schedule.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from compiled_rows import Facts, Overrides, Rows, gib, keep, make_rows, markdown, parser_of, read_kept

from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step

KEPT = Path(__file__).with_suffix(".jsonl")
TARGETS = ("v5p-128", "v6e-64", "h100-64")  # 64 chips each
LENGTHS = {32_768: 8, 131_072: 8, 524_288: 32}  # tokens, and the devices that share a sequence
STRATEGIES = ("ring", "all_gather", "ulysses")
CELLS = [(target, length, one) for target in TARGETS for length in LENGTHS for one in STRATEGIES]
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


def main() -> int:
    parser = parser_of(__doc__, KEPT)
    parser.add_argument("--compiled", action="store_true", help="also compile each with two layers")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = [(f"{target}, {length // 1024}k, {one}", overrides_of(target, length, one)) for target, length, one in CELLS]
    for name, overrides in [] if given.show else rows:
        if overrides not in read_kept(given.file):
            keep(given.file, name, overrides, asdict(estimated(overrides)))
    num_missing = make_rows(given, [(name, cut(overrides)) for name, overrides in rows if given.compiled], facts_of)
    print(estimates(kept := read_kept(given.file)), compiled(kept), sep="\n\n")
    return int(num_missing > 0)


def overrides_of(target: str, length: int, strategy: str) -> Overrides:
    context = LENGTHS[length]
    fsdp = 64 // context
    mesh = (f"mesh.fsdp={fsdp}", f"mesh.context={context}", f"global_batch_size={fsdp}")
    return (*COMMON, f"target={target}", *mesh, f"sequence_length={length}", f"parallel.context={strategy}")


def cut(overrides: Overrides) -> Overrides:
    return (*overrides, "model.num_layers=2")


def estimated(overrides: Overrides) -> Row:
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


def facts_of(report: Facts) -> Facts:
    step, memory = report["step"], report["memory"]
    return {"step": step, "peak_bytes": memory["peak_bytes_per_chip"], "fits": memory["fits"]}


def estimates(kept: Rows) -> str:
    """Returns the table of all layers; exposed: the share of the step that waits for keys, values or heads."""

    def cells(row: Facts | None) -> list[str]:
        if not row or row["why_not"]:
            return [row["why_not"] if row else "", "", ""]
        step, peak = row["step_seconds"], row["peak_bytes"]
        fits = "" if peak <= row["limit_bytes"] else " (does not fit)"
        return [f"{step:.3g} s", f"{100 * row['exposed_context_seconds'] / step:.1f} %", f"{gib(peak)} GiB{fits}"]

    return _table(("step", "exposed", "peak"), lambda *cell: cells(kept.get(overrides_of(*cell))))


def compiled(kept: Rows) -> str:
    """Returns the table of two compiled layers; exposed: all communication."""

    def cells(row: Facts | None) -> list[str]:
        if not row:
            return ["", "", ""]
        seconds = [row["step"][key] * 1e3 for key in ("predicted_seconds", "exposed_seconds")]
        return [*(f"{each:.1f} ms" for each in seconds), f"{gib(row['peak_bytes'])} GiB"]

    return _table(("step", "exposed", "peak"), lambda *cell: cells(kept.get(cut(overrides_of(*cell)))))


def _table(columns: Sequence[str], cells: Callable[[str, int, str], list[str]]) -> str:
    def rows() -> Iterator[list[str]]:
        for target in TARGETS:
            for length in LENGTHS:
                yield [
                    target,
                    f"{length // 1024}k",
                    *(cell for one in STRATEGIES for cell in cells(target, length, one)),
                ]

    heads = [f"{one}: {columns[0]}" if n == 0 else columns[n] for one in STRATEGIES for n in range(len(columns))]
    return markdown(["chips", "tokens", *heads], rows())


if __name__ == "__main__":
    sys.exit(main())
