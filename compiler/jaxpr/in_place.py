"""Finds arrays that an operation hands on in the memory in which it was given them.

    buffer -> loop(.. dynamic_update_slice ..) -> barrier -> buffer'        buffer' is where buffer was

A branch that runs on a part of the stages writes a buffer so, or hands it on as it is; a loop writes it layer by layer.
"""

from collections.abc import Mapping

from .program import Operation, Program


def origins_of(operation: Operation) -> Mapping[int, int]:
    """Returns the results of a loop or of branches that are written in place of an operand, with that operand."""
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
