"""Matmuls of operands in blocks that share a scale along what is summed (OCP Microscaling Formats 1.0).

    y[m, n]  =  sum over blocks b of  sx[m, b] sw[n, b]  sum over k in b of  qx[m, k] qw[n, k]

Such scales cannot be taken out of the sum: XLA's block-scaled dot multiplies them with the elements, by cuDNN's kernel
on GPUs that have it. Each of a site's three products sums over other dimensions, so each encodes both of its operands,
as matrices with what is summed last. A block is within one device's tokens, so that no maxima are reduced.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.errors import Problem
from ..core.float_types import XLA_NAMES
from ..core.kernels import KernelCall, KernelCost
from ..formats.block import ELEMENTS, SCALES, BlockFormat
from ..formats.operands import OperandFormat
from ..sharding.arrays import OpSite
from ..spec.target_names import kinds_of_capability
from ..target.target import TargetPlan
from .operation import OpInputs
from .quantized import Arithmetic

BLACKWELL = (10, 0)  # the compute capability from which on XLA calls cuDNN's kernel, else it decodes both operands
_TARGET = "__op$block_scaled_dot"


def block_scaled_matmul(arithmetic: Arithmetic, x: Array, weight: Array, *, subscripts: str) -> Array:
    """Returns the product of x and a weight, whose gradients are products in blocks too."""
    operands, of_y = subscripts.split("->")
    of_x, of_weight = operands.split(",")
    forward, gradients = arithmetic.forward, arithmetic.gradients
    product = partial(_product, arithmetic.emulated)

    def plain(x: Array, weight: Array) -> Array:
        return product((forward, forward), x, weight, subscripts, x.dtype)

    def backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        x, weight = residuals
        formats = (gradients, forward) if gradients else None
        dx = product(formats, gradient, weight, f"{of_y},{of_weight}->{of_x}", x.dtype)
        dw = product(formats, gradient, x, f"{of_y},{of_x}->{of_weight}", weight.dtype)
        return dx, dw

    multiply = jax.custom_vjp(plain)
    multiply.defvjp(lambda x, weight: (plain(x, weight), (x, weight)), backward)
    return multiply(x, weight)


def _product(
    emulated: bool, formats: tuple[OperandFormat, ...] | None, a: Array, b: Array, subscripts: str, dtype: Any
) -> Array:
    """Returns a sum of products, as `jnp.einsum` writes it. formats: of the operands; None: they are multiplied as they
    are. emulated: decoded, and multiplied in float32."""
    if formats is None:
        return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)
    operands, result = subscripts.split("->")
    of_a, of_b = operands.split(",")
    summed = "".join(letter for letter in of_a if letter in of_b)
    rows, columns = ("".join(letter for letter in of if letter not in summed) for of in (of_a, of_b))
    matrices = (_matrix(a, of_a, rows, summed), _matrix(b, of_b, columns, summed))
    y = _multiplied(emulated, [format.of_matrix for format in formats], matrices, dtype)
    sizes = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))
    made = rows + columns
    return jnp.transpose(y.reshape([sizes[letter] for letter in made]), [made.index(letter) for letter in result])


def _matrix(x: Array, letters: str, kept: str, summed: str) -> Array:
    """Returns an operand as (what is kept, what is summed)."""
    ordered = jnp.transpose(x, [letters.index(letter) for letter in kept + summed])
    return ordered.reshape(math.prod(ordered.shape[: len(kept)]), -1)


def _multiplied(emulated: bool, formats: Sequence[BlockFormat], matrices: Sequence[Array], dtype: Any) -> Array:
    """Returns (m, k) times (n, k): (m, n)."""
    encoded = [format.encode(matrix) for format, matrix in zip(formats, matrices, strict=True)]
    if emulated:
        a, b = (format.decode(each) for format, each in zip(formats, encoded, strict=True))
        return jnp.dot(a, b.T, preferred_element_type=jnp.float32).astype(dtype)
    batch = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
    config = {"scaled_dot_backend_config": batch | {"dequantize_type": XLA_NAMES[jnp.dtype(dtype).name].upper()}}
    call = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct((1, *(len(matrix) for matrix in matrices)), dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    return call(*(each[key][None] for key in (ELEMENTS, SCALES) for each in encoded))[0]


def is_block_scaled(parameters: Mapping[str, Any]) -> bool:
    """Returns True for the parameters of a call of the block-scaled dot."""
    return parameters.get("target_name") == _TARGET


def block_scaled_cost(call: KernelCall) -> KernelCost | None:
    """Returns the cost of a traced call; None for other kernels, and in a compiled program, whose shapes say it."""
    if not is_block_scaled(call.parameters):
        return None
    (_, rows, depth), (_, columns, _) = (each.shape for each in call.operands[:2])
    return KernelCost(2 * rows * columns * depth, num_results=rows * columns)


def has_block_scales(target: TargetPlan) -> bool:
    """Returns True for a GPU on which scales of blocks are multiplied with the elements."""
    processor = target.chip.processor if target.chip else None
    return processor is not None and processor.compute_capability >= BLACKWELL


def block_problems(where: str, site: OpSite, format: OperandFormat, inputs: OpInputs) -> Iterator[Problem]:
    """Yields why a site cannot be multiplied in blocks: its target, its mesh, or sizes that blocks do not divide."""
    target, axes, emulated = inputs.target, inputs.roles.partitioner, inputs.spec.precision.emulate
    if not emulated and not has_block_scales(target):
        what = f"the compiler for {target.name} makes no matmul faster in blocks of '{format.name}'"
        having = ", ".join(kinds_of_capability(BLACKWELL))
        fix = f"choose a target of {having}, or set precision.emulate=true, which rounds as {format.name} does"
        yield Problem(where, what, f"{fix} and is slower")
    elif split := [axis for axis in axes if inputs.mesh.sizes[axis] > 1]:
        what = f"'{format.name}' multiplies whole weights, and {split[0]} splits those of '{site.name}'"
        yield Problem(where, what, f"set mesh.{split[0]}=1, or choose fp8")
    else:
        yield from _cut(where, site, format, inputs)


def _cut(where: str, site: OpSite, format: OperandFormat, inputs: OpInputs) -> Iterator[Problem]:
    """Yields the first sum of a site's three products that blocks do not divide."""
    block = format.of_matrix.block[-1] or 1
    operands, result = site.option("subscripts").split("->")
    of_x, of_weight = operands.split(",")
    sizes = dict(zip(of_x + of_weight, site.operands[0].shape + site.operands[1].shape, strict=True))
    tokens = inputs.batch.tokens_of_device // inputs.spec.overlap.layers.batch_split
    sums = {
        "what it sums over": math.prod(sizes[letter] for letter in of_weight if letter in of_x),
        "what it makes of a token": math.prod(sizes[letter] for letter in of_weight if letter in result),
        "the tokens of a device": tokens,
    }
    for what, size in sums.items():
        if size % block:
            fix = f"make it a multiple of {block}, or give '{site.name}' another type by a rule before this one"
            yield Problem(where, f"blocks of {block} do not divide {size}, {what}, at '{site.name}'", fix)
            return
