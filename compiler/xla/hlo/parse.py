"""The text of an HLO module -> computations of instructions. Attributes are read when they are asked for.

    %fusion.1 = bf16[8,128]{1,0} fusion(%param.0, %copy.2), kind=kLoop, calls=%fused.1, metadata={op_name="mul"}
    name        type             opcode operands            attributes

Both dialects: with and without `%`, operands with and without their types.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from .types import ArrayType, num_bytes, parse_type


class HloError(ValueError):
    """A text that is no HLO module, or one that this parser does not know; with the line, where it is one."""


_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{\s*$")
_END = re.compile(r"\}(, execution_thread=.*)?\s*$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_PARENTHESES = re.compile(r"[()]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(called_computations|branch_computations)=\{([^}]*)\}")
_MESH_VALUE = re.compile(r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))?(?= \{) \{[^}]*\}")  # commas within, and no brackets
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 2**63 - 1  # what the TPU compiler writes where it has no estimate


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line. operands: names, in order. argument: what the parentheses hold where it is no operand: of
    `constant(4)` the 4. attributes: the rest of the line."""

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

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute: `attribute("custom_call_target")` -> `AsyncCollectiveStart`."""
        found = re.search(rf"(?:^|[ ,{{]){key}=", self.attributes)
        return _value(self.attributes, found.end()) if found else None


@dataclass(frozen=True)
class Computation:
    """A list of instructions; in a scheduled module they are executed in this order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return MappingProxyType({instruction.name: instruction for instruction in self.instructions})

    @cached_property
    def root(self) -> Instruction:
        """Its result."""
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Returns the parameters in the order of the arguments."""
        found = [each for each in self.instructions if each.opcode == "parameter"]
        return tuple(sorted(found, key=lambda each: int(each.argument)))


@dataclass(frozen=True)
class Module:
    """header: the first line. tables: lines of the tables of source lines that may follow it."""

    name: str
    header: str
    tables: tuple[str, ...]
    computations: Mapping[str, Computation]
    entry: str

    @property
    def is_scheduled(self) -> bool:
        return "is_scheduled=true" in self.header

    @property
    def entry_computation(self) -> Computation:
        return self.computations[self.entry]

    def all_within(self, name: str) -> Iterator[Instruction]:
        """Returns the instructions of a computation and of all that it calls."""
        for instruction in self.computations[name].instructions:
            yield instruction
            for called in instruction.called:
                if called in self.computations:
                    yield from self.all_within(called)


def parse_module(text: str) -> Module:
    """Raises HloError for what is no module."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise HloError("the text does not begin with HloModule")
    computations = _Computations()
    tables: list[str] = []
    entry, name, body = "", "", []
    for number, line in enumerate(lines[1:], start=2):
        if name and _END.match(line):
            computations[name] = Computation(name, tuple(_instruction(text, at) for at, text in body))
            name = ""
        elif name and _INSTRUCTION.match(line):
            body.append((number, line))
        elif name and body:  # some attributes run over several lines
            body[-1] = (body[-1][0], f"{body[-1][1]}\n{line}")
        elif head := _COMPUTATION.match(line):
            name, body = head[2], []
            entry = name if head[1] else entry
        elif line:
            tables.append(line)
    if name or not entry:
        raise HloError(f"line {len(lines)}: the text ends within {name}" if name else "the text has no ENTRY")
    header = lines[0]
    return Module(header.split()[1].rstrip(","), header, tuple(tables), MappingProxyType(computations), entry)


class _Computations(dict[str, Computation]):
    def __missing__(self, name: str) -> Computation:
        raise HloError(f"the text has no computation {name}")


def _instruction(line: str, number: int) -> Instruction:
    head = _INSTRUCTION.match(line)
    opcode = _OPCODE.search(line, head.end() - 1) if head else None
    if not head or not opcode:
        raise HloError(f"line {number}: no instruction: {line.strip()[:80]}")
    # A tuple's type is in parentheses itself; its end is the first that an opcode follows.
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
    # Names alone: commas within types do not occur then.
    return tuple(part.split()[-1] for part in _COMMENT.sub("", text).split(",") if part.strip())


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
