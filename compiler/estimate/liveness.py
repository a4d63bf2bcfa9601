"""Estimates the peak memory of a step without a compiler, by a walk over the fused program that counts live arrays."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.scopes import OperationName
from ..jaxpr.fusion import Fused, FusedStep, fuse
from ..jaxpr.program import Operation, Program

MemoryClass = Literal["working_parameters", "gathered_weights", "gradients", "activations", "temporaries"]


@dataclass(frozen=True)
class Peak:
    """Bytes that live at the peak, by class, besides the program's arguments. at: the operation's scope."""

    num_bytes: Mapping[MemoryClass, int]
    at: str

    @property
    def total(self) -> int:
        return sum(self.num_bytes.values())


@dataclass(frozen=True)
class LiveArray:
    """An array that lives somewhere: value `index` of `program`, which may be the body of a loop."""

    program: Program
    index: int
    kind: MemoryClass

    @property
    def num_bytes(self) -> int:
        return self.program.sizes[self.index]


@dataclass(frozen=True)
class LiveSet:
    """The arrays that live while one operation runs, besides the program's arguments. at: the operation's scope."""

    arrays: tuple[LiveArray, ...]
    at: str


def find_peak(program: Program) -> Peak:
    """Returns the peak of a step besides its arguments. Its results replace arguments that are donated."""
    highest, peak = 0, Peak({}, "")
    for one in live_sets(program):
        if (num_bytes := sum(array.num_bytes for array in one.arrays)) > highest:
            total: Counter[MemoryClass] = Counter()
            for array in one.arrays:
                total[array.kind] += array.num_bytes
            highest, peak = num_bytes, Peak(dict(total), one.at)
    return peak


def live_sets(program: Program) -> Iterator[LiveSet]:
    """Yields what lives at each operation of a step, in loops at each of the body's."""
    fused = fuse(program, is_loop=False)
    inputs, results = set(program.inputs), {i for i in fused.outputs if i is not None}
    donated = inputs if program.donates else set[int]()
    yield from _walk(fused, unowned=inputs | (results if program.donates else set()), reusable=donated)


def host_bytes(program: Program) -> int:
    """Returns the bytes per device in host memory: what loops stack there, a body's in addition to its loop's. What an
    iteration moves to the host goes straight into the stack."""
    return max(sum(p.host_sizes[i] for p, i in arrays) for arrays in host_sets(program))


def host_sets(program: Program) -> Iterator[tuple[tuple[Program, int], ...]]:
    """Yields what may lie in host memory at once: values with the program that they belong to."""
    loops = [each for each in program.operations if each.body is not None]
    own = tuple((program, i) for each in loops for i in each.outputs if program.host_sizes[i])
    yield own
    for each in loops:
        if each.body is not None:
            yield from (own + inner for inner in host_sets(each.body))


def _walk(fused: Fused, *, unowned: set[int], reusable: set[int]) -> Iterator[LiveSet]:
    """Yields the live arrays of a walk. unowned: arrays that the caller counts. reusable: the ones that may be
    overwritten."""
    program = fused.program
    last_read = {i: n for n, step in enumerate(fused.steps) for i in step.reads}
    for i in fused.outputs:
        if i is not None:
            last_read[i] = len(fused.steps)
    live: dict[int, LiveArray] = {}
    for n, step in enumerate(fused.steps):
        dying = [i for i in step.reads if last_read[i] == n]
        overwritten = _overwritten(step, dying, program.sizes, set(live) | reusable)
        for i in step.writes:
            old = overwritten.get(i)
            if i in unowned or (old is not None and old not in live):
                continue
            if old is not None:
                live.pop(old)
            live[i] = LiveArray(program, i, _class_of(step.operation, i))
        now, scope = tuple(live.values()), step.operation.scope
        yield LiveSet(now, scope)
        if step.operation.body:
            yield from (LiveSet(now + inner.arrays, f"{scope} > {inner.at}") for inner in _inside(step.operation))
        for i in [*dying, *(i for i in step.writes if i not in last_read)]:
            live.pop(i, None)


def _overwritten(step: FusedStep, dying: list[int], sizes: tuple[int, ...], owned: set[int]) -> dict[int, int]:
    """Returns the results that reuse an operand's memory, with the operand."""
    may = step.writes if step.is_fused else step.writes[: step.operation.num_carried]
    candidates, places = [i for i in dying if i in owned], {}
    for i in may:
        old = next((j for j in candidates if sizes[j] == sizes[i]), None)
        if old is not None:
            candidates.remove(old)
            places[i] = old
    return places


def _inside(loop: Operation) -> Iterator[LiveSet]:
    """Yields what lives in a loop's body. Its inputs live outside; a stacked result is written in place."""
    assert loop.body is not None
    fused = fuse(loop.body, is_loop=True)
    carried = set(loop.body.inputs[len(loop.inputs) - len(loop.body.inputs) :])
    direct = {i for step in fused.steps if step.operation.kind in ("pointwise", "matmul") for i in step.writes}
    stacked = {i for i in fused.outputs[loop.num_carried :] if i is not None}
    return _walk(fused, unowned=set(loop.body.inputs) | (stacked & direct), reusable=carried)


def _class_of(operation: Operation, value: int) -> MemoryClass:
    """Returns the class of an array. Loops that belong to neither pass run both, once for each microbatch."""
    name = OperationName(operation.scope)
    if name.is_cast_of_parameters:
        return "working_parameters"
    if operation.kind == "collective" and operation.name in ("all_gather", "reduce_scatter"):
        return "gathered_weights" if operation.name == "all_gather" else "gradients"
    if operation.kind == "loop" and (name.is_transposed or not name.is_differentiated):
        return "gradients"
    if operation.kind == "loop" and value in operation.outputs[operation.num_carried :]:
        return "activations"
    return "temporaries"
