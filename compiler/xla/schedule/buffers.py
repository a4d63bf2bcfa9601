"""Finds the arrays of a scheduled module in HBM: what writes each, what reads it, and which of them live at the peak.

An array lives from the instruction that makes it to the last that reads it, in the order of the schedule. These make
none, and name one that is there:

tuple, get-tuple-element, bitcast    and all starts and dones but for what the start makes
while                                its result is its state, and so is what each trip hands on to the next
dynamic-update-slice                 in place, as a fusion is that ends in one, or whose aliasing says so
copy, elementwise, kLoop fusion      in place of an operand of the same bytes that nothing reads any more
all-reduce                           likewise, on GPUs, and on TPUs if it is in float32: they widen other types for it
the program's results                in place of the arguments that are donated for them

Other results of the program have memory of their own from its start to its end. What such a result replaces lies there,
except for what an all-gather brings on TPUs, which is written elsewhere and moved. Except on TPUs, what ends before a
result is written may lie there. Arguments that are not donated are never overwritten. All of this is as XLA's own
figures are (bench/memory_by_text.py), which also have no memory for the whole sum within a fused reduce-scatter.

What lies in other memories (layouts with `S(1)`) takes nothing of HBM, and is followed all the same: copies lead
through it. What lies in the host's (`S(5)`) is counted by the same walk, for itself. Scalars are left out. A kernel's
own scratch memory is not seen.
"""

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..hlo import Computation, Instruction, Module
from ..hlo.flow import Flow, ModuleValue
from ..hlo.opcodes import ELEMENTWISE, IN_PLACE, NAMES
from ..hlo.types import HBM, HOST, ArrayType, elements_of, parse_type

ArraySet = frozenset[int] | tuple["ArraySet", ...]  # the arrays that a value consists of, by number
NOTHING: ArraySet = frozenset()

_ALIAS = re.compile(r"\{([\d, ]*)\}: ?\((\d+), ?\{([\d, ]*)\}")


@dataclass(frozen=True)
class Buffer:
    """An array in memory. writers, readers: instructions, in the order of the text; one that writes a part of the array
    is not a reader. loops: the names of the `while`s throughout which it lives."""

    name: str  # the instruction that made it
    array: ArrayType
    writers: tuple[Instruction, ...]
    readers: tuple[Instruction, ...]
    loops: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return _bytes_in(HBM, self.array)


@dataclass(frozen=True)
class Buffers:
    """The arrays of a program. arguments: those of the program, which are always there. others: all that it makes.
    at_peak: those of the others that live at the peak. peak_at: the instruction that runs then, after the loops around
    it. bytes_during: the bytes that live while an instruction runs, by its name."""

    arguments: tuple[Buffer, ...]
    others: tuple[Buffer, ...]
    at_peak: tuple[Buffer, ...]
    peak_at: tuple[str, ...]
    bytes_during: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.arguments, *self.at_peak))


def read_buffers(module: Module) -> Buffers:
    """Returns the buffers that a walk over a scheduled module finds, loops included."""
    walk = _Walk(module)
    peak = walk.whole()
    found = walk.buffers()
    given = tuple(found[n] for n in sorted(walk.arguments))
    always = sum(each.num_bytes for each in given)
    return Buffers(
        given,
        tuple(each for n, each in found.items() if n not in walk.arguments),
        tuple(found[n] for n in sorted(peak.live) if found[n].num_bytes),
        peak.at,
        {name: always + num_bytes for name, num_bytes in peak.during.items()},
    )


def read_host_bytes(module: Module) -> int:
    """Returns the bytes of a scheduled module at their peak in the memory of the host, arguments included."""
    walk = _Walk(module, space=HOST)
    peak = walk.whole()
    return peak.num_bytes + sum(map(walk.bytes_of, walk.arguments))


@dataclass(frozen=True)
class _Peak:
    """The worst moment of a computation. during: the bytes that live while an instruction runs, by its name."""

    num_bytes: int = 0
    live: tuple[int, ...] = ()
    at: tuple[str, ...] = ()
    during: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Made:
    """An array during the walk."""

    name: str
    array: ArrayType
    writers: list[Instruction]
    readers: list[Instruction] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)

    def copied(self) -> "_Made":
        return _Made(self.name, self.array, [*self.writers], [*self.readers], [*self.loops])


