"""Decides which values of a program are arrays in memory, and when: every estimate rests on this model of fusion.

What XLA does on accelerators, as rules:

1. Pointwise operations are fused into one another, and into a reduction that reads them. Their results are in memory
   where a matmul, a kernel, a collective, a loop, a cond or the program's end takes them, and where they are made of so
   much that readers would move more bytes to compute them again; else each reader computes them again.
2. A matmul's result that one chain of pointwise operations reads is written as the end of that chain. On GPUs cuBLAS
   writes it, and a pass behind the matmul reads it again. (It is no array in memory besides: it is there for a moment.)
3. An operation that changes the shape alone returns the same array.
4. A collective runs when its result is read; in a loop the next gather has begun by then. So gradients are reduced at
   the end of their loop.
5. A pointwise result takes the place of an operand of its size that nothing reads any more, and so does an array of
   which a slice is written again; a value that a trip hands on takes the place of the one that it was handed. What a
   loop or a branch writes in place (`origins_of`) is not moved at its border.
6. On TPUs a result that only matmuls read is computed inside of them, and crosses the memory no more than its operands
   do. (It is counted in memory all the same: where several matmuls read it, XLA may also write it.)
7. On TPUs a value that a loop stacks for the backward pass is copied into the stack, and copied out of it there.
8. On GPUs rows that are gathered, and that only pointwise operations and reductions read, are gathered inside of these.
9. A slice that pointwise operations alone read is read where it lies, and an update of a slice by a pointwise result
   that nothing else reads is written there. Other slices are copied.
10. Nothing is fused across the border of a loop's body or a branch.

The rest is in the order of the traced program.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ..core.scopes import OperationName
from .program import Operation, Program, origins_of

_FUSED = ("pointwise", "reduce")
_IN_PLACE = ("dynamic_update_slice", "optimization_barrier")


@dataclass(frozen=True)
class FusedStep:
    """An operation with the arrays that it reads and writes, by the index of their value. is_fused: True if it may
    write in place of an array that it reads. in_place: the results of a loop or of branches that are where an operand
    was, with that operand. kernels: of a matmul that ends in a chain, the arrays that the matmul and the chain move
    where the chain is a pass of its own."""

    operation: Operation
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    is_fused: bool
    in_place: Mapping[int, int] = field(default_factory=dict[int, int])
    kernels: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Fused:
    """The steps of a program in order. outputs: the arrays that it returns, None for a value that is not an array."""

    program: Program
    steps: tuple[FusedStep, ...]
    outputs: tuple[int | None, ...]


def fuse(program: Program, *, is_loop: bool) -> Fused:
    """Returns the program after the rules above. is_loop: True for the body of a loop."""
    operations = needed(program)
    same = _same_array(operations)
    readers: dict[int, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind != "move":
            for i in dict.fromkeys(same.get(i, i) for i in _inputs(operation)):
                readers[i].append(operation)
    outputs = {same.get(i, i) for i in program.outputs}
    roots: dict[int, tuple[int, ...]] = {i: (i,) for i in program.inputs}
    steps, done = [], set[int]()
    made = {i for operation in operations for i in operation.outputs}

    def read_by(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(root for i in values for root in roots.get(same.get(i, i), ())))

    def is_array(operation: Operation, reads: Iterable[int]) -> bool:
        """Returns True if the results of a pointwise operation are arrays. reads: the arrays that they are made of."""
        written = {same.get(i, i): program.sizes[i] for i in operation.outputs}
        if any(i in outputs or any(reader.kind not in _FUSED for reader in readers[i]) for i in written):
            return True
        # Each reader of a part of the results reads, or makes again, that part.
        size, read_again = sum(written.values()), sum(len(readers[i]) * each for i, each in written.items())
        made_of = sum(program.sizes[i] for i in reads)
        return made_of * read_again > (made_of + size + read_again) * size

    def chain_of(matmul: Operation) -> list[Operation]:
        """Returns the pointwise operations that read a matmul's result, each the only reader of the one before, up to
        an array."""
        chain: list[Operation] = []
        result, reads = matmul.outputs[-1], {*matmul.outputs}
        while result not in outputs and len(readers[result]) == 1 and readers[result][0].kind == "pointwise":
            link = readers[result][0]
            if len(link.outputs) > 1:
                return []
            chain.append(link)
            reads.update(read_by(link.inputs))
            if is_array(link, reads):
                return chain
            result = next(iter(link.outputs))
        return []

    for operation in operations:
        if operation.kind == "move" or done.intersection(operation.outputs):
            continue
        writes, reads, kernels = operation.outputs, read_by(_inputs(operation)), None
        is_constant = operation.kind == "pointwise" and not reads
        if is_constant or (operation.kind == "pointwise" and not is_array(operation, reads)):
            for i in writes:
                roots[i] = reads
            continue
        if operation.kind == "matmul":
            roots[writes[0]] = ()
            chain = chain_of(operation)
            others = [same.get(i, i) for link in chain for i in link.inputs]
            inside = {same.get(i, i) for link in (operation, *chain) for i in link.outputs}
            if chain and all(i in roots or i in inside or i not in made for i in others):
                writes, own, of_chain = chain[-1].outputs, reads, read_by(set(others) - inside)
                reads = tuple(dict.fromkeys((*own, *of_chain)))
                done.update(i for link in chain for i in link.outputs)
                kernels = (*operation.outputs, *own), (*writes, *operation.outputs, *of_chain)
        for i in writes:
            roots[i] = (i,)
        is_fused = operation.kind in _FUSED or operation.name in _IN_PLACE
        in_place = {result: same.get(i, i) for result, i in origins_of(operation).items()}
        steps.append(FusedStep(operation, reads, writes, is_fused, in_place, kernels))
    given = tuple(next(iter(read_by([i])), None) for i in program.outputs)
    return Fused(program, _late_collectives(steps, is_ahead=is_loop), given)


def traffic(
    fused: Fused, *, into_matmuls: bool, after_matmuls: bool = True, fuses_gathers: bool = False
) -> list[tuple[FusedStep, tuple[int, ...]]]:
    """Returns each step with the arrays that it reads and writes in memory, each as often as it is moved; of a matmul
    with a pass behind it the matmul's own. into_matmuls, after_matmuls, fuses_gathers: True where rules 6, 2 and 8
    hold. Pointwise operations on the same arrays are one pass over them."""
    inlined = _inlined(fused) if into_matmuls else {}
    readers = _readers(fused) if fuses_gathers else {}
    read_already: set[int] = set()
    moved = []
    for step in fused.steps:
        reads = dict.fromkeys(j for i in step.reads for j in inlined.get(i, (i,)))
        is_gather = step.operation.name == "gather"
        is_fused = is_gather and all(readers.get(i, {""}) <= {*_FUSED} and i not in fused.outputs for i in step.writes)
        if is_fused or any(i in inlined for i in step.writes):
            moved.append((step, ()))
            continue
        if step.kernels is not None and not after_matmuls:
            moved.append((step, step.kernels[0]))
        elif is_gather:  # only the rows of the table that are looked up
            moved.append((step, (*step.writes, *step.writes)))
        else:
            writes = [i for i in step.writes if i not in step.in_place]
            kept = {*step.in_place.values(), *(read_already if step.is_fused else ())}
            moved.append((step, (*writes, *(i for i in reads if i not in kept))))
        if step.is_fused:
            read_already.update((*reads, *step.writes))
    return moved


def sliced_in_place(fused: Fused) -> frozenset[int]:
    """Returns the results of slices that pointwise operations alone read, and of updates of a slice that one of them
    computes for the update alone: their own traffic counts."""
    readers, num_readers = _readers(fused), Counter(i for step in fused.steps for i in step.reads)
    made = {i for step in fused.steps if step.operation.kind in _FUSED for i in step.writes}
    kept, found = set(fused.outputs), set[int]()
    for step in fused.steps:
        if step.operation.name == "dynamic_slice":
            is_in_place = all(i not in kept and readers.get(i, {""}) <= {*_FUSED} for i in step.writes)
        elif step.operation.name == "dynamic_update_slice":
            size = (step.operation.hbm_bytes or 0) // 2
            own = (i for i in step.reads[1:] if i in made and fused.program.sizes[i] == size)
            is_in_place = any(num_readers[i] == 1 and i not in kept for i in own)
        else:
            continue
        found.update(step.writes if is_in_place else ())
    return frozenset(found)


def stacked_bytes(loop: Operation, around: Program) -> tuple[int, ...]:
    """Returns the bytes that one trip of a loop copies into each stack and out of it: each slice is read and written.
    An argument or a result that is no stack has 0 bytes, so that programs of one shape have equally many. The head's
    loop copies nothing: its matmuls read a chunk of the loss where it lies."""
    if "head" in OperationName(loop.scope).words:
        return ()
    ((body, (num_trips, *_)),) = ((each.program, each.executions) for each in loop.bodies)
    into = (_size(body, i) for i in body.outputs[loop.num_carried :])
    out_of = (
        _size(body, inner) if num_trips > 1 and _size(around, outer) == num_trips * _size(body, inner) else 0
        for outer, inner in zip(loop.inputs, body.inputs, strict=True)
    )
    return tuple(2 * size for size in (*into, *out_of))


def _size(program: Program, value: int) -> int:
    return program.sizes[value] + program.host_sizes[value]


def _readers(fused: Fused) -> dict[int, set[str]]:
    """Returns the kinds of operations that read each array."""
    readers: dict[int, set[str]] = defaultdict(set)
    for step in fused.steps:
        for i in step.reads:
            readers[i].add(step.operation.kind)
    return readers


def _inlined(fused: Fused) -> dict[int, tuple[int, ...]]:
    """Returns the pointwise results that only matmuls read, with the arrays that they are made of."""
    readers = _readers(fused)
    found: dict[int, tuple[int, ...]] = {}
    for step in fused.steps:
        is_read = all(readers[i] == {"matmul"} and i not in fused.outputs for i in step.writes)
        if step.operation.kind == "pointwise" and step.writes and is_read:
            found.update(dict.fromkeys(step.writes, step.reads))
    return found


def needed(program: Program) -> list[Operation]:
    """Returns the operations whose results are used, and unknown ones without results."""
    wanted, kept = set(program.outputs), []
    for operation in reversed(program.operations):
        is_effect = operation.unknown is not None and not operation.outputs
        if is_effect or wanted.intersection(operation.outputs):
            wanted.update(_inputs(operation))
            kept.append(operation)
    return kept[::-1]


def _inputs(operation: Operation) -> tuple[int, ...]:
    """Returns the operands that are used: for a loop or branches those that a body uses, and the index of the branch
    that runs."""
    if not operation.bodies:
        return operation.inputs
    first = len(operation.inputs) - len(operation.bodies[0].program.inputs)
    used = set(range(first))
    for body in (each.program for each in operation.bodies):
        read = set(body.outputs) | {i for inner in needed(body) for i in _inputs(inner)}
        used |= {first + place for place, inside in enumerate(body.inputs) if inside in read}
    return tuple(i for place, i in enumerate(operation.inputs) if place in used)


def _same_array(operations: Iterable[Operation]) -> dict[int, int]:
    """Maps each result of an operation that only changes a value's shape to that value."""
    same: dict[int, int] = {}
    for operation in operations:
        if operation.kind == "move":
            origin = operation.inputs[0]
            same.update(dict.fromkeys(operation.outputs, same.get(origin, origin)))
    return same


