"""The Ultra-Scale Playbook's best configurations, ranked by the prices of `meshloom tune`.

    pip install -e . && python bench/playbook.py

The Playbook ran thousands of jobs on 1 to 64 nodes of 8 H100 and published the best of each cell
(https://huggingface.co/spaces/nanotron/ultrascale-playbook, "Finding the best training configuration": sequences of
4,096 tokens, about a million tokens in a batch). Here every configuration without pipeline stages is priced, with the
bandwidths that the Playbook measured and nothing fitted to a cell, and the published best is looked for in their order.
Cells whose best has pipeline stages wait for pipelines: what is shown for them is the best without. Minutes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.plan import Plan
from meshloom.compiler.tune.families import Reference, TracePoint, find_families, group_candidates
from meshloom.compiler.tune.price import Prices, price_candidates
from meshloom.compiler.tune.space import MeshCandidate, Variant, find_candidates
from meshloom.runtime.processes.devices import plan_without_devices

SEQUENCES, LENGTH = 256, 4096
ZERO = {0: "tensor", 1: "zero1"}  # its ZeRO stage -> our sharding
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
    """The published best: MFU, sizes of the data, tensor and stage axes, accumulation, microbatch, ZeRO stage."""

    model: str
    nodes: int
    mfu: float
    data: int
    tensor: int
    stage: int
    accumulation: int
    microbatch: int
    zero: int


CELLS = (
    Cell("1.34 B", 1, 0.443, 4, 1, 2, 16, 4, 1),
    Cell("1.34 B", 4, 0.384, 16, 1, 2, 16, 1, 1),
    Cell("1.34 B", 16, 0.295, 64, 2, 1, 1, 4, 0),
    Cell("1.34 B", 64, 0.053, 128, 2, 2, 1, 2, 1),
    Cell("8.86 B", 1, 0.452, 2, 1, 4, 128, 1, 1),
    Cell("8.86 B", 4, 0.433, 16, 1, 2, 16, 1, 1),
    Cell("8.86 B", 16, 0.363, 16, 8, 1, 2, 8, 0),
    Cell("8.86 B", 64, 0.187, 128, 4, 1, 1, 2, 0),
)  # fmt: skip


def variant(cell: Cell, zero: int) -> Variant:
    rate = (ALL_REDUCE if zero == 0 else GATHER)[cell.nodes]
    link = "node" if cell.nodes > 1 else "chip"
    overrides = (
        *MODELS[cell.model], f"target=h100-{8 * cell.nodes}", f"target.network.{link}_bytes_per_second={rate}",
        f"sharding={ZERO[zero]}", "sharding.on_replicated=allow", "remat=none", "data=synthetic",
        "overlap.layers.reduce_in_backward=true",  # as its data parallelism does
        f"global_batch_size={SEQUENCES}", f"sequence_length={LENGTH}",
    )  # fmt: skip
    spec = read_spec(Request(overrides), then=lambda spec: spec)
    plan_without_devices(spec.target)
    return Variant((("sharding", ZERO[zero]),), spec)


def priced(cell: Cell) -> tuple[Prices, int, Plan]:
    """Returns the prices of all configurations of a cell, the memory of a device, and a plan of one of them."""
    variants = [variant(cell, zero) for zero in ZERO]
    candidates, _ = find_candidates(variants)
    families = find_families(group_candidates(candidates), traced)
    memory = variants[0].target().hbm_bytes_per_device
    assert memory is not None
    return price_candidates(candidates, families), memory, plan_run(candidates[0].spec())


def traced(function: Callable[[TracePoint], Reference], points: Sequence[TracePoint]) -> Iterator[Reference]:
    for number, point in enumerate(points, start=1):
        print(f"\r  tracing {number} of {len(points)}", end="", file=sys.stderr, flush=True)
        yield function(point)
    print(file=sys.stderr)


def is_published(one: MeshCandidate, cell: Cell) -> bool:
    sizes = one.mesh.sizes
    return (
        dict(one.variant.choices)["sharding"] == ZERO[cell.zero]
        and sizes["tensor"] == cell.tensor
        and one.num_microbatches == cell.accumulation
        and sizes["data"] * sizes["replica"] == cell.data
    )


def row(cell: Cell) -> str:
    prices, limit, plan = priced(cell)
    fits = prices.peak_bytes <= limit
    seconds = np.where(fits, prices.time.seconds, np.inf)
    order = np.argsort(seconds)
    flops = plan.model_flops_per_step or 0
    peak = (plan.target.peak_flops_per_second or 0) * plan.target.num_devices

    def mfu(place: int) -> str:
        return f"{flops / prices.time.seconds[place] / peak:.1%}"

    best = prices.candidates[order[0]]
    options = f"{cell.data}, {cell.tensor}, {cell.stage}, {cell.accumulation}, {cell.microbatch}, Z{cell.zero}"
    places = [int(np.where(order == n)[0][0]) for n, one in enumerate(prices.candidates) if is_published(one, cell)]
    if cell.stage > 1 or not places:
        own, rank = "", "pipeline" if cell.stage > 1 else "not in the space"
    else:
        own, rank = mfu(order[min(places)]), f"{min(places) + 1} of {int(fits.sum())}"
        rank += "" if fits[order[min(places)]] else ", does not fit"
    sizes = best.mesh.sizes
    ours = f"{sizes['data'] * sizes['replica']}, {sizes['tensor']}, 1, {best.num_microbatches}, "
    ours += f"{best.sequences_of_device}, Z{0 if dict(best.variant.choices)['sharding'] == 'tensor' else 1}"
    cells = (cell.model, str(cell.nodes), options, f"{cell.mfu:.1%}", own, rank, ours, mfu(order[0]))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print("| model | nodes | published: data, tensor, stage, accumulation, microbatch, ZeRO | MFU | predicted | "
          "place | our best without stages | MFU |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for cell in CELLS:
        print(f"{cell.model}, {cell.nodes} nodes", file=sys.stderr)
        print(row(cell), flush=True)


if __name__ == "__main__":
    main()
