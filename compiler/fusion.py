"""Which values of a program are arrays in memory, and when: the model of fusion and of order behind every estimate.

What XLA does on accelerators, as rules:

1. Pointwise operations are fused into one another, and into a reduction that reads them. Their results are in memory
   where a matmul, a kernel, a collective, a loop or the program's end takes them; else each reader computes them again.
2. The conversion of a matmul's result, where nothing else reads it, is done by the matmul.
3. What changes shape alone is the same array.
4. A collective runs when its result is read: gathers just before, reductions of gradients at the end of their loop.
5. A pointwise result takes the place of an operand of its size that nothing reads any more; so does what a loop
   hands on to what it was handed.

The rest is in the order of the traced program.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .program import Operation, Program

_FUSED = ("pointwise", "reduce")


@dataclass(frozen=True)
class Step:
    """An operation with the arrays that it reads and writes, by the index of their value. May write in place of one
    that it reads, where `is_fused`."""

    operation: Operation
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_fused: bool


@dataclass(frozen=True)
class Fused:
    """The steps of a program in order. outputs: the arrays that it gives back, None where one is no array."""

    program: Program
    steps: tuple[Step, ...]
    outputs: tuple[int | None, ...]


def fuse(program: Program) -> Fused:
    """Apply the rules above."""
    operations = _needed(program)
    same = _same_array(operations)
    readers: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind != "move":
            for i in dict.fromkeys(same.get(i, i) for i in _inputs(operation)):
                readers[i].append(operation)
    outputs = {same.get(i, i) for i in program.outputs}
    roots: dict[int, tuple[int, ...]] = {i: (i,) for i in program.inputs}
    steps, done = [], set[int]()

    def read_by(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(root for i in values for root in roots.get(same.get(i, i), ())))

    for operation in operations:
        if operation.kind == "move" or operation.outputs[0] in done:
            continue
        writes = operation.outputs
        reads = read_by(_inputs(operation))
        if operation.kind == "pointwise" and not _is_array(operation, readers, outputs, same):
            for i in writes:
                roots[i] = reads
            continue
        if operation.kind == "matmul" and (after := _converted(operation, readers, outputs, same)):
            writes = after.outputs
            done.add(after.outputs[0])
        for i in writes:
            roots[i] = (i,)
        steps.append(Step(operation, reads, writes, operation.kind in _FUSED))
    given = tuple(next(iter(read_by([i])), None) for i in program.outputs)
    return Fused(program, _late_collectives(steps), given)


def _needed(program: Program) -> list[Operation]:
    """The operations whose results are used."""
    wanted, kept = set(program.outputs), []
    for operation in reversed(program.operations):
        if wanted.intersection(operation.outputs):
            wanted.update(_inputs(operation))
            kept.append(operation)
    return kept[::-1]


def _inputs(operation: Operation) -> tuple[int, ...]:
    """The operands that are used: those of a loop that its body uses."""
    if operation.body is None:
        return operation.inputs
    body = operation.body
    used = set(body.outputs) | {i for inner in _needed(body) for i in _inputs(inner)}
    return tuple(i for i, inside in zip(operation.inputs, body.inputs, strict=True) if inside in used)


def _same_array(operations: Iterable[Operation]) -> dict[int, int]:
    """What only changes the shape of a value -> that value."""
    same: dict[int, int] = {}
    for operation in operations:
        if operation.kind == "move":
            origin = operation.inputs[0]
            same.update(dict.fromkeys(operation.outputs, same.get(origin, origin)))
    return same


def _is_array(
    operation: Operation, readers: dict[int, list[Operation]], outputs: set[int], same: dict[int, int]
) -> bool:
    places = [same.get(i, i) for i in operation.outputs]
    return any(i in outputs or any(reader.kind not in _FUSED for reader in readers[i]) for i in places)


def _converted(
    operation: Operation, readers: dict[int, list[Operation]], outputs: set[int], same: dict[int, int]
) -> Operation | None:
    """The one operation that reads a matmul's result, where it is a conversion that is an array."""
    result = operation.outputs[0]
    if result in outputs or len(readers[result]) != 1:
        return None
    reader = readers[result][0]
    is_one = reader.name == "convert_element_type" and _is_array(reader, readers, outputs, same)
    return reader if is_one else None


def _late_collectives(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Each collective just before the first step that reads its result."""
    ordered: list[Step] = []
    waiting: dict[int, Step] = {}

    def run(step: Step) -> None:
        for i in step.reads:
            if i in waiting:
                first = waiting[i]
                for written in first.writes:
                    waiting.pop(written, None)
                run(first)
        ordered.append(step)

    for step in steps:
        if step.operation.kind == "collective":
            waiting.update(dict.fromkeys(step.writes, step))
        else:
            run(step)
    while waiting:
        step = next(iter(waiting.values()))
        for written in step.writes:
            waiting.pop(written, None)
        run(step)
    return tuple(ordered)
