"""Compiles small programs with a known fault ahead of time, and keeps their texts:
`python tests/schedules/toys/record.py NAME TARGET` writes NAME_CHIP.txt.xz beside this file.

stack      a stack of 16 layers, split over devices along the dimension that the scan runs along
twice      every device of a pair computes the same rows of the batch; the weights are split over all four
"""

import lzma
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def stack(devices: np.ndarray) -> Any:
    mesh = Mesh(devices.reshape(4), ("fsdp",))

    def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0].sum()

    return jax.jit(jax.grad(loss)).lower(array(mesh, (16, 1024, 1024), "fsdp"), array(mesh, (4096, 1024), "fsdp"))


def twice(devices: np.ndarray) -> Any:
    mesh = Mesh(devices.reshape(2, 2), ("data", "model"))

    def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: jax.Array) -> Any:
            weights = jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, PartitionSpec()))
            return jnp.tanh(x @ weights), None

        return jax.lax.scan(layer, x, layers)[0].sum()

    layers = array(mesh, (4, 1024, 1024), None, ("data", "model"))
    return jax.jit(jax.grad(loss)).lower(layers, array(mesh, (4096, 1024), "data"))


def main(name: str, target: str) -> None:
    spec = read_spec(Request((f"target={target}",)), then=lambda spec: spec.target)
    devices = sorted(find_devices(spec, plan_target(spec, "bfloat16")), key=lambda device: device.id)
    text = globals()[name](np.array(devices)).compile().as_text()
    text = text.replace(str(Path(__file__).parents[3]), "/code").replace(sys.prefix, "/venv")
    place = Path(__file__).with_name(f"{name}_{target.partition('-')[0]}.txt.xz")
    place.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(*sys.argv[1:])
