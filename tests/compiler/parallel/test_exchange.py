"""Attention over a split length against float64 NumPy: each exchange, its gradients, and what it computes and holds."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshloom.compiler.jaxpr.subprograms import subprograms
from meshloom.compiler.parallel.attention import cudnn, splash_kernels
from meshloom.compiler.parallel.attention.blocks import TiledBlocks, plan_visits, tile_size
from meshloom.compiler.parallel.attention.cudnn import CudnnBlocks
from meshloom.compiler.parallel.attention.exchange import Exchange, attend_by_blocks, attend_over_length
from meshloom.compiler.parallel.attention.splash import SplashBlocks
from meshloom.compiler.parallel.attention.splash_kernels import NO_BUDGET, Budget
from meshloom.compiler.sharding.batch import TokenOrder
from meshloom.models.attention import Mask
from support.proofs import Computation
from support.tiers import tiered

SCALE = 0.4
# exchange, order, shards, window, soft cap, documents
CASES = {
    "ring": ("ring", "zigzag", 4, None, None, False),
    "ring, documents, soft cap": ("ring", "zigzag", 2, None, 2.0, True),
    "ring, a window of less than a chunk": ("ring", "zigzag", 4, 3, None, False),
    "ring, a window of some chunks, documents, soft cap": ("ring", "zigzag", 4, 13, 2.0, True),
    "ring, a window of most chunks, documents": ("ring", "zigzag", 2, 27, None, True),
    "ring, a window of one token": ("ring", "zigzag", 2, 1, None, False),
    "ring, contiguous": ("ring", "contiguous", 4, None, None, True),
    "ring, contiguous, a window": ("ring", "contiguous", 2, 9, None, False),
    "ring, 8 shards": ("ring", "zigzag", 8, None, None, True),
    "all_gather": ("all_gather", "zigzag", 4, None, None, False),
    "all_gather, all of them": ("all_gather", "zigzag", 2, 7, 2.0, True),
    "all_gather, contiguous, documents": ("all_gather", "contiguous", 4, None, None, True),
    "ulysses": ("ulysses", "zigzag", 2, None, None, False),
    "ulysses, kv_heads repeated, all of them": ("ulysses", "zigzag", 4, 7, 2.0, True),
    "ulysses, contiguous": ("ulysses", "contiguous", 2, None, 2.0, True),
}
PLAIN = ("ring, documents, soft cap", "ring, a window of some chunks, documents, soft cap", "all_gather, all of them",
         "ulysses, kv_heads repeated, all of them")  # fmt: skip
CI = ("ring", "ring, a window of less than a chunk", "ring, contiguous, a window", "all_gather", "ulysses")


def inputs(length, head_dim=8, heads=4, kv_heads=2):
    draw = np.random.default_rng(0).normal
    shapes = [(2, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [draw(size=shape).astype(np.float32) for shape in shapes]


def documents(length):
    """Two sequences of documents that chunks cut; the second ends in padding."""
    ids = np.ones((2, length), np.int32)
    ids[0, length // 5 :], ids[0, length // 2 + 1 :] = 2, 3
    ids[1, length // 3 :], ids[1, length - 3 :] = 2, 0
    return ids


def reference(q, k, v, d_out, ids, sinks, *, window, soft_cap):
    """[output, gradients of q, k, v, sinks], from the formulas, in float64."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    num_groups, length = q.shape[2] // k.shape[2], q.shape[1]
    k_each, v_each = (np.repeat(x, num_groups, axis=2) for x in (k, v))
    scores = SCALE * np.einsum("bthd,bshd->bhts", q, k_each)
    slope = 1.0
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
        slope = 1 - (scores / soft_cap) ** 2
    distance = np.arange(length)[:, None] - np.arange(length)
    is_seen = np.broadcast_to((distance >= 0) & (distance < (window or length)), (2, length, length))
    if ids is not None:
        is_seen = is_seen & (ids[:, :, None] == ids[:, None, :])
    weights = np.where(is_seen[:, None], np.exp(scores), 0)
    sink = 0.0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None, None]
    total = weights.sum(axis=-1, keepdims=True) + sink
    weights /= total
    d_weights = np.einsum("bthd,bshd->bhts", d_out, v_each)
    dot = (weights * d_weights).sum(axis=-1, keepdims=True)
    d_scores = SCALE * slope * weights * (d_weights - dot)
    of_kv_head = lambda x: x.reshape(*x.shape[:2], -1, num_groups, x.shape[3]).sum(axis=3)  # noqa: E731
    return [
        np.einsum("bhts,bshd->bthd", weights, v_each),
        np.einsum("bhts,bshd->bthd", d_scores, k_each),
        of_kv_head(np.einsum("bhts,bthd->bshd", d_scores, q)),
        of_kv_head(np.einsum("bhts,bthd->bshd", weights, d_out)),
        *([] if sinks is None else [-(sink / total * dot).sum(axis=(0, 2, 3))]),
    ]


