"""The order of a batch's sequences on the devices: microbatches have the same ones on every mesh."""

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.sharding.row_order import RowOrder


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
    order = plan_of("sharding=fsdp_context", "mesh.fsdp=2", "mesh.context=2", "target=cpu-4").row_order
    assert (order.num_shards, order.rows().tolist()) == (2, list(range(16)))
