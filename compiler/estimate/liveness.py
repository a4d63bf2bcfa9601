"""Estimates the peak memory of a step without a compiler: it counts the arrays that live at each priced step."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.scopes import OperationName
from ..jaxpr.fusion import FusedStep
from ..jaxpr.program import Operation, Program, origin_of
from .regions import Region

MemoryClass = Literal["working_parameters", "gathered_weights", "gradients", "activations", "temporaries"]


@dataclass(frozen=True)
class Peak:
    """The bytes that live at the peak of a step, by class, besides the program's arguments. at: the scope of the
    operation that runs then."""

    num_bytes: Mapping[MemoryClass, int]
    at: str

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


@dataclass(frozen=True)
class LiveArray:
    """An array in memory: value `index` of `program`, which may be the body of a loop or a branch."""

    program: Program
    index: int
    kind: MemoryClass

    @property
    def num_bytes(self) -> int:
        return self.program.sizes[self.index]


@dataclass(frozen=True)
class LiveSet:
    """The arrays that live while one operation runs, besides the program's arguments. at: the scope of the
    operation."""

    arrays: tuple[LiveArray, ...]
    at: str


def find_peak(step: Region) -> Peak:
    """Returns the peak of a step, without its arguments. Results replace arguments that are donated."""
    highest, peak = 0, Peak({}, "")
    for one in live_sets(step):
        if (num_bytes := sum(array.num_bytes for array in one.arrays)) > highest:
            total: Counter[MemoryClass] = Counter()
            for array in one.arrays:
                total[array.kind] += array.num_bytes
            highest, peak = num_bytes, Peak(dict(total), one.at)
    return peak


def live_sets(step: Region) -> Iterator[LiveSet]:
    """Yields the arrays that live at each operation of a step, including those inside of loops and branches."""
    program = step.program
    inputs, results = set(program.inputs), {i for i in step.fused.outputs if i is not None}
    donated = inputs if program.donates else set[int]()
    yield from _walk(step, unowned=inputs | (results if program.donates else set()), reusable=donated)


def host_bytes(step: Region) -> int:
    """Returns the bytes per device in host memory: what loops stack there, with that of a body on top of that of its
    loop. What an iteration moves to the host goes straight into the stack."""
    return max(sum(p.host_sizes[i] for p, i in arrays) for arrays in host_sets(step))


def host_sets(region: Region) -> Iterator[tuple[tuple[Program, int], ...]]:
    """Yields the values that may lie in host memory at once, with the program that they belong to. What is written in
    place of an argument of a region lies where that does."""
    program, outer = region.program, [step for step in region.steps if step.inside]
    results = (i for step in outer for i in step.operation.outputs if program.host_sizes[i])
    own = tuple((program, i) for i in results if origin_of(program, i) is None)
    yield own
    for inside in (inside for step in outer for inside in step.inside):
        yield from (own + inner for inner in host_sets(inside))


def _walk(region: Region, *, unowned: set[int], reusable: set[int]) -> Iterator[LiveSet]:
    """Yields the live arrays at each operation of a region. unowned: arrays that the caller counts. reusable: those of
    them that may be overwritten."""
    program, steps = region.program, region.steps
    last_read = {i: n for n, step in enumerate(steps) for i in step.fused.reads}
    for i in region.fused.outputs:
        if i is not None:
            last_read[i] = len(steps)
    live: dict[int, LiveArray] = {}
    reusable = set(reusable)
    for n, step in enumerate(steps):
        reads, writes, operation = step.fused.reads, step.fused.writes, step.operation
        dying = [i for i in reads if last_read[i] == n]
        overwritten = _overwritten(step.fused, dying, program.sizes, set(live) | reusable)
        for i in writes:
            old = overwritten.get(i)
            if i in unowned or (old is not None and old not in live):
                reusable |= set() if old is None else {i}  # it lies where an array of the caller's was
                continue
            before = None if old is None else live.pop(old).kind
            # A loop that runs both passes carries what one microbatch saves for the next.
            is_saved = operation.kind == "loop" and before == "activations"
            live[i] = LiveArray(program, i, "activations" if is_saved else _class_of(operation, i))
        now, scope = tuple(live.values()), operation.scope
        yield LiveSet(now, scope)
        for inside in step.inside:
            found = _inside(operation, inside, overwritten)
            yield from (LiveSet(now + one.arrays, f"{scope} > {one.at}") for one in found)
        for i in [*dying, *(i for i in writes if i not in last_read)]:
            live.pop(i, None)


def _overwritten(step: FusedStep, dying: list[int], sizes: tuple[int, ...], owned: set[int]) -> dict[int, int]:
    """Returns the results that reuse the memory of an operand, with that operand."""
    may = step.writes if step.is_fused else step.writes[: step.operation.num_carried]
    places = {i: old for i, old in step.in_place.items() if old in dying and old in owned}
    candidates = [i for i in dying if i in owned and i not in places.values()]
    for i in (i for i in may if i not in places):
        old = next((j for j in candidates if sizes[j] == sizes[i]), None)
        if old is not None:
            candidates.remove(old)
            places[i] = old
    return places


def _inside(operation: Operation, body: Region, overwritten: Collection[int]) -> Iterator[LiveSet]:
    """Yields the arrays that live inside of a loop's body or a branch. Its inputs live outside. A stacked result is
    written in place, and a branch writes its results where those of the cond are. overwritten: the results of the cond
    that take the place of its operands."""
    program, results = body.program, body.fused.outputs
    inputs = set(program.inputs)
    if operation.kind == "branches":
        ends = zip(operation.outputs, program.outputs, strict=True)
        origins = (origin_of(program, inner) for outer, inner in ends if outer in overwritten)
        reusable = {i for i in origins if i is not None}
        return _walk(body, unowned=inputs | {i for i in results if i is not None}, reusable=reusable)
    carried = set(program.inputs[len(operation.inputs) - len(program.inputs) :])
    direct = {i for each in body.steps if each.operation.kind in ("pointwise", "matmul") for i in each.fused.writes}
    stacked = {i for i in results[operation.num_carried :] if i is not None}
    return _walk(body, unowned=inputs | (stacked & direct), reusable=carried)


def _class_of(operation: Operation, value: int) -> MemoryClass:
    """Returns the class of an array. Loops that belong to neither pass run both, once for each microbatch, or stack
    what a microbatch saves. The result of a cond has the class that one of its branches makes."""
    if operation.kind == "branches":
        place = operation.outputs.index(value)
        classes: list[MemoryClass] = [
            _class_of(one, made)
            for program, made in ((body.program, body.program.outputs[place]) for body in operation.bodies)
            for one in program.operations
            if made in one.outputs
        ]
        named: list[MemoryClass] = [each for each in classes if each != "temporaries"]
        return named[0] if named else "temporaries"
    name = OperationName(operation.scope)
    if name.is_cast_of_parameters:
        return "working_parameters"
    if operation.kind == "collective" and operation.name in ("all_gather", "reduce_scatter"):
        return "gathered_weights" if operation.name == "all_gather" else "gradients"
    is_stacked = operation.kind == "loop" and value in operation.outputs[operation.num_carried :]
    if is_stacked and not (name.is_transposed or name.is_update):
        return "activations"
    if operation.kind == "loop" and (name.is_transposed or not name.is_differentiated):
        return "gradients"
    return "temporaries"
