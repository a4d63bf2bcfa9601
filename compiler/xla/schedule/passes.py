"""The bytes that compute moves through memory, and the kinds of passes that do nothing else.

A slice is read and an update written, and not the array that they are a part of. Where a part lies inside tiles, as
one layer of f32[16,512,7168]{2,0,1:T(8,128)} does, all of these tiles are touched: those of a slice are read, those of
an update read and written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.traffic import PassKind
from ...spec.cost_model import cost_model
from ..hlo import Computation, HloError, Instruction, Module
from ..hlo.flow import Flow, ModuleValue
from ..hlo.opcodes import NAMES_IN_FUSION, PARTS
from ..hlo.types import HBM, HOST, ArrayType, bits_of, parse_type


@dataclass(frozen=True)
class HbmTraffic:
    """The bytes that an operation reads and writes. inside: of tiles that it changes in part, for which they are read
    and written besides."""

    read: int
    written: int
    inside: int = 0

    @property
    def num_bytes(self) -> int:
        return self.read + self.written + 2 * self.inside


@dataclass(frozen=True)
class PartOfTiles:
    """A part of an array that lies inside tiles: its own bytes, those of the tiles, and the type of the whole."""

    kind: Literal["slice", "update"]
    num_bytes: int
    tile_bytes: int
    whole: str


def hbm_traffic(instruction: Instruction, around: Computation, module: Module) -> HbmTraffic:
    """Returns what an operation reads and writes."""
    if instruction.opcode == "dynamic-update-slice":
        update, inside = result_bytes(instruction.operands[1], around), _update_inside(instruction, around)
        return HbmTraffic(update, 0, inside) if inside else HbmTraffic(update, update)
    if instruction.opcode in PARTS:
        return HbmTraffic(_touched(instruction, around), instruction.num_bytes)
    if instruction.opcode != "fusion" or not instruction.called:
        return HbmTraffic(sum(result_bytes(name, around) for name in instruction.operands), instruction.num_bytes)
    passes = fusion_passes(instruction, around, module)
    read, written = (
        sum(num_bytes for array, num_bytes in each if array.memory_space != HOST)
        for each in (passes.read, passes.written)
    )
    return HbmTraffic(read, written, passes.inside)


@dataclass(frozen=True)
class FusionPasses:
    """The arrays that a fusion reads and writes outside of itself, each with the bytes that it moves of it. inside: of
    tiles of the device's memory that it changes in part."""

    read: tuple[tuple[ArrayType, int], ...]
    written: tuple[tuple[ArrayType, int], ...]
    inside: int


def fusion_passes(instruction: Instruction, around: Computation, module: Module) -> FusionPasses:
    """Returns what a fusion reads and writes. Raises HloError for one that names no computation."""
    if not instruction.called:
        raise HloError(f"{instruction.name}: a fusion names the computation that it runs, by calls=")
    inner = module.computations[instruction.called[0]]
    flow = Flow(module)
    operands = (around.by_name[name].arrays for name in instruction.operands)
    read = tuple(
        (arrays[0], _read_of(parameter, inner, flow))
        for arrays, parameter in zip(operands, inner.parameters, strict=False)
        if len(arrays) == 1
    )
    root = inner.root
    paths = [(place,) for place in range(len(root.operands))] if root.opcode == "tuple" else [()]
    outputs = (flow.origin(ModuleValue(inner, root, path), through=NAMES_IN_FUSION, within=inner) for path in paths)
    written, inside = list[tuple[ArrayType, int]](), 0
    for array, each in zip(instruction.arrays, outputs, strict=False):
        if each.instruction.opcode == "dynamic-update-slice":  # it writes the update of an array alone
            tiles = 0 if array.memory_space == HOST else _update_inside(each.instruction, each.computation)
            inside += tiles
            written.append((array, 0 if tiles else result_bytes(each.instruction.operands[1], each.computation)))
        else:
            written.append((array, each.array.num_bytes if each.array else each.instruction.num_bytes))
    return FusionPasses(read, tuple(written), inside)


# Compute that depends on data, or on more than its operands: its time is not that of a pass over memory.
_IRREGULAR = frozenset({
    "custom-call", "gather", "reduce-window", "rng", "rng-bit-generator", "scatter", "select-and-scatter", "sort",
})  # fmt: skip
_MUCH_MORE = 8  # times as many bytes
_LEAST_UPDATED = 3  # arrays: weights and two states of an optimizer
_PACKED_BITS = 16  # two elements or more share a place of a register, which a transposition takes apart


def is_pass(instruction: Instruction, around: Computation, module: Module) -> bool:
    """Returns True for compute that streams large arrays of the HBM through the chip, and does little else: what vector
    memory holds is a small part."""
    arrays = _large((*instruction.arrays, *operand_types(instruction, around)))
    streamed = sum(each.num_bytes for each in arrays if each.memory_space == HBM)
    elsewhere = sum(each.num_bytes for each in arrays if each.memory_space != HBM)
    is_streamed = streamed > _MUCH_MORE * elsewhere
    return is_streamed and not any(each.opcode in _IRREGULAR for each in within(instruction, module))


