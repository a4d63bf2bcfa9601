"""Grouped matmuls: each row by its group's matrix, with derivatives of their own, against NumPy in float64."""

from functools import partial
from importlib.util import find_spec, module_from_spec
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.compiler.core.scopes import RowTile
from meshloom.compiler.formats.operands import operand_formats
from meshloom.compiler.jaxpr.flops import count_flops
from meshloom.compiler.parallel.experts.grouped_matmul import (
    Kernels,
    grouped_matmul,
    grouped_matmuls,
    tiles_of_groups,
)
from meshloom.compiler.parallel.experts.quantized_groups import quantized_rows
from meshloom.compiler.parallel.quantized import Arithmetic

SIZES = [70, 0, 40, 11]  # an empty group, and rows of none
ALL_MEGABLOX = Kernels("megablox", RowTile(128, 1.0), multiplies_forward=True)


@pytest.mark.parametrize(
    "how",
    [
        Kernels("none"),
        Kernels("triton"),
        pytest.param(Kernels("megablox"), marks=pytest.mark.ci),
        pytest.param(ALL_MEGABLOX, marks=pytest.mark.ci),
    ],
    ids=["none", "triton", "megablox", "all megablox"],
)
def test_results_and_gradients_are_those_of_each_group_by_itself(how):
    """Kernels are interpreted. Triton's writes rows of the second of two tiles for three groups."""
    chance = np.random.default_rng(0)
    rows = 130 if how.name == "none" else 150  # no multiple of what the kernels take
    x, w, g = (chance.normal(size=s).astype(np.float32) for s in ((rows, 24), (4, 24, 40), (rows, 40)))
    used = sum(SIZES)
    g[used:] = np.nan if how.name == "triton" else 0  # nobody reads what has no group
    sizes = jnp.asarray(SIZES, jnp.int32)
    y, pull_back = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes, how, how.name != "none"), jnp.asarray(x), jnp.asarray(w)
    )
    y, dx, dw = (np.asarray(each) for each in (y, *pull_back(jnp.asarray(g))))
    assert how.name != "triton" or np.isnan(y[used:]).all()  # no group writes them
    ends = np.cumsum(SIZES)
    for group, (first, last) in enumerate(zip(ends - SIZES, ends, strict=True)):
        mine, given, matrix = (a.astype(np.float64) for a in (x[first:last], g[first:last], w[group]))
        np.testing.assert_allclose(y[first:last], mine @ matrix, atol=2e-4)
        np.testing.assert_allclose(dx[first:last], given @ matrix.T, atol=2e-4)
        np.testing.assert_allclose(dw[group], mine.T @ given, atol=2e-4)


def test_tiles_of_groups_are_megabloxs_own():
    """Empty groups, groups that end with a tile, and rows of none; what follows the tiles to compute is not read."""
    # A module of its own: the kernels' is changed to call ours.
    spec = find_spec("jax.experimental.pallas.ops.tpu.megablox.gmm")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(megablox := module_from_spec(spec))
    chance = np.random.default_rng(0)
    drawn = [
        chance.multinomial(chance.integers(0, 65), chance.dirichlet(np.ones(groups) / 2)) for groups in range(1, 9)
    ]
    for case, all_groups in product((*drawn, [40, 24, 0], [0, 0, 8, 56], [13, 0, 51]), (True, False)):
        sizes = jnp.asarray(case, jnp.int32)
        given = {"m": 64, "tm": 8, "start_group": jnp.asarray(0), "num_nonzero_groups": len(sizes)}
        ours, num_tiles = tiles_of_groups(group_sizes=sizes, visit_empty_groups=all_groups, **given)
        theirs, wanted = megablox.make_group_metadata(group_sizes=sizes, visit_empty_groups=all_groups, **given)
        assert num_tiles == wanted
        assert [(each.shape, each.dtype) for each in ours] == [(each.shape, each.dtype) for each in theirs]
        np.testing.assert_array_equal(ours[0], theirs[0])
        for mine, each in zip(ours[1:], theirs[1:], strict=True):
            np.testing.assert_array_equal(mine[:wanted], each[:wanted])
    given = {"m": 64, "tm": 8, "start_group": jnp.asarray(0), "num_nonzero_groups": 3}
    traced = str(jax.make_jaxpr(lambda x: tiles_of_groups(group_sizes=x, **given))(jnp.asarray([40, 24, 0], jnp.int32)))
    assert not any(name in traced for name in ("while", "scan", "scatter"))


