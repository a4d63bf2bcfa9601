"""Attention against float64 NumPy, token by token; the TPU kernel run operation by operation against the plain one."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.parallel.attention.attention import Kernel, build_attend
from meshloom.compiler.parallel.attention.splash import attend_splash, plan_cut
from meshloom.compiler.parallel.attention.splash_kernels import NO_BUDGET, Budget, plan_budget
from meshloom.models.attention import Mask, attend
from support.programs import target_of
from support.proofs import Computation
from support.reference import forward
from support.tiers import tiered

HERE = {"cpu": "cpu-8", "gpu": "h100-8", "tpu": "v5e-8"}
CASES = {
    "causal": (None, None, False),
    "window": (5, None, False),
    "soft cap": (None, 1.5, False),
    "documents": (None, None, True),
    "all of them": (7, 2.0, True),
}


def inputs(length, head_dim, *, heads=4, kv_heads=2, seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = [(2, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [draw(size=shape).astype(np.float32) for shape in shapes]


def documents(length):
    """Two sequences of three documents each, cut at other places; the second ends in padding."""
    ids = np.ones((2, length), np.int32)
    ids[0, length // 4 :], ids[0, length // 2 :] = 2, 3
    ids[1, length // 3 :], ids[1, length - 3 :] = 2, 0
    return ids


SINKS = np.array([-1.5, 0.3, 2.0, 0.7], np.float32)  # of each head


def numpy_attend(q, k, v, ids, sinks, *, scale, window, soft_cap):
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        kv = h // (q.shape[2] // k.shape[2])
        seen = [
            s for s in range(t + 1) if (window is None or t - s < window) and (ids is None or ids[b, s] == ids[b, t])
        ]
        scores = np.array([scale * float(q[b, t, h].astype(np.float64) @ k[b, s, kv]) for s in seen])
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        sink = 0.0 if sinks is None else np.exp(float(sinks[h]) - scores.max())
        out[b, t, h] = weights / (weights.sum() + sink) @ v[b, seen, kv]
    return out


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_a_float64_loop(case):
    window, soft_cap, has_documents = CASES[case]
    q, k, v = inputs(16, 8)
    ids = documents(16) if has_documents else None
    options = {"scale": 0.4, "soft_cap": soft_cap}
    ids_BT = None if ids is None else jnp.asarray(ids)
    for sinks in (None, SINKS):
        sinks_H = None if sinks is None else jnp.asarray(sinks)
        ours = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), ids_BT, sinks_H, mask=Mask(window), **options)
        np.testing.assert_allclose(ours, numpy_attend(q, k, v, ids, sinks, window=window, **options), atol=2e-6)


@pytest.mark.parametrize("budget", [NO_BUDGET, Budget(2**30, 0.0)], ids=["two backward kernels", "one"])
@pytest.mark.parametrize("case", tiered(CASES, plain=()))
def test_splash_computes_what_plain_attention_does_with_its_gradients(case, budget, proof):
    window, soft_cap, has_documents = CASES[case]
    q, k, v = map(jnp.asarray, inputs(256, 128))
    ids = jnp.asarray(documents(256)) if has_documents else None
    options = {"scale": 0.1, "mask": Mask(window and 40 * window), "soft_cap": soft_cap}
    sinks = None if case == "causal" else jnp.asarray(SINKS)

    def weighted(attend, q, k, v, sinks):
        out = attend(q, k, v, ids, sinks, **options)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))), out

    by_splash, as_it_is = (
        Computation(jax.value_and_grad(partial(weighted, each), (0, 1, 2, 3), has_aux=True), q, k, v, sinks)
        for each in (partial(attend_splash, budget=budget, interpret=True), attend)
    )
    if proof.is_known(by_splash.parts, as_it_is.parts):
        return
    ((_, ours), gradients), ((_, plain), expected) = by_splash.run(), as_it_is.run()
    np.testing.assert_allclose(ours, plain, atol=2e-5)
    for g, e in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        np.testing.assert_allclose(g, e, atol=1e-4)


@pytest.mark.tpu
@pytest.mark.ci
@pytest.mark.parametrize("num_backward", [1, 2])
def test_the_blocks_of_wide_heads_fit_the_least_vector_memory(num_backward):
    """16 MiB for a kernel on v5p, 24 heads of 256, documents: blocks of 1,024."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]
    budget = plan_budget(target_of("v5p-8"), 256, 2)
    if num_backward == 2:
        budget = replace(budget, partials_bytes=0)
    assert plan_cut(2048, Mask(), budget).block == 1024

    def total(q, k, v, ids):
        out = attend_splash(q, k, v, ids, scale=0.1, mask=Mask(), soft_cap=None, budget=budget, interpret=False)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    shapes = [((2, 2048, 24, 256), jnp.bfloat16)] * 3 + [((2, 2048), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(chip)) for each in shapes]
    text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arguments).compile().as_text()
    assert text
    assert text.count("tpu_custom_call") == 1 + num_backward


