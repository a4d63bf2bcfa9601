"""Finds copies between the memory of a device and its host's, memory space 5 of a TPU's or GPU's program.

    %s = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%p)    into the device, if %p lies on the host
    %d = f32[8]{0} copy-done(%s)

Of a slice of an array on the host the slice is copied, of an update of one the update; a call that starts one of them
does likewise.
"""

from dataclasses import dataclass

from ...core.traffic import HostCopyKind
from ..hlo import Computation, Instruction, Module
from ..hlo.types import HOST, ArrayType, elements_of, parse_type

_READ = frozenset({"copy", "dynamic-slice", "slice"})
_CALLS = frozenset({"async-start", "call-start"})


@dataclass(frozen=True)
class HostCopy:
    """The array that a copy moves, and its direction. op_name: its name in the program, or that of what it copies."""

    kind: HostCopyKind
    array: ArrayType
    op_name: str


def host_copy(instruction: Instruction, around: Computation, module: Module) -> HostCopy | None:
    """Returns the copy that an instruction is or starts; None for anything else."""
    if instruction.opcode in _CALLS:
        called = (module.computations[name] for name in instruction.called)
        inner = ((each, computation) for computation in called for each in computation.instructions)
        return next((found for each, within in inner if (found := host_copy(each, within, module))), None)
    opcode = instruction.opcode.removesuffix("-start")
    is_update = opcode == "dynamic-update-slice"
    if not is_update and opcode not in _READ:
        return None
    source = around.by_name.get(instruction.operands[1 if is_update else 0])
    if source is None or len(source.arrays) != 1:
        return None
    filled = _filled(instruction, opcode)
    sides = source.arrays[0].memory_space == HOST, filled.memory_space == HOST
    if sides[0] == sides[1]:
        return None
    moved = source.arrays[0] if is_update else filled
    kind: HostCopyKind = "copy-to-device" if sides[0] else "copy-to-host"
    return HostCopy(kind, moved, instruction.op_name or source.op_name)


def _filled(instruction: Instruction, opcode: str) -> ArrayType:
    """Returns the array that a copy fills: copy-start has it first, others that start have it after their operands."""
    if instruction.opcode == opcode:
        return instruction.arrays[0]
    parts = elements_of(instruction.type_text) or ()
    return parse_type(parts[0 if opcode == "copy" else 1])[0]