def _late_collectives(steps: Iterable[FusedStep], *, is_ahead: bool) -> tuple[FusedStep, ...]:
    """Returns the steps with each collective just before the first step that reads its result. is_ahead: True to start
    a gather together with the one before it."""
    ordered: list[FusedStep] = []
    waiting: dict[int, FusedStep] = {}

    def take(step: FusedStep) -> None:
        for written in step.writes:
            waiting.pop(written, None)
        run(step)

    def run(step: FusedStep) -> None:
        for i in step.reads:
            if i in waiting:
                take(waiting[i])
        ordered.append(step)

    for step in steps:
        if step.operation.kind == "collective":
            waiting.update(dict.fromkeys(step.writes, step))
        else:
            run(step)
    while waiting:
        take(next(iter(waiting.values())))
    return tuple(_one_ahead(ordered) if is_ahead else ordered)


def _one_ahead(steps: list[FusedStep]) -> list[FusedStep]:
    gathers = [n for n, step in enumerate(steps) if step.operation.name == "all_gather"]
    following = dict(pairwise(gathers))
    moved = set(gathers[1:])
    ordered = []
    for n, step in enumerate(steps):
        if n not in moved:
            ordered.append(step)
        after = following.get(n)
        if after is not None:
            ordered.append(steps[after])
    return ordered
