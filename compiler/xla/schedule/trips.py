"""Counts the trips of a loop. GPU programs state it; elsewhere it follows from the condition.

    condition: compare(get-tuple-element(state, i), bound), direction=LT
    body:      element i of its result is element i of its argument plus a step
    start:     element i of the tuple that the loop is given

The bound is a constant of the condition, or an element of that tuple.
"""

import re
from collections.abc import Mapping

from ..hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')
# These instructions leave a constant as it is.
_TRANSPARENT = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier"}
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def num_trips(loop: Instruction, around: Computation, module: Module) -> int | None:
    """Returns the number of iterations of a `while` in the computation `around`; None if it cannot be read."""
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition = module.computations.get((loop.attribute("condition") or "").lstrip("%"))
    body = module.computations.get((loop.attribute("body") or "").lstrip("%"))
    given = _followed(around.by_name.get(loop.operands[0]), around)
    if condition is None or body is None or given is None or given.opcode != "tuple":
        return None
    compared = _comparison(condition, module)
    if compared is None:
        return None
    direction, left, right = compared
    if isinstance(left, int):  # the bound is on the left: the comparison is mirrored
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    index = _element(left, condition)
    if index is None:
        return None
    bound = right if isinstance(right, int) else _given(_element(right, condition), given, around)
    first, step = _given(index, given, around), _step(index, body, module)
    if bound is None or first is None or not step:
        return None
    span = bound - first + (direction in ("LE", "GE") and (1 if step > 0 else -1))
    return max(0, -(-span // step)) if direction in ("LT", "LE", "GT", "GE", "NE") else None


Side = Instruction | int


def _comparison(condition: Computation, module: Module) -> tuple[str, Side, Side] | None:
    """Returns the direction and both sides of the comparison that a condition ends with, even if it is fused."""
    root = _followed(condition.root, condition)
    if root is None:
        return None
    if root.opcode == "fusion" and root.called:
        inner = module.computations[root.called[0]]
        compare = _followed(inner.root, inner)
        if compare is None or compare.opcode != "compare":
            return None
        outside = {p.name: operand for p, operand in zip(inner.parameters, root.operands, strict=True)}
        sides = [_side(name, inner, condition, outside) for name in compare.operands]
    elif root.opcode == "compare":
        compare, sides = root, [_side(name, condition, condition, {}) for name in root.operands]
    else:
        return None
    left, right = sides
    return (compare.attribute("direction") or "", left, right) if left is not None and right is not None else None


def _side(name: str, inner: Computation, outer: Computation, outside: Mapping[str, str]) -> Side | None:
    found = _followed(inner.by_name.get(name), inner)
    if found is not None and found.name in outside:
        found = _followed(outer.by_name.get(outside[found.name]), outer)
    constant = _constant(found)
    return constant if constant is not None else found


def _element(side: Side | None, condition: Computation) -> int | None:
    """Returns the element of the loop's state that an instruction of the condition reads."""
    if not isinstance(side, Instruction) or side.opcode != "get-tuple-element":
        return None
    source = condition.by_name.get(side.operands[0])
    return int(side.attribute("index") or 0) if source is not None and source.opcode == "parameter" else None


def _given(index: int | None, given: Instruction, around: Computation) -> int | None:
    """Returns the initial value of an element of the loop's state, if it is a constant."""
    if index is None or index >= len(given.operands):
        return None
    return _constant(_followed(around.by_name.get(given.operands[index]), around))


def _step(index: int, body: Computation, module: Module) -> int | None:
    """Returns what an iteration adds to an element of the state."""
    result = _followed(body.root, body)
    if result is None or result.opcode != "tuple":
        return None
    added = _followed(body.by_name.get(result.operands[index]), body)
    if added is not None and added.opcode == "fusion" and added.called:
        inner = module.computations[added.called[0]]
        added, body = _followed(inner.root, inner), inner
    if added is None or added.opcode not in ("add", "subtract"):
        return None
    constants = [_constant(_followed(body.by_name.get(name), body)) for name in added.operands]
    step = next((constant for constant in constants if constant is not None), None)
    return -step if step is not None and added.opcode == "subtract" else step


def _followed(instruction: Instruction | None, computation: Computation) -> Instruction | None:
    """Returns the operand that an instruction merely passes on."""
    while instruction is not None and instruction.opcode in _TRANSPARENT:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.argument) if re.fullmatch(r"-?\d+", instruction.argument) else None
