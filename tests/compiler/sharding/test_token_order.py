"""The order of tokens on devices that split sequences: every token once, positions with them, the same work for all."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.sharding.token_order import TokenOrder
from meshloom.runtime.train.feed import in_token_order

CONTEXT = ("sharding=fsdp_context", "mesh.context=4")


def order_of(order, length):
    places = order.of_sequence(length)
    return np.arange(length) if places is None else places


@settings(deadline=None)
@given(st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 9), st.integers(1, 5))
def test_every_token_is_on_one_device_which_knows_its_place(name, num_shards, chunk):
    order = TokenOrder(name, num_shards)
    length = order.num_chunks * chunk
    places = order_of(order, length)
    assert sorted(places) == list(range(length))
    assert sorted(order.chunks().reshape(-1)) == list(range(order.num_chunks))
    each = length // num_shards
    for shard in range(num_shards):
        known = order.of_shard(each, jnp.asarray(shard))
        np.testing.assert_array_equal(known, places[shard * each : (shard + 1) * each])


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(1, 5))
def test_zigzag_gives_every_device_the_same_number_of_visible_keys(num_shards, chunk):
    order = TokenOrder("zigzag", num_shards)
    seen = order_of(order, order.num_chunks * chunk).reshape(num_shards, -1) + 1
    assert len(set(seen.sum(axis=1))) == 1


def test_all_arrays_of_a_batch_are_put_in_order():
    rows = np.arange(16).reshape(2, 8)
    moved = in_token_order({"inputs": rows, "targets": rows + 1}, TokenOrder("zigzag", 4).of_sequence(8))
    np.testing.assert_array_equal(moved["inputs"][0], [0, 7, 1, 6, 2, 5, 3, 4])
    np.testing.assert_array_equal(moved["targets"], moved["inputs"] + 1)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        # on 8 devices, of which fsdp takes the rest
        (("sequence_length=20",), "use sequence_length=16 or 24, or token_order=contiguous, or mesh.context=2"),
        (("sequence_length=12",), "use sequence_length=8 or 16, or token_order=contiguous, or mesh.context=2"),
        (("sequence_length=4",), "use sequence_length=8, or token_order=contiguous, or mesh.context=2"),
        (("sequence_length=18",), "use sequence_length=16 or 24, or mesh.context=1"),
        (("sequence_length=21",), "use sequence_length=16 or 24, or mesh.context=1"),
        (("sequence_length=21", "token_order=contiguous"), "use sequence_length=20 or 24, or mesh.context=1"),
        (("sequence_length=20", "mesh.fsdp=2"), "use sequence_length=16 or 24, or token_order=contiguous"),
        # 2 sequences cannot be split over 4 devices
        (("sequence_length=20", "global_batch_size=2"), "use sequence_length=16 or 24, or token_order=contiguous"),
        # splash computes 128 tokens at once
        (("sequence_length=1060", "target=v5p-16"), "use sequence_length=1024 or 2048, or token_order=contiguous, "
         "or mesh.context=2"),
    ],
)  # fmt: skip
def test_a_length_that_cannot_be_cut_is_one_error_with_what_works(overrides, fix):
    with pytest.raises(ConfigError) as raised:
        plan_of(*CONTEXT, *overrides)
    (problem,) = raised.value.problems
    assert problem.where == "sequence_length"
    assert "tokens cannot be cut in" in problem.what
    assert problem.fix == fix
    for each in problem.fix.removeprefix("use ").split(", or "):
        for value in each.split("=")[1].split(" or "):
            plan_of(*CONTEXT, *overrides, f"{each.split('=')[0]}={value}")
