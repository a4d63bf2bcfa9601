"""LoRA and DoRA beside full fine-tuning of Llama 3: memory and collectives of a step (docs/results/adapters.md).

    pip install -e '.[test]' && python bench/adapters.py [--compiled]

Each row is an estimate (`meshloom explain`, seconds each; compiled_rows.py). --compiled: also compiles those of full
fine-tuning and of LoRA, minutes each, for what their compiled programs hold and reduce. All layers run in one loop, so
that the compiler takes as long for 126 layers as for two.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from compiled_rows import Facts, Overrides, Rows, gib, keep, make_rows, markdown, parser_of, read_kept

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.models.adapter import ADAPTER

KEPT = Path(__file__).with_suffix(".jsonl")
COMPILED = Path(__file__).with_name("adapters_compiled.jsonl")
FULL, LORA, DORA = "full", "lora", "dora"
SUMS = ("reduce-scatter", "all-reduce")
CELLS = [  # the model, the target with its chips, what is trained: first where both fit, then where LoRA alone does
    *[(model, target, chips, kind) for model, target, chips in (
        ("llama3_8b", "v5e-16", 16), ("llama3_70b", "v5p-64", 32), ("llama3_405b", "v5p-512", 256),
    ) for kind in (FULL, LORA, DORA)],
    *[(model, target, chips, kind) for model, target, chips in (
        ("llama3_8b", "v5e-4", 4), ("llama3_70b", "v5p-16", 8), ("llama3_405b", "v5p-64", 32),
    ) for kind in (FULL, LORA)],
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
    parser.add_argument("--compiled", action="store_true", help="also compile those of full fine-tuning and of LoRA")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = [
        (f"{model}, {target}, {kind}", overrides_of(model, target, chips, kind)) for model, target, chips, kind in CELLS
    ]
    for name, overrides in [] if given.show else rows:
        if overrides not in read_kept(given.file):
            keep(given.file, name, overrides, asdict(read_spec(Request(overrides), then=estimated)))
    of_compiled = Namespace(
        **vars(given) | {"file": COMPILED if given.file == KEPT else given.file.with_suffix(".compiled")}
    )
    chosen = [row for row, (*_, kind) in zip(rows, CELLS, strict=True) if kind != DORA]
    missing = make_rows(of_compiled, chosen if given.compiled else [], facts_of)
    print(estimates(read_kept(given.file)), compiled(read_kept(of_compiled.file)), sep="\n\n")
    return int(missing > 0)


def overrides_of(model: str, target: str, chips: int, kind: str) -> Overrides:
    adapter = () if kind == FULL else (f"adapter={kind}",)
    return (*COMMON, f"model={model}", f"target={target}", f"global_batch_size={chips}", *adapter)


def estimated(spec: RunSpec) -> Row:
    plan = plan_run(spec)
    found, memory = estimate_step(plan), plan.memory
    return Row(
        base=memory.parameters - memory.adapters,
        adapters=memory.adapters,
        optimizer=memory.optimizer,
        peak_bytes=found.memory.peak_bytes,
        limit_bytes=found.memory.limit_bytes,
        num_trained=plan.num_trained_parameters,
        gathered=sum(one.num_bytes for one in found.communication if one.kind == "all-gather"),
        reduced=sum(one.num_bytes for one in found.communication if one.kind in SUMS),
        step_seconds=found.time.seconds if found.time else None,
    )


def facts_of(report: Facts) -> Facts:
    """Returns what is kept of a compiled step: its memory by class, of each kind of collective the number and the bytes
    of its full arrays, and the bytes of gradients of the base that are summed."""
    kinds: dict[str, list[int]] = {}
    of_base = 0
    for one in report["collectives"]:
        total = kinds.setdefault(one["kind"], [0, 0])
        total[0], total[1] = total[0] + one["count"], total[1] + one["bytes"]
        is_sum = one["kind"] in SUMS and "backward" in one["source"]
        of_base += one["bytes"] if is_sum and f"/{ADAPTER}/" not in one["source"] else 0
    memory, step = report["memory"], report["step"]
    return {
        "breakdown": memory["breakdown"], "peak_bytes": memory["peak_bytes_per_chip"],
        "limit_bytes": memory["limit_bytes_per_chip"], "fits": memory["fits"], "kinds": kinds, "of_base": of_base,
        "step_seconds": step and step["predicted_seconds"],
    }  # fmt: skip


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
    """Returns the table of compiled programs, of all layers."""
    kinds = ("all-gather", *SUMS)

    def rows() -> Iterator[list[str]]:
        for model, target, chips, kind in CELLS:
            if (row := kept.get(overrides_of(model, target, chips, kind))) is None:
                continue
            held = {"base": row["breakdown"].get("parameters", 0), "adapters": 0} | row["breakdown"]
            parts = (held[part] for part in ("base", "adapters", "optimizer", "gradients"))
            counted = (row["kinds"].get(each, (0, 0)) for each in kinds)
            yield [
                model, target, kind, *("not known" if part is None else gib(part) for part in parts),
                f"{gib(row['peak_bytes'])}{'' if row['fits'] else ' (does not fit)'}",
                *(f"{gib(size)} in {count:,}" if count else "" for count, size in counted),
                gib(row["of_base"]) if row["fits"] else "",
                f"{row['step_seconds']:.3g} s" if row["step_seconds"] else "",
            ]  # fmt: skip

    heads = ("base", "adapters", "optimizer", "gradients", "peak", *kinds, "sums of the base", "step")
    return markdown(("model", "chips", "trains", *heads), rows())


if __name__ == "__main__":
    sys.exit(main())
