"""Simulated devices, in a process of their own."""

import os
import subprocess
import sys

import pytest

MANY_STEPS_IN_FLIGHT = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # of two processors

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshloom.compiler.spec.target_spec import CpuTarget
from meshloom.runtime.processes.devices import start_devices
from meshloom.runtime.processes.distributed import Processes

start_devices(CpuTarget(kind="cpu", num_devices=8), Processes())
mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

def step(weights):
    whole = [jax.lax.all_gather(x, "fsdp", tiled=True) for x in weights]
    sums = [jax.lax.psum_scatter(jnp.tanh(x @ x.T), "fsdp", tiled=True) for x in whole]
    return [x + 0.001 * y for x, y in zip(weights, sums)], jax.lax.psum(sum(x.sum() for x in sums), "fsdp")

step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("fsdp"), out_specs=(P("fsdp"), P())), donate_argnums=0)
weights = [jax.device_put(i * jnp.ones((64, 64)), NamedSharding(mesh, P("fsdp"))) for i in range(6)]
losses = []
for _ in range(150):
    weights, loss = step(weights)
    losses.append(loss)
jax.block_until_ready(losses)
"""


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a machine that can lend out two processors")
def test_many_steps_in_flight_do_not_starve_a_collective():
    """With as many threads as devices, three of four such processes ended by "Expected 8 threads to join"."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NPROC")}
    environment["XLA_FLAGS"] = "--xla_cpu_collective_call_terminate_timeout_seconds=10"
    for _ in range(2):
        command = [sys.executable, "-c", MANY_STEPS_IN_FLIGHT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
