"""Compiles small programs for four devices and compares the memory that their texts show with XLA's own figure.

    python bench/memory_by_text.py TARGET...      v5e-4, h100-4, cpu-4: a table in Markdown

Most donate nothing, so that their results need memory of their own. Arrays are small: of those for TPUs only `sum` and
`scatter` are larger than the vector memory, in which XLA counts what a text shows in no HBM.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshloom.compiler.analysis.program_memory import read_peak
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices, options_without_device
from meshloom.compiler.xla.aot import memory_of
from meshloom.compiler.xla.hlo import parse_module

BF16, F32 = jnp.bfloat16, jnp.float32
Shape = tuple[tuple[int, ...], Any, tuple[str | None, ...]]
LAYERS, MOMENTS = ((8, 2048, 2048), BF16, (None, "fsdp")), ((8, 2048, 2048), F32, (None, "fsdp"))
X, WIDE_X = ((8192, 2048), BF16, ("fsdp",)), ((2048, 16384), F32, ("fsdp",))
MATRICES, WIDE = tuple(((2048, 2048), BF16, ("fsdp",)) for _ in range(6)), ((16384, 8192), F32, ("fsdp",))


def forward(layers: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, layers)[0]


def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
    return (forward(layers, x).astype(F32) ** 2).mean()


def update(layers: jax.Array, moments: jax.Array, x: jax.Array) -> Any:
    moments = 0.9 * moments + jax.grad(loss)(layers, x).astype(F32)
    return (layers - 0.1 * moments).astype(BF16), moments


def descend(*arrays: jax.Array) -> Any:
    def of(matrices: Any) -> jax.Array:
        x = arrays[-1]
        for each in matrices:
            x = jnp.tanh(x @ each)
        return (x.astype(F32) ** 2).mean()

    value, gradients = jax.value_and_grad(of)(arrays[:-1])
    return value, [(x - 0.1 * g).astype(BF16) for x, g in zip(arrays, gradients, strict=False)]


def gradient(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: (jnp.dot(x, w, preferred_element_type=F32) ** 2).sum())(weights)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Shape, ...], tuple[int, ...], bool]] = {
    "forward": (forward, (LAYERS, X), (), False),
    "grad": (jax.grad(loss), (LAYERS, X), (), False),
    "update": (update, (LAYERS, MOMENTS, X), (), False),
    "update, donated": (update, (LAYERS, MOMENTS, X), (0, 1), False),
    "descend": (descend, (*MATRICES, X), (), False),
    "descend, donated": (descend, (*MATRICES, X), tuple(range(6)), False),
    "many results": (lambda x: [x * n for n in range(6)], (X,), (), False),
    "sum": (gradient, (WIDE, WIDE_X), (), False),
    "scatter": (lambda w, x: w - 0.1 * gradient(w, x), (WIDE, WIDE_X), (), True),
    "scatter, donated": (lambda w, x: w - 0.1 * gradient(w, x), (WIDE, WIDE_X), (0,), True),
}


def rows(name: str) -> None:
    """Prints a row for each program of a target."""
    spec = read_spec(Request((f"target={name}",)), then=lambda spec: spec.target)
    target = plan_target(spec, "bfloat16")
    devices = jax.devices() if target.platform == "cpu" else find_devices(spec, target)
    mesh = Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("fsdp",))
    for program, (function, shapes, donated, is_split) in PROGRAMS.items():
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
            for shape, dtype, axes in shapes
        ]
        out = arguments[0].sharding if is_split else None
        lowered: Any = jax.jit(function, donate_argnums=donated, out_shardings=out).lower(*arguments)
        compiled = lowered.compile(compiler_options={**options_without_device(target)} or None)
        shown = read_peak(parse_module(compiled.as_text() or "")).num_bytes
        known = memory_of(compiled).needed_bytes(target.platform) or 0
        print(
            f"| {program} | {name} | {shown / 2**20:.1f} | {known / 2**20:.1f} | {shown / known - 1:+.1%} |", flush=True
        )


if __name__ == "__main__":
    print("| program | target | MiB by its text | by XLA | |\n|---|---|---|---|---|")
    for each in sys.argv[1:]:
        rows(each)