@pytest.mark.parametrize(
    ("how", "width", "columns"),
    [("none", 24, 40), ("none", 64, 8), ("triton", 24, 40), pytest.param("megablox", 64, 8, marks=pytest.mark.ci)],
)
def test_the_gradient_of_rows_sums_over_all_arrays_of_matrices(how, width, columns):
    """By one kernel where the matrices are small, and by one for each where they are large."""
    chance = np.random.default_rng(0)
    shapes = ((150, width), *[(4, width, columns)] * 2, *[(150, columns)] * 2)
    x, *others = (chance.normal(size=shape).astype(np.float32) for shape in shapes)
    matrices, gradients = others[:2], others[2:]
    used = sum(SIZES)
    for g in gradients:
        g[used:] = np.nan if how == "triton" else 0
    sizes = jnp.asarray(SIZES, jnp.int32)
    multiply = partial(grouped_matmuls, sizes_G=sizes, how=Kernels(how), interpret=how != "none")
    y, pull_back = jax.vjp(multiply, jnp.asarray(x), tuple(map(jnp.asarray, matrices)))
    traced = jax.make_jaxpr(pull_back)(tuple(map(jnp.asarray, gradients)))
    assert ("concatenate" in str(traced)) == (width == 64)
    dx, of_matrices = pull_back(tuple(map(jnp.asarray, gradients)))
    first = 0
    for group, size in enumerate(SIZES):
        mine = slice(first, first + size)
        first += size
        rows, *given = (each[mine].astype(np.float64) for each in (x, *gradients))
        into = [each[group].astype(np.float64) for each in matrices]
        np.testing.assert_allclose(dx[mine], sum(g @ w.T for g, w in zip(given, into, strict=True)), atol=2e-4)
        for number, (g, w) in enumerate(zip(given, into, strict=True)):
            np.testing.assert_allclose(y[number][mine], rows @ w, atol=2e-4)
            np.testing.assert_allclose(of_matrices[number][group], rows.T @ g, atol=2e-4)


@pytest.mark.parametrize("how", ["none", "triton", "megablox"])
def test_both_passes_take_the_arithmetic_of_one_matrix_for_each_row(how):
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 256), (8, 256, 128))]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def both(x, w, sizes):
        y, pull_back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, Kernels(how)), x, w)
        return pull_back(y)

    count = count_flops(jax.make_jaxpr(both)(*shapes, sizes).jaxpr, "test")
    assert count.known == 3 * 2 * 512 * 256 * 128
    assert not count.unknown


def _read_again(x: np.ndarray, of: str, axes: tuple[int, ...] | None) -> np.ndarray:
    """An operand as it is read again after rounding, in float64."""
    largest, dtype = {"fp8": (448.0, "float8_e4m3fn"), "fp8_e5m2": (57344.0, "float8_e5m2"), "int8": (127.0, None)}[of]
    scale = np.max(np.abs(x), axis=axes, keepdims=True) / largest
    scaled = x / np.where(scale > 0, scale, 1)
    return scale * (np.round(scaled) if dtype is None else scaled.astype(np.float32).astype(dtype).astype(np.float64))


@pytest.mark.ci
@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize(("forward", "gradients"), [("fp8", "fp8_e5m2"), ("int8", "int8")])
def test_groups_in_few_bits_are_those_of_rounded_operands(forward, gradients, is_emulated):
    """A tensor's scale is that of all rows of groups, and of all matrices; rows of none, which are not finite, have no
    part in it, and nothing of theirs gets out."""
    chance, is_tensor = np.random.default_rng(0), forward == "fp8"
    x, w, g = (chance.normal(size=s).astype(np.float32) for s in ((130, 24), (4, 24, 40), (130, 40)))
    w *= 2.0 ** np.arange(4)[:, None, None]
    used = sum(SIZES)
    x[used:], g[used:] = np.nan, np.nan
    formats = operand_formats()
    arithmetic = Arithmetic(
        formats[forward], formats[gradients], rounds_at_random=False, emulated=is_emulated, tokens=()
    )
    multiply = partial(
        quantized_rows,
        arithmetic,
        sizes_G=jnp.asarray(SIZES, jnp.int32),
        how=Kernels("none"),
        experts=(),
        rows=(),
        into=(),
        out_of=(),
    )
    y, pull_back = jax.vjp(lambda x, w: multiply(x, w), jnp.asarray(x), jnp.asarray(w))
    y, dx, dw = (np.asarray(each) for each in (y, *pull_back(jnp.asarray(g))))
    assert not y[used:].any()
    assert not dx[used:].any()
    x, g = x[:used].astype(np.float64), g[:used].astype(np.float64)
    of_x, of_g = ({over: _read_again(each, of, None if is_tensor else over) for over in ((0,), (1,))}
                  for each, of in ((x, forward), (g, gradients)))  # fmt: skip
    of_w = [_read_again(w.astype(np.float64), forward, None if is_tensor else axes) for axes in ((1,), (2,))]
    tolerance = 1e-5 if is_emulated or forward == "int8" else 2e-5
    first = 0
    for group, size in enumerate(SIZES):
        mine = slice(first, first + size)
        first += size
        into, out_of = (matrices[group] for matrices in of_w)
        for ours, theirs in (
            (y[mine], of_x[1,][mine] @ into),
            (dx[mine], of_g[1,][mine] @ out_of.T),
            (dw[group], of_x[0,][mine].T @ of_g[0,][mine]),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(np.abs(theirs).max(initial=0), 1e-6))
