"""LoRA and DoRA beside full fine-tuning of Llama 3: memory and collectives of a step (docs/results/adapters.md).

    pip install -e '.[test]' && python bench/adapters.py [--compiled]

Each row is an estimate (`meshloom explain`, seconds each; compiled_rows.py). --compiled: also compiles those of 8B with
two layers, minutes each, for what their compiled programs hold and reduce.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from compiled_rows import Facts, Overrides, Rows, gib, keep, make_rows, markdown, parser_of, read_kept

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step

KEPT = Path(__file__).with_suffix(".jsonl")
NONE, LORA, DORA = "full", "lora", "dora"
CELLS = [  # the model, the target with its chips, what is trained: the same chips, then a slice on which LoRA fits
    *[(model, target, chips, kind) for model, target, chips in (
        ("llama3_8b", "v5e-16", 16), ("llama3_70b", "v5p-64", 32), ("llama3_405b", "v5p-512", 256),
    ) for kind in (NONE, LORA, DORA)],
    ("llama3_8b", "v5e-4", 4, LORA), ("llama3_70b", "v5p-16", 8, LORA), ("llama3_405b", "v5p-64", 32, LORA),
]  # fmt: skip
COMMON = ("sharding=fsdp", "remat=full", "overlap=prefetch", "data=synthetic", "sequence_length=8192")


@dataclass(frozen=True)
class Row:
    """Bytes of a chip, but num_trained, a number of parameters, and gathered and reduced, bytes of full arrays that a
    step gathers, and of those whose sums it makes."""

    base: int
    adapters: int
    optimizer: int
    peak_bytes: int
    limit_bytes: int | None
    num_trained: int
    gathered: int
    reduced: int
    step_seconds: float | None


def main() -> int:
    parser = parser_of(__doc__, KEPT)
    parser.add_argument("--compiled", action="store_true", help="also compile those of 8B with two layers")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = [
        (f"{model}, {target}, {kind}", overrides_of(model, target, chips, kind)) for model, target, chips, kind in CELLS
    ]
    for name, overrides in [] if given.show else rows:
        if overrides not in read_kept(given.file):
            keep(given.file, name, overrides, asdict(read_spec(Request(overrides), then=estimated)))
    missing = make_rows(given, [(name, cut(overrides)) for name, overrides in rows[:2] if given.compiled], facts_of)
    print(estimates(kept := read_kept(given.file)), compiled(kept), sep="\n\n")
    return int(missing > 0)


def overrides_of(model: str, target: str, chips: int, kind: str) -> Overrides:
    adapter = () if kind == NONE else (f"adapter={kind}",)
    return (*COMMON, f"model={model}", f"target={target}", f"global_batch_size={chips}", *adapter)


def cut(overrides: Overrides) -> Overrides:
    return (*overrides, "model.num_layers=2")


def estimated(spec: RunSpec) -> Row:
    plan = plan_run(spec)
    found, memory = estimate_step(plan), plan.memory
    sums = ("reduce-scatter", "all-reduce")
    return Row(
        base=memory.parameters - memory.adapters,
        adapters=memory.adapters,
        optimizer=memory.optimizer,
        peak_bytes=found.memory.peak_bytes,
        limit_bytes=found.memory.limit_bytes,
        num_trained=plan.num_trained_parameters,
        gathered=sum(one.num_bytes for one in found.communication if one.kind == "all-gather"),
        reduced=sum(one.num_bytes for one in found.communication if one.kind in sums),
        step_seconds=found.time.seconds if found.time else None,
    )


def facts_of(report: Facts) -> Facts:
    """Returns what is kept of a compiled step: its memory by class, and of each kind of collective the number and the
    bytes of its arrays."""
    kinds: dict[str, list[int]] = {}
    for one in report["collectives"]:
        total = kinds.setdefault(one["kind"], [0, 0])
        total[0], total[1] = total[0] + one["count"], total[1] + one["bytes"]
    memory = report["memory"]
    return {"breakdown": memory["breakdown"], "peak_bytes": memory["peak_bytes_per_chip"], "kinds": kinds}


def estimates(kept: Rows) -> str:
    """Returns the table of all layers."""

    def rows() -> Iterator[list[str]]:
        for model, target, chips, kind in CELLS:
            if (row := kept.get(overrides_of(model, target, chips, kind))) is None:
                continue
            fits = "" if row["limit_bytes"] is None or row["peak_bytes"] <= row["limit_bytes"] else " (does not fit)"
            yield [
                model, target, kind, f"{row['num_trained'] / 1e6:,.0f} M", gib(row["base"]), gib(row["adapters"]),
                gib(row["optimizer"]), f"{gib(row['peak_bytes'])}{fits}", gib(row["gathered"]), gib(row["reduced"]),
                f"{row['step_seconds']:.3g} s" if row["step_seconds"] else "",
            ]  # fmt: skip

    heads = (
        "model",
        "chips",
        "trains",
        "trained",
        "base",
        "adapters",
        "optimizer",
        "peak",
        "gathered",
        "reduced",
        "step",
    )
    return markdown(heads, rows())


def compiled(kept: Rows) -> str:
    """Returns the table of two compiled layers."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")

    def rows() -> Iterator[list[str]]:
        for model, target, chips, kind in CELLS[:2]:
            if row := kept.get(cut(overrides_of(model, target, chips, kind))):
                counted = (row["kinds"].get(each, (0, 0)) for each in kinds)
                held, other = row["breakdown"], row["breakdown"].get("parameters", 0)
                bytes_of = (held.get("base", other), held.get("adapters", 0), held["optimizer"], row["peak_bytes"])
                yield [kind, *map(gib, bytes_of), *(f"{count} of {gib(size)}" for count, size in counted)]

    return markdown(("trains", "base", "adapters", "optimizer", "peak", *kinds), rows())


if __name__ == "__main__":
    sys.exit(main())
