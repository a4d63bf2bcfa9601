"""Experts' matmuls in few bits: of rows sorted by group, or of groups that all have as many rows. The matrices of all
groups are one tensor, and each has channels of its own.

On TPUs `ragged_dot` takes float8 and int8 as they are: forward, and for the gradient of rows. The gradient of the
matrices is megablox's, which takes neither two types nor whole numbers: elements are exact in bfloat16, and are
multiplied in that.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.partition_spec import Axes
from ...core.scopes import encoding_scope
from ..encodings import decoded_weight, encoded_weight
from ..quantized import Arithmetic, Products, SplitBy, quantized_groups, scales_beside
from .grouped_matmul import Kernels, matrices_gradient, of_group, rows_gradient


def quantized_rows(
    arithmetic: Arithmetic, x_RE: Array, w_GEM: Any, sizes_G: Array, *, how: Kernels, experts: Axes, rows: Axes,
    into: Axes, out_of: Axes,
) -> Array:  # fmt: skip
    """Returns x w of the group of each row, (R, M); zeros for rows of none, which may hold anything. experts,
    rows, into, out_of: the mesh axes that have other groups, other rows, and other parts of E and M; the largest
    magnitude of a tensor is that over all of them."""
    how = Kernels("none") if arithmetic.emulated else how
    with jax.named_scope(encoding_scope(arithmetic.forward.name)):  # once for all matrices that read the rows
        has_group = jnp.arange(x_RE.shape[0])[:, None] < jnp.sum(sizes_G)
        x_RE = jnp.where(has_group, x_RE, 0)
    split: SplitBy = {"g": experts, "r": rows, "e": into, "m": out_of}
    y = quantized_groups(
        arithmetic, x_RE, decoded_weight(w_GEM), sizes_G, "re,gem->rm",
        products=lambda sizes: _products(sizes, x_RE.shape[0], how), split=split, encoded=encoded_weight(w_GEM),
    )  # fmt: skip
    return jnp.where(has_group, y, 0)


def quantized_equal_groups(
    arithmetic: Arithmetic, x_LCE: Array, w_LEM: Any, *, experts: Axes, rows: Axes, into: Axes, out_of: Axes
) -> Array:
    """Returns the same of experts that have as many rows each, (L, C, M)."""
    split: SplitBy = {"l": experts, "c": tuple(a for a in rows if a not in experts), "e": into, "m": out_of}
    return quantized_groups(
        arithmetic, x_LCE, decoded_weight(w_LEM), None, "lce,lem->lcm",
        products=lambda _: Products(), split=split, encoded=encoded_weight(w_LEM),
    )  # fmt: skip


def _products(sizes_G: Array, num_rows: int, how: Kernels) -> Products:
    def forward(x: Array, w: Array, _: str, dtype: jnp.dtype) -> Array:
        return jax.lax.ragged_dot(x, w, sizes_G, preferred_element_type=_sums(x, dtype))

    def of_x(g: Array, w: Array, _: str, dtype: jnp.dtype) -> Array:
        if _is_few_bits(g):
            return rows_gradient(g, w, sizes_G, _sums(g, dtype), Kernels("none"))
        return rows_gradient(g, w, sizes_G, dtype, how)

    def of_weight(x: Array, g: Array, _: str, dtype: jnp.dtype) -> Array:
        x, g = (each.astype(jnp.bfloat16) if _is_few_bits(each) else each for each in (x, g))
        return matrices_gradient(x, g, sizes_G, dtype, how)

    def beside(scales: Array, letters: str, result: str) -> Array:
        if "g" in letters and "g" not in result and scales.size > 1:
            return of_group(scales.reshape(scales.shape[0], -1), sizes_G, num_rows)
        return scales_beside(scales, letters, result)

    return Products(forward, of_x, of_weight, beside)


def _is_few_bits(x: Array) -> bool:
    return jnp.dtype(x.dtype).itemsize == 1


def _sums(x: Array, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the type in which a kernel adds up products: of whole numbers int32."""
    return jnp.dtype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.integer) else dtype
