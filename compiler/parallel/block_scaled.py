"""Matmuls of operands in blocks that share a scale along what is summed: 32 entries (OCP Microscaling Formats 1.0), 16
(NVIDIA, arXiv:2509.25149), or 128, and 128 x 128 of a weight (DeepSeek-V3, arXiv:2412.19437).

    y[m, n]  =  sum over blocks b of  sx[m, b] sw[n, b]  sum over k in b of  qx[m, k] qw[n, k]

Such scales cannot be taken out of the sum: XLA's block-scaled dot multiplies them with the elements, by cuDNN's kernel
on GPUs that have it. Of float8 it takes one byte for each 32 entries, a power of two, so larger blocks repeat theirs,
and those with scales in float32 can only be emulated: decoded, then multiplied and summed in float32. Each of a site's
three products sums over other dimensions, so each encodes both of its operands, as matrices with what is summed last. A
block is within one device's tokens, so that its scale needs no other device.

Scales of 16 entries in float8 share one in float32, of the whole operand, which is taken out of the sum. Of an operand
that tokens split, it comes from the largest magnitude on all devices, so that all of them encode alike.
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
from ..core.partition_spec import Axes
from ..formats.block import ELEMENTS, SCALES, BlockFormat, EncodedArray
from ..formats.operands import OperandFormat, operand_formats
from ..sharding.arrays import OpSite
from ..spec.plan_spec import PlanSpec
from ..spec.target_names import kinds_of_capability
from ..target.target import TargetPlan
from .operation import OpInputs
from .quantized import GRADIENT, INPUT, WEIGHT, Arithmetic

BLACKWELL = (10, 0)  # the compute capability from which on XLA calls cuDNN's kernel, else it decodes both operands
_TARGET = "__op$block_scaled_dot"
_SCALED_ENTRIES = 32  # along what is summed, of each scale that XLA's block-scaled dot takes


def block_scaled_matmul(arithmetic: Arithmetic, x: Array, weight: Array, *, subscripts: str) -> Array:
    """Returns the product of x and a weight, whose gradients are products in blocks too."""
    operands, of_y = subscripts.split("->")
    of_x, of_weight = operands.split(",")
    tokens, weights = arithmetic.forward.of_matrix(), arithmetic.forward.of_matrix(is_weight=True)
    gradients = arithmetic.gradients.of_matrix() if arithmetic.gradients else None
    product = partial(_product, arithmetic)

    def plain(x: Array, weight: Array) -> Array:
        return product({INPUT: tokens, WEIGHT: weights}, x, weight, subscripts, x.dtype)

    def backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
        x, weight = residuals
        of_dx = {GRADIENT: gradients, WEIGHT: weights} if gradients else None
        of_dw = {GRADIENT: gradients, INPUT: tokens} if gradients else None
        dx = product(of_dx, gradient, weight, f"{of_y},{of_weight}->{of_x}", x.dtype)
        dw = product(of_dw, gradient, x, f"{of_y},{of_x}->{of_weight}", weight.dtype)
        return dx, dw

    multiply = jax.custom_vjp(plain)
    multiply.defvjp(lambda x, weight: (plain(x, weight), (x, weight)), backward)
    return multiply(x, weight)


def _product(
    arithmetic: Arithmetic, formats: Mapping[str, BlockFormat] | None, a: Array, b: Array, subscripts: str, dtype: Any
) -> Array:
    """Returns a sum of products, as `jnp.einsum` writes it. formats: of both operands, by their names; None: they are
    multiplied as they are."""
    if formats is None:
        return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)
    operands, result = subscripts.split("->")
    of_a, of_b = operands.split(",")
    summed = "".join(letter for letter in of_a if letter in of_b)
    rows, columns = ("".join(letter for letter in of if letter not in summed) for of in (of_a, of_b))
    matrices = (_matrix(a, of_a, rows, summed), _matrix(b, of_b, columns, summed))
    y = _multiplied(arithmetic, formats, matrices, dtype)
    sizes = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))
    made = rows + columns
    return jnp.transpose(y.reshape([sizes[letter] for letter in made]), [made.index(letter) for letter in result])


def _matrix(x: Array, letters: str, kept: str, summed: str) -> Array:
    """Returns an operand as (what is kept, what is summed)."""
    ordered = jnp.transpose(x, [letters.index(letter) for letter in kept + summed])
    return ordered.reshape(math.prod(ordered.shape[: len(kept)]), -1)


def _multiplied(
    arithmetic: Arithmetic, named: Mapping[str, BlockFormat], matrices: Sequence[Array], dtype: Any
) -> Array:
    """Returns (m, k) times (n, k): (m, n). named: the formats of both, by the names of the operands."""
    formats = list(named.values())
    pairs = zip(named.items(), matrices, strict=True)
    encoded = [arithmetic.encoded(name, _encoded(arithmetic, name, format, x)) for (name, format), x in pairs]
    if arithmetic.emulated:  # decoded, and multiplied in float32
        a, b = (format.decode(each) for format, each in zip(formats, encoded, strict=True))
        return jnp.dot(a, b.T, preferred_element_type=jnp.float32).astype(dtype)
    pairs = [_scales_of(format, each) for format, each in zip(formats, encoded, strict=True)]
    scales, shared = zip(*pairs, strict=True)
    # Without what they share, results exceed the range of float16.
    made = jnp.float32 if all(each is not None for each in shared) and dtype == jnp.float16 else dtype
    batch = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]}
    config = {"scaled_dot_backend_config": batch | {"dequantize_type": XLA_NAMES[jnp.dtype(made).name].upper()}}
    call = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct((1, *(len(matrix) for matrix in matrices)), made),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    y = call(*(each[ELEMENTS][None] for each in encoded), *(each[None] for each in scales))[0]
    for each in shared:
        y = y if each is None else y.astype(jnp.float32) * each
    return y.astype(dtype)


def _encoded(arithmetic: Arithmetic, operand: str, format: BlockFormat, matrix: Array) -> EncodedArray:
    """Returns this device's part of an operand. What its scales share is of all devices that have tokens of it."""
    axes = arithmetic.tokens if operand != WEIGHT else ()
    return format.encode(matrix, scales_over_devices=lambda amax: jax.lax.pmax(amax, axes) if axes else amax)


