"""Grouped matmuls: each row by its group's matrix, with derivatives of their own, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.compiler.jaxpr.flops import count_flops
from meshloom.compiler.parallel.experts.grouped_matmul import grouped_matmul

SIZES = [70, 0, 40, 11]  # an empty group, and rows of none


@pytest.mark.parametrize("how", ["none", "triton", pytest.param("megablox", marks=pytest.mark.ci)])
def test_results_and_gradients_are_those_of_each_group_by_itself(how):
    """Kernels are interpreted. Triton's writes rows of the second of two tiles for three groups."""
    chance = np.random.default_rng(0)
    rows = 130 if how == "none" else 150  # no multiple of what the kernels take
    x, w, g = (chance.normal(size=s).astype(np.float32) for s in ((rows, 24), (4, 24, 40), (rows, 40)))
    used = sum(SIZES)
    g[used:] = np.nan if how == "triton" else 0  # nobody reads what has no group
    sizes = jnp.asarray(SIZES, jnp.int32)
    y, pull_back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, how, how != "none"), jnp.asarray(x), jnp.asarray(w))
    y, dx, dw = (np.asarray(each) for each in (y, *pull_back(jnp.asarray(g))))
    assert how != "triton" or np.isnan(y[used:]).all()  # no group writes them
    ends = np.cumsum(SIZES)
    for group, (first, last) in enumerate(zip(ends - SIZES, ends, strict=True)):
        mine, given, matrix = (a.astype(np.float64) for a in (x[first:last], g[first:last], w[group]))
        np.testing.assert_allclose(y[first:last], mine @ matrix, atol=2e-4)
        np.testing.assert_allclose(dx[first:last], given @ matrix.T, atol=2e-4)
        np.testing.assert_allclose(dw[group], mine.T @ given, atol=2e-4)


@pytest.mark.parametrize("how", ["none", "triton", "megablox"])
def test_both_passes_take_the_arithmetic_of_one_matrix_for_each_row(how):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (8, 256, 128))]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def both(x, w, sizes):
        y, pull_back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, how), x, w)
        return pull_back(y)

    count = count_flops(jax.make_jaxpr(both)(*shapes, sizes).jaxpr, "test")
    assert count.known == 3 * 2 * 512 * 256 * 128
    assert not count.unknown
