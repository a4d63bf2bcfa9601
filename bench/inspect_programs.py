"""Compiles train and inference steps that are not ours, ahead of time, for `meshloom inspect`.

    python bench/inspect_programs.py NAME... --to DIR     compiles them; keeps DIR/NAME.txt, NAME.json: XLA's own peak
    python bench/inspect_programs.py --show DIR           inspects what is there, as a table in Markdown

nnx         a decoder in Flax NNX, fully sharded by PartitionSpecs on its parameters, on v6e-16
optax       the classifier of Optax's tutorials, its batch split, on v5e-16
decode      one step of greedy decoding with a KV cache, tensor parallel, on v6e-8
equinox     a transformer in Equinox, its batch split and its parameters whole, on h100-8 (jax-cuda13-plugin)
maxtext_dense, maxtext_moe    recorded by bench/record_program.py, with MaxText's own command, on v5p-128:

    DENSE="maxtext.trainers.pre_train.train_compile compile_topology=v5p-128 compile_topology_num_slices=1 \\
        dataset_type=synthetic remat_policy=full override_model_config=true base_num_decoder_layers=4 \\
        max_target_length=2048 per_device_batch_size=4 attention=flash"
    python bench/record_program.py DIR/maxtext_dense $DENSE model_name=llama3-8b
    python bench/record_program.py DIR/maxtext_moe $DENSE model_name=mixtral-8x7b megablox=false \\
        sparse_matmul=false capacity_factor=1.25

Each is written as its library's documentation writes it, not tuned for anything. equinox: `pip install equinox`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshloom
from meshloom.compiler.core.format import human_bytes, human_seconds, human_share
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.schema import by_exposed
from meshloom.compiler.target.target import plan_target
from meshloom.compiler.target.topology import find_devices, options_without_device
from meshloom.compiler.xla.aot import memory_of

TARGETS = {"maxtext_dense": "v5p-128", "maxtext_moe": "v5p-128", "nnx": "v6e-16", "optax": "v5e-16", "decode": "v6e-8",
           "equinox": "h100-8"}  # fmt: skip


def mesh_of(target: str, **sizes: int) -> Mesh:
    """Returns a mesh over the target's devices in their own order, as JAX would be given them on a pod."""
    spec = read_spec(Request((f"target={target}",)), then=lambda spec: spec.target)
    devices = sorted(find_devices(spec, plan_target(spec, "bfloat16")), key=lambda device: device.id)
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def on(mesh: Mesh, x: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def array(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return on(mesh, jax.ShapeDtypeStruct(shape, dtype), *spec)


def nnx() -> Any:
    """Four layers of a decoder; every matrix is split along its first dimension, the batch over the same axis."""
    from flax import nnx

    width, vocab, length, mesh = 2048, 32_000, 2048, mesh_of("v6e-16", fsdp=16)

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.RMSNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(16, width, dtype=jnp.bfloat16, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(vocab, width, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(4)])
            self.head = nnx.Linear(width, vocab, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens).astype(jnp.bfloat16)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    graph, state = nnx.split(model, nnx.Param)[:2]
    params = jax.tree.map(lambda x: on(mesh, x, *(["fsdp"] if x.ndim > 1 and x.shape[0] % 16 == 0 else [])), state)
    optimizer = optax.adamw(3e-4)
    moments = jax.tree.map(lambda x: x, jax.eval_shape(optimizer.init, params))
    moments = jax.tree.map(lambda x: on(mesh, x, *(["fsdp"] if x.ndim > 1 and x.shape[0] % 16 == 0 else [])), moments)

    def train_step(params: Any, moments: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return jax.jit(train_step, donate_argnums=(0, 1)).lower(
        params, moments, array(mesh, (32, length + 1), jnp.int32, "fsdp")
    )


def optax_tutorial() -> Any:
    """A classifier of images with three wide layers, Adam, and a batch that is split."""
    mesh = mesh_of("v5e-16", data=16)
    sizes = (3072, 8192, 8192, 10)
    params = [{"weights": array(mesh, shape, jnp.float32), "bias": array(mesh, shape[1:], jnp.float32)}
              for shape in pairwise(sizes)]  # fmt: skip
    solver = optax.adam(1e-3)
    state = jax.tree.map(lambda x: on(mesh, x), jax.eval_shape(solver.init, params))

    def predict(params: Any, images: jax.Array) -> jax.Array:
        x = images.reshape(images.shape[0], -1)
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["weights"] + layer["bias"])
        return x @ params[-1]["weights"] + params[-1]["bias"]

    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()

        gradients = jax.grad(loss)(params)
        updates, state = solver.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    images = array(mesh, (4096, 32, 32, 3), jnp.float32, "data")
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, images, array(mesh, (4096,), jnp.int32, "data"))


def decode() -> Any:
    """A token of each of 64 sequences: four layers, heads and the MLP split, a cache of 4,096 positions."""
    mesh = mesh_of("v6e-8", model=8)
    layers, width, heads, size, batch, length, vocab = 4, 4096, 32, 128, 64, 4096, 32_000
    bf16 = jnp.bfloat16
    params = {
        "embed": array(mesh, (vocab, width), bf16),
        "qkv": array(mesh, (layers, width, 3, heads, size), bf16, None, None, None, "model"),
        "out": array(mesh, (layers, heads, size, width), bf16, None, "model"),
        "up": array(mesh, (layers, width, 4 * width), bf16, None, None, "model"),
        "down": array(mesh, (layers, 4 * width, width), bf16, None, "model"),
    }
    cache = array(mesh, (layers, 2, batch, length, heads, size), bf16, None, None, None, None, "model")

    def step(params: Any, cache: jax.Array, tokens: jax.Array, position: jax.Array) -> Any:
        x = params["embed"][tokens]

        def layer(x: jax.Array, inputs: Any) -> Any:
            weights, cache = inputs
            q, k, v = jnp.einsum("be,echd->cbhd", x, weights["qkv"])
            cache = jax.lax.dynamic_update_slice_in_dim(cache, jnp.stack([k, v])[:, :, None], position, axis=2)
            scores = jnp.einsum("bhd,bthd->bht", q, cache[0]).astype(jnp.float32) / size**0.5
            scores = jnp.where(jnp.arange(length) <= position, scores, -jnp.inf)
            mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores).astype(bf16), cache[1])
            x = x + jnp.einsum("bhd,hde->be", mixed, weights["out"])
            return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], cache

        stacked = {name: weights for name, weights in params.items() if name != "embed"}
        x, cache = jax.lax.scan(layer, x, (stacked, cache))
        return jnp.argmax(x @ params["embed"].T, axis=-1), cache

    tokens = array(mesh, (batch,), jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(params, cache, tokens, array(mesh, (), jnp.int32))


def equinox() -> Any:
    """A transformer by `equinox.nn`, vmapped over the batch, its parameters whole on every GPU."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    mesh, width, length = mesh_of("h100-8", data=8), 2048, 1024

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norm: eqx.nn.LayerNorm

        def __init__(self, key: jax.Array):
            first, second = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(16, width, key=first)
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, key=second)
            self.norm = eqx.nn.LayerNorm(width)

        def __call__(self, x: jax.Array) -> jax.Array:
            normed = jax.vmap(self.norm)(x)
            x = x + self.attention(normed, normed, normed)
            return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))

    blocks = eqx.filter_eval_shape(lambda key: [Block(each) for each in jax.random.split(key, 4)], jax.random.key(0))
    params, static = eqx.partition(blocks, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    params = jax.tree.map(lambda x: on(mesh, x), params)
    solver = optax.adamw(1e-4)
    state = jax.tree.map(lambda x: on(mesh, x), jax.eval_shape(solver.init, params))

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            def run(one: jax.Array) -> jax.Array:
                for block in eqx.combine(params, static):
                    one = block(one)
                return one

            return jnp.mean((jax.vmap(run)(x) - y) ** 2)

        gradients = jax.grad(loss)(params)
        updates, state = solver.update(gradients, state, params)
        return eqx.apply_updates(params, updates), state

    batch = array(mesh, (32, length, width), jnp.float32, "data")
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch, batch)


PLATFORMS = {name: "gpu" if target.startswith("h100") else "tpu" for name, target in TARGETS.items()}
PROGRAMS: dict[str, Callable[[], Any]] = {
    "nnx": nnx, "optax": optax_tutorial, "decode": decode, "equinox": equinox
}  # fmt: skip


def keep(name: str, folder: Path) -> None:
    """Compiles a program and keeps its text."""
    spec = read_spec(Request((f"target={TARGETS[name]}",)), then=lambda spec: spec.target)
    options = options_without_device(plan_target(spec, "bfloat16"))
    compiled = PROGRAMS[name]().compile(compiler_options=options or None)
    text = compiled.as_text().replace(str(Path(__file__).parents[1]), "/code").replace(sys.prefix, "/venv")
    (folder / f"{name}.txt").write_text(text)
    (folder / f"{name}.json").write_text(json.dumps({"peak_bytes": memory_of(compiled).needed_bytes(PLATFORMS[name])}))
    print(meshloom.inspect(compiled, target=TARGETS[name]).text)


def table_row(path: Path) -> str:
    meshloom.inspect(path, target=TARGETS[path.stem])  # imports what it needs
    start = time.process_time()
    report = meshloom.inspect(path, target=TARGETS[path.stem]).report
    seconds = time.process_time() - start
    step = report.compiled
    worst = [each for each in by_exposed(report.collectives) if each.exposed_seconds][:1]
    recorded = path.with_suffix(".json")
    peak = json.loads(recorded.read_text())["peak_bytes"] if recorded.exists() else 0
    cells = (
        path.stem,
        report.target.name,
        f"{path.stat().st_size / 1e6:.2f} MB, {seconds:.2f} s",
        f"{human_bytes(step.peak_bytes or 0)} ({human_bytes(peak)})",
        human_seconds(step.step_seconds or 0.0),
        human_share(step.exposed_fraction or 0.0),
        f"{worst[0].kind}, {human_seconds(worst[0].exposed_seconds or 0.0)}, {worst[0].line}" if worst else "",
        ", ".join(dict.fromkeys(each.rule for each in report.findings)),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="programs that are not ours, for `meshloom inspect`")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--to", type=Path, metavar="DIR", default=Path())
    parser.add_argument("--show", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.show:
        print("| program | target | text, read in | memory (by XLA) | step | exposed | the most exposed | findings |")
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(table_row(path) for path in sorted(arguments.show.glob("*.txt")) if path.stem in TARGETS))
        return
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        keep(name, arguments.to)


if __name__ == "__main__":
    main()
