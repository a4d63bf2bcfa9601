"""How the global batch is cut into microbatches and over devices, and in which order its rows and tokens lie there."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.sharding.batch import RowOrder, TokenOrder, check_batch
from meshloom.runtime.train.feed import in_token_order


def test_microbatches_and_data_shards_divide_the_global_batch():
    plan = plan_of(*LINEAR_STACK, "target=cpu-8")
    check_batch(spec_of(*LINEAR_STACK, "global_batch_size=16", "num_microbatches=2"), plan.mesh, plan.roles)
    for wrong in (["global_batch_size=16", "num_microbatches=3"], ["global_batch_size=12"]):
        with pytest.raises(ConfigError, match="not divisible by 8 data shards"):
            check_batch(spec_of(*LINEAR_STACK, *wrong), plan.mesh, plan.roles)


@pytest.mark.parametrize(("shards", "microbatches"), [(1, 1), (1, 4), (4, 1), (2, 2), (4, 3), (3, 4)])
def test_a_microbatch_is_the_same_sequences_on_any_number_of_devices(shards, microbatches):
    order = RowOrder(24 * shards, shards, microbatches)
    rows = order.rows()
    assert sorted(rows) == list(range(24 * shards))
    on_devices = rows.reshape(shards, microbatches, -1)  # as a device splits its own rows
    for microbatch in range(microbatches):
        size = 24 * shards // microbatches
        assert on_devices[:, microbatch].reshape(-1).tolist() == list(range(microbatch * size, (microbatch + 1) * size))
    np.testing.assert_array_equal(order.rows_at(jnp.arange(order.num_rows)), rows)


def test_devices_along_a_sequence_or_a_matrix_split_no_batch():
    order = plan_of("sharding=fsdp_context", "mesh.fsdp=2", "mesh.context=2", "target=cpu-4").batch.row_order
    assert (order.num_shards, order.rows().tolist()) == (2, list(range(16)))


CONTEXT = ("sharding=fsdp_context", "mesh.context=4")


def order_of(order, length):
    places = order.of_sequence(length)
    return np.arange(length) if places is None else places


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


@pytest.mark.cases(plain=2)
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
