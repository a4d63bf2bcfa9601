"""A step as operations on values, which estimates are made from. read_jaxpr.py makes it of a traced step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.traffic import Traffic
from .unknown import UnknownPrimitive

# move: the same bytes under another shape. pointwise: fused with its neighbours. reduce: fused with what it reads.
# unknown: a primitive that no list names; it reads and writes arrays, like other. loop, branches: they run bodies.
Kind = Literal["matmul", "kernel", "collective", "loop", "branches", "move", "pointwise", "reduce", "other", "unknown"]


@dataclass(frozen=True)
class Body:
    """A program that an operation runs: the body of a loop, or a branch. executions: their number in one execution of
    the operation, on each stage of the mesh; a single value where all stages have the same."""

    program: "Program"
    executions: tuple[float, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of the step.

    inputs, outputs: indices of values. scope: the names of the parts that it belongs to. flops: those of a device;
    None: unknown. stage_pairs: of a permute between stages, the senders with their receivers. hbm_bytes: the bytes that
    it declares to read and write. bodies: the body of a loop, or the branches; their inputs are the last ones of the
    operation. num_carried: the number of the loop's first results that each trip hands to the next; the others are
    stacked. chosen: of a slot of a pipeline, the branch that each stage runs, by
    tick. unknown: the record of what is not known of it.
    """

    kind: Kind
    name: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int | None = 0
    collective: Traffic | None = None
    stage_pairs: tuple[tuple[int, int], ...] = ()
    bodies: tuple[Body, ...] = ()
    num_carried: int = 0
    hbm_bytes: int | None = None
    chosen: tuple[tuple[int, ...], ...] = ()
    unknown: UnknownPrimitive | None = None


@dataclass(frozen=True)
class Program:
    """A sequence of operations on values. sizes: the bytes of each value on a device, by its index. host_sizes: the
    bytes of a device's part of it in host memory; a value lies in one of the two. dtypes: the type of each. donates:
    True if results may take the place of inputs."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    host_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donates: bool = True

    def walk(self) -> Iterator[Operation]:
        """Yields the operations, each before those of its bodies."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.program.walk()


def origins_of(operation: Operation) -> Mapping[int, int]:
    """Returns the results of a loop or of branches that are written in place of an operand, with that operand: a branch
    that runs on a part of the stages writes a buffer or hands it on as it is, and a loop writes it layer by layer."""
    found: dict[int, int] = {}
    if not operation.bodies:
        return found
    first = len(operation.inputs) - len(operation.bodies[0].program.inputs)
    num = operation.num_carried if operation.kind == "loop" else len(operation.outputs)
    for place, result in enumerate(operation.outputs[:num]):
        programs = [body.program for body in operation.bodies]
        origins = [origin_of(each, each.outputs[place]) for each in programs]
        places = {None if i is None else each.inputs.index(i) for each, i in zip(programs, origins, strict=True)}
        if len(places) == 1 and (origin := places.pop()) is not None:
            found[result] = operation.inputs[first + origin]
    return found


def origin_of(program: Program, value: int) -> int | None:
    """Returns the argument whose buffer this value reuses, or None."""
    makers = {made: operation for operation in program.operations for made in operation.outputs}
    while value not in program.inputs:
        operation = makers.get(value)
        if operation is None:
            return None
        if operation.kind == "move" or operation.name == "dynamic_update_slice":
            value = operation.inputs[0]
        elif operation.name == "optimization_barrier":
            value = operation.inputs[operation.outputs.index(value)]
        elif (origin := origins_of(operation).get(value)) is not None:
            value = origin
        else:
            return None
    return value
