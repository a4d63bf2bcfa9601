"""Scales that overflow: how often, and at which operand of which site."""

import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshloom.compiler.formats.operands import operand_formats
from meshloom.compiler.parallel.block_scaled import block_scaled_matmul
from meshloom.compiler.parallel.overflow import OverflowCounts, describe_overflows
from meshloom.compiler.parallel.quantized import Arithmetic, quantized_matmul

SITES = ["layers/up", "layers/down"]


def _loss(name: str, counts: OverflowCounts, weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    """Of three layers of two matmuls."""
    format = operand_formats()[name]

    def multiply(site: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        arithmetic = Arithmetic(
            format, format, rounds_at_random=False, emulated=True, tokens=(), watch=partial(counts.watch, site)
        )
        if format.blocks:
            return block_scaled_matmul(arithmetic, x, weight, subscripts="bte,em->btm")
        return quantized_matmul(arithmetic, x, weight, "bte,em->btm")

    def layer(x: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return multiply(SITES[1], multiply(SITES[0], x, of_layer[0]), of_layer[1]), None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0])


def _counted(name: str, *, up: float = 1 / 32, times: float = 1.0, num_devices: int = 1) -> OverflowCounts:
    """Returns the counts of a step. up: the weights of `up` in the second layer. times: the loss is multiplied."""
    counts = OverflowCounts()
    weights = jnp.full((3, 32, 32), 1 / 32).at[1].set(up), jnp.full((3, 32, 32), 1 / 32)
    mesh = jax.make_mesh((num_devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:num_devices])

    def gradients(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = jax.grad(lambda weights: times * _loss(name, counts, weights, x))(weights)
        return jax.lax.psum(found, "data")

    specs = (PartitionSpec(), PartitionSpec("data"))
    program = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    jax.block_until_ready(jax.jit(program)(weights, jnp.ones((num_devices, 32, 32))))
    jax.effects_barrier()
    return counts


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise", "mxfp8"])
def test_an_overflow_is_counted_from_where_it_begins_and_that_is_named_first(name):
    """Forward, the second of three layers makes infinity, which the next matmul reads."""
    counts = _counted(name, up=3e38)
    shares = {each: counts.overflowed[each] / counts.encoded[each] for each in counts.encoded}
    assert shares["input of layers/down"] == pytest.approx(2 / 3)
    assert shares["input of layers/up"] == pytest.approx(1 / 3)
    assert shares["weight of layers/down"] == 0
    told = describe_overflows([counts.totals], SITES)
    assert told.startswith("scales overflowed: input of layers/down (")
    assert counts.overflowed["gradient of layers/up"] > 0
    assert told.index("input of layers/up") < told.index("gradient of")


def test_backward_an_overflow_begins_at_the_last_site():
    counts = _counted("fp8", times=jnp.inf)
    assert not any(counts.overflowed[f"input of {site}"] for site in SITES)
    assert describe_overflows([counts.totals], SITES).startswith("scales overflowed: gradient of layers/down (")


def test_counts_are_of_all_devices_and_processes():
    one, four = (_counted("fp8", up=3e38, num_devices=n) for n in (1, 4))
    assert four.overflowed == {each: 4 * times for each, times in one.overflowed.items()}
    both, alone = (describe_overflows([four.totals] * n, SITES) for n in (2, 1))
    (first, of), (first_alone, of_alone) = (each.split("(")[1].split(")")[0].split(" of ") for each in (both, alone))
    assert (int(first), int(of)) == (2 * int(first_alone), 2 * int(of_alone))


def test_no_count_of_a_device_is_lost_while_another_counts():
    """Callbacks of devices run in threads of their own, at once."""
    counts, overflows = OverflowCounts(), jnp.asarray(True)
    at_once = threading.Barrier(4)

    def report() -> None:
        at_once.wait()
        for _ in range(20_000):
            counts._count("input of layers/up", overflows)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=report) for _ in range(4)]
        [each.start() for each in threads]
        [each.join() for each in threads]
    finally:
        sys.setswitchinterval(before)
    assert counts.overflowed == counts.encoded == {"input of layers/up": 80_000}


def test_what_is_finite_has_no_overflow():
    counts = _counted("fp8")
    assert counts.encoded
    assert describe_overflows([counts.totals], SITES) == "no scale of a matmul overflowed"
