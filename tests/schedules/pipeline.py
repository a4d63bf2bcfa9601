"""Makes pipeline_NAME.txt: matmuls in the slots of a pipeline's ticks, on 4 stages of 2 chips.

A forward slot is LAYERS matmuls, a backward slot twice as many. Of gpipe, a slot gathers each weight over `fsdp`, and
the last stage has a head of its own. Of slices, 1f1b on two slices, of two stages each. Of shared, the head is split
over the stages, which all run it when the last one has a forward slot; of hangs, each when it has one itself.
"""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.compiler.core.scopes import end_scope, shared_end_scope, slot_scope

STAGES, MICROBATCHES, LAYERS = 4, 8, 2
B, E, V = 2048, 2048, 4096  # rows of a microbatch, its width, and the width of the head


def ticks(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the microbatch of the forward and of the backward slot, by tick and stage; -1 where it is empty."""
    first = STAGES - 1 + (MICROBATCHES if name == "gpipe" else 0)  # the tick of the last stage's first backward
    num_ticks = first + MICROBATCHES + STAGES - 1
    tables = np.full((2, num_ticks, STAGES), -1)
    for stage in range(STAGES):
        for microbatch in range(MICROBATCHES):
            tables[0, stage + microbatch, stage] = microbatch
            tables[1, first + STAGES - 1 - stage + microbatch, stage] = microbatch
    return tables[0], tables[1]


def step(name: str, batch, weights, head):
    """Runs all ticks. batch: (microbatches, B, E). weights: (layers, E, E / 2) of this device. head: (E, V)."""
    stage = jax.lax.axis_index("stage")
    is_whole = name != "gpipe"
    weights = weights[0]

    def gathered(w):
        return jax.lax.all_gather(w, "fsdp", axis=w.ndim - 1, tiled=True)

    whole = gathered(weights) if is_whole else weights

    def forward(x, w):
        return jax.lax.dot(x, w if is_whole else gathered(w)), None

    def backward(g, layer):
        w, x = layer
        w = w if is_whole else gathered(w)
        dw = jax.lax.dot(x.T, g, preferred_element_type=jnp.float32)
        return jax.lax.dot(g, w.T), dw if is_whole else jax.lax.psum_scatter(
            dw, "fsdp", scatter_dimension=1, tiled=True
        )

    def tick(carry, row):
        xs, dx, d_weights, total = carry
        f, b = row[0][stage], row[1][stage]
        g = jax.lax.ppermute(dx, "stage", [(i, (i - 1) % STAGES) for i in range(STAGES)])
        with jax.named_scope(slot_scope("F")):
            x = jnp.where(stage == 0, batch[jnp.maximum(f, 0)], xs[jnp.maximum(f, 0)])

            def on(x, total):
                y, _ = jax.lax.scan(forward, x, whole)
                if not is_whole:
                    with jax.named_scope(end_scope("last")):
                        total = jax.lax.cond(
                            stage == STAGES - 1, lambda: total + jnp.max(jax.lax.dot(y, head)), lambda: total
                        )
                return y, total

            y, total = jax.lax.cond(f >= 0, on, lambda x, total: (jnp.zeros_like(x), total), x, total)
        if name in ("shared", "hangs"):
            runs = row[0][-1] if name == "shared" else f

            def on_head(total):
                return total + jnp.max(jax.lax.psum(jax.lax.dot(y, head), "stage"))

            with jax.named_scope(slot_scope("F")), jax.named_scope(shared_end_scope("last")):
                total = jax.lax.cond(runs >= 0, on_head, lambda total: total, total)
        arrived = jax.lax.ppermute(y, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)])
        g = jnp.where(stage == STAGES - 1, y, g)
        with jax.named_scope(slot_scope("BW")):

            def on_b(g, d_weights):
                x = jnp.broadcast_to(xs[jnp.maximum(b, 0)], (LAYERS, B, E))
                dx, dw = jax.lax.scan(backward, g, (whole, x), reverse=True)
                return dx, d_weights + dw

            dx, d_weights = jax.lax.cond(b >= 0, on_b, lambda g, d: (jnp.zeros_like(g), d), g, d_weights)
        come = row[0][(stage - 1) % STAGES]
        xs = jax.lax.dynamic_update_index_in_dim(xs, arrived, jnp.where(come >= 0, come, MICROBATCHES), 0)
        return (xs, dx, d_weights, total), None

    zeros = jnp.zeros((B, E), batch.dtype)
    carry = (jnp.zeros((MICROBATCHES + 1, B, E), batch.dtype), zeros,
             jnp.zeros(whole.shape, jnp.float32), jnp.zeros((), batch.dtype))  # fmt: skip
    (_, dx, d_weights, total), _ = jax.lax.scan(tick, carry, tuple(map(jnp.asarray, ticks(name))))
    if is_whole:
        d_weights = jax.lax.psum_scatter(d_weights, "fsdp", scatter_dimension=2, tiled=True)
    return dx[None], d_weights[None], jax.lax.psum(total, ("stage", "fsdp"))


def compiled_text(name: str) -> str:
    if name == "slices":
        devices = topologies.get_topology_desc("v5p:2x2x1", "tpu", num_slices=2).devices
    else:
        devices = topologies.get_topology_desc("v5p:2x2x2", "tpu").devices
    mesh = Mesh(np.array(devices).reshape(STAGES, 2), ("stage", "fsdp"))
    specs = (PartitionSpec(None, "fsdp"), PartitionSpec("stage", None, None, "fsdp"), PartitionSpec())
    out = (PartitionSpec("stage", "fsdp"), PartitionSpec("stage", None, None, "fsdp"), PartitionSpec())
    shapes = ((MICROBATCHES, 2 * B, E), (STAGES, LAYERS, E, E), (E, V))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]

    def run(*arrays):
        return step(name, *arrays)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(*arrays).compile().as_text() or ""


if __name__ == "__main__":
    sys.stdout.write(compiled_text(sys.argv[1]))
