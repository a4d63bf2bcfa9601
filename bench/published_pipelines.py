"""Pipelines that others ran on H100, declared and estimated: what the schedule and more replicas give there and here.

    pip install -e . && python bench/published_pipelines.py [--rows TEXT] [--show]

Each row is an estimate (`meshloom explain`, half a minute each; compiled_rows.py). Published are Llama 3 405B
(arXiv:2407.21783, section 3.3.2 and table 4) and torchtitan's runs of it (benchmarks/llama3_h100_202412_torchtitan.md).
Neither can be declared as it ran: docs/results/published_pipelines.md says in what a row differs.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
from compiled_rows import Facts, Overrides, Rows, gib, keep, kept_rows, markdown, parser_of, read_kept

from meshloom.compiler.core.partition_spec import STAGE
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step

KEPT = Path(__file__).with_suffix(".jsonl")
MODEL: Overrides = (
    "model=llama3_405b", "sharding=fsdp_tensor", "mesh.tensor=8", "sequence_length=8192", "data=synthetic",
)  # fmt: skip
# torchtitan's 1f1b runs as in ticks of two operations; ticks of one, which `auto` chooses, are shorter and do not fit.
MULTI = "pipeline.ticks=multi"
GRAND_TETON = ("target.chip.hbm_bytes_per_second=2.4e12", "target.chip.power_limit_watts=500")
ONE_CHUNK, EIGHT_CHUNKS = ("pipeline=1f1b",), ("pipeline=interleaved_1f1b", "pipeline.num_chunks=8")
TWO_CHUNKS = ("pipeline=interleaved_1f1b", "pipeline.num_chunks=2")


@dataclass(frozen=True)
class Run:
    """A declared run. published: in TFLOP/s of a GPU, or tokens per second and GPU; None: such a run is not
    published."""

    name: str
    overrides: Overrides
    published: str | None = None


# 126 layers in 128 parts: the first has the embedding alone, and the last the head.
ALONE = f"pipeline.layers=[0{',1' * 126},0]"


def llama(num_gpus: int, schedule: Overrides, remat: str, published: str | None = None) -> Run:
    """Returns a run of Llama 3 405B: 2,048 sequences over 16 stages, one in a microbatch."""
    replicas = num_gpus // 128
    chosen = (
        f"target=h100-{num_gpus}", "mesh.stage=16", f"mesh.fsdp={replicas}", "global_batch_size=2048",
        f"num_microbatches={2048 // replicas}", f"remat={remat}", *schedule,
        *((ALONE,) if schedule == EIGHT_CHUNKS else ()),
    )  # fmt: skip
    return Run(f"405B, {num_gpus:,} GPUs, remat {remat}, {_name(schedule)}", (*MODEL, *chosen), published)


def torchtitan(schedule: Overrides, published: str) -> Run:
    """Returns a run of torchtitan: 256 sequences over 8 stages, as many microbatches as stages, which is its
    default."""
    chosen = (
        "target=h100-512", "mesh.stage=8", "mesh.fsdp=8", "global_batch_size=256", "num_microbatches=8", "remat=full",
        *schedule, MULTI, *GRAND_TETON,
    )  # fmt: skip
    return Run(f"torchtitan 405B, 512 GPUs, {_name(schedule)}", (*MODEL, *chosen), published)


def _name(schedule: Overrides) -> str:
    return ", ".join(word.split("=")[1] for word in schedule)


RUNS = (
    llama(8192, EIGHT_CHUNKS, "none", "430 TFLOP/s"),
    llama(16384, EIGHT_CHUNKS, "none", "400 TFLOP/s"),
    llama(8192, EIGHT_CHUNKS, "save_dots"),
    llama(16384, EIGHT_CHUNKS, "save_dots"),
    llama(8192, EIGHT_CHUNKS, "full"),
    llama(16384, EIGHT_CHUNKS, "full"),
    llama(8192, ONE_CHUNK, "full"),
    llama(16384, ONE_CHUNK, "full"),
    torchtitan(ONE_CHUNK, "100 tokens/s, float8"),
    torchtitan(TWO_CHUNKS, "128 tokens/s, float8"),
)
ROWS = {run.name: run.overrides for run in RUNS}


def main() -> int:
    given = parser_of(__doc__, KEPT).parse_args()
    jax.config.update("jax_platforms", "cpu")
    for name, overrides in ROWS.items():
        wanted = given.rows.lower() in name.lower() and not given.show
        if wanted and overrides not in read_kept(given.file):
            keep(given.file, name, overrides, read_spec(Request(overrides), then=estimated))
    print(table(read_kept(given.file)))
    return 0


def estimated(spec: RunSpec) -> Facts:
    plan = plan_run(spec)
    found = estimate_step(plan)
    assert found.time is not None
    assert plan.pipeline is not None
    return {
        "seconds": found.time.seconds,
        "compute_seconds": found.time.compute_seconds,
        "bubble_seconds": found.time.bubble_seconds,
        "exposed_seconds": {"+".join(axes): seconds for axes, seconds in found.time.exposed.items()},
        "flops": plan.model_flops_per_step,
        "tokens": spec.tokens_per_step,
        "num_chips": plan.target.num_chips,
        "peak_bytes": found.memory.peak_bytes,
        "limit_bytes": found.memory.limit_bytes,
        "jax": jax.__version__,
    }


def table(kept: Rows) -> str:
    """Returns the table of the rows that are kept, with the published figures."""
    published = {run.name: run.published or "" for run in RUNS}
    columns = ("run", "published", "estimated", "tokens/s", "step", "bubble", "over tensor", "over fsdp", "over stage",
               "memory of a GPU")  # fmt: skip
    return markdown(columns, ([name, published[name], *_cells(facts)] for name, facts in kept_rows(ROWS, kept)))


def _cells(facts: Facts) -> list[str]:
    seconds, num_chips = facts["seconds"], facts["num_chips"]
    exposed = (facts["exposed_seconds"].get(axis, 0.0) for axis in ("tensor", "fsdp", STAGE))
    shares = (f"{each / seconds:.1%}" for each in (facts["bubble_seconds"], *exposed))
    fits = "" if facts["peak_bytes"] <= facts["limit_bytes"] else ", does not fit"
    return [
        f"{facts['flops'] / seconds / num_chips / 1e12:.0f} TFLOP/s", f"{facts['tokens'] / seconds / num_chips:.0f}",
        f"{seconds:.2f} s", *shares, f"{gib(facts['peak_bytes'])} GiB{fits}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
