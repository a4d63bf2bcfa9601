"""Counts the arithmetic of matmuls and convolutions, as their program states it."""

import math
import re
from dataclasses import dataclass

from ..hlo import Instruction
from ..hlo.types import ArrayType

# Both forms of JSON: plain, and within a string with escaped quotes.
_DIMENSIONS = re.compile(r'(lhs|rhs)_(contracting|batch|ragged)_dim(?:ension)?s\\?"?[:=]\s*[\[{]([^\]}]*)[\]}]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def dot_flops(instruction: Instruction, operands: tuple[ArrayType, ...]) -> float | None:
    """Returns 2 FLOPs for each multiply-add: the elements of the result times the contracted sizes. A sum over groups
    of rows multiplies each row once. None if the program does not say what is contracted."""
    named = {(side, kind): [int(d) for d in re.findall(r"\d+", found)]
             for side, kind, found in _DIMENSIONS.findall(instruction.attributes)}  # fmt: skip
    contracted = named.get(("lhs", "contracting"))
    if contracted is None or len(operands) < 2 or max(contracted, default=0) >= len(operands[0].shape):
        return None
    depth = math.prod(operands[0].shape[d] for d in contracted)
    is_summed_by_group = bool(set(contracted) & set(named.get(("lhs", "ragged"), ())))
    num_groups = instruction.arrays[0].shape[0] if is_summed_by_group else 1
    return 2.0 * instruction.arrays[0].num_elements * depth / num_groups


def contraction(left: ArrayType, right: ArrayType, result: ArrayType) -> float | None:
    """Returns the FLOPs of a product of two matrices by their shapes alone: rows x depth by depth x columns. None if
    the shapes do not fit."""
    if not (left.num_elements and right.num_elements and result.num_elements):
        return None
    squared, rest = divmod(left.num_elements * right.num_elements, result.num_elements)
    depth = math.isqrt(squared)
    if rest or depth * depth != squared or not _fits(depth, left.shape) or not _fits(depth, right.shape):
        return None
    return 2.0 * result.num_elements * depth


def _fits(depth: int, shape: tuple[int, ...]) -> bool:
    """Returns True if the first or the last dimensions of a shape have that size together."""
    ends = (shape[:n] for n in range(1, len(shape))), (shape[n:] for n in range(1, len(shape)))
    return any(math.prod(sizes) == depth for several in ends for sizes in several)


@dataclass(frozen=True)
class Convolution:
    """The shapes of a convolution: inputs, kernel and outputs, whichever of them it computes."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]


def convolution_flops(instruction: Instruction, shapes: Convolution) -> float | None:
    """Returns the FLOPs of a convolution, the form in which TPUs write matmuls: 2 for each tap of the window that lies
    on the input, not on its padding or between its elements. Batches of matmuls are spatial dimensions with such
    windows."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None or any(len(shape) != len(labels[1]) for shape in (shapes.image, shapes.kernel, shapes.out)):
        return None
    left, right, result = labels.groups()
    out, image, kernel = shapes.out, shapes.image, shapes.kernel
    window = dict(part.split("=", 1) for part in (_WINDOW.search(instruction.attributes) or ("", ""))[1].split())
    spatial = sorted(label for label in result if label.isdigit())
    taps = 1
    for i, label in enumerate(spatial):
        size, stride, spread, dilation = (
            int(window[key].split("x")[i]) if key in window else 1
            for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        pad = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        num_outputs, num_inputs = out[result.index(label)], image[left.index(label)]
        places = (n * stride - pad + k * dilation for k in range(size) for n in range(num_outputs))
        taps *= sum(place % spread == 0 and 0 <= place < num_inputs * spread for place in places)
    return 2.0 * taps * out[result.index("b")] * out[result.index("f")] * kernel[right.index("i")]