def pass_kind(instruction: Instruction, around: Computation, module: Module, traffic: HbmTraffic) -> PassKind | None:
    """Returns the kind of a pass over memory; None for one that reads and writes."""
    if kind := _kind_of_copy(instruction, around, module):
        return kind
    if traffic.written > _MUCH_MORE * traffic.read:
        return "write"
    if traffic.read > _MUCH_MORE * traffic.written:
        return "read"
    of_operands = {(each.dtype, each.shape) for each in operand_types(instruction, around)}
    updated = [each for each in _large(instruction.arrays) if (each.dtype, each.shape) in of_operands]
    return "update" if len(updated) >= _LEAST_UPDATED else None


def _kind_of_copy(instruction: Instruction, around: Computation, module: Module) -> PassKind | None:
    """Returns the kind of a copy into tiles of another shape, or of one that makes columns of rows; None for all
    else."""
    if instruction.opcode == "fusion" and instruction.called:
        around = module.computations[instruction.called[0]]
        instruction = around.root
    source = next(iter(operand_types(instruction, around)), None)
    if instruction.opcode != "copy" or source is None or not source.tile or not instruction.arrays[0].tile:
        return None
    before, after = source.tile, instruction.arrays[0].tile
    if sorted(before) != sorted(after):
        return "retile"
    turns = before.index(max(before)) != after.index(max(after))
    return "transpose" if turns and bits_of(source.dtype) <= _PACKED_BITS else None


def _large(arrays: Sequence[ArrayType]) -> list[ArrayType]:
    return [each for each in arrays if each.num_bytes > cost_model().negligible_bytes]


def parts_of_tiles(instruction: Instruction, around: Computation, module: Module) -> Iterator[PartOfTiles]:
    """Yields the slices and updates at a place that the program computes which lie inside tiles, also in a fusion."""
    if instruction.opcode == "fusion":
        for inner in (module.computations[name] for name in instruction.called):
            for each in inner.instructions:
                yield from parts_of_tiles(each, inner, module)
    elif instruction.opcode == "dynamic-update-slice" and (tiles := _update_inside(instruction, around)):
        yield PartOfTiles("update", result_bytes(instruction.operands[1], around), tiles, instruction.type_text)
    elif instruction.opcode == "dynamic-slice" and (tiles := _touched(instruction, around)) > instruction.num_bytes:
        yield PartOfTiles("slice", instruction.num_bytes, tiles, around.by_name[instruction.operands[0]].type_text)


def _update_inside(instruction: Instruction, around: Computation) -> int:
    """Returns the bytes of the tiles that an update of an array changes in part; 0 if it changes whole ones.

    The dimension in which a part differs from the whole is one of the two innermost ones of the layout.
    """
    update = around.by_name.get(instruction.operands[1])
    if update is None or not update.arrays or not instruction.arrays:
        return 0
    tiles = instruction.arrays[0].touched_bytes(update.arrays[0].shape)
    return tiles if tiles > update.num_bytes else 0


def _touched(part: Instruction, around: Computation) -> int:
    """Returns the bytes of the tiles that a slice is read from; of rows that data chooses, their own."""
    whole = next(iter(operand_types(part, around)), None)
    if part.opcode == "gather" or whole is None or not part.arrays:
        return part.num_bytes
    return max(part.num_bytes, whole.touched_bytes(part.arrays[0].shape))


# Of a copy within a fusion only what is read of it is made: tpu7x with NATIVE_EMISSION copies stacks to other tiles so.
_VIEWS = NAMES_IN_FUSION | {"copy"}


def _read_of(parameter: Instruction, inner: Computation, flow: Flow) -> int:
    """Returns the bytes of a parameter that a fusion reads: the slices of one that is only sliced, even through a
    view."""
    read = 0
    uses = flow.uses(ModuleValue(inner, parameter), through=_VIEWS, within=inner)
    for use in uses:
        if use.place or use.is_result:
            return parameter.num_bytes
        if use.reader.opcode in PARTS:
            read += _touched(use.reader, inner)
        elif use.reader.opcode != "dynamic-update-slice":
            return parameter.num_bytes
    return min(read, parameter.num_bytes) if uses else parameter.num_bytes


def within(instruction: Instruction, module: Module) -> tuple[Instruction, ...]:
    """Returns an instruction and all that it calls."""
    called = (name for name in instruction.called if name in module.computations)
    return (instruction, *(inner for name in called for inner in module.all_within(name)))


def operand_types(instruction: Instruction, around: Computation) -> tuple[ArrayType, ...]:
    """Returns the types of an instruction's operands, those of a tuple each."""
    found = (around.by_name.get(name) for name in instruction.operands)
    return tuple(array for each in found if each is not None for array in parse_type(each.type_text))


def result_bytes(name: str, around: Computation) -> int:
    """Returns the bytes of an instruction's result."""
    found = around.by_name.get(name)
    return found.num_bytes if found is not None else 0
