"""The Ultra-Scale Playbook's best configurations, ranked by the prices of `meshloom tune`.

    pip install -e . && python bench/playbook.py [--rows TEXT] [--show]

The Playbook ran thousands of jobs on 1 to 64 nodes of 8 H100 and published the best of each cell
(https://huggingface.co/spaces/nanotron/ultrascale-playbook, "Finding the best training configuration": sequences of
4,096 tokens, about a million tokens in a batch). Here every configuration without stages is priced, and every one with
as many stages (two where it has none) and as much tensor parallelism as the published best, with the bandwidths that
the Playbook measured and nothing fitted to a cell, and the published best is looked for in their order. The Playbook's
jobs have the schedule 1f1b and no recomputation, accumulate gradients in float32, and give the stage of the head fewer
layers, as `pipeline.layers=balanced` does (https://github.com/huggingface/nanotron, scripts/scaling_benchmarks.py and
examples/config_tiny_llama_bench.yaml). Cells with stages are priced with `remat=minimal`, too. Minutes for each row,
which is kept (compiled_rows.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from compiled_rows import Facts, Overrides, Rows, gib, kept_rows, make_rows, markdown, parser_of, read_kept

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.tune.families import Reference, TracePoint, find_families, group_candidates
from meshloom.compiler.tune.price import Prices, price_candidates
from meshloom.compiler.tune.space import MeshCandidate, Variant, find_candidates
from meshloom.runtime.processes.devices import plan_without_devices

KEPT = Path(__file__).with_suffix(".jsonl")
SEQUENCES, LENGTH = 256, 4096
STAGED: Overrides = ("pipeline=1f1b", "pipeline.layers=balanced")
ZERO = {0: "tensor", 1: "zero1"}  # its ZeRO stage -> our sharding
FLAT = "overlap.layers.reduce_in_backward=true"  # as its data parallelism does; a pipeline reduces gradients at the end
# Llama 3's shapes with as many heads for keys as for queries and 131,072 tokens have the published numbers of
# parameters, 1.342 B (16 layers, tied) and 8.859 B.
MODELS = {
    "1.34 B": ("model=llama3_8b", "model.embed_dim=2048", "model.num_layers=16", "model.num_heads=32",
               "model.num_kv_heads=32", "model.head_dim=64", "model.mlp_dim=8192", "model.embeddings=tied",
               "model.vocab_size=131072"),
    "8.86 B": ("model=llama3_8b", "model.num_kv_heads=32", "model.vocab_size=131072"),
}  # fmt: skip
ALL_REDUCE = {1: 436e9, 4: 160.1e9, 16: 84.7e9, 64: 32.9e9}  # measured, bytes per second and GPU or node, by nodes
GATHER = {1: 250e9, 4: 119e9, 16: 55e9, 64: 11e9}  # all-gather and reduce-scatter, as ZeRO-1 has them


@dataclass(frozen=True)
class Cell:
    """The published best: MFU, sizes of the data, tensor and stage axes, accumulation, microbatch, ZeRO stage.
    remat: of all that is priced."""

    model: str
    nodes: int
    mfu: float
    data: int
    tensor: int
    stage: int
    accumulation: int
    microbatch: int
    zero: int
    remat: str = "none"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.nodes} nodes{'' if self.remat == 'none' else f', {self.remat}'}"

    @property
    def options(self) -> str:
        sizes = self.data, self.tensor, self.stage, self.accumulation, self.microbatch
        return f"{', '.join(map(str, sizes))}, Z{self.zero}"


PUBLISHED = (
    Cell("1.34 B", 1, 0.443, 4, 1, 2, 16, 4, 1),
    Cell("1.34 B", 4, 0.384, 16, 1, 2, 16, 1, 1),
    Cell("1.34 B", 16, 0.295, 64, 2, 1, 1, 4, 0),
    Cell("1.34 B", 64, 0.053, 128, 2, 2, 1, 2, 1),
    Cell("8.86 B", 1, 0.452, 2, 1, 4, 128, 1, 1),
    Cell("8.86 B", 4, 0.433, 16, 1, 2, 16, 1, 1),
    Cell("8.86 B", 16, 0.363, 16, 8, 1, 2, 8, 0),
    Cell("8.86 B", 64, 0.187, 128, 4, 1, 1, 2, 0),
)  # fmt: skip
CELLS = (*PUBLISHED, *(replace(cell, remat="minimal") for cell in PUBLISHED if cell.stage > 1))


def variant(cell: Cell, zero: int, *, is_staged: bool) -> Variant:
    sizes = f"{{stage: [{max(cell.stage, 2)}], tensor: [{cell.tensor}]}}"
    staged = (*STAGED, f"tune.mesh={sizes}")
    rate = (ALL_REDUCE if zero == 0 else GATHER)[cell.nodes]
    link = "node" if cell.nodes > 1 else "chip"
    overrides = (
        *MODELS[cell.model], f"target=h100-{8 * cell.nodes}", f"target.network.{link}_bytes_per_second={rate}",
        f"sharding={ZERO[zero]}", "sharding.on_replicated=allow", f"remat={cell.remat}", "data=synthetic",
        f"global_batch_size={SEQUENCES}", f"sequence_length={LENGTH}", *(staged if is_staged else (FLAT,)),
    )  # fmt: skip
    spec = read_spec(Request(overrides), then=lambda spec: spec)
    plan_without_devices(spec.target)
    pipeline = (("pipeline", "1f1b"),) if is_staged else ()
    return Variant((("sharding", ZERO[zero]), *pipeline), spec)


def priced(cell: Cell) -> tuple[Prices, int, Plan]:
    """Returns the prices of all configurations of a cell, the memory of a device, and a plan of one of them."""
    variants = [variant(cell, zero, is_staged=is_staged) for zero in ZERO for is_staged in (False, True)]
    candidates, _ = find_candidates(variants)
    families = find_families(group_candidates(candidates), traced)
    memory = variants[0].target().hbm_bytes_per_device
    assert memory is not None
    return price_candidates(candidates, families), memory, plan_run(candidates[0].spec())


def traced(function: Callable[[TracePoint], Reference], points: Sequence[TracePoint]) -> Iterator[Reference]:
    return map(function, points)


def is_published(one: MeshCandidate, cell: Cell) -> bool:
    sizes = one.mesh.sizes
    return (
        dict(one.variant.choices)["sharding"] == ZERO[cell.zero]
        and sizes["tensor"] == cell.tensor
        and sizes["stage"] == cell.stage
        and one.num_microbatches == cell.accumulation
        and sizes["data"] * sizes["replica"] == cell.data
    )


def facts_of(cell: Cell) -> Facts:
    """Returns the published best's place among those that fit, and the best ones without stages and with them."""
    prices, limit, plan = priced(cell)
    fits = prices.peak_bytes <= limit
    order = np.argsort(np.where(fits, prices.time.seconds, np.inf))
    flops = plan.model_flops_per_step or 0
    peak = (plan.target.peak_flops_per_second or 0) * plan.target.num_devices

    def of(number: int) -> Facts:
        one, time = prices.candidates[number], prices.time.of(number)
        sizes, zero = one.mesh.sizes, 0 if dict(one.variant.choices)["sharding"] == "tensor" else 1
        options = (sizes["data"] * sizes["replica"], sizes["tensor"], one.num_stages, one.num_microbatches)
        return {
            "options": f"{', '.join(map(str, options))}, {one.sequences_of_device}, Z{zero}",
            "mfu": flops / time.seconds / peak,
            "bubble_fraction": time.bubble_seconds / time.seconds,
            "peak_bytes": int(prices.peak_bytes[number]),
        }

    def best(of_stages: Callable[[int], bool]) -> Facts | None:
        return next((of(n) for n in order if fits[n] and of_stages(prices.candidates[n].num_stages)), None)

    published = next(number for number in order if is_published(prices.candidates[number], cell))
    place = int(np.where(order == published)[0][0]) + 1 if fits[published] else None
    bests = {"unstaged": best(lambda stages: stages == 1), "staged": best(lambda stages: stages > 1)}
    return {"published": of(published), "place": place, "num_fit": int(fits.sum()), **bests}


