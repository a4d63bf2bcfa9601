"""Moments in 8 bits: a step's arithmetic in float64 NumPy, the layout of blocks, and what is refused."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.partition_spec import axes_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.optim.moments import moment_layout
from meshloom.compiler.optim.optimizers import ParameterKind
from meshloom.compiler.report.explain import plan_as_json
from support.programs import on_devices, programs_of

RATE = 0.01
FIXED = ("schedule=constant", "schedule.num_warmup_steps=0", f"optimizer.learning_rate={RATE}",
         "optimizer.max_grad_norm=null", "optimizer.weight_decay=0", "target=cpu-1", "model.mlp_dim=192")  # fmt: skip
UP = "layers/mlp/up_EM"  # (3, 32, 192): a shard of 192 is one block
MATRIX = ParameterKind(((0,), (1,)), False)


def _nearest(levels: np.ndarray, x: np.ndarray) -> np.ndarray:
    return levels[np.abs(x[..., None] - levels).argmin(-1)]


INT8 = np.arange(-127, 128) / 127
ROOT4 = (np.arange(256) / 255.0) ** 4
E4M3 = np.sort([s * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
                for s in (-1, 1) for e in range(16) for m in range(8) if (e, m) != (15, 7)]) / 448  # fmt: skip


def _stored(levels: np.ndarray, x: np.ndarray, *, root: int = 1) -> np.ndarray:
    """Returns what blocks of whole rows stand for: the nearest level by the root, times the largest magnitude."""
    scale = np.abs(x).max(-1, keepdims=True)
    y = x / np.where(scale > 0, scale, 1)
    to = lambda z: np.sign(z) * np.abs(z) ** (1 / root)  # noqa: E731
    return _nearest(to(levels), to(y)) ** root * scale


def _steps(*overrides: str, num_steps: int = 3) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Returns a matrix before and after each step, its gradients, and the optimizer's last state."""
    plan = plan_of(*FIXED, *overrides)
    chance = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape) * 0.1, jnp.float32), plan.model.abstract())
    state, update = plan.optimizer.init(params), jax.jit(plan.optimizer.update)
    curve, gradients = [leaves_by_path(params)[UP]], []
    for _ in range(num_steps):
        grads = jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape) ** 3, jnp.float32), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        curve.append(leaves_by_path(params)[UP])
        gradients.append(leaves_by_path(grads)[UP])
    return [np.asarray(x, np.float64) for x in curve], [np.asarray(x, np.float64) for x in gradients], state


def test_adamw_in_8_bits_computes_as_float64_does():
    curve, gradients, state = _steps("optimizer.moment_dtype=int8")
    p, m, v = curve[0], np.zeros_like(curve[0]), np.zeros_like(curve[0])
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        p = p - RATE * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        # A number halfway between two levels may be rounded to either of them.
        off = np.abs(curve[t] - p) > 1e-5
        assert off.mean() < 1e-3
        p = curve[t]
        m, v = _stored(INT8, m), _stored(ROOT4, v, root=4)
    types = {path.rpartition("mu/")[2] if "mu/" in path else path.rpartition("nu/")[2]: str(x.dtype)
             for path, x in leaves_by_path(state).items() if f"mu/{UP}" in path}  # fmt: skip
    assert types == {f"{UP}/elements": "int8", f"{UP}/scales": "float32"}


def test_lion_in_float8_computes_as_float64_does():
    curve, gradients, _ = _steps("optimizer=lion", "optimizer.moment_dtype=float8")
    p, m = curve[0], np.zeros_like(curve[0])
    for t, g in enumerate(gradients, start=1):
        p = p - RATE * np.sign(0.9 * m + 0.1 * g)
        assert (np.abs(curve[t] - p) > 1e-5).mean() < 1e-3
        p, m = curve[t], _stored(E4M3, 0.99 * m + 0.01 * g)