@dataclass(frozen=True)
class _Ran:
    """A computation that was walked. outside: the numbers of the arrays that it was given. touched: the writers and
    readers that it added to each. value: its result. new: the arrays of the result that it made, by number."""

    outside: tuple[int, ...]
    touched: list[tuple[tuple[Instruction, ...], tuple[Instruction, ...]]]
    peak: _Peak
    value: ArraySet
    new: dict[int, _Made]


@dataclass
class _Step:
    """The effect of an instruction on memory. names_only: it moves nothing."""

    value: ArraySet
    made: set[int] = field(default_factory=set)
    inside: _Peak = _Peak()
    names_only: bool = False


@dataclass
class _Walk:
    """A walk over a module that counts the arrays in one memory: space, 0 for HBM."""

    module: Module
    space: int = HBM
    arrays: list[_Made] = field(default_factory=list)
    same: dict[int, int] = field(default_factory=dict)  # an array -> the array whose place it takes
    known: dict[Hashable, _Ran] = field(default_factory=dict)
    arguments: frozenset[int] = frozenset()  # the program's; only its results may take their place

    @property
    def is_tpu(self) -> bool:
        return ":T(" in self.module.header  # layouts with tiles

    def whole(self) -> _Peak:
        """Walks over the whole program, and returns its peak besides its arguments."""
        entry = self.module.entry_computation
        given = tuple(self.made(each, each.type_text) for each in entry.parameters)
        self.arguments = frozenset(range(len(self.arrays)))
        peak, _ = self.run(entry, given, _donated(self.module, given))
        return peak

    def bytes_of(self, number: int) -> int:
        return _bytes_in(self.space, self.arrays[number].array)

    def made(self, instruction: Instruction, type_text: str) -> ArraySet:
        """Returns a new array for each of a type's."""
        elements = elements_of(type_text)
        if elements is not None:
            return tuple(self.made(instruction, each) for each in elements)
        (array,) = parse_type(type_text) or (ArrayType("token", ()),)
        if array.num_elements <= 1:
            return NOTHING
        self.arrays.append(_Made(instruction.name, array, [instruction]))
        return frozenset({len(self.arrays) - 1})

    def place(self, number: int) -> int:
        while number in self.same:
            number = self.same[number]
        return number

    def buffers(self) -> dict[int, Buffer]:
        """Returns the buffers found, by number; values that share memory are one buffer."""
        shared: dict[int, list[_Made]] = {}
        for number, made in enumerate(self.arrays):
            shared.setdefault(self.place(number), []).append(made)
        return {
            number: Buffer(
                self.arrays[number].name,
                self.arrays[number].array,
                tuple(w for made in several for w in made.writers),
                tuple(r for made in several for r in made.readers),
                tuple(loop for made in several for loop in made.loops),
            )
            for number, several in sorted(shared.items())
        }

    def run(
        self, computation: Computation, arguments: tuple[ArraySet, ...], results: ArraySet | None
    ) -> tuple[_Peak, ArraySet]:
        """Returns the peak of a computation besides its arguments, and its result.

        results: the places that the result goes to; None: it is new, and the caller's to count.
        """
        values: dict[str, ArraySet] = {}
        steps: list[_Step] = []
        for each in computation.instructions:
            step = self._step(each, values, arguments)
            values[each.name] = step.value
            steps.append(step)
        root = values[computation.root.name]
        own = {n for step in steps for n in step.made}
        if results is None:
            own -= set(_flat(root))
        else:
            self._put(root, results, own)
        return self._peak(computation, steps, values, own), root

    def _peak(self, computation: Computation, steps: list[_Step], values: dict[str, ArraySet], own: set[int]) -> _Peak:
        own = {n for n in own if n not in self.same}
        last: dict[int, int] = {}
        written: dict[int, int] = {}  # an array from outside -> the step that first writes into it
        for place, (each, step) in enumerate(zip(computation.instructions, steps, strict=True)):
            for n in step.made & self.same.keys():
                written.setdefault(self.place(n), place)
            if not step.names_only:
                last |= dict.fromkeys((n for name in each.operands for n in _flat(values[name])), place)
        results = set(_flat(values[computation.root.name]))
        last |= dict.fromkeys(results, len(steps))
        places = self._results(computation, steps, values, own & results, last)
        own -= self.same.keys()
        live = {n: self.bytes_of(n) for n in places}
        now, peak, during = sum(live.values()), _Peak(), dict[str, int]()
        for place, (each, step) in enumerate(zip(computation.instructions, steps, strict=True)):
            if each.opcode == "while":
                for n in live:
                    self.arrays[n].loops.append(each.name)
            free = [n for n in self._dying(each, values, last, place) if self.place(n) not in places]
            for n in sorted(step.made & own - live.keys()):
                num_bytes = self.bytes_of(n)
                until = last.get(n, place)
                alike = (m for m in free if num_bytes and self.bytes_of(m) == num_bytes)
                old = next((m for m in alike if m in live or written.get(m, len(steps)) >= until), None)
                if old is not None:
                    free.remove(old)
                    now -= live.pop(old, 0)
                elif (result := self._with_room(places, num_bytes, place, until)) is not None:
                    places[result] = (until, places[result][1])
                    continue
                if old is None or old in own:
                    live[n] = num_bytes
                    now += num_bytes
                else:
                    self.same[n] = old
            during[each.name] = now
            during |= {name: now + num_bytes for name, num_bytes in step.inside.during.items()}
            if now + step.inside.num_bytes > peak.num_bytes:
                peak = _Peak(now + step.inside.num_bytes, (*live, *step.inside.live), (each.name, *step.inside.at))
            for n in [n for n in live if last.get(n, place) <= place]:
                now -= live.pop(n)
        return replace(peak, during=during)

    def _results(
        self,
        computation: Computation,
        steps: list[_Step],
        values: dict[str, ArraySet],
        own: set[int],
        last: dict[int, int],
    ) -> dict[int, tuple[int, int]]:
        """Returns the places of the program's results that replace no argument, which are there from its start: until
        which step each is taken by something else, and from which step on it is written. What is overwritten by such a
        result lies in its place."""
        if computation.name != self.module.entry:
            return {}
        first = dict.fromkeys(own, 0)
        for place, (each, step) in reversed(list(enumerate(zip(computation.instructions, steps, strict=True)))):
            dying = self._dying(each, values, last, place)
            # GPUs put what an asynchronous collective brings nowhere else, TPUs what an all-gather brings.
            makers = {n: self.arrays[n].writers[0].opcode for n in dying}
            apart = ("-start", "all-gather") if self.is_tpu else ("-start",)
            free = [n for n in dying if not makers[n].endswith(apart)]
            for n in sorted(step.made):
                if (result := self.place(n)) not in first:
                    continue
                first[result] = place
                num_bytes = self.bytes_of(n)
                alike = (m for m in free if self.bytes_of(m) == num_bytes and self.place(m) not in first)
                if (before := next(alike, None)) is not None:
                    free.remove(before)
                    self.same[before] = result
        return {n: (-1, place) for n, place in first.items()}

    def _with_room(self, places: Mapping[int, tuple[int, int]], num_bytes: int, begin: int, until: int) -> int | None:
        """Returns the smallest place of a result in which an array can lie before the result is written. XLA's compiler
        for TPUs uses none so."""
        if self.is_tpu or not num_bytes:
            return None
        fits = [
            n for n, (taken, written) in places.items()
            if taken < begin and until < written and self.bytes_of(n) >= num_bytes
        ]  # fmt: skip
        return min(fits, key=lambda n: self.bytes_of(n), default=None)

    def _dying(self, each: Instruction, values: dict[str, ArraySet], last: dict[int, int], place: int) -> list[int]:
        """Returns the operands that it reads last if its results may overwrite them: copies, sums over devices and
        elementwise operations."""
        is_loop = each.opcode == "fusion" and each.attribute("kind") == "kLoop"
        is_elementwise = is_loop or each.opcode == "copy" or each.opcode in ELEMENTWISE
        is_sum = each.opcode == "all-reduce-start" or (each.opcode == "all-reduce" and self.is_tpu)
        is_widened = self.is_tpu and any(array.dtype != "f32" for array in each.arrays)  # sums are in float32
        if not is_elementwise and (not is_sum or is_widened):
            return []
        read = {self.place(n): n for name in each.operands for n in _flat(values[name]) if last.get(n) == place}
        return [n for place, n in read.items() if place not in self.arguments]

    def _put(self, value: ArraySet, place: ArraySet, own: set[int]) -> None:
        """Merges the results of a loop's body, or of the program, with the buffers that receive them."""
        if isinstance(value, tuple) and isinstance(place, tuple):
            for inner, outer in zip(value, place, strict=False):
                self._put(inner, outer, own)
        elif len(made := set(_flat(value)) & own) == 1 and len(there := set(_flat(place))) == 1:
            self.same[made.pop()] = there.pop()

    def _step(self, each: Instruction, values: dict[str, ArraySet], arguments: tuple[ArraySet, ...]) -> _Step:
        opcode, operands = each.opcode, [values[name] for name in each.operands]
        if opcode == "parameter":
            return _Step(arguments[int(each.argument)], names_only=True)
        if opcode == "constant":  # lies with the code
            return _Step(NOTHING, names_only=True)
        if opcode == "tuple":
            return _Step(tuple(operands), names_only=True)
        if opcode == "get-tuple-element":
            return _Step(_element(operands[0], int(each.attribute("index") or 0)), names_only=True)
        if opcode in NAMES:
            return _Step(operands[0], names_only=True)
        if opcode.endswith("-done"):
            return _Step(_done(opcode, operands[0]), names_only=True)
        if opcode in ("while", "call", "conditional"):
            return self._called(each, operands)
        value = self._started(each, operands) if opcode.endswith("-start") else self._made_by(each, operands)
        made = set(_flat(value)) - {n for operand in operands for n in _flat(operand)}
        written = set(_flat(value)) if not opcode.endswith("-start") else made
        for n in written - made:
            self.arrays[n].writers.append(each)
        for n in {n for operand in operands for n in _flat(operand)} - written:
            self.arrays[n].readers.append(each)
        return _Step(value, made)

    def _called(self, each: Instruction, operands: list[ArraySet]) -> _Step:
        if each.opcode == "while":
            body = self.module.computations[each.body]
            inside, _ = self.run(body, (operands[0],), operands[0])
            return _Step(operands[0], inside=inside)
        computations = [self.module.computations[name] for name in each.called]
        given = [tuple(operands)] if each.opcode == "call" else [(operand,) for operand in operands[1:]]
        inside, value = self._run_once(computations[0], given[0], None)
        for computation, arguments in zip(computations[1:], given[1:], strict=True):
            other, _ = self._run_once(computation, arguments, value)
            during = {**inside.during, **other.during}
            inside = replace(max(inside, other, key=lambda peak: peak.num_bytes), during=during)
        made = set(_flat(value)) - {n for operand in operands for n in _flat(operand)}
        return _Step(value, made, inside)

    def _run_once(
        self, computation: Computation, arguments: tuple[ArraySet, ...], results: ArraySet | None
    ) -> tuple[_Peak, ArraySet]:
        """Returns what `run` does. A computation that was walked with arrays of the same types, in the same places, is
        not walked again: only its results are new, and what reads and writes the arrays outside."""
        given = (*arguments, *(() if results is None else (results,)))
        outside = tuple(dict.fromkeys(n for value in given for n in _flat(value)))
        key = (computation.name, results is None, self._pattern(given, outside))
        if (known := self.known.get(key)) is None:
            num_before = [(len(self.arrays[n].writers), len(self.arrays[n].readers)) for n in outside]
            peak, value = self.run(computation, arguments, results)
            touched = [
                (tuple(self.arrays[n].writers[writers:]), tuple(self.arrays[n].readers[readers:]))
                for n, (writers, readers) in zip(outside, num_before, strict=True)
            ]
            there = {n: self.place(n) if self.place(n) in outside else n for n in _flat(value)}
            new = {n: self.arrays[n].copied() for n in there.values() if n not in outside}
            self.known[key] = _Ran(outside, touched, peak, _renamed(value, there), new)
            return peak, value
        names = dict(zip(known.outside, outside, strict=True))
        for n, (writers, readers) in zip(outside, known.touched, strict=True):
            made = self.arrays[n]
            made.writers += [each for each in writers if each not in made.writers]
            made.readers += [each for each in readers if each not in made.readers]
        for n, made in known.new.items():
            self.arrays.append(made.copied())
            names[n] = len(self.arrays) - 1
        return known.peak, _renamed(known.value, names)

    def _pattern(self, given: tuple[ArraySet, ...], outside: tuple[int, ...]) -> Hashable:
        """Returns all of the arrays that a walk depends on: their types, which of them are one, and where they lie."""
        number = {n: index for index, n in enumerate(outside)}
        places: dict[int, int] = {}
        lie = [places.setdefault(self.place(n), len(places)) for n in outside]
        kept = [(n in self.arguments, self.place(n) in self.arguments) for n in outside]
        return _renamed(given, number), tuple(self.arrays[n].array for n in outside), tuple(lie), tuple(kept)

    def _started(self, each: Instruction, operands: list[ArraySet]) -> ArraySet:
        """Returns the place of the results of a start. It is (operands, results, ...), except that an all-reduce has
        results alone, a copy has the other order, and a receive has no operand to send."""
        elements = elements_of(each.type_text)
        if each.opcode == "all-reduce-start" or elements is None:
            return self.made(each, each.type_text)
        if each.opcode == "copy-start":
            return (self.made(each, elements[0]), operands[0], *(NOTHING for _ in elements[2:]))
        first = tuple(operands) if elements[0].startswith("(") else operands[0] if operands else NOTHING
        return (first, *(self.made(each, element) for element in elements[1:]))

    def _made_by(self, each: Instruction, operands: list[ArraySet]) -> ArraySet:
        if each.opcode in IN_PLACE:
            return operands[0]
        if each.attribute("custom_call_target") == "ConcatBitcast":  # the slices lie side by side
            return frozenset(_flat(tuple(operands)))
        elements = elements_of(each.type_text)
        places = self._places(each)
        types = elements if elements is not None else (each.type_text,)
        found = tuple(
            _element_of(operands, places[index]) if index in places else self.made(each, text)
            for index, text in enumerate(types)
        )
        return found if elements is not None else found[0]

    def _places(self, each: Instruction) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Returns the results that are written in place: index -> operand and the element of it."""
        told = each.attribute("output_to_operand_aliasing")
        if told:
            return {_path(out)[0] if out.strip() else 0: (int(n), _path(at)) for out, n, at in _ALIAS.findall(told)}
        if each.opcode != "fusion":
            return {}
        inner = self.module.computations[each.called[0]]
        root = inner.root
        paths = [(place,) for place in range(len(root.operands))] if root.opcode == "tuple" else [()]
        flow, through = Flow(self.module), NAMES | IN_PLACE
        origins = [flow.origin(ModuleValue(inner, root, path), through=through, within=inner) for path in paths]
        return {
            index: (int(origin.instruction.argument), ())
            for index, origin in enumerate(origins)
            if origin.computation is inner and origin.instruction.opcode == "parameter"
        }


def _donated(module: Module, arguments: tuple[ArraySet, ...]) -> ArraySet:
    """Returns the buffers of the program's results: donated arguments, or new ones."""
    start = module.header.find("input_output_alias={")
    text = module.header[start : module.header.find("entry_computation_layout", start)] if start >= 0 else ""
    found = {_path(out): int(number) for out, number, _ in _ALIAS.findall(text)}
    if list(found) == [()]:
        return arguments[found[()]]
    return tuple(arguments[found[n,]] if (n,) in found else NOTHING for n in range(max(found, default=(-1,))[0] + 1))


def _bytes_in(space: int, array: ArrayType) -> int:
    return array.held_bytes if array.memory_space == space else 0


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _done(opcode: str, started: ArraySet) -> ArraySet:
    if opcode == "copy-done":
        return _element(started, 0)
    if opcode == "recv-done":
        return (_element(started, 1), NOTHING)
    return NOTHING if opcode == "send-done" else _element(started, 1)


def _element(value: ArraySet, index: int) -> ArraySet:
    if not isinstance(value, tuple):
        return value
    return value[index] if index < len(value) else NOTHING


def _element_of(operands: list[ArraySet], place: tuple[int, tuple[int, ...]]) -> ArraySet:
    number, path = place
    value = operands[number]
    for index in path:
        value = _element(value, index)
    return value


def _renamed(value: ArraySet, names: Mapping[int, int]) -> ArraySet:
    if isinstance(value, tuple):
        return tuple(_renamed(each, names) for each in value)
    return frozenset(names[n] for n in value)


def _flat(value: ArraySet) -> Iterator[int]:
    for each in value if isinstance(value, tuple) else sorted(value):
        if isinstance(each, int):
            yield each
        else:
            yield from _flat(each)
