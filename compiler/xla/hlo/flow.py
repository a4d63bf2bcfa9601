"""Follows the values of a module through views, tuples, loops, branches, calls and fusions.

    %g = all-gather(%x)
    %t = tuple(%i, %g)
    %w = while(%t), body=%b            %b: %s = parameter(0)
                                           %e = get-tuple-element(%s), index=1
                                           %f = fusion(%e, %j), calls=%inner      %inner: dynamic-slice(%p, %q)

The only use of %g is the dynamic-slice of %inner, within the loop %w.

Programs for GPUs state the trips of a loop. In others they follow from its values:

    condition: compare(get-tuple-element(state, i), bound), direction=LT
    body:      element i of its result is element i of its argument plus a step
    start:     element i of the tuple that the loop is given

The bound is a constant of the condition, or of what the loop is given and does not change.
"""

import re
from dataclasses import dataclass

from .opcodes import SAME_ELEMENTS, UNCHANGED
from .parse import Computation, Instruction, Module
from .types import ArrayType, elements_of, parse_type

Path = tuple[int, ...]  # the place of an element within nested tuples


@dataclass(frozen=True)
class ValueUse:
    """An instruction that uses a value. place: the position of the operand. array: the value as the instruction reads
    it. loops: the loops that the value enters on its way, the outermost first. is_result: it leaves the program."""

    reader: Instruction
    place: int
    array: ArrayType | None
    loops: tuple[str, ...] = ()
    is_result: bool = False


@dataclass(frozen=True)
class ModuleValue:
    """A value: the name of an instruction, or an element of its tuple."""

    computation: Computation
    instruction: Instruction
    path: Path = ()
    loops: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, Path]:
        return self.computation.name, self.instruction.name, self.path

    @property
    def array(self) -> ArrayType | None:
        """Returns the array that the value is; None if it is a tuple."""
        text = self.instruction.type_text
        for index in self.path:
            elements = elements_of(text) or ()
            text = elements[index] if index < len(elements) else ""
        arrays = parse_type(text)
        return arrays[0] if len(arrays) == 1 else None