def _scales_of(format: BlockFormat, encoded: EncodedArray) -> tuple[Array, Array | None]:
    """Returns the scales of an operand's blocks as XLA takes them, and the scale that these share; None: they share
    none."""
    scales = encoded[SCALES]
    if format.scales_format is not None:
        return scales[ELEMENTS], scales[SCALES]
    return repeated_scales(format, scales), None


def repeated_scales(format: BlockFormat, scales: Array) -> Array:
    """Returns the scales of a matrix as a scale for each row and so many entries as XLA takes."""
    rows, entries = format.block_sizes(scales.shape)
    for axis, times in enumerate((rows, entries // _SCALED_ENTRIES)):
        scales = jnp.repeat(scales, times, axis) if times > 1 else scales
    return scales


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
    axes, is_emulated = inputs.roles.partitioner, inputs.spec.precision.emulate
    if not is_emulated and (problem := _not_real(where, format, inputs.target)):
        yield problem
    elif not is_emulated and (split := [axis for axis in axes if inputs.mesh.sizes[axis] > 1]):
        what = f"'{format.name}' multiplies whole weights, and {split[0]} splits those of '{site.name}'"
        yield Problem(where, what, f"set mesh.{split[0]}=1, or choose fp8")
    else:
        yield from _cut(where, site, format, inputs)


def has_real_blocks(format: OperandFormat) -> bool:
    """Returns True where a kernel takes the scales of a type's blocks: one byte each."""
    return format.of_matrix().has_powers_of_two or format.has_shared_scale


def _not_real(where: str, format: OperandFormat, target: TargetPlan) -> Problem | None:
    """Returns why a target does not multiply scales of these blocks with the elements; None where it does."""
    having, emulate = ", ".join(kinds_of_capability(BLACKWELL)), "set precision.emulate=true, which rounds as"
    if not has_real_blocks(format):
        what = f"no compiler multiplies '{format.name}', with scales in float32, faster than bfloat16"
        named = [name for name, each in operand_formats().items() if each.blocks and has_real_blocks(each)]
        fix = f"choose a type with a scale for each tensor or channel, or {' or '.join(named)} on {having}"
        return Problem(where, what, f"{fix}, or {emulate} {format.name} does and is slower")
    if has_block_scales(target):
        return None
    what = f"the compiler for {target.name} makes no matmul faster in blocks of '{format.name}'"
    fix = f"choose a target of {having}, or {emulate} {format.name} does and is slower"
    return Problem(where, what, fix)


def _cut(where: str, site: OpSite, format: OperandFormat, inputs: OpInputs) -> Iterator[Problem]:
    """Yields the first sum of a site's three products that blocks do not divide, or of which a device has parts of
    blocks."""
    block = format.of_matrix().block[-1] or 1
    operands, result = site.option("subscripts").split("->")
    of_x, of_weight = operands.split(",")
    sizes = dict(zip(of_x + of_weight, site.operands[0].shape + site.operands[1].shape, strict=True))
    num_parts = inputs.spec.overlap.layers.batch_split
    tokens = inputs.batch.tokens_of_device // num_parts
    split, n = _split_by(site, inputs), inputs.mesh.num_shards
    sums = {
        "what it sums over": [letter for letter in of_weight if letter in of_x],
        "what it makes of a token": [letter for letter in of_weight if letter in result],
    }
    for what, letters in sums.items():
        own, axes = [sizes[letter] for letter in letters], tuple(axis for at in letters for axis in split[at])
        size = math.prod(own)
        if size // n(axes) % block:
            of_device = f"{size // n(axes)}" if not axes else f"{size // n(axes)} ({size} over {' and '.join(axes)})"
            fits = [f"{count}" for count in range(1, n(axes)) if size % count == 0 and size // count % block == 0]
            fewer = f", split it over {' or '.join(fits)} of {n(axes)} devices" if fits else ""
            fix = f"make {_keys_of(own, inputs.spec) or 'it'} a multiple of {block * n(axes)}{fewer}"
            what = f"blocks of {block} do not divide {of_device}, {what}, at '{site.name}'"
            yield Problem(where, what, f"{fix}, or give '{site.name}' another type by a rule before this one")
            return
    if tokens % block:
        part = "a microbatch" if num_parts == 1 else "a part of a microbatch"
        what = f"blocks of {block} do not divide {tokens}, the tokens of a device in {part}"
        yield Problem(where, what, _fix_of_tokens(tokens, block, inputs.spec.sequence_length))


def _keys_of(sizes: Sequence[int], spec: PlanSpec) -> str | None:
    """Returns the model's keys for these sizes; None if no key, or more than one, has one of the sizes."""
    found = [[key for key, value in spec.model if type(value) is int and value == size] for size in sizes]
    return " x ".join(f"model.{each[0]}" for each in found) if all(len(each) == 1 for each in found) else None


def _fix_of_tokens(tokens: int, block: int, length: int) -> str:
    """Returns the fix for tokens of a device that blocks do not divide: the next length of sequences with which they
    do. length: the declared one."""
    step = block * length // math.gcd(tokens, block * length)
    batch = f"a global_batch_size, num_microbatches or mesh that gives it a multiple of {block} tokens"
    return f"use sequence_length={-(-length // step) * step}, or {batch}"


def _split_by(site: OpSite, inputs: OpInputs) -> Mapping[str, Axes]:
    """Returns the axes of the partitioner that split each dimension of a site, by its letter."""
    operands, result = site.option("subscripts").split("->")
    split = dict[str, Axes].fromkeys(operands.replace(",", ""), ())
    for letters, name in ((operands.split(",")[0], site.operands[0].activation), (result, site.name)):
        if plan := inputs.activation(name):
            of_partitioner = (tuple(a for a in d.axes if a in inputs.roles.partitioner) for d in plan.dimensions)
            split |= {letter: axes for letter, axes in zip(letters, of_partitioner, strict=True) if axes}
    return split
