"""Finds copies between the memory of a device and its host's, memory space 5 of a TPU's or GPU's program.

    %s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%p)    into the device, if %p lies on the host
    %d = f32[8]{0} copy-done(%s)

Of a slice of an array on the host the slice is copied, of an update of one the update. A fusion copies what it reads
there and what it writes there. A call that starts copies makes all that its computation makes, in each trip of a loop.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...core.traffic import HOST_COPIES, HostCopyKind
from ..hlo import Computation, HloError, Instruction, Module
from ..hlo.flow import num_trips
from ..hlo.types import HOST, ArrayType, bits_of, elements_of, parse_type
from .passes import fusion_passes

_READ = frozenset({"copy", "dynamic-slice", "slice"})
_CALLS = frozenset({"async-start", "call", "call-start"})


@dataclass(frozen=True)
class HostCopy:
    """The bytes that an instruction copies one way. sizes: the elements of each array. op_name: the name of the copy in
    the program, or of what it copies. is_certain: False if a loop does it so often as the program does not say."""

    kind: HostCopyKind
    num_bytes: int
    sizes: tuple[int, ...]
    dtype: str
    op_name: str
    is_certain: bool = True


def host_copies(instruction: Instruction, around: Computation, module: Module) -> tuple[HostCopy, ...]:
    """Returns what an instruction copies, or starts to copy: all of one way together, into the device first. Raises
    HloError for a form that is not known."""
    found = list(_each(instruction, around, module))
    return tuple(_joined(alike) for kind in HOST_COPIES if (alike := [each for each in found if each.kind == kind]))


def _joined(copies: list[HostCopy]) -> HostCopy:
    largest = max(copies, key=lambda each: each.num_bytes)
    return replace(
        largest,
        num_bytes=sum(each.num_bytes for each in copies),
        sizes=tuple(size for each in copies for size in each.sizes),
        is_certain=all(each.is_certain for each in copies),
    )


def _each(instruction: Instruction, around: Computation, module: Module) -> Iterator[HostCopy]:
    if instruction.opcode == "fusion":
        passes = fusion_passes(instruction, around, module)
        for kind, moved in zip(HOST_COPIES, (passes.read, passes.written), strict=True):
            for array, num_bytes in moved:
                if array.memory_space == HOST and num_bytes:
                    sizes = (num_bytes * 8 // bits_of(array.dtype),)
                    yield HostCopy(kind, num_bytes, sizes, array.dtype, instruction.op_name)
    elif instruction.opcode == "while":
        trips = num_trips(instruction, around, module)
        for each in _within(instruction.body, module):
            times = 1 if trips is None else trips
            is_certain = each.is_certain and trips is not None
            yield replace(each, num_bytes=times * each.num_bytes, sizes=times * each.sizes, is_certain=is_certain)
    elif instruction.opcode in _CALLS:
        for name in instruction.called:
            yield from _within(name, module)
    elif (copied := _whole(instruction, around)) is not None:
        yield copied


def _within(name: str, module: Module) -> Iterator[HostCopy]:
    computation = module.computations[name]
    return (each for inner in computation.instructions for each in _each(inner, computation, module))


def _whole(instruction: Instruction, around: Computation) -> HostCopy | None:
    """Returns the copy of an array, or of a part of one, that is an instruction alone; None for anything else."""
    opcode = instruction.opcode.removesuffix("-start")
    is_update = opcode == "dynamic-update-slice"
    if not is_update and opcode not in _READ:
        return None
    source = around.by_name[instruction.operands[1 if is_update else 0]]
    if len(source.arrays) != 1:
        return None
    filled = _filled(instruction, opcode)
    sides = source.arrays[0].memory_space == HOST, filled.memory_space == HOST
    if sides[0] == sides[1]:
        return None
    moved = source.arrays[0] if is_update else filled
    kind: HostCopyKind = "copy-to-device" if sides[0] else "copy-to-host"
    name = instruction.op_name or source.op_name
    return HostCopy(kind, moved.num_bytes, (moved.num_elements,), moved.dtype, name)


def _filled(instruction: Instruction, opcode: str) -> ArrayType:
    """Returns the array that a copy fills: copy-start has it first, others that start have it after their operands."""
    if instruction.opcode == opcode:
        arrays = instruction.arrays
    else:
        place, parts = 0 if opcode == "copy" else 1, elements_of(instruction.type_text) or ()
        arrays = parse_type(parts[place]) if place < len(parts) else ()
    if len(arrays) != 1:
        raise HloError(f"{instruction.name}: {instruction.opcode} has no result in its type {instruction.type_text}")
    return arrays[0]
