"""Memory of the compiled train step by remat policy, sharding and precision: XLA's own numbers, against the plan's.

    python bench/memory.py

Compiles for eight simulated devices, runs nothing; prints two tables in Markdown. Bytes are per device. state: what a
step takes beside its batch, planned and as XLA counts it; temporaries: all that XLA makes room for within a step.
"""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import meshloom  # noqa: E402
from meshloom.compiler.xla.programs import lower  # noqa: E402

MODEL = ("model.num_layers=8", "model.embed_dim=256", "model.num_heads=16", "model.num_kv_heads=8", "model.mlp_dim=768",
         "sequence_length=256", "global_batch_size=32", "data=synthetic")  # fmt: skip
REMAT = ("none", "minimal", "save_dots", "save_names", "offload", "full")
SHARDINGS = ("ddp", "zero1", "zero2", "hsdp", "fsdp")
MIB = 2**20


def measure(*overrides: str) -> dict[str, float]:
    """MiB per device: planned and compiled state, planned gradients, temporaries."""
    plan = meshloom.plan(*MODEL, *overrides)
    compiled = lower(plan, plan.mesh.of_devices(jax.devices()))["train"].compile()
    xla = compiled.memory_analysis()
    return {
        "planned state": plan.memory.state_bytes / MIB,
        "XLA's state": (xla.argument_size_in_bytes - plan.memory.batch) / MIB,
        "planned gradients": plan.memory.gradients / MIB,
        "temporaries": xla.temp_size_in_bytes / MIB,
    }


def table(first: str, rows: dict[str, dict[str, float]]) -> None:
    """The rows as a Markdown table."""
    names = list(next(iter(rows.values())))
    print(f"| {first} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}", flush=True)
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in values.values())} |")
    print()


def main() -> None:
    table("`remat`, with `sharding=fsdp`", {f"`{p}`": measure(f"remat={p}") for p in REMAT})
    full = ("remat=full", "precision=bfloat16_params", "num_microbatches=2")
    table(
        "`sharding`, with `precision=bfloat16_params remat=full num_microbatches=2`",
        {f"`{s}`": measure(f"sharding={s}", *full) for s in SHARDINGS},
    )


if __name__ == "__main__":
    main()
