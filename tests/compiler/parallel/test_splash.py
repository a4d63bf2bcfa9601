"""The tables of splash attention's blocks against those that JAX makes by evaluating the mask."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as jax_tables

from conftest import plan_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.parallel.attention import splash, splash_kernels
from meshloom.compiler.parallel.attention.splash import attend_splash, mask_info, plan_cut
from meshloom.compiler.parallel.attention.splash_kernels import (
    NO_BUDGET,
    AttentionShape,
    Budget,
    choose_backward,
    fused_tables,
    seen_blocks,
)  # fmt: skip
from meshloom.models.attention import Mask
from support.proofs import Computation

WINDOWS = (None, 1, 2, 127, 128, 129, 130, 255, 256, 257, 258, 385, 513, 1000, 5000)
BLOCKS = [(128, 128), (256, 128), (640, 128), (1024, 256), (1536, 512)]


def _mask(first, last, window):
    shape = (last - first, last)
    return masks.CausalMask(shape, first) if window is None else masks.LocalMask(shape, (window - 1, 0), first)


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize(("length", "block"), BLOCKS)
def test_tables_are_those_that_jax_makes(length, block, keys_first):
    """Of all queries, and of their second half alone."""
    make = jax_tables.process_mask_dkv if keys_first else jax_tables.process_mask
    for window, first in product(WINDOWS, (0, length // block // 2 * block)):
        heads = masks.MultiHeadMask([_mask(first, length, window)] * 2)
        theirs, in_kernel = make(heads, (block, block), head_shards=1, q_seq_shards=1)
        ours = mask_info(first, length, block, Mask(window), keys_first=keys_first)
        for name in ("data_next", "block_mask"):
            expected, found = getattr(theirs, name), getattr(ours, name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, err_msg=f"{name}, window {window}, first {first}")
        assert theirs.mask_next is None
        assert theirs.partial_mask_blocks is None
        assert in_kernel is not None  # the mask within a block is evaluated there, of each query's own number
        np.testing.assert_array_equal(ours.q_sequence, np.arange(first, length))


@pytest.mark.ci  # two programs of interpreted kernels
def test_queries_in_parts_give_what_they_give_at_once(proof, monkeypatch):
    """Two parts of 256 queries in two blocks, with gradients."""
    draw = np.random.default_rng(0).normal
    q, k, v = (jnp.asarray(draw(size=(1, 512, n, 128)), jnp.float32) for n in (2, 1, 1))
    ids = jnp.asarray((np.arange(512) >= 200).astype(np.int32)[None])

    def attended(q, k, v):
        out = attend_splash(q, k, v, ids, scale=0.1, mask=Mask(300), soft_cap=None, budget=NO_BUDGET, interpret=True)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)))

    run = jax.value_and_grad(attended, (0, 1, 2))
    whole = Computation(run, q, k, v)
    monkeypatch.setattr(splash, "plan_cut", lambda length, mask, budget: splash.Cut(128, 256))
    parts = Computation(lambda *operands: run(*operands), q, k, v)
    if proof.is_known(whole.parts, parts.parts):
        return
    for ours, expected in zip(jax.tree.leaves(parts.run()), jax.tree.leaves(whole.run()), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.ci  # programs of interpreted kernels
@pytest.mark.parametrize(("num_blocks", "at_once", "num_turns"), [(8, "sequence", 2), (3, "kv_head", 3)])
def test_one_backward_kernel_in_turns_gives_what_two_give(num_blocks, at_once, num_turns, proof, monkeypatch):
    """Two sequences of 4 x 4 blocks, with a budget for so many blocks of partial sums."""
    monkeypatch.setattr(splash_kernels, "KEYS_BLOCKS", (128,))
    draw = np.random.default_rng(0).normal
    q, k, v = (jnp.asarray(draw(size=(2, 512, n, 128)), jnp.float32) for n in (4, 2, 2))
    ids = jnp.asarray(np.arange(512)[None] >= np.array([[200], [400]]), jnp.int32)
    shape = AttentionShape(2, 4, 2, 512, 512, 128, 4, 128)
    budget = Budget(shape.partials_bytes(num_blocks), 0.0, most_block=128)
    seen = seen_blocks(np.arange(0, 512, 128)[None], 128, 512, Mask())
    chosen = choose_backward(shape, seen, budget)
    assert (chosen.at_once, len(chosen.turns)) == (at_once, num_turns)

    def attended(budget, q, k, v):
        out = attend_splash(q, k, v, ids, scale=0.1, mask=Mask(), soft_cap=2.0, budget=budget, interpret=True)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape)))

    ours, two = (Computation(jax.grad(partial(attended, each), (0, 1, 2)), q, k, v) for each in (budget, NO_BUDGET))
    if proof.is_known(ours.parts, two.parts):
        return
    for found, expected in zip(ours.run(), two.run(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "window", "cut"),
    [
        (8192, None, (1024, 8192)),
        (640, None, (640, 640)),  # 5 of 128, and one of 640
        (1536, None, (768, 1536)),
        (8192, 256, (512, 8192)),  # a block of 1,024 would compute four times what the window leaves
        (8192, 1024, (1024, 8192)),
        (2**18, None, (1024, 2**18)),
        (2**19, None, (1024, 2**19)),
        (2**20, None, (1024, 2**18)),
        (2**20, 4096, (1024, 2**20)),
    ],
)
def test_the_cheapest_block_is_chosen_and_queries_are_cut_where_tables_would_not_fit(length, window, cut):
    """A TPU's scalar memory is 1 MiB, and libtpu refuses tables that are larger: 3 bytes for each of 512 x 512 blocks
    fit, and for 1,024 x 1,024 do not."""
    assert plan_cut(length, Mask(window), NO_BUDGET) == splash.Cut(*cut)
    for first in range(0, length, cut[1]):
        for keys_first in (False, True):
            tables = mask_info(first, first + cut[1], cut[0], Mask(window), keys_first=keys_first)
            assert sum(np.asarray(x).nbytes for x in (tables.data_next, tables.block_mask)) <= 0.75 * 2**20


def test_a_long_sequence_evaluates_no_mask(monkeypatch):
    """A million tokens on one device: 4 million blocks, none of which is looked at."""
    evaluated = []
    for mask in (masks.CausalMask, masks.LocalMask):
        monkeypatch.setattr(mask, "__getitem__", lambda self, index: evaluated.append(index))
    windows = "model.attention_windows=[4096,null]"
    plan = plan_of("target=v5e-4", "sequence_length=1048576", "model.num_layers=2", windows, "global_batch_size=4")
    assert plan.operation("attention").chosen.name == "splash"
    assert estimate_step(plan).memory.peak_bytes > 0
    assert evaluated == []


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(("length", "window"), [(1024, None), (4096, None), (4096, 1024), (4096, 500)])
def test_flops_are_of_the_blocks_that_the_mask_leaves(length, window):
    """Of each block of which the mask leaves anything."""
    where = f"model.attention_windows=[{window or 'null'}]"
    shape = ("model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=128")
    plan = plan_of("target=v5e-4", f"sequence_length={length}", "global_batch_size=4", "remat=none", where, *shape)
    block = plan_cut(length, Mask(window), NO_BUDGET).block
    seen = np.asarray(_mask(0, length, window)[:, :]).reshape(length // block, block, length // block, block)
    num_blocks = int(seen.any(axis=(1, 3)).sum())
    attention = next(part for part in estimate_step(plan).roofline if part.name == "attention")
    keys_block, forward = _keys_block(plan, length, window, block), 2 * num_blocks * block**2
    if keys_block is None:
        backward = (3 + 4) * num_blocks * block**2  # scores, their gradient and dq; the same two, dk and dv
    else:
        seen = np.asarray(_mask(0, length, window)[:, :]).reshape(length // block, block, length // keys_block, -1)
        backward = 5 * int(seen.any(axis=(1, 3)).sum()) * block * keys_block
    assert attention.flops == 2 * 2 * 128 * (forward + backward)


def _keys_block(plan, length, window, block):
    """Returns the block of keys of the one backward kernel; None: there are two."""
    budget = plan.operation("attention").chosen.parameters.budget
    seen = seen_blocks(np.arange(0, length, block)[None], block, length, Mask(window))
    return choose_backward(AttentionShape(1, 2, 1, length, length, 128, 4, block), seen, budget).keys_block


@pytest.mark.parametrize("window", [None, 700])
def test_the_one_backward_kernel_visits_what_is_seen_and_loads_nothing_else(window):
    block, keys_block, length = 128, 256, 2048
    starts = np.arange(0, length, block)[None]
    seen = seen_blocks(starts, block, length, Mask(window))(keys_block)
    mask = np.asarray(_mask(0, length, window)[:, :]).reshape(length // block, block, length // keys_block, keys_block)
    np.testing.assert_array_equal(seen[0], mask.any(axis=(1, 3)))
    data_next, block_mask = (x[0, 0] for x in fused_tables(seen))
    np.testing.assert_array_equal(block_mask > 0, seen[0])
    rows, columns = np.indices(seen[0].shape)
    np.testing.assert_array_equal(data_next[seen[0]], rows[seen[0]])
    assert seen[0][data_next, columns].all()  # a hidden block reads a row that its keys need before or after


WHOLE_LENGTH = AttentionShape(1, 32, 32, 8192, 8192, 128, 2, 512)
CAUSAL = seen_blocks(np.arange(0, 8192, 512)[None], 512, 8192, Mask())


@pytest.mark.parametrize(
    ("budget", "keys_block", "at_once", "num_turns", "reason"),
    [
        (Budget(2**40, 0.0), 512, "batch", 1, "one backward kernel, 2.0 GiB of partial sums"),  # bytes are free
        (Budget(2**40, 168.0), 1024, "batch", 1, "one backward kernel, 1.0 GiB"),  # of v6e
        (Budget(2**30, 168.0), 1024, "batch", 1, "one backward kernel, 1.0 GiB"),
        (Budget(2**29, 168.0), 1024, "sequence", 1, "one backward kernel, 512.0 MiB"),
        (Budget(2**28, 168.0), 2048, "sequence", 1, "one backward kernel, 256.0 MiB"),
        (Budget(2**27, 168.0), 1024, "sequence", 3, "one backward kernel in 3 turns, 128.0 MiB"),
        (Budget(2**23, 168.0), 2048, "kv_head", 1, "one backward kernel, 8.0 MiB"),
        (Budget(2**18, 168.0), None, "batch", 0, "two backward kernels: one needs 256.0 MiB of partial sums"),
        (Budget(2**40, 1e4), None, "batch", 0, "partial sums of one take longer than its matmuls save"),
    ],
)  # fmt: skip
def test_one_backward_kernel_is_chosen_by_flops_and_bytes(budget, keys_block, at_once, num_turns, reason):
    """Two sequences of 8,192 tokens: partial sums of one are 64 MiB for each block of keys."""
    chosen = choose_backward(replace(WHOLE_LENGTH, sequences=2), CAUSAL, budget)
    assert (chosen.keys_block, chosen.at_once, len(chosen.turns)) == (keys_block, at_once, num_turns)
    assert reason in chosen.reason


def test_the_plan_says_how_many_backward_kernels_there_are_and_why():
    shape = ("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=128", "precision=bfloat16",
             "global_batch_size=4")  # fmt: skip
    why = {length: plan_of("target=v5e-4", f"sequence_length={length}", *shape).operation("attention").reason
           for length in (4096, 2**20)}  # fmt: skip
    assert "one backward kernel, " in why[4096]
    assert "two backward kernels: one needs" in why[2**20]
