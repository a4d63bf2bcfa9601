"""Step times of the loops over layers on eight simulated devices, which hide nothing: what a loop itself costs.

    python bench/layer_loop.py [num_rounds [num_layers]]

One small transformer, fully sharded, in float32; steps are timed in interleaved rounds, against `overlap=none`.
"""

import statistics
import sys
import time

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import meshloom  # noqa: E402
from meshloom.compiler.xla.programs import build, lower  # noqa: E402

SHAPE = (
    "model.embed_dim=256", "model.num_heads=8", "model.num_kv_heads=8", "model.head_dim=32",
    "model.mlp_dim=768", "global_batch_size=16", "sequence_length=64", "precision=float32", "remat=full",
)  # fmt: skip
LOOPS = {
    "none": ("overlap=none",),
    "prefetch": ("overlap=prefetch",),
    "prefetch, not deferred": ("overlap=prefetch", "overlap.layers.deferred_reduce_scatter=false"),
    "prefetch, unroll 2": ("overlap=prefetch", "overlap.layers.unroll=2"),
}
STEPS_PER_ROUND = 5


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    num_layers = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    tokens = np.random.default_rng(0).integers(0, 257, (16, 65), dtype=np.int32)
    steps, states, seconds = {}, {}, {name: [] for name in LOOPS}
    for name, overrides in LOOPS.items():
        plan = meshloom.plan(*SHAPE, f"model.num_layers={num_layers}", *overrides)
        programs = build(lower(plan, plan.mesh.of_devices(jax.devices()), ("init", "train")))
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch = {key: jax.device_put(batch[key], x.sharding) for key, x in programs.batch.items()}
        steps[name] = lambda state, train=programs["train"], batch=batch: train(state, batch)[0]
        states[name] = programs["init"]()
    for round_ in range(num_rounds + 1):
        for name in list(LOOPS) if round_ % 2 else reversed(LOOPS):
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                states[name] = steps[name](states[name])
            jax.block_until_ready(states[name])
            if round_:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / STEPS_PER_ROUND)
    print("| loop | median ms | range | against `none` |\n|---|---|---|---|")
    for name, each in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(each, seconds["none"], strict=True))
        median, least, most = (1e3 * f(each) for f in (statistics.median, min, max))
        print(f"| {name} | {median:.1f} | {least:.1f}..{most:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
