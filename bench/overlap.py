"""Compares what `overlap=none`, `xla` and `auto` expose of a step, and its predicted time, by one simulator.

    pip install -e '.[tpu]' && pip install 'jax[cuda13]' && python bench/overlap.py [--rows TEXT] [--layers 2] [FILE]

Each row is compiled by the command for hardware that need not be there: minutes for each program (compiled_rows.py).
--layers cuts every model: the table in minutes, for a look.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from compiled_rows import NOT_COMPILED, Facts, Rows, gib, make_rows, markdown, parser_of, read_kept, versions_of

from meshloom.compiler.schema import TriedReport

KEPT = Path(__file__).with_suffix(".jsonl")
ALIKE = ("remat=full", "precision.gradient_reduction=bfloat16", "data=synthetic")
TENSOR_4 = ("sharding=fsdp_tensor", "mesh.tensor=4")
MODES = ("none", "xla", "auto")


@dataclass(frozen=True)
class Row:
    """sequences: of one chip. num_candidates: that auto compiles at most."""

    model: str
    target: str
    num_chips: int
    sequences: int
    length: int
    sharding: tuple[str, ...] = ("sharding=fsdp",)
    others: tuple[str, ...] = ()
    num_candidates: int = 4

    @property
    def name(self) -> str:
        split = "FSDP + tensor 4" if self.sharding == TENSOR_4 else "FSDP"
        return f"{self.model}, {self.target}, {split}, {self.sequences} x {self.length}"

    def overrides(self, mode: str, layers: int | None) -> tuple[str, ...]:
        search = (f"overlap.search.max_candidates={self.num_candidates}",) if mode == "auto" else ()
        cut = (f"model.num_layers={layers}",) if layers else ()
        return (f"model={self.model}", f"target={self.target}", *self.sharding, *ALIKE, *self.others, *cut,
                f"global_batch_size={self.sequences * self.num_chips}", f"sequence_length={self.length}",
                f"overlap={mode}", *search)  # fmt: skip


ROWS = (
    Row("llama2_7b", "v5e-256", 256, 4, 4096),
    Row("llama3_8b", "v5p-128", 64, 4, 4096),
    Row("llama3_8b", "v6e-64", 64, 4, 4096),
    Row("llama3_8b", "h100-64", 64, 2, 4096, num_candidates=12),
    Row("llama3_70b", "v5p-512", 256, 2, 4096),
    Row("llama3_70b", "v5p-512", 256, 2, 4096, TENSOR_4),
    Row("llama3_70b", "h100-512", 512, 2, 4096, num_candidates=12),
    # 16,384 tokens of a chip hide the matrices that cross meanwhile, 512 nearly, 128 cannot
    Row("linear_stack", "v5p-128", 64, 4, 4096, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("linear_stack", "v5p-128", 64, 1, 512, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("linear_stack", "v5p-128", 64, 1, 128, others=("model.embed_dim=8192", "model.num_layers=16")),
    Row("llama2_7b", "v5e-64", 64, 4, 2048),
    Row("llama3_8b", "v5p-128", 64, 4, 2048),
    Row("llama3_8b", "v6e-64", 64, 4, 2048),
    Row("llama2_70b", "v5p-256", 128, 2, 2048),
    Row("llama2_70b", "v5p-256", 128, 2, 2048, TENSOR_4),
)


def facts_of(report: Facts) -> Facts:
    step, memory = report["step"], report["memory"]
    return {
        "predicted_seconds": step["predicted_seconds"],
        "exposed_fraction": step["exposed_fraction"],
        "predicted_mfu": step["predicted_mfu"],
        "peak_bytes_per_chip": memory["peak_bytes_per_chip"],
        "fits": memory["fits"],
        "link_seconds": sum(part["link_seconds"] or 0.0 for part in report["roofline"]),
        "compute_seconds": step["compute_seconds"],
        "tried": [_named(one) for one in report["search"]["tried"]] if report["search"] else None,
        "chosen": report["search"]["chosen"] if report["search"] else None,
        "versions": versions_of(report),
    }


def _named(tried: Facts) -> Facts:
    kept = ("predicted_seconds", "exposed_fraction", "peak_bytes_per_chip", "fits", "compile_seconds", "why_not")
    return {"name": TriedReport.model_validate_json(json.dumps(tried)).name} | {key: tried[key] for key in kept}


def table(kept: Rows, layers: int | None = None) -> str:
    columns = ("model, target, sharding, sequences x length of a chip", *MODES, "chosen", "link / compute")
    return markdown(columns, filter(None, (cells_of(row, layers, kept) for row in ROWS)))


def cells_of(row: Row, layers: int | None, kept: Rows) -> list[str] | None:
    """Returns None if nothing of the row is compiled yet but what it is compared with."""
    none, xla, auto = (kept.get(row.overrides(mode, layers)) for mode in MODES)
    if auto is None:
        return None
    chosen = auto["tried"][auto["chosen"]]
    share = auto["link_seconds"] / auto["compute_seconds"] if auto["compute_seconds"] else 0.0
    return [row.name, *map(figures, (none, xla, chosen)), chosen["name"], f"{share:.2f}"]


def figures(one: Facts | None) -> str:
    if one is None:
        return NOT_COMPILED
    if one["predicted_seconds"] is None:
        return "does not fit" if one["fits"] is False else one.get("why_not") or "not known"
    return f"{one['exposed_fraction']:.1%}, {one['predicted_seconds']:.3g} s, {gib(one['peak_bytes_per_chip'])} GiB"


def main() -> int:
    """Returns 1 if a row could not be compiled."""
    parser = parser_of(__doc__, KEPT)
    parser.add_argument("--layers", type=int, help="of every model")
    given = parser.parse_args()
    todo = [(row.name, row.overrides(mode, given.layers)) for mode in reversed(MODES) for row in ROWS]  # baseline last
    num_missing = make_rows(given, todo, facts_of)
    print(table(read_kept(given.file), given.layers))
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main())
