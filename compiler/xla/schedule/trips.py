"""Counts the trips of a loop. GPU programs state it; elsewhere it follows from the condition.

    condition: compare(get-tuple-element(state, i), bound), direction=LT
    body:      element i of its result is element i of its argument plus a step
    start:     element i of the tuple that the loop is given

The bound is a constant of the condition, or of what the loop is given and does not change.
"""

import re

from ..hlo import Computation, Instruction, Module
from ..hlo.flow import Flow, ModuleValue, Path

_KNOWN = re.compile(r'"known_trip_count":\s*\{"n":"(\d+)"\}')
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def num_trips(loop: Instruction, around: Computation, module: Module) -> int | None:
    """Returns the number of iterations of a `while` in the computation `around`; None if it cannot be read."""
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition, body = (module.computations.get(name) for name in (loop.condition, loop.body))
    if condition is None or body is None:
        return None
    flow = Flow(module)
    compare = flow.origin(ModuleValue(condition, condition.root))
    if compare.instruction.opcode != "compare":
        return None
    direction, (left, right) = compare.instruction.attribute("direction") or "", _operands(compare, flow)
    if _constant(left) is not None:  # the bound is on the left: the comparison is mirrored
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    if left.instruction.opcode != "parameter" or left.computation is not condition or len(left.path) != 1:
        return None
    if right.instruction.opcode == "parameter" and right.computation is condition and flow.is_kept(loop, right.path):
        # Another loop may have the same condition, and another bound.
        right = flow.origin(ModuleValue(around, around.by_name[loop.operands[0]], right.path))
    bound = _constant(right)
    first = _constant(flow.origin(ModuleValue(around, around.by_name[loop.operands[0]], left.path)))
    step = _step(body, left.path, flow)
    if bound is None or first is None or not step:
        return None
    span = bound - first + (direction in ("LE", "GE") and (1 if step > 0 else -1))
    return max(0, -(-span // step)) if direction in ("LT", "LE", "GT", "GE", "NE") else None


def _operands(value: ModuleValue, flow: Flow) -> list[ModuleValue]:
    """Returns the origins of the operands of the instruction that computes a value."""
    around = value.computation
    return [flow.origin(ModuleValue(around, around.by_name[name])) for name in value.instruction.operands]


def _step(body: Computation, path: Path, flow: Flow) -> int | None:
    """Returns what an iteration adds to an element of the state."""
    added = flow.origin(ModuleValue(body, body.root, path))
    if added.instruction.opcode not in ("add", "subtract"):
        return None
    operands = _operands(added, flow)
    if all(each.computation is not body or each.path != path for each in operands):
        return None  # to something else
    step = next((found for each in operands if (found := _constant(each)) is not None), None)
    return -step if step is not None and added.instruction.opcode == "subtract" else step


def _constant(value: ModuleValue) -> int | None:
    is_whole = value.instruction.opcode == "constant" and re.fullmatch(r"-?\d+", value.instruction.argument)
    return int(value.instruction.argument) if is_whole else None