@pytest.mark.parametrize(
    ("shape", "spec", "block"),
    [
        ((64, 4096), PartitionSpec(None, "fsdp"), 256),
        ((64, 11008), PartitionSpec(None, "fsdp"), 172),  # 11008 / 8 = 1376 = 8 * 172
        ((4096, 128), PartitionSpec("fsdp", None), 128),
        ((64, 640), PartitionSpec(None, ("fsdp", "tensor")), 40),
        ((1024, 24), PartitionSpec(None, "fsdp"), None),  # 3 a device
        ((8, 64), PartitionSpec(None, "fsdp"), None),  # 512 elements
    ],
)
def test_no_shard_cuts_a_block(shape, spec, block):
    mesh = {"fsdp": 8, "tensor": 2}
    layout = moment_layout(shape, MATRIX, spec, mesh)
    assert layout.block == block
    shard = shape[-1] // int(np.prod([mesh[axis] for axis in axes_of(spec[1])]))
    divisors = [n for n in range(16, shard + 1) if shard % n == 0]
    if block:
        assert min(abs(n - 256) for n in divisors) == abs(block - 256)


def test_a_declared_block_that_a_shard_would_cut_is_refused_with_lengths_that_work():
    keys = ("target=cpu-8", "sharding=fsdp", "model.mlp_dim=192", "optimizer.moment_dtype=int8")
    with pytest.raises(ConfigError) as error:
        plan_of(*keys, "optimizer.moment_block=100", "model.embed_dim=512")
    (problem,) = [one for one in error.value.problems if UP in one.what]
    assert "192" in problem.what
    (named,) = [part for part in problem.what.split("; ") if "divide it" in part]
    lengths = [int(word) for word in named.split() if word.isdecimal()]
    assert lengths
    assert all(192 % length == 0 for length in lengths)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("optimizer=lion", "optimizer.moment_dtype=int8"), "small moments become zero"),
        (("optimizer.moment_dtype=float8",), "second moments in float8"),
        (("optimizer=muon", "optimizer.moment_dtype=int8"), "AdamW and Lion alone"),
        (("optimizer.moment_block=64",), "no moments are stored in 8 bits"),
    ],
)
def test_types_that_do_not_train_as_float32_are_refused_with_the_reason(keys, why):
    with pytest.raises(ConfigError, match=why):
        plan_of(*keys)


LAYOUTS = {
    "one device": ("target=cpu-1",),
    "fsdp 4": ("target=cpu-4", "sharding=fsdp"),
    "fsdp_tensor 2x2": ("target=cpu-4", "sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2"),
}


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", [("optimizer.moment_dtype=int8",), ("optimizer=lion", "optimizer.moment_dtype=float8")])  # fmt: skip  # noqa: E501
def test_with_the_same_blocks_every_layout_trains_as_one_device_and_moves_nothing_more(optimizer, tokens):
    keys = (
        "model.mlp_dim=192",
        "model.embed_dim=64",
        "model.vocab_size=320",
        "schedule.num_warmup_steps=0",
        "optimizer.learning_rate=0.003",
    )
    curves = {}
    for name, layout in LAYOUTS.items():
        plan = plan_of(*keys, *layout, *optimizer, "optimizer.moment_block=16")
        programs, order = programs_of(plan), plan.batch.token_order.of_sequence(tokens.shape[2] - 1)
        whole = plan_of(*keys, *layout, *optimizer[:-1])  # one device has no collectives
        expected = {} if name == "one device" else _collectives(programs_of(whole)["train"])
        assert _collectives(programs["train"]) == expected, name
        state, curves[name] = programs["init"](), []
        for batch in tokens[:5]:
            state, metrics = programs["train"](state, on_devices(programs, batch, order))
            curves[name].append(float(metrics["loss"]))
        np.testing.assert_allclose(curves[name], curves["one device"], rtol=2e-3, err_msg=name)


def _collectives(program: Any) -> Counter[str]:
    """Returns how often each collective is in a compiled program."""
    kinds = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
    return Counter(re.findall(rf" ({'|'.join(kinds)})(?:-start)?\(", program.as_text()))


def test_the_plan_counts_the_bytes_of_elements_and_scales():
    keys = ("target=cpu-8", "sharding=fsdp", "model.mlp_dim=1024", "model.embed_dim=512")
    whole, small = (plan_of(*keys, *more) for more in ((), ("optimizer.moment_dtype=int8",)))
    by_type = plan_as_json(small)["optimizer_bytes_by_type"]
    # Read from the shapes of the arrays themselves, which a device has an eighth of.
    state = leaves_by_path(small.abstract["optimizer"])
    elements = sum(x.size for path, x in state.items() if path.endswith("elements"))
    assert by_type["int8"] + by_type["uint8"] == elements // 8
    assert sum(by_type.values()) == small.memory.optimizer
    assert small.memory.optimizer < 0.3 * whole.memory.optimizer