@pytest.mark.tpu
@pytest.mark.ci
def test_splash_compiles_for_tpu_with_no_scores_in_memory_and_no_collectives():
    """2 x 2 TPU v5e chips, batch over one axis, heads over the other: forward and backward are three kernel calls."""
    pytest.importorskip("libtpu", reason="pip install -e '.[tpu]'")
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=chips, axis_types=(AxisType.Auto,) * 2)
    layout = NamedSharding(mesh, P("data", None, "tensor", None))
    shapes = [(4, 2048, heads, 128) for heads in (8, 4, 4)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=layout) for shape in shapes]
    programs = {}
    for implementation in ("splash", "xla"):
        attend = build_attend(Kernel(implementation, P(None, None, "tensor", None)))

        def total(q, k, v, attend=attend):
            out = attend(q, k, v, None, scale=0.1, mask=Mask(), soft_cap=None)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        gradient = jax.shard_map(jax.grad(total, (0, 1, 2)), in_specs=P("data"), out_specs=P("data"),
                                 axis_names={"data"}, check_vma=False)  # fmt: skip
        with jax.set_mesh(mesh):
            programs[implementation] = jax.jit(gradient).lower(*arguments).compile()
    texts = {name: program.as_text() for name, program in programs.items()}
    assert texts["splash"].count("tpu_custom_call") == 3
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", texts["splash"])
    assert "2048,2048" in texts["xla"]
    assert "2048,2048" not in texts["splash"]
    temporary = {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}
    assert temporary["splash"] < temporary["xla"] / 20


@pytest.mark.parametrize(
    ("overrides", "platform", "expected"),
    [
        ((), "cpu", "xla"),
        (("sequence_length=256",), "tpu", "splash"),
        (("sequence_length=200",), "tpu", "xla"),
        (("precision=bfloat16", "model.head_dim=8"), "gpu", "cudnn"),
        ((), "gpu", "xla"),  # float32
        (("precision=bfloat16", "model.head_dim=8", "model.attention_soft_cap=30.0"), "gpu", "xla"),
    ],
)
def test_auto_takes_the_platforms_kernel_where_it_can_run(overrides, platform, expected):
    plan = plan_of(*overrides, f"target={HERE[platform]}").operation("attention")
    assert plan.chosen.name == expected
    assert plan.reason
    assert bool(plan.missed) is (expected == "xla" and platform != "cpu")


@pytest.mark.parametrize(
    ("overrides", "platform"),
    [
        (("parallel.attention=splash",), "cpu"),
        (("parallel.attention=cudnn",), "tpu"),
        (("parallel.attention=splash", "sequence_length=200"), "tpu"),
        (("parallel.attention=cudnn",), "gpu"),  # float32
    ],
)
def test_a_kernel_that_cannot_run_is_refused(overrides, platform):
    with pytest.raises(ConfigError, match=r"parallel\.attention"):
        plan_of(*overrides, f"target={HERE[platform]}")


@pytest.mark.parametrize(
    "model",
    [
        ("model.attention_windows=[4,null,6]",),
        pytest.param((), marks=pytest.mark.release),
        pytest.param(("model.qk_norm=rms", "model.biases=all"), marks=pytest.mark.ci),
    ],
)
def test_a_document_in_a_packed_sequence_has_the_logits_that_it_has_alone(model):
    """With learned nothing and rotary positions, which are relative: where a document lies does not matter."""
    plan = plan_of(*model)
    params = plan.model.init(jax.random.key(3))
    tokens = np.random.default_rng(0).integers(0, 257, (2, 16))
    ids, logits = documents(16), jax.jit(partial(forward, plan.model))
    packed = logits(params, jnp.asarray(tokens), jnp.asarray(ids))
    for row in range(2):
        for document in set(ids[row]) - {0}:
            where = ids[row] == document
            alone = logits(params, jnp.asarray(tokens[row : row + 1, where]))
            np.testing.assert_allclose(packed[row, where], alone[0], atol=1e-4)
