"""A step's program as a shape, which many declarations share, and numbers, in which they differ.

    shape, numbers = read_costs(regions, ..)  numbers: sizes, FLOPs, bytes sent, executions; one vector
    costs = Costs(shape, numbers[:, None])    or a column for each of many declarations: ../tune/families.py
    costs.peak_bytes()                        as liveness.find_peak, for each column
    costs.regions()                           arithmetic, traffic and transfers of each region: step_time.py

The same code prices one declaration and ten thousand.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..core.kernels import AttentionCall, RatedBy
from ..core.partition_spec import Axes
from ..core.scopes import OperationName
from ..core.traffic import MOVING, AxisGroups, CollectiveKind, Crossing, HostCopyKind
from ..jaxpr.fusion import needed
from ..jaxpr.program import Operation, Program
from ..parallel.attention.exchange import EXCHANGE, RING
from ..parallel.operation import ParallelOp, find_source
from ..pipeline.makespan import Numbers, TickLoop, TickPart, TickPermute, TickSlot
from .liveness import host_sets, live_sets
from .regions import PricedStep, Region

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# merged: sums of ring attention outside its kernels. routed: passes over the rows of experts.
# sliced: slices of an array that are copied out of it, or into it, or into another order.
WorkKind = Literal["matmul", "attention", "grouped", "merged", "routed", "sliced", "other"]


@dataclass(frozen=True)
class Work:
    """An operation that computes. flops: the place of its FLOPs in the numbers. moved: the places of the arrays that it
    reads and writes in memory, each as often as it is moved. results: of a matmul, the place of the elements of its
    result. dtype: the type of the operands of a plain or grouped matmul. rated_by: of a kernel, what its rate depends
    on."""

    kind: WorkKind
    region: int
    flops: int | None
    moved: tuple[int, ...]
    results: int | None = None
    dtype: str = ""
    rated_by: RatedBy | None = None


@dataclass(frozen=True)
class Transfer(Crossing):
    """A collective. parameter: the path of the one that it moves, or whose gradient; None for activations. full_bytes:
    a place. source: the name of what it moves, if it belongs to one of the operations that run by a strategy
    (`ParallelOp.source`). is_of_tick: whether it is a permute between the slots of a pipeline's ticks. beside: the
    works of its region beside which it may run, as a slice; None: to the last. ready: the first work that may run after
    what it sends is there. maker: the work that computes what it sends and nothing else; None: there is none. groups:
    as of `DeviceTraffic`."""

    kind: CollectiveKind
    parameter: str | None
    region: int
    full_bytes: int
    source: str | None = None
    is_of_tick: bool = False
    beside: tuple[int, int | None] = (0, None)
    ready: int = 0
    maker: int | None = None
    groups: AxisGroups | None = None

    @property
    def is_weight(self) -> bool:
        """Returns True if it moves a parameter or its gradient, and no activation."""
        return self.parameter is not None


@dataclass(frozen=True)
class CopiedArray:
    """An array that a region copies to the host, or back. num_bytes: a place. made: the works of the region that run
    before it is made; None: the region begins with it."""

    kind: HostCopyKind
    region: int
    num_bytes: int
    made: int | None = None


@dataclass(frozen=True)
class ProgramShape:
    """The parts that programs share if they differ in sizes alone. Places are indices into the vector of numbers.

    regions: the regions of regions.py in the order of `Region.walk`, each with the places of its factors: of one number
    for all stages of the mesh, or of one for each stage. live: sets of arrays that live at once in the memory of the
    device; on_host: of its host. arguments: the state and the batch. ticks: the loop over the ticks of a pipeline.
    copied: what is copied to the host and back.
    """

    num_numbers: int
    works: tuple[Work, ...]
    transfers: tuple[Transfer, ...]
    regions: tuple[tuple[tuple[int, ...], ...], ...]
    live: tuple[tuple[int, ...], ...]
    on_host: tuple[tuple[int, ...], ...]
    arguments: tuple[int, ...]
    ticks: TickLoop | None = None
    copied: tuple[CopiedArray, ...] = ()

    def inside(self, number: int) -> tuple[int, ...]:
        """Returns a region with those that run inside of it; the step itself alone."""
        own = self.regions[number]
        return tuple(one for one, each in enumerate(self.regions) if each[: len(own)] == own) if own else (number,)

    @property
    def operations(self) -> "ProgramShape":
        """Returns the shape without its sets of live arrays and its tables of ticks, which depend on sizes."""
        return replace(self, live=(), on_host=(), ticks=self.ticks and self.ticks.form)

    @property
    def matmul_types(self) -> set[str]:
        """Returns the types of the operands of matmuls."""
        return {work.dtype for work in self.works if work.dtype}

    @property
    def collective_axes(self) -> tuple[tuple[Axes, AxisGroups | None], ...]:
        """Returns the mesh axes that collectives run over, with the groups of devices along them, each once."""
        return tuple(dict.fromkeys((each.mesh_axes, each.groups) for each in self.transfers))

    @cached_property
    def membership(self) -> "csr_array":
        """Returns the sets in the memory of the device as a matrix."""
        return _membership(self.live, self.num_numbers)

    @cached_property
    def membership_on_host(self) -> "csr_array":
        return _membership(self.on_host, self.num_numbers)


def read_costs(step: Region, weights: frozenset[str], ops: Sequence[ParallelOp]) -> tuple[ProgramShape, Numbers]:
    """Returns the shape and the numbers of the regions of a step. weights: the paths of its parameters. ops: its
    operations.

    An operation whose arithmetic or traffic is unknown counts as zero; `StepEstimate.unknown` lists them.
    """
    return _Reader(step, weights, ops).read()


@dataclass(frozen=True)
class WorkCosts:
    """The costs of one execution of an operation, of each declaration: its FLOPs, None of a pass over memory; the bytes
    that it moves; of a matmul the elements of its result."""

    work: Work
    flops: Numbers | None
    num_bytes: Numbers
    num_results: Numbers | None


@dataclass(frozen=True)
class RegionCosts:
    """The costs of one region. works: in the order of its program. transfers: collectives, each with its bytes, of each
    declaration. executions: in a step, (stages, declarations). is_step: True for the step itself, False for the body of
    a loop or a branch. has_loops: True for a body in which loops or branches run."""

    works: tuple[WorkCosts, ...]
    transfers: tuple[tuple[Transfer, Numbers], ...]
    executions: Numbers
    is_step: bool
    has_loops: bool


@dataclass(frozen=True)
class Costs:
    """The costs of many declarations whose programs have one shape. numbers: (places, declarations)."""

    shape: ProgramShape
    numbers: Numbers

    def peak_bytes(self) -> Numbers:
        """Returns the peak of a step in the memory of a device, including its arguments."""
        arguments = self.numbers[list(self.shape.arguments)].sum(axis=0)
        return arguments + _largest(self.shape.membership, self.numbers)

    def host_bytes(self) -> Numbers:
        """Returns the bytes per device in host memory."""
        return _largest(self.shape.membership_on_host, self.numbers)

    def regions(self) -> tuple[RegionCosts, ...]:
        """Returns the costs of each region."""
        return tuple(self._region(number) for number in range(len(self.shape.regions)))

    def executions(self, number: int) -> Numbers:
        """Returns how often a region is executed in a step: (stages, declarations)."""
        executions = np.ones((1, self.numbers.shape[1]))
        for places in self.shape.regions[number]:
            executions = executions * self.numbers[list(places)]
        return executions

    def copied_to_host(self, number: int) -> list[tuple[int | None, Numbers]]:
        """Returns the arrays that a region copies to the host: the works before each is made, as of `CopiedArray`, and
        its bytes."""
        own = (each for each in self.shape.copied if (each.region, each.kind) == (number, "copy-to-host"))
        return [(each.made, self.numbers[each.num_bytes]) for each in own]

    def copied_bytes(self) -> dict[int, dict[HostCopyKind, Numbers]]:
        """Returns the bytes that a region copies to the host and back in a whole step, (stages, declarations)."""
        found: dict[int, dict[HostCopyKind, Numbers]] = defaultdict(lambda: defaultdict(lambda: np.zeros(())))
        for each in self.shape.copied:
            num_bytes = self.executions(each.region) * self.numbers[each.num_bytes]
            found[each.region][each.kind] = found[each.region][each.kind] + num_bytes
        return found

    def _region(self, number: int) -> RegionCosts:
        works = (self._work(each) for each in self.shape.works if each.region == number)
        own = (each for each in self.shape.transfers if each.region == number)
        transfers = tuple((each, self.numbers[each.full_bytes]) for each in own)
        return RegionCosts(
            tuple(works),
            transfers,
            self.executions(number),
            is_step=number == 0,
            has_loops=len(self.shape.inside(number)) > 1,
        )

    def _work(self, work: Work) -> WorkCosts:
        flops, results = (None if place is None else self.numbers[place] for place in (work.flops, work.results))
        return WorkCosts(work, flops, self.numbers[list(work.moved)].sum(axis=0), results)


def _membership(sets: tuple[tuple[int, ...], ...], num_numbers: int) -> "csr_array":
    """Returns a matrix with a row for each set, which has a one for each member of the set."""
    from scipy.sparse import csr_array

    sizes = [len(one) for one in sets]
    members = np.fromiter((i for one in sets for i in one), np.int64, sum(sizes))
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return csr_array((np.ones(len(members)), members, starts), shape=(len(sets), num_numbers))


def _largest(sets: "csr_array", numbers: Numbers) -> Numbers:
    return np.asarray(sets @ numbers).max(axis=0, initial=0.0)


class _Reader:
    def __init__(self, step: Region, weights: frozenset[str], ops: Sequence[ParallelOp]) -> None:
        self.step = step
        self.weights = sorted(weights)
        self.ops = ops
        self.numbers: list[float] = []
        self.first: dict[int, int] = {}  # the place of a program's first size; its host sizes follow the sizes
        self.works: list[Work] = []
        self.transfers: list[Transfer] = []
        self.copied: list[CopiedArray] = []
        self.ticks: TickLoop | None = None

    def read(self) -> tuple[ProgramShape, Numbers]:
        step, regions = self.step, list(self.step.walk())
        for one in regions:
            self.first[id(one.program)] = len(self.numbers)
            self.numbers += [*one.program.sizes, *one.program.host_sizes]
        places: dict[int, tuple[int, ...]] = {}  # the places of a body's executions, by id
        factors = tuple(tuple(self.factor(each, places) for each in one.factors) for one in regions)
        numbers = {id(one): number for number, one in enumerate(regions)}
        for number, one in enumerate(regions):
            self.region(number, one)
            if any(step.operation.chosen for step in one.steps) and self.ticks is None:
                self.ticks = self.tick_loop(number, one, numbers)
        live = {tuple(sorted(self.size(a.program, a.index) for a in one.arrays)) for one in live_sets(step)}
        on_host = tuple(tuple(self.size(p, i) + len(p.sizes) for p, i in one) for one in host_sets(step))
        shape = ProgramShape(
            num_numbers=len(self.numbers),
            works=tuple(self.works),
            transfers=tuple(self.transfers),
            regions=factors,
            live=tuple(sorted(live)),
            on_host=on_host,
            arguments=tuple(self.size(step.program, i) for i in step.program.inputs),
            ticks=self.ticks,
            copied=tuple(self.copied),
        )
        return shape, np.array(self.numbers, dtype=np.float64)

    def size(self, program: Program, index: int) -> int:
        return self.first[id(program)] + index

    def number(self, value: float) -> int:
        self.numbers.append(value)
        return len(self.numbers) - 1

    def factor(self, executions: tuple[float, ...], places: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        if id(executions) not in places:
            places[id(executions)] = tuple(map(self.number, executions))
        return places[id(executions)]

    def tick_loop(self, number: int, region: Region, numbers: dict[int, int]) -> TickLoop:
        """Returns the loop over ticks whose body is this region. numbers: of all regions, by id."""
        parts: list[TickPart] = []
        inside = {id(step.operation): step.inside for step in region.steps}
        num_stages = max(len(one.operation.chosen[0]) for one in region.steps if one.operation.chosen)
        flying: dict[int, set[int]] = {}  # the permutes that a value is made from, by their places
        for operation in region.program.operations:
            collective, place = operation.collective, len(parts)
            made_from = set[int]().union(*(flying.get(each, set()) for each in operation.inputs))
            if operation.chosen:
                branches = tuple(
                    tuple(numbers[id(each)] for each in one.walk()) for one in inside.get(id(operation), ())
                )
                is_shared = OperationName(operation.scope).shared_end is not None
                parts.append(TickSlot(branches, operation.chosen, is_shared))
                for each in made_from:
                    permute = parts[each]
                    if isinstance(permute, TickPermute) and permute.needed_by is None:
                        parts[each] = replace(permute, needed_by=place)
                continue
            if collective is not None and operation.stage_pairs:
                sources = ([s for s, to in operation.stage_pairs if to == stage] for stage in range(num_stages))
                parts.append(TickPermute(tuple(map(tuple, sources)), self.number(collective.bytes)))
                made_from = {place}
            flying |= dict.fromkeys(operation.outputs, made_from)
        return TickLoop(number, tuple(parts))

    def region(self, number: int, region: Region) -> None:
        is_tick = any(step.operation.chosen for step in region.steps)
        first = len(self.works)
        if region.stacked_bytes:
            self.works.append(Work("other", number, None, tuple(map(self.number, region.stacked_bytes))))
        before: list[int] = []  # the works of the region that precede each step
        sent: list[int] = []
        for place, step in enumerate(region.steps):
            before.append(len(self.works) - first)
            if step.inside:
                continue
            operation = step.operation
            if operation.collective is not None and operation.collective.mesh_axes:
                sent.append(place)
            moved = tuple(self.size(region.program, i) for i in step.arrays)
            if step.hbm_bytes and not moved:
                moved = (self.number(step.hbm_bytes),)
            flops = self.number(operation.flops) if operation.flops else None
            if moved or flops is not None:
                kind = "sliced" if operation.is_reordered and not step.arrays else _kind_of(operation, self.ops)
                work = Work(kind, number, flops, moved, rated_by=operation.rated_by)
                if work.kind == "matmul" and flops is not None:
                    results = self.number(_num_results(operation, region.program))
                    work = replace(work, results=results, dtype=region.program.dtypes[operation.inputs[0]])
                elif work.kind == "grouped" and operation.inputs:
                    work = replace(work, dtype=region.program.dtypes[operation.inputs[0]])
                self.works.append(work)
            if step.behind:
                behind = tuple(self.size(region.program, i) for i in step.behind)
                self.works.append(Work("other", number, None, behind))
        before.append(len(self.works) - first)
        order = StepOrder(region.steps)
        self.copied += self.copies(number, region.program, order, before)
        for place in sent:
            operation = region.steps[place].operation
            collective, name = operation.collective, OperationName(operation.scope)
            assert collective is not None
            self.transfers.append(
                Transfer(
                    collective.kind,
                    collective.mesh_axes,
                    parameter=next(iter(name.parameters(self.weights)), None),
                    region=number,
                    full_bytes=self.number(collective.bytes),
                    source=find_source(self.ops, name),
                    is_of_tick=is_tick and bool(operation.stage_pairs),
                    beside=order.beside(collective.kind, place, before, is_step=number == 0),
                    ready=before[order.ready(place)],
                    maker=None if (maker := order.maker(place)) is None else before[maker],
                    groups=collective.groups,
                )
            )

    def copies(self, number: int, program: Program, order: "StepOrder", before: Sequence[int]) -> Iterator[CopiedArray]:
        """Yields the arrays of a region that lie on one side and are copied to the other."""
        made = dict[int, int]()  # by value, the last step that it is made by; none for what a region begins with
        for operation in needed(program):
            last = max((made[value] for value in operation.inputs if value in made), default=None)
            places = {value: order.made.get(value, last) for value in operation.outputs}
            made |= {value: place for value, place in places.items() if place is not None}
            for given, there in () if operation.bodies else zip(operation.inputs, operation.outputs, strict=False):
                match bool(program.host_sizes[given]), bool(program.host_sizes[there]):
                    case False, True:
                        num_bytes, place = self.size(program, there) + len(program.sizes), made.get(given)
                        yield CopiedArray("copy-to-host", number, num_bytes, None if place is None else before[place])
                    case True, False:
                        yield CopiedArray("copy-to-device", number, self.size(program, given) + len(program.sizes))
                    case _:
                        pass


class StepOrder:
    """The order of a region's steps: by value, the step that makes it and the first that reads it; the loops.

    fresh: the values that are there when the region begins, and what passes over memory make of these alone, which run
    as soon as the compiler likes."""

    def __init__(self, steps: Sequence[PricedStep]) -> None:
        self.steps = steps
        self.made = {value: place for place, step in enumerate(steps) for value in step.fused.writes}
        last_first = reversed(list(enumerate(steps)))
        self.read = {value: place for place, step in last_first for value in step.fused.reads}
        self.loops = [place for place, step in enumerate(steps) if step.inside]
        self.num_readers = Counter(value for step in steps for value in step.fused.reads)
        self.fresh = set[int]()
        for step in steps:
            if _is_pass(step) and all(self.is_fresh(value) for value in step.fused.reads):
                self.fresh |= set(step.fused.writes)

    def is_fresh(self, value: int) -> bool:
        return value not in self.made or value in self.fresh

    def beside(self, kind: CollectiveKind, place: int, before: Sequence[int], *, is_step: bool) -> tuple[int, int]:
        """Returns the works of the region beside which a collective of a weight may run. place: of the collective among
        the steps. before: the works that precede each step, and all. Nothing is on its way while a loop runs.

        A trip of a loop hands to the next one what it has still to reduce, which then ends with it.
        """
        own, last = self.steps[place].fused, len(self.steps)
        if kind in MOVING or not is_step:
            read = min((self.read.get(i, last) for i in own.writes), default=last) if kind in MOVING else last
            return before[max((loop + 1 for loop in self.loops if loop < read), default=0)], before[read]
        ready = max((self.made[i] + 1 for i in own.reads if i in self.made), default=0)
        return before[ready], before[min((loop for loop in self.loops if loop >= ready), default=last)]

    def ready(self, place: int) -> int:
        """Returns how many steps have run when all that a step reads is there."""
        return max((self.made[i] + 1 for i in self.steps[place].fused.reads if not self.is_fresh(i)), default=0)

    def maker(self, place: int) -> int | None:
        """Returns the step that computes what a step reads and nothing else; None if there is none."""
        made = [value for value in self.steps[place].fused.reads if not self.is_fresh(value)]
        if len(made) != 1 or self.num_readers[made[0]] > 1:
            return None
        by = self.made[made[0]]
        if _is_pass(self.steps[by]):
            return self.maker(by)
        return by if self.steps[by].operation.flops and not self.steps[by].inside else None


def _is_pass(step: PricedStep) -> bool:
    """Returns True for a step that only passes over memory."""
    return not (step.operation.flops or step.operation.collective or step.inside)


def _num_results(operation: Operation, program: Program) -> float:
    """Returns the elements of a matmul's result on a device."""
    return sum(program.sizes[each] / np.dtype(program.dtypes[each]).itemsize for each in operation.outputs)


def _kind_of(operation: Operation, ops: Sequence[ParallelOp]) -> WorkKind:
    if operation.rated_by is not None:
        return "attention" if isinstance(operation.rated_by, AttentionCall) else "grouped"
    if operation.is_product:
        return "matmul"
    name = OperationName(operation.scope)
    if name.fact(EXCHANGE) == RING:
        return "merged"
    if any(name.fact(op.kind) for op in ops if op.passes_over_rows):
        return "routed"
    return "sliced" if operation.name in ("dynamic_slice", "dynamic_update_slice") else "other"
