"""Our compiled train step against a plain hand-written JAX transformer of the same shape, on the same mesh.

    python bench/decoder.py [num_rounds]

Both are Llama-shaped, train in float32 with AdamW on eight simulated CPU devices, data parallel and fully sharded. The
plain one leaves all sharding to `jit`. Steps are timed in interleaved rounds; bytes are XLA's own.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import meshloom  # noqa: E402
from meshloom.compiler.xla.programs import build, lower  # noqa: E402

L, E, H, K, D, M, V, B, T = 4, 256, 8, 4, 32, 768, 512, 16, 64
STEPS_PER_ROUND = 5
SHAPE = (
    f"model.vocab_size={V}", f"model.embed_dim={E}", f"model.num_layers={L}", f"model.num_heads={H}",
    f"model.num_kv_heads={K}", f"model.head_dim={D}", f"model.mlp_dim={M}", f"global_batch_size={B}",
    f"sequence_length={T}", "precision=float32",
)  # fmt: skip


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def rope(x):
    half = D // 2
    angles = jnp.arange(T)[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    left, right = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def layer(x, w):
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bte,ehd->bthd", h, w[name]) for name in ("q", "k", "v"))
    a = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + jnp.einsum("bthd,hde->bte", a, w["o"])
    h = norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def loss(params, tokens, targets):
    x, _ = jax.lax.scan(layer, params["table"][tokens], params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain_program(mesh, shard_axis):
    """The step as one would write it by hand: parameters over `shard_axis` of their widest dimension, or whole."""
    shapes = {
        "table": (V, E), "norm": (E,), "head": (E, V),
        "layers": {"norm1": (L, E), "norm2": (L, E), "q": (L, E, H, D), "k": (L, E, K, D), "v": (L, E, K, D),
                   "o": (L, H, D, E), "gate": (L, E, M), "up": (L, E, M), "down": (L, M, E)},
    }  # fmt: skip
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b1=0.9, b2=0.95, weight_decay=0.1))
    axis = mesh.axis_names[0]

    def init():
        keys = iter(jax.random.split(jax.random.key(0), 32))
        params = jax.tree.map(lambda s: 0.02 * jax.random.normal(next(keys), s) if len(s) > 1 else jnp.ones(s), shapes,
                              is_leaf=is_shape)  # fmt: skip
        return params, optimizer.init(params)

    def place(x):
        entries = [axis if shard_axis and size == E and len(x.shape) > 0 else None for size in x.shape]
        if entries.count(axis) > 1:
            entries[-1] = None
        return NamedSharding(mesh, P(*entries))

    shardings = jax.tree.map(place, jax.eval_shape(init))
    rows = NamedSharding(mesh, P(axis))

    def step(state, inputs, targets):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, inputs, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    state = jax.jit(init, out_shardings=shardings)()
    batch = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=rows)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, batch, batch).compile(), state, rows


def num_bytes(compiled):
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def compare(sharding, num_rounds):
    plan = meshloom.plan(f"sharding={sharding}", *SHAPE)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    programs = build(lower(plan, plan.mesh.of_devices(jax.devices())))
    plain, plain_state, rows = plain_program(mesh, sharding == "fsdp")
    tokens = np.random.default_rng(0).integers(0, V, (B, T + 1), dtype=np.int32)
    ours_batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    ours_batch = {name: jax.device_put(ours_batch[name], x.sharding) for name, x in programs.batch.items()}
    inputs, targets = (jax.device_put(x, rows) for x in (tokens[:, :-1], tokens[:, 1:]))
    states = {"ours": programs["init"](), "plain": plain_state}
    steps = {"ours": lambda s: programs["train"](s, ours_batch), "plain": lambda s: plain(s, inputs, targets)}
    seconds = {"ours": [], "plain": []}
    for round_ in range(num_rounds + 1):
        for name in ("ours", "plain") if round_ % 2 else ("plain", "ours"):
            start = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                states[name], _ = steps[name](states[name])
            jax.block_until_ready(states[name])
            if round_:  # the first one warms up
                seconds[name].append((time.perf_counter() - start) / STEPS_PER_ROUND)
    ratios = sorted(a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True))
    for name, program in (("ours", programs["train"]), ("plain", plain)):
        milliseconds = [1e3 * s for s in seconds[name]]
        spread = f"({min(milliseconds):.1f}..{max(milliseconds):.1f})"
        size = f"{num_bytes(program) / 2**20:7.2f} MiB per device"
        print(f"{sharding:5} {name:5}  {statistics.median(milliseconds):7.1f} ms {spread}  {size}")
    print(f"{sharding:5} ratio of times: median {statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f}), "
          f"of bytes {num_bytes(programs['train']) / num_bytes(plain):.3f}")  # fmt: skip


if __name__ == "__main__":
    for sharding in ("ddp", "fsdp"):
        compare(sharding, int(sys.argv[1]) if len(sys.argv) > 1 else 10)
