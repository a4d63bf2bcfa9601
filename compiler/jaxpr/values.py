"""The values of a traced program: their bytes on a device, how they lie over mesh axes, and the collectives that bring
them into another layout or add them up over devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax

from ..core.float_types import num_bits
from ..core.partition_spec import Axes
from ..core.traffic import MOVING, CollectiveKind, DeviceTraffic
from .program import LANES, Operation
from .propagate import DimAxes

ADDITIONS = {"add", "add_any"}
_SHAPES = {"reshape", "transpose", "squeeze", "expand_dims"}  # they commute with a sum over devices


@dataclass(frozen=True)
class Partial:
    """A value that devices have yet to add up: over which mesh axes, and the operation that made it."""

    aval: Any
    axes: Axes
    name: str
    scope: str


@dataclass
class ProgramValues:
    """The values of a program that is being read, by index, with the operations so far. joins_sums: the compiler adds
    partial results of several matmuls up before it sums them over devices, and sums into shards where shards are
    wanted."""

    mesh_sizes: Mapping[str, int]
    joins_sums: bool
    operations: list[Operation] = field(default_factory=list, init=False)
    sizes: list[int] = field(default_factory=list, init=False)
    host_sizes: list[int] = field(default_factory=list, init=False)
    dtypes: list[str] = field(default_factory=list, init=False)
    layouts: list[DimAxes] = field(default_factory=list, init=False)
    widths: list[int] = field(default_factory=list, init=False)  # the length of each value's last dimension
    partial: dict[int, Partial] = field(default_factory=dict, init=False)  # values that devices have yet to add up
    # The results of `crossed`.
    brought: dict[tuple[int, CollectiveKind, DimAxes], int] = field(default_factory=dict, init=False)

    def value(self, aval: Any, layout: DimAxes) -> int:
        dtype = getattr(aval, "dtype", None)
        shape = getattr(aval, "shape", ())
        num_bytes = math.prod(shape) * (num_bits(dtype) if getattr(dtype, "itemsize", 0) else 0) // 8
        if any(layout):  # most values of a step are whole where they are made
            layout = tuple(tuple(axis for axis in axes if self.mesh_sizes[axis] > 1) for axes in layout)
            num_bytes //= self.num_shards(tuple(axis for axes in layout for axis in axes))
        is_on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        self.sizes.append(0 if is_on_host else num_bytes)
        self.host_sizes.append(num_bytes if is_on_host else 0)
        self.widths.append(shape[-1] if shape else 0)
        self.dtypes.append(_name_of(dtype))
        self.layouts.append(layout)
        return len(self.sizes) - 1

    def pad(self) -> None:
        """Gives arrays that a TPU kernel reads or writes the size of its layout, in which a last dimension of less than
        128 fills whole rows of 128. Arrays that pointwise operations make of them, or make them of, have it too."""
        padded: dict[int, int] = {}
        for operation in self.operations:
            if operation.name == "pallas_call":
                ends = (*operation.inputs, *operation.outputs)
                padded |= {i: self.sizes[i] * LANES // self.widths[i] for i in ends if 1 < self.widths[i] < LANES}
        found = -1
        while padded and found != len(padded):
            found = len(padded)
            for operation in self.operations:
                ends = [i for i in (*operation.inputs, *operation.outputs) if operation.kind in ("move", "pointwise")]
                known = {self.sizes[i]: padded[i] for i in ends if i in padded}
                padded |= {i: known[self.sizes[i]] for i in ends if self.sizes[i] in known}
        for i, size in padded.items():
            self.sizes[i] = size

    def num_shards(self, axes: Axes) -> int:
        return math.prod(self.mesh_sizes[axis] for axis in axes)

    def still_partial(self, name: str, operands: list[int]) -> Partial | None:
        """Returns the sum over devices that the result of an operation still needs, if the operation commutes with
        it."""
        found = [self.partial.get(i) for i in operands]
        is_linear = name in _SHAPES or (name in ADDITIONS and len({one and one.axes for one in found}) == 1)
        return found[0] if is_linear and found else None

    def summed(self, i: int, wanted: DimAxes = ()) -> int:
        """Returns the value added up over devices, once for all readers: whole, or in the shards that are wanted."""
        partial = self.partial.get(i)
        if partial is None:
            return i
        layout, kind = self.layouts[i], "all-reduce"
        if self.joins_sums and set(partial.axes) <= {axis for axes in wanted for axis in axes}:
            added = (tuple(axis for axis in axes if axis in partial.axes) for axes in wanted)
            layout = tuple(old + new for old, new in zip(layout, added, strict=True))
            kind = "reduce-scatter"
        return self.crossed(partial.aval, i, layout, kind, partial.axes, partial.name, partial.scope)

    def in_shards(self, i: int) -> int:
        """Returns the value, added up in the shards that a constraint in the program wants, if one does. The
        partitioner gives a constrained value that layout everywhere: a matmul's result that is kept for the backward
        pass lies as the activation that is made of it, in a stack as in a buffer."""
        shards = (known for key, known in self.brought.items() if key[:2] == (i, "reduce-scatter"))
        return next(shards, i) if i in self.partial else i

    def crossed(
        self, aval: Any, operand: int, layout: DimAxes, kind: CollectiveKind, axes: Axes, name: str, scope: str
    ) -> int:
        """Returns the operand in another layout, after a collective over these axes: one, however many operations read
        it."""
        if (known := self.brought.get((operand, kind, layout))) is not None:
            return known
        result = self.brought[operand, kind, layout] = self.value(aval, layout)
        full = self.sizes[operand] * (self.num_shards(axes) if kind in MOVING else 1)
        collective = DeviceTraffic(kind, axes, self.num_shards(axes), full, dtype=self.dtypes[result])
        is_reordered = kind == "all-gather" and self.lies_apart(aval, self.layouts[operand], layout)
        self.operations.append(
            Operation("collective", name, scope, (operand,), (result,), 0, collective, is_reordered=is_reordered)
        )
        return result

    def lies_apart(self, aval: Any, before: DimAxes, after: DimAxes) -> bool:
        """Returns True if the parts of an array that one of the layouts splits lie apart in memory."""
        first = next((d for d, (old, new) in enumerate(zip(before, after, strict=True)) if old != new), 0)
        return any(aval.shape[d] > self.num_shards(after[d]) for d in range(first))


@cache
def _name_of(dtype: Any) -> str:
    """Returns the name of a type, which NumPy takes long to put together."""
    return str(dtype)