def split(name, order, num_shards, block_kernel, window, soft_cap):
    """(q, k, v, ids, sinks) in the shards' order -> output, in the same."""
    mesh = jax.make_mesh((num_shards,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_shards])
    exchange = Exchange(name, ("context",), TokenOrder(order, num_shards))
    whole = partial(attend_by_blocks, block_kernel)
    run = partial(attend_over_length, exchange, block_kernel, whole, scale=SCALE, mask=Mask(window), soft_cap=soft_cap)
    by_length = P(None, "context")
    operands = (by_length, by_length, by_length, by_length, P())
    on_shards = jax.shard_map(run, mesh=mesh, in_specs=operands, out_specs=by_length, check_vma=False)
    return lambda q, k, v, ids, sinks=None: on_shards(q, k, v, ids, sinks)


def both_passes_of(case, block_kernel, arrays, ids, sinks):
    """Returns the computation of [output, gradients], and the places of its tokens in the sequence."""
    name, order, num_shards, window, soft_cap = case[:5]
    run = split(name, order, num_shards, block_kernel, window, soft_cap)
    length = arrays[0].shape[1]
    places = TokenOrder(order, num_shards).of_sequence(length)
    places = np.arange(length) if places is None else places
    q, k, v, d_out = (jnp.asarray(x[:, places]) for x in arrays)
    ids = None if ids is None else jnp.asarray(ids[:, places])

    def both(q, k, v, sinks, d_out):
        out, pull_back = jax.vjp(lambda q, k, v, sinks: run(q, k, v, ids, sinks), q, k, v, sinks)
        return out, *pull_back(d_out)

    return Computation(both, q, k, v, sinks, d_out), places


def assert_is_reference(case, block_kernel, arrays, ids, proof, *, has_sinks):
    window, soft_cap = case[3:5]
    q, k, v, d_out = arrays
    sinks = np.linspace(-1, 2, q.shape[2], dtype=np.float32) if has_sinks else None
    both, places = both_passes_of(case, block_kernel, arrays, ids, sinks)
    if proof.is_known(both.parts, places):
        return
    expected = reference(q, k, v, d_out, ids, sinks, window=window, soft_cap=soft_cap)
    *by_token, d_sinks = both.run()
    found = [*(np.asarray(x)[:, np.argsort(places)] for x in by_token), *([] if sinks is None else [d_sinks])]
    assert len(found) == len(expected)
    for what, ours, exact in zip(("output", "dq", "dk", "dv", "d_sinks"), found, expected, strict=False):
        np.testing.assert_allclose(ours, exact, atol=4e-6 * max(1, np.abs(exact).max()), err_msg=what)


@pytest.mark.parametrize("name", tiered(CASES, plain=PLAIN, ci=CI))
def test_each_exchange_computes_attention_and_its_gradients(name, proof):
    """Tiles of 4 tokens: a chunk of 32 tokens over 2 devices has two."""
    case = CASES[name]
    ids, has_sinks = documents(32) if case[-1] else None, case[4] is not None
    assert_is_reference(case, partial(TiledBlocks, tile=4), inputs(32), ids, proof, has_sinks=has_sinks)


