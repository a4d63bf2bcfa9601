"""A step's program as a shape, which many declarations share, and numbers, in which they differ.

    shape, numbers = read_costs(program, ..)  numbers: sizes, FLOPs, bytes sent, trips of loops; one vector
    costs = Costs(shape, numbers[:, None])    or a column for each of many declarations: scaling.py
    costs.peak_bytes()                        as liveness.find_peak, for each column
    costs.regions()                           arithmetic, traffic and transfers of each loop: step_time.py

So one piece of code prices one declaration, and ten thousand.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array

from ..core.collectives import CollectiveKind
from ..core.partition_spec import Axes
from ..core.scopes import OperationName
from ..jaxpr.fusion import fuse, stacked_bytes, traffic
from ..jaxpr.program import Operation, Program
from ..parallel.exchange import RING
from ..parallel.operation import ParallelOp, find_source
from ..spec.compiler_traits import CompilerTraits
from .liveness import host_sets, live_sets

Numbers = np.ndarray[Any, np.dtype[np.float64]]
WorkKind = Literal["matmul", "attention", "merged", "other"]  # merged: the sums of ring attention beside its kernels


@dataclass(frozen=True)
class Work:
    """An operation that computes. flops: the place of its FLOPs in the numbers. moved: the places of the arrays that it
    reads and writes in memory, one for each time."""

    kind: WorkKind
    region: int
    flops: int | None
    moved: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A collective. is_weight: it moves a parameter or its gradient, not an activation. full_bytes: a place. source:
    what it moves, if it belongs to one of the operations that run by a strategy (`ParallelOp.source`)."""

    kind: CollectiveKind
    axes: Axes
    is_weight: bool
    region: int
    full_bytes: int
    source: str | None = None


@dataclass(frozen=True)
class ProgramShape:
    """The parts that programs share if they differ in sizes alone. Places are indices into the vector of numbers.

    regions: the step itself, then its loops; of each the places of the numbers of trips that multiply it. live: sets of
    arrays that live at once in the memory of the device; on_host: of its host. arguments: state and batch.
    """

    num_numbers: int
    works: tuple[Work, ...]
    transfers: tuple[Transfer, ...]
    regions: tuple[tuple[int, ...], ...]
    live: tuple[tuple[int, ...], ...]
    on_host: tuple[tuple[int, ...], ...]
    arguments: tuple[int, ...]

    @property
    def operations(self) -> "ProgramShape":
        """Returns the shape without what lives at once, which sizes have a say in."""
        return replace(self, live=(), on_host=())

    @property
    def collectives(self) -> tuple[tuple[CollectiveKind, Axes], ...]:
        """Returns the kinds of collectives with the mesh axes that they run over, each once."""
        return tuple(dict.fromkeys((each.kind, each.axes) for each in self.transfers))


def read_costs(
    program: Program, weights: frozenset[str], compiler: CompilerTraits, ops: Sequence[ParallelOp]
) -> tuple[ProgramShape, Numbers]:
    """Returns the shape and the numbers of a step's program. weights: the paths of its parameters. ops: its operations.

    An operation whose arithmetic or traffic is unknown counts as nothing; `StepEstimate.unknown` lists them.
    """
    return _Reader(weights, compiler, ops).read(program)


@dataclass(frozen=True)
class RegionCosts:
    """The costs of one region in a whole step, for each declaration. kinds: FLOPs and bytes by kind of work.

    transfers: of each collective its bytes, and how often it runs.
    """

    flops: dict[WorkKind, Numbers]
    num_bytes: dict[WorkKind, Numbers]
    transfers: tuple[tuple[Transfer, Numbers, Numbers], ...]


@dataclass(frozen=True)
class Costs:
    """numbers: (places, declarations)."""

    shape: ProgramShape
    numbers: Numbers

    def peak_bytes(self) -> Numbers:
        """Returns the peak of a step in the memory of a device, its arguments among it."""
        arguments = self.numbers[list(self.shape.arguments)].sum(axis=0)
        return arguments + _largest(self._live, self.numbers)

    def host_bytes(self) -> Numbers:
        """Returns the bytes per device in host memory."""
        return _largest(self._on_host, self.numbers)

    def regions(self) -> tuple[RegionCosts, ...]:
        """Returns the costs of each region, times its trips."""
        return tuple(self._region(number) for number in range(len(self.shape.regions)))

    def _region(self, number: int) -> RegionCosts:
        trips = self.numbers[list(self.shape.regions[number])].prod(axis=0)
        flops: dict[WorkKind, Numbers] = defaultdict(lambda: np.zeros_like(trips))
        num_bytes: dict[WorkKind, Numbers] = defaultdict(lambda: np.zeros_like(trips))
        for work in self.shape.works:
            if work.region == number:
                num_bytes[work.kind] += trips * self.numbers[list(work.moved)].sum(axis=0)
                if work.flops is not None:
                    flops[work.kind] += trips * self.numbers[work.flops]
        own = (each for each in self.shape.transfers if each.region == number)
        transfers = tuple((each, self.numbers[each.full_bytes], trips) for each in own)
        return RegionCosts(dict(flops), dict(num_bytes), transfers)

    @cached_property
    def _live(self) -> csr_array:
        return _membership(self.shape.live, self.shape.num_numbers)

    @cached_property
    def _on_host(self) -> csr_array:
        return _membership(self.shape.on_host, self.shape.num_numbers)


