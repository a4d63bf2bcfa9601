"""Lays out the result of an operation over the mesh from the layouts of its operands, as XLA's partitioner will.

    dot_general  x (8, 64, 128) P(None, None, 'tensor') @ w (128, 32) P('tensor', None)
    ->           (8, 64, 32) P(None, None, None), a sum over tensor

Layouts go forward only: activation rules pin the values that matter by constraints, and those between two of them
follow.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..core.partition_spec import Axes
from .program import REDUCTIONS

DimAxes = tuple[Axes, ...]  # the mesh axes of each dimension


def propagate(equation: Any, layouts: Sequence[DimAxes], num_shards: Callable[[Axes], int]) -> tuple[DimAxes, Axes]:
    """Returns (layout of the result, mesh axes over which the partial results must be reduced)."""
    name, params = equation.primitive.name, equation.params
    out = tuple(equation.outvars[0].aval.shape)
    if not any(map(any, layouts)):
        return ((),) * len(out), ()
    shapes = [tuple(x.aval.shape) for x in equation.invars]
    reduced: Axes = ()
    if name == "dot_general":
        result, reduced = _dot(params["dimension_numbers"], *layouts[:2])
    elif name == "ragged_dot_general":
        result, reduced = _ragged_dot(params["ragged_dot_dimension_numbers"], *layouts[:2], rank=len(out))
    elif name == "conv_general_dilated":
        result, reduced = _convolution(params, *layouts[:2])
    elif name in REDUCTIONS:
        gone = params["axes"] if "axes" in params else params["dimensions"]
        result = tuple(axes for d, axes in enumerate(layouts[0]) if d not in gone)
        reduced = tuple(axis for d in gone for axis in layouts[0][d])
    elif name == "transpose":
        result = tuple(layouts[0][d] for d in params["permutation"])
    elif name == "broadcast_in_dim":
        result = _broadcast(params["broadcast_dimensions"], shapes[0], out, layouts[0])
    elif name in ("reshape", "squeeze", "expand_dims"):
        result = _reshape(shapes[0], out, layouts[0], num_shards)
    elif name == "gather":
        result = _gather(params, shapes, out, layouts)
        collapsed = params["dimension_numbers"].collapsed_slice_dims
        reduced = tuple(axis for d in collapsed for axis in layouts[0][d])  # each device has some of the rows
    else:  # the layout of each dimension in the first operand of this rank in which it has this length and is split
        same_rank = [(shape, layout) for shape, layout in zip(shapes, layouts, strict=True) if len(shape) == len(out)]
        result = tuple(
            next((layout[d] for shape, layout in same_rank if layout[d] and shape[d] == size), ())
            for d, size in enumerate(out)
        )
    used: set[str] = set()
    return tuple(_first_time(axes, used) for axes in result), tuple(dict.fromkeys(reduced))


def _dot(numbers: Any, left: DimAxes, right: DimAxes) -> tuple[DimAxes, Axes]:
    (contracted_l, contracted_r), (batch_l, batch_r) = numbers
    batch = tuple(left[i] or right[j] for i, j in zip(batch_l, batch_r, strict=True))
    free_l = tuple(axes for d, axes in enumerate(left) if d not in (*contracted_l, *batch_l))
    free_r = tuple(axes for d, axes in enumerate(right) if d not in (*contracted_r, *batch_r))
    reduced = tuple(
        axis for i, j in zip(contracted_l, contracted_r, strict=True) for axis in dict.fromkeys(left[i] + right[j])
    )
    return batch + free_l + free_r, reduced


def _ragged_dot(numbers: Any, left: DimAxes, right: DimAxes, *, rank: int) -> tuple[DimAxes, Axes]:
    """Returns the layout of a ragged matmul: that of a matmul, but for a result that begins with the groups, such as
    the gradient of their weights. Each device makes all groups."""
    groups = numbers.rhs_group_dimensions
    free, reduced = _dot(
        numbers.dot_dimension_numbers, left, tuple(() if d in groups else x for d, x in enumerate(right))
    )
    contracted_r, batch_r = numbers.dot_dimension_numbers[0][1], numbers.dot_dimension_numbers[1][1]
    first_r = len(free) - (len(right) - len(contracted_r) - len(batch_r))
    kept_r = [d for d in range(len(right)) if d not in (*contracted_r, *batch_r)]
    free = free[:first_r] + tuple(axes for d, axes in zip(kept_r, free[first_r:], strict=True) if d not in groups)
    return ((),) * (rank - len(free)) + free, reduced


def _convolution(params: Any, left: DimAxes, right: DimAxes) -> tuple[DimAxes, Axes]:
    """Returns the layout of a convolution: sequences as they lie, features as in the kernel. Those that are summed over
    are split in both operands or in neither."""
    numbers = params["dimension_numbers"]
    result: list[Axes] = [()] * len(left)
    result[numbers.out_spec[0]] = left[numbers.lhs_spec[0]]
    result[numbers.out_spec[1]] = right[numbers.rhs_spec[0]]
    if params["feature_group_count"] > 1:
        result[numbers.out_spec[1]] = right[numbers.rhs_spec[0]] or left[numbers.lhs_spec[1]]
        return tuple(result), ()
    return tuple(result), tuple(dict.fromkeys(left[numbers.lhs_spec[1]] + right[numbers.rhs_spec[1]]))


def taken(equation: Any, layouts: Sequence[DimAxes], *, is_known: bool) -> list[DimAxes]:
    """Returns the layouts in which an operation takes its operands: whole along dimensions that a device needs all of.

    fft  x (8, 64) P('data', 'tensor') along the last dimension  ->  P('data', None)
    """
    whole = [range(len(layout)) if not is_known else () for layout in layouts]
    params = equation.params
    match equation.primitive.name:
        case "fft":
            rank = len(layouts[0])
            whole[0] = range(rank - len(params["fft_lengths"]), rank)
        case "ragged_dot_general":
            numbers = params["ragged_dot_dimension_numbers"]
            ragged = set(numbers.lhs_ragged_dimensions)
            (left, right), _ = numbers.dot_dimension_numbers
            beside = [j for i, j in zip(left, right, strict=True) if i in ragged]  # the same rows, of the other factor
            whole = [tuple(ragged), (*numbers.rhs_group_dimensions, *beside), *(range(len(x)) for x in layouts[2:])]
        case "conv_general_dilated":
            numbers = params["dimension_numbers"]
            whole = [numbers.lhs_spec[2:], numbers.rhs_spec[2:]]
            if params["batch_group_count"] > 1:
                whole = [range(len(layout)) for layout in layouts]
    return [
        tuple(() if d in dims else axes for d, axes in enumerate(layout))
        for layout, dims in zip(layouts, whole, strict=True)
    ]


def _broadcast(places: Sequence[int], shape: Sequence[int], out: Sequence[int], layout: DimAxes) -> DimAxes:
    result: list[Axes] = [()] * len(out)
    for d, place in enumerate(places):
        if shape[d] == out[place]:
            result[place] = layout[d]
    return tuple(result)


def _reshape(shape: Sequence[int], out: Sequence[int], layout: DimAxes, num_shards: Callable[[Axes], int]) -> DimAxes:
    """Returns the layout of a reshape: a dimension that is split or merged keeps its axes on the outermost part that
    they divide."""
    result: list[Axes] = [()] * len(out)
    if 0 in shape:  # an array without entries, which no product of sizes tells apart from another
        return tuple(result)
    i = j = 0
    while i < len(shape) and j < len(out):
        first_i, first_j, left, right = i, j, shape[i], out[j]
        while left != right:
            if left < right:
                i += 1
                left *= shape[i]
            else:
                j += 1
                right *= out[j]
        axes = next((layout[d] for d in range(first_i, i + 1) if shape[d] > 1), ())
        place = next((d for d in range(first_j, j + 1) if out[d] > 1), first_j)
        if axes and out[place] % num_shards(axes) == 0:
            result[place] = axes
        i, j = i + 1, j + 1
    return tuple(result)


def _gather(params: Any, shapes: Sequence[tuple[int, ...]], out: Sequence[int], layouts: Sequence[DimAxes]) -> DimAxes:
    """Returns the layout of rows of a table: that of the table along dimensions that are taken whole, and that of the
    indices."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    kept = [d for d in range(len(shapes[0])) if d not in numbers.collapsed_slice_dims]
    result: list[Axes] = [()] * len(out)
    for place, d in zip(numbers.offset_dims, kept, strict=False):
        if sizes[d] == shapes[0][d]:
            result[place] = layouts[0][d]
    others = [place for place in range(len(out)) if place not in numbers.offset_dims]
    for place, axes in zip(others, layouts[1], strict=False):
        result[place] = axes
    return tuple(result)


def _first_time(axes: Axes, used: set[str]) -> Axes:
    fresh = tuple(axis for axis in axes if axis not in used)
    used.update(fresh)
    return fresh
