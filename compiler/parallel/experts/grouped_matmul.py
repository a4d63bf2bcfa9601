"""Matmuls of rows that are sorted by group, each group with its own matrix, and their derivatives.

    rows (R, E), sizes (3, 1, 4), matrices (3, E, M)  ->  (R, M); rows after the eighth are undefined

Differentiated by JAX, the gradient of the matrices is a dense product over all groups on a TPU: 8 times the arithmetic
for 8 groups. On a GPU `ragged_dot` is one, too. So they are kernels:

    megablox  TPUs: JAX's Pallas kernels for both derivatives; forward `ragged_dot`, which is one
    triton    NVIDIA GPUs, in 16 bits: a kernel in Pallas for Triton, below
    none      anywhere else: `ragged_dot`

XLA computes `ragged_dot` on GPUs by the matrices of all groups, with zeros for the rows of others: 8 times the
arithmetic for 8 groups. JAX has kernels for Hopper alone, which ask the attached GPU
(`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`); the ones here are compiled ahead of time, from Ampere on. Rows are
cut in tiles. One in which groups meet is computed for each of them, and each writes its own rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib import import_module
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from ...core.kernels import Deferred, KernelArray, KernelCall, KernelCost
from ...core.scopes import LARGEST_TILE, RowTile

# A tile: 3 stages of bfloat16 take 96 KiB of the 163 that A100's blocks have.
ROWS, COLUMNS, DEPTH = 128, 128, 64
_ROW_DEPTH = 64  # rows that are contracted at once
_NEIGHBOURS = 8  # tiles of rows that follow one another on the same columns, whose matrix then is in the L2 cache
_LEAST = 16  # the least that a tensor core takes
_PARAMETERS = {"num_warps": 8, "num_stages": 3}
pl: Any = Deferred("jax.experimental.pallas")
triton: Any = Deferred("jax.experimental.pallas.triton")


class Tiles(NamedTuple):
    """Tiles of rows. For each tile: its group and its place, -1 where it is not used; for each group: its first row and
    the one after its last."""

    group_T: Array
    place_T: Array
    first_G: Array
    end_G: Array


def multiply_rows(
    x_RE: Array, w_GEM: Array, sizes_G: Array, *, is_transposed: bool = False, interpret: bool = False
) -> Array:
    """Returns x w of the group of each row, (R, M); rows of no group are undefined. sizes_G: int32, the rows of each
    group, from the first row on. is_transposed: w is (G, M, E)."""
    return multiply_and_add([(x_RE, w_GEM)], sizes_G, is_transposed=is_transposed, interpret=interpret)


def multiply_and_add(
    pairs: Sequence[tuple[Array, Array]], sizes_G: Array, *, is_transposed: bool, interpret: bool
) -> Array:
    """Returns the sum over pairs (x, w) of x w of the group of each row, as `multiply_rows`. All have equal shapes."""
    num_rows, num_columns = len(pairs[0][0]), pairs[0][1].shape[1 if is_transposed else 2]
    pairs = [(padded(x, ROWS, _LEAST), padded(w, _LEAST, _LEAST)) for x, w in pairs]
    (x_RE, w_GEM), *_ = pairs
    (rows, depth), columns = x_RE.shape, w_GEM.shape[1 if is_transposed else 2]
    num_tiles = rows // ROWS + sizes_G.shape[0] - 1
    tile = _part(COLUMNS, columns), _part(DEPTH, depth)
    out = pl.pallas_call(
        partial(_multiply, num_tiles=num_tiles, tile=tile, is_transposed=is_transposed),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x_RE.dtype),
        grid=(num_tiles * (columns // tile[0]),),
        compiler_params=triton.CompilerParams(**_PARAMETERS),
        interpret=interpret,
        name="grouped_matmul",
        cost_estimate=_cost(pairs, rows * columns * x_RE.dtype.itemsize, columns),
    )(*_tiles(sizes_G, num_tiles), *chain(*pairs))
    return out[:num_rows, :num_columns]


def multiply_groups(x_RE: Array, g_RM: Array, sizes_G: Array, dtype: Any, *, interpret: bool = False) -> Array:
    """Returns x^T g of the rows of each group, (G, E, M): the gradient of its matrix."""
    width, num_columns = x_RE.shape[1], g_RM.shape[1]
    x_RE, g_RM = (padded(x, ROWS, _LEAST) for x in (x_RE, g_RM))
    shape = (sizes_G.shape[0], x_RE.shape[1], g_RM.shape[1])
    tile = _part(ROWS, shape[1]), _part(COLUMNS, shape[2])
    end_G = jnp.cumsum(sizes_G)
    out = pl.pallas_call(
        partial(_contract_rows, tile=tile),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(shape[1] // tile[0], shape[2] // tile[1], shape[0]),
        compiler_params=triton.CompilerParams(**_PARAMETERS),
        interpret=interpret,
        name="grouped_matmul_of_rows",
        cost_estimate=_cost([(x_RE, g_RM)], math.prod(shape) * jnp.dtype(dtype).itemsize, shape[2]),
    )(end_G - sizes_G, end_G, x_RE, g_RM)
    return out[:, :width, :num_columns]


def _tiles(sizes_G: Array, num_tiles: int) -> Tiles:
    end_G = jnp.cumsum(sizes_G)
    first_G = end_G - sizes_G
    place_G = first_G // ROWS
    tiles_G = jnp.where(sizes_G > 0, (end_G + ROWS - 1) // ROWS - place_G, 0)
    through_G = jnp.cumsum(tiles_G)
    tile_T = jnp.arange(num_tiles, dtype=jnp.int32)
    # Not by a search in a loop: XLA's scheduler for GPUs has no gather on its way while a loop runs.
    group_T = jnp.sum(through_G <= tile_T[:, None], axis=1, dtype=jnp.int32)
    is_used = group_T < sizes_G.shape[0]
    group_T = jnp.minimum(group_T, sizes_G.shape[0] - 1)
    place_T = place_G[group_T] + tile_T - (through_G - tiles_G)[group_T]
    return Tiles(group_T, jnp.where(is_used, place_T, -1), first_G, end_G)


def _multiply(
    group_T: Any, place_T: Any, first_G: Any, end_G: Any, *arrays: Any, num_tiles: int, tile: tuple[int, int],
    is_transposed: bool,
) -> None:  # fmt: skip
    *operands, out_RM = arrays
    columns, depth = tile
    t, n = _in_neighbourhoods(pl.program_id(0), num_tiles, out_RM.shape[1] // columns)
    group, place = group_T[t], place_T[t]
    is_used = place >= 0
    rows = pl.ds(jnp.maximum(place, 0) * ROWS, ROWS)
    of_columns = pl.ds(n * columns, columns)

    def add(k: Array, sums: Array, x_RE: Any, w_GEM: Any) -> Array:
        contracted = pl.ds(k * depth, depth)
        x = triton.load(x_RE.at[rows, contracted])
        if is_transposed:
            w = triton.load(w_GEM.at[group, of_columns, contracted]).T
        else:
            w = triton.load(w_GEM.at[group, contracted, of_columns])
        return sums + triton.dot(x, w)

    num_steps = jnp.where(is_used, jnp.int32(operands[0].shape[1] // depth), jnp.int32(0))
    sums = jnp.zeros((ROWS, columns), jnp.float32)
    for x_RE, w_GEM in zip(operands[::2], operands[1::2], strict=True):
        sums = jax.lax.fori_loop(0, num_steps, partial(add, x_RE=x_RE, w_GEM=w_GEM), sums)
    row = place * ROWS + jnp.arange(ROWS)
    is_own = (row >= first_G[group]) & (row < end_G[group]) & is_used
    triton.store(out_RM.at[rows, of_columns], sums.astype(out_RM.dtype), mask=is_own[:, None])


def _contract_rows(first_G: Any, end_G: Any, x_RE: Any, g_RM: Any, out_GEM: Any, *, tile: tuple[int, int]) -> None:
    group = pl.program_id(2)
    of_width, of_columns = (pl.ds(pl.program_id(n) * size, size) for n, size in enumerate(tile))
    first, end = first_G[group], end_G[group]

    def add(place: Array, sums: Array) -> Array:
        rows = pl.ds(place * _ROW_DEPTH, _ROW_DEPTH)
        row = place * _ROW_DEPTH + jnp.arange(_ROW_DEPTH)
        is_own = ((row >= first) & (row < end))[:, None]
        x = triton.load(x_RE.at[rows, of_width], mask=is_own, other=0.0)
        g = triton.load(g_RM.at[rows, of_columns], mask=is_own, other=0.0)
        return sums + triton.dot(x.T, g)

    sums = jnp.zeros(tile, jnp.float32)
    sums = jax.lax.fori_loop(first // _ROW_DEPTH, (end + _ROW_DEPTH - 1) // _ROW_DEPTH, add, sums)
    out_GEM[group, of_width, of_columns] = sums.astype(out_GEM.dtype)


def _in_neighbourhoods(program: Array, num_tiles: int, num_columns: int) -> tuple[Array, Array]:
    """Returns the tile of rows and that of columns, such that _NEIGHBOURS tiles of rows take turns on all columns."""
    neighbourhood = program // (_NEIGHBOURS * num_columns)
    first = neighbourhood * _NEIGHBOURS
    size = jnp.minimum(num_tiles - first, _NEIGHBOURS)
    within = program % (_NEIGHBOURS * num_columns)
    return first + within % size, within // size


def _part(most: int, size: int) -> int:
    """Returns the largest power of two up to `most` that divides a size, which is a multiple of _LEAST."""
    while size % most:
        most //= 2
    return most


def padded(x: Array, *multiples: int) -> Array:
    """Returns an array with zeros after the end of its last dimensions, up to a multiple for each."""
    extra = [(0, -size % multiple) for size, multiple in zip(x.shape[-len(multiples) :], multiples, strict=True)]
    if not any(after for _, after in extra):
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(extra)) + extra)


def _cost(pairs: Sequence[tuple[Array, Array]], num_bytes: int, num_columns: int) -> Any:
    """Returns the cost of a kernel that counts each row of a pair's left once, against one matrix, as if all rows were
    filled; the scope says how many are. num_bytes: of the result."""
    flops = sum(2 * left.size * num_columns for left, _ in pairs)
    num_bytes += sum(each.nbytes for each in chain(*pairs))
    return pl.CostEstimate(flops=flops, bytes_accessed=num_bytes, transcendentals=0)


@dataclass(frozen=True)
class Kernels:
    """The kernels of a layer's grouped matmuls, as above. tile: of TPUs' kernels, the rows of a tile.
    multiplies_forward: megablox computes the forward pass, too."""

    name: Literal["megablox", "triton", "none"]
    tile: RowTile = LARGEST_TILE
    multiplies_forward: bool = False


# gmm and tgmm without the derivatives of `ops.gmm`
megablox: Any = Deferred("jax.experimental.pallas.ops.tpu.megablox.gmm")
WIDEST = 1024  # of what a tile contracts, and of its columns: for 16384 x 4096 x 14336 on v5p (docs/experts.md)
_MIN_ROWS = _LANES = 128  # the entries that the kernels take at once
_ROWS_ARE_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def grouped_matmul(x_RE: Array, w_GEM: Array, sizes_G: Array, how: Kernels, interpret: bool = False) -> Array:
    """Returns x w of the group of each row, (R, M). sizes_G: int32, the rows of each group, from the first row on.
    interpret: kernels operation by operation, on any platform."""
    return cast(tuple[Array], grouped_matmuls(x_RE, (w_GEM,), sizes_G, how, interpret))[0]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmuls(
    x_RE: Array, matrices: tuple[Array, ...], sizes_G: Array, how: Kernels, interpret: bool = False
) -> tuple[Array, ...]:
    """Returns x w of several arrays of matrices, as `grouped_matmul` of each. The gradient of the rows is made in one
    kernel where that moves less: a sum of a product for each array writes and reads again arrays as large as the rows.
    """
    if how.name == "triton":
        return tuple(multiply_rows(x_RE, w_GEM, sizes_G, interpret=interpret) for w_GEM in matrices)
    if how.multiplies_forward:
        return tuple(_by_megablox(x_RE, w_GEM, sizes_G, x_RE.dtype, how, interpret) for w_GEM in matrices)
    return tuple(jax.lax.ragged_dot(x_RE, w_GEM, sizes_G, preferred_element_type=x_RE.dtype) for w_GEM in matrices)


_Saved = tuple[Array, tuple[Array, ...], Array]


def _forward(
    x_RE: Array, matrices: tuple[Array, ...], sizes_G: Array, how: Kernels, interpret: bool
) -> tuple[tuple[Array, ...], _Saved]:
    return grouped_matmuls(x_RE, matrices, sizes_G, how, interpret), (x_RE, matrices, sizes_G)


def _backward(
    how: Kernels, interpret: bool, saved: _Saved, gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None]:
    x_RE, matrices, sizes_G = saved
    if how.name == "triton":
        pairs = list(zip(gradients, matrices, strict=True))
        dx_RE = multiply_and_add(pairs, sizes_G, is_transposed=True, interpret=interpret)
    elif _copies_move_less(x_RE, matrices):
        g_RM, w_GEM = (jnp.concatenate(each, axis=-1) for each in (gradients, matrices))
        dx_RE = rows_gradient(g_RM, w_GEM, sizes_G, x_RE.dtype, how, interpret)
    else:
        by_rows = partial(rows_gradient, sizes_G=sizes_G, dtype=x_RE.dtype, how=how, interpret=interpret)
        dx_RE = reduce(jnp.add, map(by_rows, gradients, matrices))
    of_matrices = (
        matrices_gradient(x_RE, g_RM, sizes_G, w_GEM.dtype, how, interpret)
        for g_RM, w_GEM in zip(gradients, matrices, strict=True)
    )
    return dx_RE, tuple(of_matrices), None


grouped_matmuls.defvjp(_forward, _backward)


def _copies_move_less(x_RE: Array, matrices: tuple[Array, ...]) -> bool:
    """Returns whether gradients and matrices are copied to lie side by side: where the copies move fewer elements than
    a sum of a product for each, which writes and reads as many arrays as large as the rows."""
    of_matrices = sum(w_GEM.size for w_GEM in matrices)
    of_gradients = sum(len(x_RE) * w_GEM.shape[2] for w_GEM in matrices)
    return of_gradients + of_matrices < len(matrices) * x_RE.size


def rows_gradient(
    g_RM: Array, w_GEM: Array, sizes_G: Array, dtype: Any, how: Kernels, interpret: bool = False
) -> Array:
    """Returns g w^T of the group of each row, (R, E)."""
    if how.name == "triton":
        return multiply_rows(g_RM, w_GEM, sizes_G, is_transposed=True, interpret=interpret)
    if how.name == "none":
        return jax.lax.ragged_dot(g_RM, w_GEM.swapaxes(1, 2), sizes_G, preferred_element_type=dtype)
    return _by_megablox(g_RM, w_GEM, sizes_G, dtype, how, interpret, is_transposed=True)


def _by_megablox(
    rows: Array, w_GEM: Array, sizes_G: Array, dtype: Any, how: Kernels, interpret: bool, *, is_transposed: bool = False
) -> Array:
    """Returns rows w, or rows w^T, of the group of each row."""
    _adapt_megablox()
    padded_rows = padded(rows, _MIN_ROWS, 1)
    contracted, columns = (2, 1) if is_transposed else (1, 2)
    tile = _tile_rows(len(padded_rows), how.tile), *(tile_width(w_GEM.shape[each]) for each in (contracted, columns))
    found = megablox.gmm(padded_rows, w_GEM, sizes_G, dtype, tile, transpose_rhs=is_transposed, interpret=interpret)
    return cast(Array, found)[: rows.shape[0]]


def matrices_gradient(
    x_RE: Array, g_RM: Array, sizes_G: Array, dtype: Any, how: Kernels, interpret: bool = False
) -> Array:
    """Returns x^T g of the rows of each group, (G, E, M)."""
    if how.name == "triton":
        return multiply_groups(x_RE, g_RM, sizes_G, dtype, interpret=interpret)
    if how.name == "none":
        return jax.lax.ragged_dot_general(x_RE, g_RM, sizes_G, _ROWS_ARE_CONTRACTED, preferred_element_type=dtype)
    _adapt_megablox()
    x, g = (padded(each, _MIN_ROWS, 1) for each in (x_RE, g_RM))
    tile = _tile_rows(len(g), how.tile), tile_width(x.shape[1]), tile_width(g.shape[1])
    return megablox.tgmm(x.swapaxes(0, 1), g, sizes_G, dtype, tile, interpret=interpret)


def _adapt_megablox() -> None:
    """Lets megablox multiply bfloat16, and find the groups of tiles without a loop.

    It asks the attached device whether it multiplies bfloat16, which starts JAX while a step is only planned, and may
    not be the target. Every TPU from v4 on does, and so do the others. Its own search for groups is a loop, and no
    gather of weights is on its way while one runs (docs/results/experts.md).
    """
    module: Any = import_module(megablox.__name__)
    module.common.supports_bfloat16_matmul = lambda: True
    module.make_group_metadata = tiles_of_groups


def tiles_of_groups(
    *, group_sizes: Array, m: int, tm: int, start_group: Any, num_nonzero_groups: int, visit_empty_groups: bool = True
) -> tuple[tuple[Array, Array, Array], Array]:
    """Returns what megablox's kernels read of the groups of rows: (first row of each group and the end of the last, the
    group of each tile to compute, and its place among the tiles of rows), and the number of tiles to compute.

    A tile in which groups meet is computed for each of them. Behind the tiles to compute, up to m / tm + G - 1, the
    last group and the last tile follow. group_sizes: (G,). m, tm: rows, in all and of a tile. visit_empty_groups: a
    group without rows has a tile, too, in which its result is set to zero. start_group, num_nonzero_groups: all groups.
    """
    del start_group, num_nonzero_groups
    num_groups, num_tiles = group_sizes.shape[0], m // tm
    end_G = jnp.cumsum(group_sizes).astype(jnp.int32)
    place_G = (end_G - group_sizes) // tm
    tiles_G = jnp.where(group_sizes > 0, -(-end_G // tm) - place_G, int(visit_empty_groups))
    through_G = jnp.cumsum(tiles_G)
    tile_T = jnp.arange(num_tiles + num_groups - 1, dtype=jnp.int32)
    # Each is a sum over groups of what a comparison picks: a search or a gather would be a loop or a slow operation.
    is_past_TG = tile_T[:, None] >= through_G
    group_T = jnp.minimum(is_past_TG.sum(axis=1), num_groups - 1).astype(jnp.int32)
    is_of_TG = group_T[:, None] == jnp.arange(num_groups)
    first_T = jnp.where(is_of_TG, place_G - through_G + tiles_G, 0).sum(axis=1)
    place_T = jnp.clip(first_T + tile_T, 0, num_tiles - 1).astype(jnp.int32)
    first_G = jnp.concatenate([jnp.zeros(1, jnp.int32), end_G])
    return (first_G, group_T, place_T), through_G[-1]


def of_group(values_GM: Array, sizes_G: Array, num_rows: int) -> Array:
    """Returns the entries (R, M) of the group of each row; zeros for rows of none. A product with one 1 in each row,
    whose gradient is one, too."""
    ends_G, rows_R1 = jnp.cumsum(sizes_G), jnp.arange(num_rows)[:, None]
    is_of_RG = (rows_R1 >= ends_G - sizes_G) & (rows_R1 < ends_G)
    return jnp.matmul(is_of_RG.astype(values_GM.dtype), values_GM, precision="highest")


def tile_width(size: int) -> int:
    """Returns the width of megablox's tiles along a dimension of the matrices. The kernels compute whole tiles, so it
    is the one that leaves least of them empty, and the widest of those: 768 for 768 and 1,536, of which tiles of 1,024
    would leave a quarter empty."""
    if size <= WIDEST:
        return size + -size % _LANES
    return min(range(WIDEST, WIDEST // 2 - 1, -_LANES), key=lambda width: (_in_tiles(size, width), -width))


def best_tile(tiles: Sequence[RowTile], rows: int, num_groups: int) -> RowTile:
    """Returns the tile of rows that takes least for so many rows: a small one is empty to a lesser part where groups
    meet, and its matmul may take longer. tiles: those whose time is known."""
    return min(tiles, key=lambda tile: (rows + num_groups * tile.rows) * tile.time, default=LARGEST_TILE)


def _in_tiles(size: int, tile: int) -> int:
    """Returns the size of the tiles that cover a dimension."""
    return size + -size % tile


def _tile_rows(num_rows: int, wanted: RowTile) -> int:
    return next((size for size in (wanted.rows, 256) if num_rows % size == 0), _MIN_ROWS)


def grouped_cost(call: KernelCall, filled: float, wanted: RowTile = LARGEST_TILE) -> KernelCost | None:
    """Returns the cost of a grouped matmul; None for another kernel. filled: the share of its rows that tokens fill.
    wanted: megablox's tile of rows, and that of XLA's own kernel.

    Rows that are not filled are skipped, neither read nor written, and a tile in which groups meet is computed for each
    of them: one tile more for each group that has rows. So is what megablox's tiles have beyond the matrices. The
    kernels declare the FLOPs of all rows, but a compiled one for Triton loses what it declared: there each element of
    the rows meets a row of the group's matrix, or of the other rows, and both are as long as the result's last
    dimension.
    """
    if not (call.is_pallas or (call.stated is not None and call.stated.unit == "grouped")):
        return None
    matrices = [each.shape for each in call.operands if len(each.shape) == 2]
    of_groups = next((each.shape for each in (*call.results, *call.operands) if len(each.shape) == 3), None)
    cost = call.stated
    if cost is None and "triton" in call.kernel and matrices:
        num_pairs = max(1, sum(len(each.shape) == 3 for each in call.operands))
        cost = KernelCost(2.0 * num_pairs * math.prod(matrices[0]) * call.results[0].shape[-1])
    if cost is None or not cost.flops or not matrices or of_groups is None:
        return cost and replace(cost, unit="grouped")
    num_rows = matrices[-1][0]  # the rows of groups may be the columns of a first matrix
    name, tile = _kernel_of(call, num_rows, wanted)
    computed = filled * num_rows + min(of_groups[0], filled * num_rows) * tile
    if name == "megablox":
        computed *= wanted.time * math.prod(_in_tiles(each, tile_width(each)) / each for each in of_groups[1:])
    num_bytes = round(sum(_moved_bytes(each, filled) for each in (*call.operands, *call.results)))
    flops = cost.flops * computed / num_rows
    return replace(cost, flops=flops, num_bytes=num_bytes, unit="grouped", grouped=name)


def _moved_bytes(array: KernelArray, filled: float) -> float:
    """Returns the bytes that a kernel moves of an operand or a result: of rows those that are filled."""
    share = filled if len(array.shape) == 2 else 1.0
    return share * math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def _kernel_of(call: KernelCall, num_rows: int, wanted: RowTile) -> tuple[str, int]:
    """Returns the name of a kernel in conf/calibration/_kernels.yaml, and the rows of its tiles."""
    if "ragged" in call.kernel:
        return "ragged_dot", wanted.ragged
    if "triton" in call.kernel or "grouped_matmul" in call.kernel:
        return "triton", _ROW_DEPTH if any(len(each.shape) == 3 for each in call.results) else ROWS
    return "megablox", _tile_rows(num_rows, wanted)
