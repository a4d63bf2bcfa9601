"""The Ultra-Scale Playbook's best configurations, ranked by the prices of `meshloom tune`.

    pip install -e . && python bench/playbook.py [--rows TEXT]

The Playbook ran thousands of jobs on 1 to 64 nodes of 8 H100 and published the best of each cell
(https://huggingface.co/spaces/nanotron/ultrascale-playbook, "Finding the best training configuration": sequences of
4,096 tokens, about a million tokens in a batch). Here every configuration without stages is priced, and every one with
as many stages (two where it has none) and as much tensor parallelism as the published best, with the bandwidths that
the Playbook measured and nothing fitted to a cell, and the published best is looked for in their order. The Playbook's
jobs have the schedule 1f1b and no recomputation, accumulate gradients in float32, and give the stage of the head fewer
layers, which is not declared here (https://github.com/huggingface/nanotron, scripts/scaling_benchmarks.py and
examples/config_tiny_llama_bench.yaml). Minutes for each row.
"""

import argparse
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


def variant(cell: Cell, zero: int, *, is_staged: bool) -> Variant:
    sizes = f"{{stage: [{max(cell.stage, 2)}], tensor: [{cell.tensor}]}}"
    staged = ("pipeline=1f1b", f"tune.mesh={sizes}")
    rate = (ALL_REDUCE if zero == 0 else GATHER)[cell.nodes]
    link = "node" if cell.nodes > 1 else "chip"
    overrides = (
        *MODELS[cell.model], f"target=h100-{8 * cell.nodes}", f"target.network.{link}_bytes_per_second={rate}",
        f"sharding={ZERO[zero]}", "sharding.on_replicated=allow", "remat=none", "data=synthetic",
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
    for number, point in enumerate(points, start=1):
        print(f"\r  tracing {number} of {len(points)}", end="", file=sys.stderr, flush=True)
        yield function(point)
    print(file=sys.stderr)


def is_published(one: MeshCandidate, cell: Cell) -> bool:
    sizes = one.mesh.sizes
    return (
        dict(one.variant.choices)["sharding"] == ZERO[cell.zero]
        and sizes["tensor"] == cell.tensor
        and sizes["stage"] == cell.stage
        and one.num_microbatches == cell.accumulation
        and sizes["data"] * sizes["replica"] == cell.data
    )


def row(cell: Cell) -> str:
    prices, limit, plan = priced(cell)
    fits = prices.peak_bytes <= limit
    order = np.argsort(np.where(fits, prices.time.seconds, np.inf))
    flops = plan.model_flops_per_step or 0
    peak = (plan.target.peak_flops_per_second or 0) * plan.target.num_devices

    def mfu(number: int) -> str:
        return f"{flops / prices.time.seconds[number] / peak:.1%}"

    def best(of_stages: Callable[[int], bool]) -> list[str]:
        number = next(number for number in order if of_stages(prices.candidates[number].num_stages))
        one = prices.candidates[number]
        sizes, zero = one.mesh.sizes, 0 if dict(one.variant.choices)["sharding"] == "tensor" else 1
        options = (sizes["data"] * sizes["replica"], sizes["tensor"], one.num_stages, one.num_microbatches)
        return [f"{', '.join(map(str, options))}, {one.sequences_of_device}, Z{zero}", mfu(number)]

    published = next(number for number in order if is_published(prices.candidates[number], cell))
    place = f"{int(np.where(order == published)[0][0]) + 1} of {int(fits.sum())}"
    gib = prices.peak_bytes[published] / 2**30
    place = place if fits[published] else f"does not fit, {gib:.0f} GiB"
    options = f"{cell.data}, {cell.tensor}, {cell.stage}, {cell.accumulation}, {cell.microbatch}, Z{cell.zero}"
    head = [cell.model, str(cell.nodes), options, f"{cell.mfu:.1%}", mfu(published), place]
    return f"| {' | '.join([*head, *best(lambda stages: stages == 1), *best(lambda stages: stages > 1)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only cells whose name has this text, such as '1.34 B, 4 nodes'")
    wanted = parser.parse_args().rows
    print("| model | nodes | published: data, tensor, stage, accumulation, microbatch, ZeRO | MFU | predicted | "
          "place | our best without stages | MFU | our best with stages | MFU |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cell in CELLS:
        name = f"{cell.model}, {cell.nodes} nodes"
        if wanted in name:
            print(name, file=sys.stderr)
            print(row(cell), flush=True)


if __name__ == "__main__":
    main()
