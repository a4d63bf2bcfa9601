"""Reads the peak memory of a compiled step, by class of arrays.

The class follows from JAX's names for the instructions that write and read an array; the first match applies:

gathered_weights    an all-gather of a weight writes it
working_parameters  the cast of parameters to the compute type writes it
gradients           the reduction of a weight's gradient, or the update, reads it, and something before the update wrote
                    it; or it is added to one of these
activations         the forward pass writes it, and the backward pass reads it
temporaries         all others

The estimate has the same classes (estimate/liveness.py). Copies and transposes by the compiler have no name; they take
the names of their source and their use.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..core.known import Unknown
from ..core.scopes import OperationName, Pass
from ..estimate.liveness import MemoryClass
from ..parallel.registry import OPERATIONS
from ..target.target import TargetPlan
from ..xla.aot import ProgramMemory
from ..xla.hlo import Instruction, Module
from ..xla.schedule.buffers import Buffer, Buffers, read_buffers
from ..xla.schedule.prices import instruction_kind

# Primitives that only move, cast or sum. The compiler's own instructions have no name.
MOVES = {"", "add", "add_any", "convert_element_type", "dynamic_slice", "dynamic_update_slice", "psum",
         "reduce_scatter", "reshape", "squeeze", "transpose", "while"}  # fmt: skip

HELD: tuple[MemoryClass, ...] = (
    "gathered_weights",
    "working_parameters",
    "gradients",
)  # reported if held through a loop
MOST_UNNAMED = 64  # the search for names stops after so many unnamed arrays in a row, so that time stays linear


@dataclass(frozen=True)
class HeldArray:
    """A weight in use or a gradient that lives throughout a loop. shape: its shape on one device. names: names of the
    instructions that write and read it. over_microbatches: the loops it lives in that contain other loops. over_others:
    the loops it lives in that do not touch it."""

    name: str  # the instruction that makes it
    kind: MemoryClass
    num_bytes: int
    shape: tuple[int, ...]
    names: tuple[OperationName, ...]
    over_microbatches: tuple[str, ...]
    over_others: tuple[str, ...]


@dataclass(frozen=True)
class PeakMemory:
    """Bytes on a device at the peak. by_class: bytes of each class, besides the arguments. at: the instruction that
    runs at the peak. held: weights and gradients that live throughout a loop. bytes_during: the live bytes while an
    instruction runs, by its name."""

    num_bytes: int
    by_class: Mapping[MemoryClass, int]
    at: str
    held: tuple[HeldArray, ...]
    bytes_during: Mapping[str, int]


def read_peak(module: Module) -> PeakMemory:
    """Returns the peak of a scheduled program. Raises HloError if it calls a computation that it does not have."""
    buffers = read_buffers(module)
    classes = classify(buffers, module)
    by_class = Counter[MemoryClass]()
    for each in buffers.at_peak:
        by_class[classes[id(each)]] += each.num_bytes
    held = _held(buffers.others, classes, module)
    return PeakMemory(
        buffers.peak_bytes, dict(by_class), " > ".join(buffers.peak_at), tuple(held), buffers.bytes_during
    )


def needed_bytes(memory: ProgramMemory | None, peak: PeakMemory | Unknown, target: TargetPlan) -> int | None:
    """Returns the bytes that a program needs on a device, as its compiler counts them if that is per device, or else as
    its text shows; None if neither is known."""
    counted = memory.needed_bytes(target.platform) if memory else None
    if counted is not None or isinstance(peak, Unknown):
        return counted
    return peak.num_bytes


def _held(buffers: Sequence[Buffer], classes: Mapping[int, MemoryClass], module: Module) -> Iterator[HeldArray]:
    loops = {each.name: each for c in module.computations.values() for each in c.instructions if each.opcode == "while"}
    inside = {name: list(module.all_within(loops[name].body)) for name in loops}
    nested = {name for name, within in inside.items() if any(each.opcode == "while" for each in within)}
    touched = {name: {id(each) for each in within} for name, within in inside.items()}
    for each in buffers:
        if classes[id(each)] not in HELD or not each.num_bytes or not each.loops:
            continue
        used = {id(instruction) for instruction in (*each.writers, *each.readers)}
        over = [name for name in each.loops if name in nested]
        idle = [name for name in each.loops if name not in nested and not used & touched[name]]
        names = tuple(OperationName(i.op_name) for i in (*each.writers, *each.readers) if i.op_name)
        yield HeldArray(each.name, classes[id(each)], each.num_bytes, each.array.shape, names, tuple(over), tuple(idle))


def classify(buffers: Buffers, module: Module) -> dict[int, MemoryClass]:
    """Returns the class of each array that the program makes, by its `id`."""
    names = _Names(buffers.others, module)
    found: dict[int, MemoryClass] = {
        id(each): _class_of(names.written(each), names.read(each)) for each in buffers.others
    }
    # An array that is added to a gradient is the gradient of one microbatch.
    waiting = [each for each in buffers.others if found[id(each)] == "gradients"]
    while waiting:
        total = waiting.pop()
        for each in names.parts_of(total):
            if found[id(each)] in ("temporaries", "activations"):
                found[id(each)] = "gradients"
                waiting.append(each)
    return found


def _class_of(written: Sequence[OperationName], read: Sequence[OperationName]) -> MemoryClass:
    before, after = _passes(written), _passes(read)
    if any(name.gathers_weight for name in written):
        return "gathered_weights"
    if any(name.is_cast_of_parameters for name in written):
        return "working_parameters"
    if before - {"update"} and ("update" in after or any(name.reduces_gradient for name in (*written, *read))):
        return "gradients"
    if "forward" in before and after & {"backward", "recomputed"}:
        return "activations"
    return "temporaries"


def _passes(names: Iterable[OperationName]) -> set[Pass]:
    return {name.in_pass for name in names}


@dataclass
class _Names:
    """Names of the instructions that write and read an array; a copy is replaced by the names of its source or its
    use."""

    buffers: Sequence[Buffer]
    module: Module
    _read_by: dict[int, list[Buffer]] = field(init=False)
    _written_by: dict[int, list[Buffer]] = field(init=False)

    def __post_init__(self) -> None:
        self._read_by, self._written_by = defaultdict(list), defaultdict(list)
        for each in self.buffers:
            for reader in each.readers:
                self._read_by[id(reader)].append(each)
            for writer in each.writers:
                self._written_by[id(writer)].append(each)

    def written(self, buffer: Buffer) -> list[OperationName]:
        return self._names(buffer, "writers", self._read_by)

    def read(self, buffer: Buffer) -> list[OperationName]:
        return self._names(buffer, "readers", self._written_by)

    def parts_of(self, gradient: Buffer) -> list[Buffer]:
        """Returns the arrays read to write a gradient that are gradients too: arrays of its shape, or parts that are
        moved or added."""
        return [
            each
            for writer in gradient.writers
            if instruction_kind(writer, self.module, OPERATIONS) == "other"
            for each in self._read_by[id(writer)]
            if _sizes(each) == _sizes(gradient)
            or ((OperationName(writer.op_name).last in MOVES) and _is_part(each, gradient))
        ]

    def _names(
        self, buffer: Buffer, end: Literal["writers", "readers"], others: Mapping[int, list[Buffer]]
    ) -> list[OperationName]:
        seen, waiting, names = {id(buffer)}, [buffer], list[OperationName]()
        while waiting and len(seen) < MOST_UNNAMED:
            ends: tuple[Instruction, ...] = getattr(waiting.pop(), end)
            for instruction in ends:
                if name := instruction.op_name:
                    names.append(OperationName(name))
                    continue
                for each in others.get(id(instruction), ())[:MOST_UNNAMED]:
                    if id(each) not in seen and _is_part(each, buffer):
                        seen.add(id(each))
                        waiting.append(each)
        return names


def _is_part(a: Buffer, b: Buffer) -> bool:
    """Returns True if the sizes are the same in any order, except for those of a shard, a layer or a microbatch."""
    left, right = Counter(_sizes(a)), Counter(_sizes(b))
    less, more = sorted(((left - right).total(), (right - left).total()))
    return less <= 1 and more <= 2


def _sizes(buffer: Buffer) -> list[int]:
    return sorted(size for size in buffer.array.shape if size != 1)
