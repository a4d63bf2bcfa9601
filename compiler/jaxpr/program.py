"""A step as operations on values: what estimates are made from (estimated_step.py makes it of the traced step)."""

from dataclasses import dataclass
from typing import Literal

from ..core.collectives import CollectiveKind
from ..core.partition_spec import Axes
from .unknown import UnknownPrimitive

# move: the same bytes under another shape. pointwise: fused with its neighbours. reduce: fused with what it reads.
# unknown: a primitive that no list names; an array in, an array out, as of the others. loop, branches: run bodies.
Kind = Literal["matmul", "kernel", "collective", "loop", "branches", "move", "pointwise", "reduce", "other", "unknown"]


@dataclass(frozen=True)
class TracedCollective:
    """full_bytes: of the whole array on one side of it, that which every device of the group has a part of, or all."""

    kind: CollectiveKind
    axes: Axes
    full_bytes: int
    dtype: str


@dataclass(frozen=True)
class Body:
    """A program that an operation runs: the body of a loop, or a branch. executions: their number for one execution of
    the operation, on each stage of the mesh; a single value where all stages have the same."""

    program: "Program"
    executions: tuple[float, ...]


@dataclass(frozen=True)
class Operation:
    """inputs, outputs: indices of values. scope: names that say what it is part of. flops: of a device; None: unknown.
    hbm_bytes: what it declares itself to read and write. unknown: what is not known of it, if something is not. bodies:
    the one of a loop, or the branches; their inputs are the last ones of the operation."""

    kind: Kind
    name: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int | None = 0
    collective: TracedCollective | None = None
    bodies: tuple[Body, ...] = ()
    num_carried: int = 0  # of a loop: its first results, which each trip hands to the next; the others are stacked
    hbm_bytes: int | None = None
    unknown: UnknownPrimitive | None = None


@dataclass(frozen=True)
class Program:
    """sizes: bytes on a device of each value, by its index. host_sizes: bytes of a device's part in the host's memory,
    likewise; a value lies in one of the two. dtypes: likewise."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    host_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donates: bool = True  # results may take the place of inputs
