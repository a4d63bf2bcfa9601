"""Calls of kernels and what they cost: the vocabulary in which a program asks and an operation answers.

A traced program calls a kernel by an equation, a compiled one by an instruction. Both become a `KernelCall`, and the
operation that runs the kernel says what one call costs (`ParallelOp.kernel_cost`). This file does not import JAX. The
kernels of Pallas take 0.3 s to import, and most steps for CPUs use none: they are `Deferred`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, Protocol

from .scopes import OperationName
from .traffic import ComputeKind


class Deferred(ModuleType):
    """A module of this name, which is imported when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


# The kinds of kernel: each reaches a fraction of peak FLOP/s that was measured for its kind alone.
Unit = Literal["matmul", "attention", "grouped"]


@dataclass(frozen=True)
class KernelArray:
    """An operand or a result of a kernel. dtype: the name of its type, as NumPy spells it: bfloat16, int32."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class AttentionCall:
    """The properties of a call that the rate of an attention kernel depends on.

    head_dim: the size of a head of the queries. length: the number of keys; 0: not known. block: the tokens of a block;
    0: not known. matmuls: how many one call computes for each score: 2 forward; backward 5, or 3 and 4 in two kernels.
    """

    head_dim: int = 0
    length: int = 0
    block: int = 0
    matmuls: int = 2

    @property
    def is_backward(self) -> bool:
        return self.matmuls > 2


def contracted_size(matmuls: int, of_keys: int, of_values: int) -> int:
    """Returns what an attention kernel of so many matmuls sums over for each score. Forward one matmul has the width of
    keys, and one that of values; backward the scores again, and a gradient of each of four factors (arXiv:2205.14135),
    of which keys' and values' are one kernel, or the queries' another."""
    with_values = {2: 1, 3: 1, 4: 2, 5: 2}[matmuls]
    return (matmuls - with_values) * of_keys + with_values * of_values


# What the rate of a kernel depends on: a call of attention, or the name of a kernel of grouped matmuls.
RatedBy = AttentionCall | str


@dataclass(frozen=True)
class KernelCost:
    """The cost of one call.

    flops: its arithmetic. dtype: the type of the arithmetic; empty: that of its first matrix of floats. num_bytes: the
    bytes that it moves; None: its operands and results, once. attention: of an attention kernel, what its rate depends
    on. grouped: of grouped matmuls, the kernel's name in conf/calibration/_kernels.yaml. unknown: the name of a kernel
    that takes at least this, if nobody knows how much longer. num_results: the elements of a matmul's result, or of
    several together; 0: not known."""

    flops: float = 0.0
    dtype: str = ""
    unit: Unit = "matmul"
    num_bytes: int | None = None
    unknown: str = ""
    attention: AttentionCall | None = None
    grouped: str = "declared"
    num_results: int = 0

    @property
    def rated_by(self) -> RatedBy | None:
        """Returns what its rate depends on; None for a plain matmul."""
        if self.unit == "attention":
            return self.attention or AttentionCall()
        return self.grouped if self.unit == "grouped" else None


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel, as a program shows it.

    kernel: its names: of the primitive and the Pallas function, or of the custom call's target and the instruction.
    name: the scopes around it. operands, results: its arrays; in a traced program whole along the dimensions that the
    partitioner splits, in a compiled one as they lie on a device. stated: the cost by its shapes, by its author's
    `cost_estimate` or by a table of public libraries; None where none of them says it. parameters: those of the
    equation; empty in a compiled program. is_pallas: it is written in Pallas.
    """

    kernel: str
    name: OperationName
    operands: tuple[KernelArray, ...]
    results: tuple[KernelArray, ...]
    stated: KernelCost | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_pallas: bool = False

    @property
    def is_traced(self) -> bool:
        """Returns True for a call in a traced program."""
        return bool(self.parameters)


class KernelOwner(Protocol):
    """An operation, as far as whoever reads a program asks it (`ParallelOp`)."""

    def kernel_cost(self, call: KernelCall) -> KernelCost | None: ...

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None: ...


def ask_owners(owners: Sequence[KernelOwner], call: KernelCall) -> KernelCost | None:
    """Returns the cost of a call by the first operation that knows the kernel; None where none of them does."""
    return next((cost for owner in owners if (cost := owner.kernel_cost(call)) is not None), None)
