"""Finds which dimensions of each parameter form a matrix: optimizers need to know, and a shape does not say.

layers/attention/query_EHD  (layers, embed, heads, head_dim)  ->  per layer a matrix embed x (heads head_dim)
layers/mlp/down_ME          (layers, mlp, embed)              ->  per layer a matrix mlp x embed
layers/mlp_norm/scale_E     (layers, embed)                   ->  per layer a vector
"""

from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import jax

from meshloom.models import LogicalAxes, Model, is_logical_axes

DimGroups = tuple[tuple[int, ...], ...]  # dimensions, in groups

_COPIES = ("layers", "experts")  # leading dimensions along which a parameter holds copies of one thing


@dataclass(frozen=True)
class ParameterKind:
    """A parameter acts on groups of dimensions. groups: those of one copy; dimensions that act as one share a group
    (heads, head_dim). is_in_stack: True for a parameter of a layer, whose first dimension is `layers`."""

    groups: DimGroups
    is_in_stack: bool

    @property
    def is_matrix(self) -> bool:
        """Returns True for a matrix that multiplies activations; False for norm scales and biases."""
        return len(self.groups) > 1


def parameter_kinds(model: Model) -> Any:
    """Returns a `ParameterKind` for every parameter, as a tree like them."""
    stacks = {stack.name for stack in model.stacks}
    return {
        piece: jax.tree.map(partial(parameter_kind, is_in_stack=piece in stacks), tree, is_leaf=is_logical_axes)
        for piece, tree in model.logical_axes().items()
    }


def parameter_kind(axes: LogicalAxes, *, is_in_stack: bool) -> ParameterKind:
    """Returns the kind of a parameter: ('layers', 'embed', 'heads', 'head_dim') -> groups ((1,), (2, 3))."""
    num_copies = len(list(takewhile(lambda name: name in _COPIES, axes)))
    groups: list[tuple[int, ...]] = []
    for dimension in range(num_copies, len(axes)):
        is_within_head = axes[dimension] == "head_dim" and axes[dimension - 1] in ("heads", "kv_heads")
        if is_within_head and groups:
            groups[-1] = (*groups[-1], dimension)
        else:
            groups.append((dimension,))
    return ParameterKind(tuple(groups), is_in_stack)
