"""Matmuls of rows that are sorted by group, each group with its own matrix, and their derivatives.

    rows (R, E), sizes (3, 1, 4), matrices (3, E, M)  ->  (R, M); rows after the eighth are undefined

Differentiated by JAX, the gradient of the matrices is a dense product over all groups on a TPU: 8 times the arithmetic
for 8 groups. On a GPU `ragged_dot` is one, too. So they are kernels:

    megablox  TPUs: JAX's Pallas kernels for both derivatives; forward `ragged_dot`, which is one
    triton    NVIDIA GPUs, in 16 bits: grouped_triton.py
    none      anywhere else: `ragged_dot`
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox import ops

from ..core.kernels import KernelCall, KernelCost
from .grouped_triton import multiply_groups, multiply_rows, padded

Kernels = Literal["megablox", "triton", "none"]

megablox: Any = ops.backend  # pyright: ignore[reportPrivateImportUsage] (gmm and tgmm without `ops.gmm`'s derivatives)
TILE = (512, 1024, 1024)  # rows, what is contracted, columns: of 16384 x 4096 x 14336 on v5p (docs/experts.md)
# The kernels ask the attached device whether it multiplies bfloat16, which starts JAX while a step is only planned, and
# may not be the target. Every TPU from v4 on does, and so do the others.
megablox.common.supports_bfloat16_matmul = lambda: True
_MIN_ROWS = 128  # that the kernels take at once
_ROWS_ARE_CONTRACTED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(x_RE: Array, w_GEM: Array, sizes_G: Array, how: Kernels, interpret: bool = False) -> Array:
    """Returns x w of the group of each row, (R, M). sizes_G: int32, the rows of each group, from the first row on.
    interpret: kernels operation by operation, on any platform."""
    if how == "triton":
        return multiply_rows(x_RE, w_GEM, sizes_G, interpret=interpret)
    return jax.lax.ragged_dot(x_RE, w_GEM, sizes_G, preferred_element_type=x_RE.dtype)


def _forward(
    x_RE: Array, w_GEM: Array, sizes_G: Array, how: Kernels, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x_RE, w_GEM, sizes_G, how, interpret), (x_RE, w_GEM, sizes_G)


def _backward(
    how: Kernels, interpret: bool, saved: tuple[Array, Array, Array], g_RM: Array
) -> tuple[Array, Array, None]:
    x_RE, w_GEM, sizes_G = saved
    derivatives = {"megablox": _by_megablox, "triton": _by_triton, "none": _by_ragged_dot}[how]
    return (*derivatives(x_RE, w_GEM, sizes_G, g_RM, interpret), None)


grouped_matmul.defvjp(_forward, _backward)


def _by_ragged_dot(x_RE: Array, w_GEM: Array, sizes_G: Array, g_RM: Array, _: bool) -> tuple[Array, Array]:
    dx_RE = jax.lax.ragged_dot(g_RM, w_GEM.swapaxes(1, 2), sizes_G, preferred_element_type=x_RE.dtype)
    dw_GEM = jax.lax.ragged_dot_general(x_RE, g_RM, sizes_G, _ROWS_ARE_CONTRACTED, preferred_element_type=w_GEM.dtype)
    return dx_RE, dw_GEM


def _by_triton(x_RE: Array, w_GEM: Array, sizes_G: Array, g_RM: Array, interpret: bool) -> tuple[Array, Array]:
    dx_RE = multiply_rows(g_RM, w_GEM, sizes_G, is_transposed=True, interpret=interpret)
    return dx_RE, multiply_groups(x_RE, g_RM, sizes_G, w_GEM.dtype, interpret=interpret)


def _by_megablox(x_RE: Array, w_GEM: Array, sizes_G: Array, g_RM: Array, interpret: bool) -> tuple[Array, Array]:
    num_rows = x_RE.shape[0]
    x_RE, g_RM = (padded(x, _MIN_ROWS, 1) for x in (x_RE, g_RM))
    rows = next(size for size in (TILE[0], 256, _MIN_ROWS) if x_RE.shape[0] % size == 0)
    tile = (rows, *TILE[1:])
    dx_RE = megablox.gmm(g_RM, w_GEM, sizes_G, x_RE.dtype, tile, transpose_rhs=True, interpret=interpret)
    dw_GEM = megablox.tgmm(x_RE.swapaxes(0, 1), g_RM, sizes_G, w_GEM.dtype, tile, interpret=interpret)
    return dx_RE[:num_rows], dw_GEM


def grouped_cost(call: KernelCall) -> KernelCost | None:
    """Returns the cost of a grouped matmul with all of its rows filled; None for another kernel.

    The kernels declare it, but a compiled one for Triton loses what it declared: there each element of the rows meets a
    row of the group's matrix, or of the other rows, and both are as long as the result's last dimension.
    """
    is_grouped = call.is_pallas or (call.stated is not None and call.stated.unit == "grouped")
    if is_grouped and call.stated is not None:
        return replace(call.stated, unit="grouped")
    if not is_grouped or "triton" not in call.kernel:
        return None
    rows = next(each.shape for each in call.operands if len(each.shape) > 1)
    return KernelCost(2.0 * math.prod(rows) * call.results[0].shape[-1], unit="grouped")
