"""Parses the text of an HLO module into computations of instructions. Attributes are read when they are asked for.

    %fusion.1 = bf16[8,128]{1,0} fusion(%param.0, %copy.2), kind=kLoop, calls=%fused.1, metadata={op_name="mul"}
    name        type             opcode operands            attributes

Both dialects: with and without `%`, operands with and without their types.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from .opcodes import least_operands
from .types import COMMENT, ArrayType, num_bytes, parse_type


class HloError(ValueError):
    """The text is not an HLO module, or has a form that this parser does not know. The message names the line if there
    is one."""


_MODULE = "HloModule "
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"\s*(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{\s*(?://.*)?$")
_END = re.compile(r"\s*\}(, execution_thread=.*?)?\s*(?://.*)?$")
_IGNORED = re.compile(r"\s*(?://.*)?$")  # between instructions: nothing, or a comment
_TABLE = re.compile(r"\s*(?:FileNames|FunctionNames|FileLocations|StackFrames|\d+ .*)\s*$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_PARENTHESES = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BRACKETED = re.compile(r"\[[^\[\]{}()]*\]|\{[^\[\]{}()]*\}|\([^\[\]{}()]*\)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(called_computations|branch_computations)=\{([^}]*)\}")
_MESH_VALUE = re.compile(r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))?(?= \{) \{[^}]*\}")  # commas inside, no brackets
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1  # the TPU compiler writes it where it has no estimate


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation. operands: their names, in order. argument: the text in parentheses if it is not an
    operand: the 4 of `constant(4)`. attributes: the rest of the line."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    argument: str
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """Returns the arrays of its value."""
        return parse_type(self.type_text)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of its value."""
        return num_bytes(self.type_text)

    @property
    def op_name(self) -> str:
        """Returns its origin, as JAX named it; empty if the compiler made it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int | None:
        """Returns the TPU compiler's estimate of its compute time, in clock cycles of the chip."""
        found = _CYCLES.search(self.attributes)
        cycles = int(found[1]) if found else _UNKNOWN_CYCLES
        return None if cycles == _UNKNOWN_CYCLES else cycles

    @property
    def called(self) -> tuple[str, ...]:
        """Returns the computations that it runs or applies."""
        names = [name for _, name in _CALLED.findall(self.attributes)]
        for _, several in _CALLED_LIST.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in several.split(",")]
        return tuple(names)

    @property
    def body(self) -> str:
        """Returns the computation that a `while` repeats."""
        return (self.attribute("body") or "").lstrip("%")

    @property
    def condition(self) -> str:
        """Returns the computation that says whether a `while` goes on."""
        return (self.attribute("condition") or "").lstrip("%")

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute: `attribute("custom_call_target")` -> `AsyncCollectiveStart`."""
        found = re.search(rf"(?:^|[ ,{{]){key}=", self.attributes)
        return _value(self.attributes, found.end()) if found else None


@dataclass(frozen=True)
class Computation:
    """A list of instructions. In a scheduled module they run in this order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return MappingProxyType({instruction.name: instruction for instruction in self.instructions})

    @cached_property
    def root(self) -> Instruction:
        """Returns the instruction whose value is the result."""
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])

    @cached_property
    def readers(self) -> Mapping[str, list[tuple[Instruction, int]]]:
        """Returns the instructions that read each value, with the place of the operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {}
        for each in self.instructions:
            for place, name in enumerate(each.operands):
                found.setdefault(name, []).append((each, place))
        return found

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Returns the parameters in the order of the arguments."""
        found = [each for each in self.instructions if each.opcode == "parameter"]
        return tuple(sorted(found, key=lambda each: int(each.argument)))


