"""Makes windowed_einsum.txt: matmuls whose operands XLA gathers, and whose results it scatters, window by window."""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
               "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
mesh = Mesh(np.array(devices).reshape(8), ("tensor",))
T, D, F = 8192, 4096, 16384


def split(*axes: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))


def block(x_TD: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    h_TF = jax.nn.silu(jnp.einsum("td,df->tf", x_TD, up_DF))
    h_TF = jax.lax.with_sharding_constraint(h_TF, split(None, "tensor"))
    return jax.lax.with_sharding_constraint(jnp.einsum("tf,fd->td", h_TF, down_FD), split("tensor"))


def array(shape: tuple[int, int], *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split(*axes))


lowered = jax.jit(block).lower(array((T, D), "tensor"), array((D, F), None, "tensor"), array((F, D), "tensor"))
sys.stdout.write(lowered.compile({"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}).as_text() or "")