def overrides_of(cell: Cell) -> Overrides:
    """Returns what a row is kept by."""
    remat = () if cell.remat == "none" else (f"remat={cell.remat}",)
    return (*MODELS[cell.model], *STAGED, *remat, cell.options, f"{cell.nodes} nodes")


def table(kept: Rows, *, is_staged: bool) -> str:
    columns = (
        "model", "nodes", "remat", "published: data, tensor, stage, accumulation, microbatch, ZeRO", "MFU", "predicted",
        "bubble", "memory", "place", "our best without stages", "MFU", "our best with stages", "MFU",
    )  # fmt: skip
    cells = {cell.name: cell for cell in CELLS if (cell.stage > 1) == is_staged}
    rows = kept_rows({name: overrides_of(cell) for name, cell in cells.items()}, kept)
    return markdown(columns, (_row(cells[name], facts) for name, facts in rows))


def _row(cell: Cell, facts: Facts) -> list[str]:
    own, place = facts["published"], facts["place"]
    ranked = f"{place} of {facts['num_fit']}" if place else f"does not fit; {facts['num_fit']} do"
    bests = [[best["options"], f"{best['mfu']:.1%}"] if best else ["none fits", ""]
             for best in (facts["unstaged"], facts["staged"])]  # fmt: skip
    predicted = [f"{own['mfu']:.1%}", f"{own['bubble_fraction']:.1%}", f"{gib(own['peak_bytes'])} GiB", ranked]
    return [
        cell.model,
        str(cell.nodes),
        f"`{cell.remat}`",
        cell.options,
        f"{cell.mfu:.1%}",
        *predicted,
        *bests[0],
        *bests[1],
    ]


def main() -> None:
    given = parser_of(__doc__, KEPT).parse_args()
    cells = {overrides_of(cell): cell for cell in CELLS}
    rows = ((cell.name, overrides) for overrides, cell in cells.items())
    make_rows(given, rows, dict, make=lambda overrides: (facts_of(cells[overrides]), None))
    for is_staged in (True, False):
        print(table(read_kept(given.file), is_staged=is_staged))


if __name__ == "__main__":
    main()