def _membership(sets: tuple[tuple[int, ...], ...], num_numbers: int) -> csr_array:
    """Returns a matrix with a row for each set, which holds a one for each of its members."""
    sizes = [len(one) for one in sets]
    members = np.fromiter((i for one in sets for i in one), np.int64, sum(sizes))
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return csr_array((np.ones(len(members)), members, starts), shape=(len(sets), num_numbers))


def _largest(sets: csr_array, numbers: Numbers) -> Numbers:
    return np.asarray(sets @ numbers).max(axis=0, initial=0.0)


class _Reader:
    def __init__(self, weights: frozenset[str], compiler: CompilerTraits, ops: Sequence[ParallelOp]) -> None:
        self.weights = sorted(weights)
        self.ops = ops
        self.compiler = compiler
        self.numbers: list[float] = []
        self.first: dict[int, int] = {}  # of a program, the place of its first size; its host sizes follow
        self.works: list[Work] = []
        self.transfers: list[Transfer] = []
        self.regions: list[tuple[int, ...]] = []

    def read(self, program: Program) -> tuple[ProgramShape, Numbers]:
        for one in _programs(program):
            self.first[id(one)] = len(self.numbers)
            self.numbers += [*one.sizes, *one.host_sizes]
        self.region(program, (), is_loop=False)
        live = {tuple(sorted(self.size(a.program, a.index) for a in one.arrays)) for one in live_sets(program)}
        on_host = tuple(tuple(self.size(p, i) + len(p.sizes) for p, i in one) for one in host_sets(program))
        shape = ProgramShape(
            num_numbers=len(self.numbers),
            works=tuple(self.works),
            transfers=tuple(self.transfers),
            regions=tuple(self.regions),
            live=tuple(sorted(live)),
            on_host=on_host,
            arguments=tuple(self.size(program, i) for i in program.inputs),
        )
        return shape, np.array(self.numbers, dtype=np.float64)

    def size(self, program: Program, index: int) -> int:
        return self.first[id(program)] + index

    def number(self, value: float) -> int:
        self.numbers.append(value)
        return len(self.numbers) - 1

    def region(self, program: Program, trips: tuple[int, ...], *, is_loop: bool) -> None:
        number = len(self.regions)
        self.regions.append(trips)
        for step, arrays in traffic(fuse(program, is_loop=is_loop), into_matmuls=self.compiler.fuses_into_matmuls):
            operation = step.operation
            if operation.body is not None:
                self.loop(operation, operation.body, program, (*trips, self.number(operation.num_trips)))
                continue
            if (collective := operation.collective) is not None and collective.axes:
                name = OperationName(operation.scope)
                is_weight = next(iter(name.parameters(self.weights)), None) is not None
                full = self.number(collective.full_bytes)
                source = find_source(self.ops, name)
                self.transfers.append(Transfer(collective.kind, collective.axes, is_weight, number, full, source))
            moved = self.moved(program, operation, arrays)
            flops = self.number(operation.flops) if operation.flops else None
            if moved or flops is not None:
                self.works.append(Work(_kind_of(operation), number, flops, moved))

    def loop(self, operation: Operation, body: Program, around: Program, trips: tuple[int, ...]) -> None:
        stacked = stacked_bytes(operation, around) if self.compiler.copies_loop_carry else 0
        if stacked:
            self.works.append(Work("other", len(self.regions), None, (self.number(stacked),)))
        self.region(body, trips, is_loop=True)

    def moved(self, program: Program, operation: Operation, arrays: tuple[int, ...]) -> tuple[int, ...]:
        if operation.hbm_bytes is not None or operation.flops is None:
            return (self.number(operation.hbm_bytes),) if operation.hbm_bytes else ()
        return tuple(self.size(program, i) for i in arrays)


def _kind_of(operation: Operation) -> WorkKind:
    if operation.kind in ("matmul", "kernel"):
        return "matmul" if operation.kind == "matmul" else "attention"
    return "merged" if OperationName(operation.scope).exchange == RING else "other"


def _programs(program: Program) -> Iterator[Program]:
    yield program
    for operation in program.operations:
        if operation.body is not None:
            yield from _programs(operation.body)