@dataclass(frozen=True)
class Module:
    """A program. header: its first line. tables: the lines of the tables of source lines that may follow the header."""

    name: str
    header: str
    tables: tuple[str, ...]
    computations: Mapping[str, Computation]
    entry: str

    @property
    def num_replicas(self) -> int:
        return self._count("replica_count")

    @property
    def num_partitions(self) -> int:
        return self._count("num_partitions")

    @property
    def num_devices(self) -> int:
        """Returns the number of devices that run the program."""
        return self.num_replicas * self.num_partitions

    def _count(self, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", self.header)
        return int(found[1]) if found else 1

    @property
    def is_scheduled(self) -> bool:
        return "is_scheduled=true" in self.header

    @property
    def entry_computation(self) -> Computation:
        return self.computations[self.entry]

    @cached_property
    def callers(self) -> Mapping[str, list[tuple[Computation, Instruction]]]:
        """Returns the instructions that call each computation, with their own."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for each in computation.instructions:
                for name in each.called:
                    found.setdefault(name, []).append((computation, each))
        return found

    def all_within(self, name: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation and of all that it calls, each computation once."""
        return (each for computation in self.computations_within(name) for each in computation.instructions)

    def computations_within(self, name: str) -> Iterator[Computation]:
        """Yields a computation and all that it calls, each once."""
        seen, waiting = {name}, [name]
        while waiting:
            yield (computation := self.computations[waiting.pop()])
            for instruction in computation.instructions:
                called = [each for each in instruction.called if each in self.computations and each not in seen]
                seen.update(called)
                waiting += called


def split_modules(text: str) -> tuple[str, ...]:
    """Returns the text of each module that a text has, one after the other; the text itself where it has none."""
    starts = [match.start() for match in re.finditer(rf"^[ \t]*{_MODULE}", text, re.MULTILINE)][1:]
    return tuple(text[start:end] for start, end in zip((0, *starts), (*starts, len(text)), strict=True))


def module_name(text: str) -> str:
    """Returns the name in the header of a module's text; empty if it has none."""
    found = re.search(rf"^\s*{_MODULE}([^\s,]+)", text, re.MULTILINE)
    return found[1] if found else ""


def parse_module(text: str) -> Module:
    """Returns the module that a text holds. Raises HloError for a text that is not one module, and for a line that is
    neither an instruction nor a part of one."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), start=1):
        reader.read(number, line)
    return reader.module()


@dataclass
class _Reader:
    """Reads a text line by line. name: the name of the open computation. body: its instructions, each with the number
    of its first line; the last one is open until its brackets close."""

    header: str = ""
    entry: str = ""
    name: str = ""
    number: int = 0
    body: list[tuple[int, list[str]]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    computations: "_Computations" = field(default_factory=lambda: _Computations())
    is_open: bool = False
    depth: int = 0
    is_in_string: bool = False

    def read(self, number: int, line: str) -> None:
        self.number = number
        if self.is_open:
            self.body[-1][1].append(line)
            self._count(line)
        elif _IGNORED.match(line):
            return
        elif not self.header:
            if not line.lstrip().startswith(_MODULE):
                raise HloError("the text does not begin with HloModule")
            self.header = line.strip()
        elif self.name:
            if _END.match(line):
                found = tuple(_instruction("\n".join(lines), at) for at, lines in self.body)
                self.computations[self.name] = _checked(Computation(self.name, found))
                self.name = ""
            elif _INSTRUCTION.match(line):
                self.body.append((self.number, [line]))
                self._count(line)
            else:
                raise self._error(f"this is not read: {line.strip()[:80]}")
        elif head := _COMPUTATION.match(line):
            if head[2] in self.computations:
                raise self._error(f"there is a computation {head[2]} already")
            self.name, self.body = head[2], []
            if head[1] and self.entry:
                raise self._error("there is an ENTRY already")
            self.entry = self.name if head[1] else self.entry
        elif _TABLE.match(line):
            self.tables.append(line)
        else:
            is_module = line.lstrip().startswith(_MODULE)
            raise self._error("a second module begins here" if is_module else f"this is not read: {line.strip()[:80]}")

    def module(self) -> Module:
        """Returns what was read."""
        if not self.header:
            raise HloError("the text does not begin with HloModule")
        if self.name:
            raise self._error(f"the text ends within {self.name}")
        if not self.entry:
            raise HloError("the text has no ENTRY")
        return Module(
            module_name(self.header), self.header, tuple(self.tables), MappingProxyType(self.computations), self.entry
        )

    def _count(self, line: str) -> None:
        """Counts brackets, so that an instruction is open until all of its own are closed: attributes and constants run
        over several lines."""
        text = f'"{line}' if self.is_in_string else line
        if '"' in text:
            text = _STRING.sub("", text)
        self.is_in_string = '"' in text
        text = text.partition('"')[0]
        self.depth += sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
        self.is_open = self.is_in_string or self.depth > 0
        if self.depth < 0:
            raise self._error(f"a bracket closes that is not open: {line.strip()[:80]}")

    def _error(self, what: str) -> HloError:
        return HloError(f"line {self.number}: {what}")


def _checked(computation: Computation) -> Computation:
    """Returns a computation whose instructions have names of their own and read what the computation has."""
    if not computation.instructions:
        raise HloError(f"the computation {computation.name} has no instructions")
    names = computation.by_name
    if len(names) < len(computation.instructions):
        count = Counter(each.name for each in computation.instructions)
        raise HloError(f"{computation.name} has several instructions {next(n for n in count if count[n] > 1)}")
    for each in computation.instructions:
        if missing := next((name for name in each.operands if name not in names), None):
            raise HloError(f"{each.name} in {computation.name} reads {missing}, which is not there")
        if len(each.operands) < (least := least_operands(each.opcode)):
            found = f"{len(each.operands)} of {least} operands"
            raise HloError(f"{each.name} in {computation.name}: {each.opcode} has {found}")
    numbers = sorted(each.argument for each in computation.instructions if each.opcode == "parameter")
    if numbers != sorted(map(str, range(len(numbers)))):
        raise HloError(f"the parameters of {computation.name} are not numbered from 0 on: {', '.join(numbers)}")
    return computation


class _Computations(dict[str, Computation]):
    def __missing__(self, name: str) -> Computation:
        raise HloError(f"the text has no computation {name}")


def _instruction(line: str, number: int) -> Instruction:
    head = _INSTRUCTION.match(line)
    opcode = _OPCODE.search(line, head.end() - 1) if head else None
    if not head or not opcode:
        raise HloError(f"line {number}: no instruction: {line.strip()[:80]}")
    # A tuple's type is itself in parentheses; it ends at the first one that an opcode follows.
    type_text = line[head.end() : opcode.start()]
    end = _closing(line, opcode.end())
    if end is None:
        raise HloError(f"line {number}: no end of operands: {line.strip()[:80]}")
    inner = line[opcode.end() : end]
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        type_text=type_text,
        operands=() if opcode[1] in ("constant", "parameter", "iota") else _operands(inner),
        argument=inner if opcode[1] in ("constant", "parameter") else "",
        attributes=line[end + 1 :].removeprefix(", "),
        is_root=bool(head[1]),
    )


def _operands(text: str) -> tuple[str, ...]:
    if "%" in text:
        return tuple(_OPERAND.findall(text))
    text = COMMENT.sub("", text)
    while "[" in text or "{" in text or "(" in text:  # types, with commas of their own
        text, before = _BRACKETED.sub("", text), text
        if text == before:
            break
    return tuple(part.split()[-1] for part in text.split(",") if part.strip())


def _closing(line: str, start: int) -> int | None:
    """Returns the index of the parenthesis that closes the one before `start`."""
    end = line.find(")", start)
    if end < 0 or line.find("(", start, end) < 0:
        return end if end >= 0 else None
    depth = 1
    for match in _PARENTHESES.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return None


def _value(text: str, start: int) -> str:
    """Returns the value of an attribute: up to the comma or space after it, with brackets and quotes whole."""
    if mesh := _MESH_VALUE.match(text, start):
        return mesh[0]
    if text.startswith('"', start):
        return text[start + 1 : text.index('"', start + 1)]
    depth = 0
    for place in range(start, len(text)):
        character = text[place]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return text[start:place]
        elif character == "," and depth == 0:
            return text[start:place]
    return text[start:]