@pytest.mark.ci  # the kernels' operations one by one
@pytest.mark.parametrize(
    "case",
    [
        ("ring", "zigzag", 2, None, None, True),
        ("ring", "zigzag", 2, 300, 2.0, False),
        ("ring", "zigzag", 2, 1000, None, False),  # known to the device alone how far keys are
        ("all_gather", "zigzag", 2, None, 2.0, True),
        ("all_gather", "zigzag", 2, 300, None, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(NO_BUDGET, id="two backward kernels"),
        pytest.param(Budget(2**30, 0.0), id="one", marks=pytest.mark.release),
        pytest.param(Budget(2 * 128 * 2 * 128 * 4, 0.0, most_block=128), id="one in turns", marks=pytest.mark.release),
    ],
)
def test_so_it_does_with_splash_for_each_block(case, budget, proof, monkeypatch):
    """In turns: each of the two blocks of queries that see some of 128 keys, or of half as many."""
    monkeypatch.setattr(splash_kernels, "KEYS_BLOCKS", (budget.most_block,))
    length = 1024 if case[3] else 512
    ids = documents(length) if case[-1] else None
    kernel, has_sinks = partial(SplashBlocks, budget=budget, interpret=True), case[4] is not None
    assert_is_reference(case, kernel, inputs(length, 128, 2, 1), ids, proof, has_sinks=has_sinks)


class LikeCudnn:
    """What cuDNN's documentation says of its kernels, in plain operations. Gradients behind the given keys are NaN."""

    @staticmethod
    def forward(operands, mode):
        weights, lse = _weights(operands, mode, None)
        return jnp.einsum("bhts,bhsd->bhtd", weights, _of_heads(operands.v, operands.q)), lse

    @staticmethod
    def backward(operands, lse, out, gradient, mode):
        q, k, v = operands[:3]
        weights, _ = _weights(operands, mode, lse)
        dot = jnp.sum(out * gradient, axis=-1, keepdims=True)
        d_scores = mode.scale * weights * (jnp.einsum("bhtd,bhsd->bhts", gradient, _of_heads(v, q)) - dot)
        sums = [
            jnp.einsum("bhts,bhtd->bhsd", one, other).reshape(*k.shape[:2], -1, *k.shape[2:]).sum(2)
            for one, other in ((d_scores, q), (weights, gradient))
        ]
        if operands.lengths is not None:
            is_given = jnp.arange(k.shape[2])[:, None] < operands.lengths[1][:, None, None, None]
            sums = [jnp.where(is_given, x, jnp.nan) for x in sums]
        return jnp.einsum("bhts,bhsd->bhtd", d_scores, _of_heads(k, q)), *sums


def _weights(operands, mode, lse):
    assert mode.layout == cudnn.BHTD
    scores = mode.scale * jnp.einsum("bhtd,bhsd->bhts", operands.q, _of_heads(operands.k, operands.q))
    places = jnp.arange(scores.shape[-1])
    if mode.mask == cudnn.CAUSAL:
        scores = jnp.where(jnp.arange(scores.shape[-2])[:, None] >= places, scores, -jnp.inf)
    if mode.mask == cudnn.SOME_KEYS:
        scores = jnp.where(places < operands.lengths[1][:, None, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1) if lse is None else lse
    return jnp.exp(scores - lse[..., None]), lse


def _of_heads(x_BKSD, q_BHTD):
    return jnp.repeat(x_BKSD, q_BHTD.shape[1] // x_BKSD.shape[1], axis=1)


@pytest.mark.parametrize(
    "case",
    [
        ("ring", "zigzag", 4, None, None),
        ("all_gather", "zigzag", 2, None, None),
        pytest.param(("ring", "contiguous", 4, None, None), marks=pytest.mark.ci),
        pytest.param(("all_gather", "contiguous", 4, None, None), marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_so_it_does_with_a_kernel_that_works_as_cudnn_does(case, proof, monkeypatch):
    """A stand-in: this proves what is done with the kernels, and not the kernels."""
    monkeypatch.setattr(cudnn, "bind_forward", LikeCudnn.forward)
    monkeypatch.setattr(cudnn, "bind_backward", LikeCudnn.backward)
    assert_is_reference(case, lambda _: CudnnBlocks(), inputs(32), None, proof, has_sinks=True)


def test_so_it_does_of_whole_sequences_beside_sinks(monkeypatch):
    """The same stand-in, which has heads before the length."""

    def turned(x):
        return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x, x)

    def forward(operands, mode):
        return turned(LikeCudnn.forward(turned(operands), replace(mode, layout=cudnn.BHTD)))

    def backward(operands, lse, out, d_out, mode):
        mode = replace(mode, layout=cudnn.BHTD)
        return turned(LikeCudnn.backward(turned(operands), lse, turned(out), turned(d_out), mode))

    monkeypatch.setattr(cudnn, "bind_forward", forward)
    monkeypatch.setattr(cudnn, "bind_backward", backward)
    q, k, v, d_out = inputs(32)
    sinks = np.linspace(-1, 2, q.shape[2], dtype=np.float32)
    attend = partial(cudnn.attend_cudnn, scale=SCALE, mask=Mask(), soft_cap=None)
    out, pull_back = jax.vjp(lambda q, k, v, sinks: attend(q, k, v, None, sinks), *map(jnp.asarray, (q, k, v, sinks)))
    expected = reference(q, k, v, d_out, None, sinks, window=None, soft_cap=None)
    for ours, exact in zip((out, *pull_back(jnp.asarray(d_out))), expected, strict=True):
        np.testing.assert_allclose(ours, exact, atol=4e-6 * max(1, np.abs(exact).max()))


def _compiled(name, order, num_shards, length, window=None) -> Any:
    """The forward pass. With heads of 128, nearly all of its arithmetic is in matmuls."""
    run = split(name, order, num_shards, TiledBlocks, window, None)
    operand = jax.ShapeDtypeStruct((1, length, 2, 128), jnp.float32)
    return jax.jit(lambda q, k, v: run(q, k, v, None)).lower(operand, operand, operand).compile()


@pytest.mark.parametrize(
    ("order", "num_shards", "window", "share"),
    [
        # A device's queries are two chunks of 2n. Own step: 2 causal blocks and 1 whole, which plain operations compute
        # as 3 whole ones; then 2 for each of n - 1 others: 2n + 1 of the 4n blocks with all keys.
        ("zigzag", 4, None, 9 / 16),
        pytest.param("zigzag", 8, None, 17 / 32, marks=pytest.mark.ci),
        ("zigzag", 4, 128, 4 / 16),  # a window of one chunk reaches into the one before: 2 chunks for each of both
        pytest.param("contiguous", 4, None, 1.0, marks=pytest.mark.ci),  # the last device computes all of them
    ],
)
def test_blocks_that_are_masked_are_not_computed(order, num_shards, window, share):
    length = 1024
    flops = _compiled("ring", order, num_shards, length, window).cost_analysis()["flops"]
    assert flops / (4 * 2 * 128 * length * length / num_shards) == pytest.approx(share, rel=0.05)


def sizes_of(jaxpr):
    """Elements of every array that a jaxpr and all within it make."""
    for equation in jaxpr.eqns:
        yield from (math.prod(x.aval.shape) for x in equation.outvars)
        for inner in subprograms(equation.params):
            yield from sizes_of(inner)


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("name", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("window", [None, 1500, 3000])  # 3,000 of 4,096: only the device knows how far keys are
def test_no_array_has_the_scores_of_a_device(name, window):
    """2,048 tokens of 2 heads on each of 4 devices, forward and backward; a conveyor computes both chunks at once."""
    run = split(name, "zigzag", 2 if name == "ulysses" else 4, TiledBlocks, window, 2.0)
    operand = jax.ShapeDtypeStruct((1, 8192, 2, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    def both_passes(q, k, v, ids):
        out, pull_back = jax.vjp(lambda q, k, v: run(q, k, v, ids), q, k, v)
        return pull_back(out)

    traced = jax.jit(both_passes).trace(operand, operand, operand, ids)
    assert max(sizes_of(traced.jaxpr.jaxpr)) <= 2 * 2 * 512 * 512 < 2048 * 2048


@pytest.mark.parametrize(
    ("window", "most"),
    [
        # 16 rows of tiles, in zig-zag order 2 of 8 chunks of 2 rows on each of 4 devices. Chunk i sees 2i + 1 and
        # 2i + 2 tiles: chunks i and 7 - i together 34 of 64.
        (None, 34),
        (32, 8),  # each row its own tile and the one before
    ],
)
def test_tiles_that_are_masked_are_not_visited(window, most):
    order, tile, length = TokenOrder("zigzag", 4), 32, 512
    starts = (order.chunks()[:, :, None] * 64 + tile * np.arange(2)).reshape(4, -1)
    distance = np.arange(length)[:, None] - np.arange(length)
    is_seen = np.logical_and(distance >= 0, distance < (window or length))
    of_tiles = np.any(is_seen.reshape(16, tile, 16, tile), axis=(1, 3))
    visits = plan_visits(starts, length, tile, Mask(window))
    assert visits.shape == (4, 3, most)
    for own, (rows, columns, far) in zip(starts // tile, visits, strict=True):
        visited = [(r, c) for r, c, d in zip(rows, columns, far, strict=True) if d > -tile]
        assert visited == [tuple(each) for each in np.argwhere(of_tiles[own])]


@pytest.mark.parametrize(("lengths", "size"), [((1024, 8192), 512), ((24, 24), 24), ((1536,), 512), ((1042,), 521)])
def test_a_tile_is_a_common_divisor_near_512(lengths, size):
    assert tile_size(*lengths) == size


def _written(lowered):
    kinds = re.findall(
        r"stablehlo\.(all_gather|reduce_scatter|all_to_all|collective_permute|all_reduce)", lowered.as_text()
    )
    return Counter(kinds)


@pytest.mark.parametrize(
    ("name", "window", "forward", "both"),
    [
        # n - 1 steps of 4 arrays: two chunks of keys, two of values. Backward again, and float32 gradients beside them.
        ("ring", None, {"collective_permute": 12}, {"collective_permute": 36}),
        # Of a conveyor of one step there is nothing at the far end: 4 arrays one way, their gradients the other.
        ("ring", 5, {"collective_permute": 4}, {"collective_permute": 12}),
        ("all_gather", None, {"all_gather": 2}, {"all_gather": 4, "reduce_scatter": 2}),
        ("ulysses", None, {"all_to_all": 4}, {"all_to_all": 8}),
    ],
)
def test_collectives_by_kind_and_count(name, window, forward, both):
    run = split(name, "zigzag", 4, TiledBlocks, window, None)
    operand = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    one_pass = lambda q, k, v: run(q, k, v, None)  # noqa: E731
    assert _written(jax.jit(one_pass).lower(operand, operand, operand)) == forward

    def both_passes(q, k, v):
        out, pull_back = jax.vjp(one_pass, q, k, v)
        return pull_back(out)

    assert _written(jax.jit(both_passes).lower(operand, operand, operand)) == both
