"""Peak memory as estimated without XLA, against XLA's own, of steps compiled for TPUs that are not there.

    pip install -e '.[test]' && python bench/memory_accuracy.py [FILE]

Real widths; few layers, since memory grows by the same amount with each, and in the last rows whole models. A row
takes half a minute and more to compile; what is measured is kept in FILE (bench/memory_accuracy.jsonl) and not compiled
again. Estimates are made anew, a second for each, and kept beside it.
peak: `memory_analysis().peak_memory_in_bytes`, the arguments included. reserved: argument + output - alias + temp.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
                   "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

from compiled_rows import Facts, markdown, read_lines
from jax.experimental import topologies

import meshloom
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.spec.target_spec import TpuTarget
from meshloom.compiler.target.target import topology_arguments
from meshloom.compiler.xla.programs import lower

KEPT = Path(__file__).with_suffix(".jsonl")
# As these were compiled: logits in blocks of loss.max_logits_bytes whatever the chip, and the whole table gathered.
PINNED = ("loss.max_logits_share=0", "parallel.embedding=all_gather")
TENSOR_2, TENSOR_4 = "mesh.tensor=2", "mesh.tensor=4"

# model, layers, sequences, length, target, sharding, remat, other overrides
ROWS: tuple[tuple[Any, ...], ...] = (
    ("llama2_7b", 4, 8, 4096, "v5e-8", "fsdp", "full"),
    ("llama2_7b", 4, 8, 4096, "v5e-8", "fsdp", "none"),
    ("llama2_7b", 4, 16, 4096, "v6e-8", "fsdp", "save_dots"),
    ("llama2_7b", 4, 16, 4096, "v5p-16", "hsdp", "save_names", "num_microbatches=2"),
    ("llama3_8b", 4, 8, 8192, "v5p-16", "fsdp_tensor", "save_names", TENSOR_2),
    ("llama3_8b", 4, 16, 4096, "v5p-16", "fsdp", "none", "precision=bfloat16_params"),
    ("llama3_8b", 6, 16, 8192, "v5e-16", "fsdp_tensor", "full", TENSOR_4),
    ("gpt2_124m", 12, 64, 1024, "v5e-8", "ddp", "none"),
    ("gpt2_124m", 12, 128, 1024, "v5e-8", "zero1", "save_names"),
    ("qwen3_0_6b", 8, 16, 4096, "v5e-8", "ddp", "save_dots"),
    ("qwen3_0_6b", 8, 32, 4096, "v6e-8", "zero1", "full"),
    ("gemma2_9b", 4, 8, 8192, "v5p-16", "fsdp", "full"),
    ("gemma2_9b", 4, 8, 4096, "v6e-8", "fsdp_tensor", "save_dots", TENSOR_2),
    ("llama2_7b", 4, 8, 2048, "v5p-16", "fsdp", "full", "parallel.attention=xla"),
    ("llama3_8b", 32, 128, 8192, "v5p-128", "fsdp", "full"),
    ("llama3_70b", 80, 256, 4096, "v6e-256", "fsdp_tensor", "full", TENSOR_4),
    ("qwen3_8b", 36, 64, 4096, "v5e-64", "fsdp", "save_names"),
)


def plan_of(row: tuple[Any, ...]) -> Plan:
    model, layers, sequences, length, target, sharding, remat, *others = row
    overrides = (
        f"model={model}", f"model.num_layers={layers}", f"global_batch_size={sequences}", f"sequence_length={length}",
        f"target={target}", f"sharding={sharding}", f"remat={remat}", "data=synthetic", *PINNED, *others,
    )  # fmt: skip
    return meshloom.plan(*overrides)


def compile_row(plan: Plan) -> dict[str, Any]:
    """Bytes as XLA counts them, per device."""
    start = time.perf_counter()
    assert isinstance(plan.spec.target, TpuTarget)
    assert plan.target.topology_name is not None
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=plan.target.topology_name, **topology_arguments(plan.spec.target)
    )
    memory = lower(plan, plan.mesh.of_devices(topology.devices))["train"].compile().memory_analysis()
    counts = {name: getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")}
    return counts | {
        "code": memory.generated_code_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(rows: Sequence[Facts]) -> str:
    columns = "model, layers | sequences | target | sharding | remat |  | estimate | XLA's peak | off | reserved"
    return markdown(columns.split(" | "), map(_cells, rows))


def _cells(kept: Facts) -> list[str]:
    model, layers, sequences, length, target, sharding, remat, *others = kept["row"]
    reserved = kept["argument"] + kept["temp"] + kept["output"] - kept["alias"]
    off = f"{kept['estimate'] / kept['peak'] - 1:+.1%}"
    names = [f"`{model}`, {layers}", f"{sequences} x {length:,}", target, f"`{sharding}`", f"`{remat}`"]
    estimate, peak, reserved = (f"{size / 2**30:.2f}" for size in (kept["estimate"], kept["peak"], reserved))
    return [*names, " ".join(others), estimate, peak, off, reserved]


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT
    kept = {tuple(one["row"]): one for one in read_lines(path)}
    for number, row in enumerate(ROWS, start=1):
        if row not in kept:
            print(f"compiling {number} of {len(ROWS)}: {' '.join(map(str, row))}", file=sys.stderr, flush=True)
            kept[row] = {"row": row} | compile_row(plan_of(row))
        kept[row]["estimate"] = estimate_step(plan_of(row)).memory.peak_bytes
        path.write_text("".join(json.dumps(kept[one]) + "\n" for one in ROWS if one in kept))
    print(table([kept[row] for row in ROWS]))


if __name__ == "__main__":
    main()
