"""How the frozen matrices under an adapter are encoded (QLoRA, arXiv:2305.14314): which they are, and their blocks.

    layers/mlp/down_ME (32, 14336, 4096), {element: nf4, block: 64, scales_block: 256}
      -> 64 numbers of M, which the matmul sums over, share a scale: (32, 224, 4096)
         256 of these along E share one in turn: (32, 224, 16)

The matrices of layers are encoded, those of experts too. What is small or sensitive is not: norms, biases, embeddings,
the head, and what a model keeps in float32, as routers.
"""

import math
from collections.abc import Iterable, Sequence

from meshloom.models import Model
from meshloom.models.adapter import Matrix
from meshloom.models.config import BaseConfig

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.trees import leaves_by_path
from ..formats.block import BlockFormat
from ..formats.element import element_formats

WHERE = "adapter.base"
_SCALES = "uint8"


def base_formats(model: Model, base: BaseConfig) -> dict[str, BlockFormat]:
    """Returns the format of each matrix of the layers, by path. Raises ConfigError for an element that cannot hold
    weights, and for blocks that do not divide what a matmul sums over."""
    signed = [name for name, element in element_formats().items() if element.is_signed]
    if base.element not in signed:
        what = f"'{base.element}' is not a type of elements that hold weights"
        raise_if_any([Problem(f"{WHERE}.element", what, use_one_of(base.element, signed))])
    stacks = {stack.name for stack in model.stacks}
    shapes = {path: x.shape for path, x in leaves_by_path(model.abstract()).items()}
    matrices = {
        path: (matrix, shapes[path][1:])
        for path, matrix in model.matrices.items()
        if path.split("/")[0] in stacks and path not in model.float32
    }
    formats = {path: _format(base, base.block, *each) for path, each in matrices.items()}
    refused = [path for path, format in formats.items() if format is None]
    if refused:
        matrix, shape = matrices[refused[0]]
        summed = _sizes(matrix, shape, matrix.contracted)
        others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        what = f"blocks of {base.block} do not divide {math.prod(summed)}, the rows of '{refused[0]}'{others}"
        raise_if_any([Problem(f"{WHERE}.block", what, _use(_fitting(base, matrices.values())))])
    return {path: format for path, format in formats.items() if format is not None}


def _fitting(base: BaseConfig, matrices: Iterable[tuple[Matrix, Sequence[int]]]) -> list[int]:
    """Returns the powers of two that fit all matrices as a length of blocks."""
    each, sizes = list(matrices), [2**n for n in range(3, 11)]
    return [size for size in sizes if all(_format(base, size, *one) for one in each)]


def _use(sizes: Sequence[int]) -> str:
    whole = "null, a scale for each column"
    return f"use {', '.join(map(str, sizes))}, or {whole}" if sizes else f"use {whole}"


def _format(base: BaseConfig, length: int | None, matrix: Matrix, shape: Sequence[int]) -> BlockFormat | None:
    """Returns the format of a matrix of one layer; None where blocks of this length do not divide it."""
    block = _block(length, matrix, shape)
    if block is None:
        return None
    of_scales = None
    if base.scales_block is not None:
        out = [at for at, letter in enumerate(matrix.letters) if letter in matrix.out] or [len(shape) - 1]
        sizes = BlockFormat(base.element, block).scales_shape(shape)
        along = _largest_divisor(sizes[out[-1]], base.scales_block)
        of_scales = BlockFormat(_SCALES, tuple(along if at == out[-1] else 1 for at in range(len(shape))))
    return BlockFormat(base.element, block, scales_format=of_scales)


def _block(length: int | None, matrix: Matrix, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the block along each dimension: of the dimensions that are summed over, the last is filled first, as in a
    matrix of (out, in) that is stored row by row."""
    block, left = [1] * len(shape), length
    for at in reversed(range(len(shape))):
        if matrix.letters[at] not in matrix.contracted:
            continue
        block[at] = shape[at] if left is None else math.gcd(left, shape[at])
        left = left and left // block[at]
        if left not in (None, 1) and block[at] != shape[at]:
            return None
    return tuple(block) if left in (None, 1) else None


def _sizes(matrix: Matrix, shape: Sequence[int], letters: str) -> list[int]:
    return [size for letter, size in zip(matrix.letters, shape, strict=True) if letter in letters]


def _largest_divisor(size: int, most: int) -> int:
    return next(each for each in range(min(size, most), 0, -1) if size % each == 0)


def describe_format(format: BlockFormat, shape: Sequence[int]) -> str:
    """Returns a format in words: 'nf4 in blocks of 64, with scales in uint8 in blocks of 256'."""
    sizes = format.block_sizes(shape)
    scales = f"{format.scale} scales"
    if format.scales_format is not None:
        of_scales = format.scales_format.block_sizes(format.scales_shape(shape))
        scales = f"{format.scales_format.element} scales in blocks of {math.prod(of_scales)}"
    return f"{format.element} in blocks of {math.prod(sizes)}, {scales}"