@dataclass(frozen=True)
class Flow:
    """Follows the values of a module. Its methods take `through`, the opcodes that hand on their first operand."""

    module: Module

    def uses(
        self, value: ModuleValue, *, through: frozenset[str] = SAME_ELEMENTS, within: Computation | None = None
    ) -> list[ValueUse]:
        """Returns all uses of a value. within: the computation that it is not to be followed out of; None: the
        program."""
        end = self.module.entry if within is None else within.name
        found, seen = list[ValueUse](), set[tuple[str, str, Path]]()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if value.key in seen:
                continue
            seen.add(value.key)
            if value.instruction is value.computation.root:
                if value.computation.name == end:
                    found.append(ValueUse(value.instruction, 0, value.array, value.loops, is_result=True))
                else:
                    waiting += self._returned(value)
            for reader, place in value.computation.readers.get(value.instruction.name, ()):
                handed = self._handed(value, reader, place, through)
                if handed is None:
                    found.append(ValueUse(reader, place, value.array, value.loops))
                else:
                    waiting += handed
        return found

    def _handed(
        self, value: ModuleValue, reader: Instruction, place: int, through: frozenset[str]
    ) -> list[ModuleValue] | None:
        """Returns the places to which a reader hands a value on; None if it uses it."""
        of, path, loops = value.computation, value.path, value.loops
        opcode = reader.opcode
        if opcode == "tuple":
            return [ModuleValue(of, reader, (place, *path), loops)]
        if opcode == "get-tuple-element":
            index = int(reader.attribute("index") or 0)
            if path and path[0] != index:
                return []
            return [ModuleValue(of, reader, path[1:], loops)]
        if opcode in through:
            return [ModuleValue(of, reader, path, loops)]
        if opcode == "slice-start" and (whole := self._joined(reader, of)):
            return [ModuleValue(of, whole, path, loops)]
        if opcode == "while":
            called = [self._computation(name) for name in reader.called]
            inside = [ModuleValue(inner, inner.parameters[0], path, (*loops, reader.name)) for inner in called]
            return [*inside, ModuleValue(of, reader, path, loops)]
        if opcode == "conditional" and place:
            inner = self._computation(reader.called[place - 1])
            return [ModuleValue(inner, inner.parameters[0], path, loops)]
        if opcode in ("call", "fusion"):
            inner = self._computation(reader.called[0])
            return [ModuleValue(inner, inner.parameters[place], path, loops)]
        return None

    def _returned(self, value: ModuleValue) -> list[ModuleValue]:
        """Returns the places that the result of a computation is handed on to."""
        found = list[ModuleValue]()
        inner = value.computation
        for around, each in self.module.callers.get(inner.name, ()):
            loops = value.loops
            if each.opcode == "while" and each.body == inner.name:
                found.append(ModuleValue(inner, inner.parameters[0], value.path, loops))
                loops = loops[: loops.index(each.name)] if each.name in loops else loops
            elif each.opcode not in ("call", "conditional", "fusion"):
                continue
            found.append(ModuleValue(around, each, value.path, loops))
        return found

    def _joined(self, start: Instruction, around: Computation) -> Instruction | None:
        """Returns the whole copy that an asynchronous slice is a part of: TPUs copy a large array in several slices,
        and name them as one by `ConcatBitcast`."""
        for done, _ in around.readers.get(start.name, ()):
            for reader, _ in around.readers.get(done.name, ()):
                if _is_joined(reader):
                    return reader
        return None

    def origin(
        self, value: ModuleValue, *, through: frozenset[str] = SAME_ELEMENTS, within: Computation | None = None
    ) -> ModuleValue:
        """Returns the place that a value comes from unchanged: the instruction that computes it, or a parameter of the
        program. What a loop does not change comes from outside of it. within: a computation whose parameters it is not
        to be followed beyond."""
        place, seen = value, set[tuple[str, str, Path]]()
        while place.key not in seen:
            seen.add(place.key)
            is_outer = place.instruction.opcode == "parameter" and place.computation is within
            before = None if is_outer else self._before(place, through)
            if before is None:
                break
            place = before
        return place

    def _before(self, value: ModuleValue, through: frozenset[str]) -> ModuleValue | None:
        of, each, path = value.computation, value.instruction, value.path
        if each.opcode == "get-tuple-element":
            return ModuleValue(of, of.by_name[each.operands[0]], (int(each.attribute("index") or 0), *path))
        if each.opcode == "tuple" and path:
            return ModuleValue(of, of.by_name[each.operands[path[0]]], path[1:])
        if each.opcode in through and each.operands:
            return ModuleValue(of, of.by_name[each.operands[0]], path)
        if _is_joined(each):
            part = of.by_name[each.operands[0]]
            while part.opcode in ("slice-done", "slice-start"):
                part = of.by_name[part.operands[0]]
            return ModuleValue(of, part, path)
        if each.opcode in ("call", "fusion"):
            inner = self._computation(each.called[0])
            return ModuleValue(inner, inner.root, path)
        if each.opcode == "while" and self.is_kept(each, path):
            return ModuleValue(of, of.by_name[each.operands[0]], path)
        if each.opcode == "parameter":
            if len(callers := self.module.callers.get(value.computation.name, ())) != 1:
                return None
            ((around, each),) = callers
            place = int(value.instruction.argument)
            if each.opcode == "while":
                place = 0 if self.is_kept(each, value.path) else -1
            elif each.opcode == "conditional":
                place = 1 + list(each.called).index(value.computation.name)
            elif each.opcode not in ("call", "fusion"):
                place = -1
            return None if place < 0 else ModuleValue(around, around.by_name[each.operands[place]], value.path)
        return None

    def is_kept(self, loop: Instruction, path: Path) -> bool:
        """Returns whether each iteration of a loop hands on an element of its state as it is."""
        body = self._computation(loop.body)
        handed_on = self.origin(ModuleValue(body, body.root, path), through=UNCHANGED, within=body)
        is_own = handed_on.computation is body and handed_on.path == path
        return bool(path) and handed_on.instruction.opcode == "parameter" and is_own

    def _computation(self, name: str) -> Computation:
        return self.module.computations[name]


def _is_joined(instruction: Instruction) -> bool:
    return instruction.attribute("custom_call_target") == "ConcatBitcast"


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
