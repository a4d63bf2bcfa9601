"""Prices compute on a chip, by the best source that the program has for each operation.

bytes    for what only passes over memory: what is read and written, at the measured share of the memory's bandwidth; of
         an update inside the tiles of an array, all of these tiles
cycles   the TPU compiler's own estimate, divided by the clock
bound    for a matmul whose estimate is longer than both its arithmetic at the chip's measured share of the peak and its
         memory traffic: the longer of these two
flops    for matmuls and attention kernels without an estimate: arithmetic at a measured share of the peak
nothing  for an unknown kernel: at least what it writes, and a launch
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...core.kernels import AttentionCall, KernelCost, KernelOwner
from ...core.scopes import OperationName
from ...core.traffic import ComputeKind, PassKind
from ...spec.cost_model import cost_model
from ...spec.kernel_rates import AttentionKernel, grouped_kernels
from ..hlo import Computation, Instruction, Module
from ..hlo.flow import Flow, ModuleValue
from ..hlo.opcodes import FREE, NAMES_IN_FUSION, PARTS
from ..hlo.types import HBM, HOST, ArrayType, parse_type
from .kernels import is_attention, is_matmul, is_pallas, kernel_work
from .steps import Compute, PricedBy

if TYPE_CHECKING:
    from ...target.matmul_times import MatmulTimes  # which imports NumPy: reading a program needs none

_FREE_TARGETS = frozenset({
    "AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding", "SliceBuffer",
})  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """The figures of one JAX device that prices are made from.

    peak_flops_per_second: by type of the operands. matmul_share, memory_share: the shares of the peaks that single
    large kernels reach. attention: the kernel that attention is priced with; None: at the peak. arithmetic: what a run
    keeps of the rate of the other kernels. matmuls: measured times of matmuls; None: their share of the peak counts.
    passes: the shares of the bandwidth that some kinds of passes over memory reach instead. factors: how much longer
    each kind of compute takes, by a calibration.
    """

    platform: str  # tpu, gpu
    clock_hz: float | None
    peak_flops_per_second: Mapping[str, float]
    hbm_bytes_per_second: float
    matmul_share: float = 1.0
    attention: AttentionKernel | None = None
    arithmetic: float = 1.0
    memory_share: float = 1.0
    passes: Mapping[PassKind, float] = field(default_factory=dict)
    factors: Mapping[ComputeKind, float] = field(default_factory=dict)
    matmuls: "MatmulTimes | None" = None


def price_instruction(
    instruction: Instruction,
    around: Computation,
    module: Module,
    chip: Chip,
    ops: Sequence[KernelOwner] = (),
    *,
    sends: bool = False,
) -> Compute | None:
    """Returns the compute of an instruction that is neither a collective nor a loop; None if it takes no time. ops:
    operations that know their own kernels. sends: whether chunks of a collective are sent from within it."""
    if instruction.opcode in FREE or instruction.attribute("custom_call_target") in _FREE_TARGETS:
        return None
    price = _price(instruction, around, module, chip, ops)
    if price.seconds == 0:
        return None
    kind = instruction_kind(instruction, module, ops)
    factor = chip.factors.get(kind, 1.0)
    if sends and any(map(is_matmul, _within(instruction, module))):
        factor *= cost_model().sending_matmul
    return Compute(
        name=instruction.name,
        kind=kind,
        seconds=None if price.seconds is None else price.seconds * factor,
        priced_by=price.by,
        op_name=instruction.op_name,
        estimated_seconds=None if price.estimated is None else price.estimated * factor,
        unknown=price.unknown,
    )


@dataclass(frozen=True)
class _Price:
    """The price of an instruction. seconds: its time, or the least that it takes where `by` is "nothing"; None where
    that is not known. estimated: the compiler's estimate, if the price is another. unknown: the kernel without a known
    time."""

    seconds: float | None
    by: PricedBy
    estimated: float | None = None
    unknown: str = ""


def _price(
    instruction: Instruction, around: Computation, module: Module, chip: Chip, ops: Sequence[KernelOwner]
) -> _Price:
    estimated, numbers = None, cost_model()
    if chip.clock_hz and (cycles := instruction.estimated_cycles) is not None:
        estimated = cycles / chip.clock_hz
    work = _work_of(instruction, _operand_types(instruction, around), module, ops)
    is_pass = chip.passes and not work.flops and _is_pass(instruction, around, module)
    if estimated is not None and not work.flops and not is_pass:
        return _Price(estimated, "cycles")
    traffic = _traffic(instruction, around, module) if work.num_bytes is None else _Traffic(0, work.num_bytes)
    moved = traffic.read + traffic.written
    kind = _pass_kind(instruction, around, traffic) if is_pass else None
    share = chip.passes.get(kind, chip.memory_share) if kind else chip.memory_share
    memory_seconds = moved / (chip.hbm_bytes_per_second * share)
    if chip.platform == "tpu" and not work.flops and moved <= numbers.negligible_bytes:
        return _Price(None, "nothing", unknown=work.unknown) if work.unknown else _Price(0.0, "bytes")
    peak = chip.peak_flops_per_second.get(work.dtype)
    if work.flops and peak is None and estimated is not None:
        return _Price(estimated, "cycles")
    flops_seconds = _arithmetic_seconds(work, peak, chip) if work.flops and peak else 0.0
    allowed = max(flops_seconds, memory_seconds)
    if estimated is not None and not is_pass and estimated > allowed:
        return _Price(allowed, "bound", estimated)
    if estimated is not None and not is_pass and not _is_measured(work, chip):
        return _Price(estimated, "cycles")
    seconds = max(allowed, numbers.kernel_seconds) + numbers.kernel_gap_seconds if chip.platform == "gpu" else allowed
    if work.unknown or (work.flops and peak is None):
        return _Price(seconds, "nothing", unknown=work.unknown or f"{work.dtype} arithmetic")
    return _Price(seconds, "flops" if flops_seconds > memory_seconds else "bytes")


def _is_measured(work: KernelCost, chip: Chip) -> bool:
    """Returns True for a matmul of which the chip has measured times."""
    is_matmul = work.unit == "matmul" and work.num_results > 0
    return is_matmul and chip.matmuls is not None and chip.matmuls.knows(work.dtype)


def _arithmetic_seconds(work: KernelCost, peak: float, chip: Chip) -> float:
    """Returns the time of a kernel's arithmetic: measured for matmuls of this size, else at a share of the peak."""
    if _is_measured(work, chip):
        assert chip.matmuls is not None
        return float(chip.matmuls.seconds(work.dtype, work.flops, work.num_results))
    start = cost_model().matmul_seconds if chip.platform == "tpu" and work.num_results else 0.0
    return work.flops / _rate(work, peak, chip) + start


def _rate(work: KernelCost, peak: float, chip: Chip) -> float:
    """Returns the FLOP/s that kernels of a kind reach."""
    if work.unit == "grouped":
        return peak * grouped_kernels()[work.grouped].share * chip.arithmetic
    if work.unit == "attention" and chip.attention is not None:
        return chip.attention.flops_per_second(work.attention or AttentionCall(), peak) * chip.arithmetic
    return peak * (chip.arithmetic if work.unit == "attention" else chip.matmul_share)


def _work_of(
    instruction: Instruction, operands: tuple[ArrayType, ...], module: Module, ops: Sequence[KernelOwner]
) -> KernelCost:
    """Returns the work of an instruction, of a fusion with all that it calls."""
    if instruction.opcode not in ("fusion", "call") and not _is_xla_triton(instruction):
        return kernel_work(instruction, operands, ops)
    total = KernelCost()
    for name in instruction.called:
        computation = module.computations[name]
        for inner in computation.instructions:
            found = _work_of(inner, _operand_types(inner, computation), module, ops)
            total = replace(
                total,
                flops=total.flops + found.flops,
                dtype=found.dtype if found.flops else total.dtype,
                num_results=total.num_results + found.num_results,
                unknown=total.unknown or found.unknown,
            )
    return total


def _is_xla_triton(instruction: Instruction) -> bool:
    """Returns True for a kernel that XLA generates with Triton and calls instead of fusing: its computation is
    there."""
    return bool(instruction.called) and (instruction.attribute("custom_call_target") or "").startswith("__triton")


@dataclass(frozen=True)
class _Traffic:
    """The bytes that an operation reads and writes."""

    read: int
    written: int


def _traffic(instruction: Instruction, around: Computation, module: Module) -> _Traffic:
    """Returns what an operation reads and writes. An operand that is only sliced counts as its slices, and one that is
    updated in place as the update; where that lies inside tiles, all of them are read and written."""
    if instruction.opcode == "dynamic-update-slice":
        update, tiles = _bytes_of(instruction.operands[1], around), updated_inside_tiles(instruction, around)
        return _Traffic(update + tiles, tiles or update)
    if instruction.opcode in PARTS:
        return _Traffic(instruction.num_bytes, instruction.num_bytes)
    if instruction.opcode != "fusion" or not instruction.called:
        return _Traffic(sum(_bytes_of(name, around) for name in instruction.operands), instruction.num_bytes)
    passes = fusion_passes(instruction, around, module)
    read, written = (
        sum(num_bytes for array, num_bytes in each if array.memory_space != HOST)
        for each in (passes.read, passes.written)
    )
    return _Traffic(read, written)


@dataclass(frozen=True)
class FusionPasses:
    """The arrays that a fusion reads and writes outside of itself, each with the bytes that it moves of it."""

    read: tuple[tuple[ArrayType, int], ...]
    written: tuple[tuple[ArrayType, int], ...]


def fusion_passes(instruction: Instruction, around: Computation, module: Module) -> FusionPasses:
    """Returns what a fusion reads and writes; what it only hands on, it does neither."""
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
    written = list[tuple[ArrayType, int]]()
    for array, each in zip(instruction.arrays, outputs, strict=False):
        if each.instruction.opcode == "dynamic-update-slice":  # it writes the update of an array alone
            written.append((array, _bytes_of(each.instruction.operands[1], each.computation)))
        else:
            written.append((array, each.array.num_bytes if each.array else each.instruction.num_bytes))
    return FusionPasses(read, tuple(written))


# Compute that depends on data, or on more than its operands: its time is not that of a pass over memory.
_IRREGULAR = frozenset({
    "custom-call", "gather", "reduce-window", "rng", "rng-bit-generator", "scatter", "select-and-scatter", "sort",
})  # fmt: skip
_MUCH_MORE = 8  # times as many bytes
_LEAST_UPDATED = 3  # arrays: weights and two states of an optimizer


def _is_pass(instruction: Instruction, around: Computation, module: Module) -> bool:
    """Returns True for compute that streams large arrays of the HBM through the chip, and does nothing else."""
    arrays = _large((*instruction.arrays, *_operand_types(instruction, around)))
    is_streamed = bool(arrays) and all(each.memory_space == HBM for each in arrays)
    return is_streamed and not any(each.opcode in _IRREGULAR for each in _within(instruction, module))


def _pass_kind(instruction: Instruction, around: Computation, traffic: _Traffic) -> PassKind | None:
    """Returns the kind of a pass over memory; None for one that reads and writes."""
    if updated_inside_tiles(instruction, around):
        return "tile"
    if traffic.written > _MUCH_MORE * traffic.read:
        return "write"
    if traffic.read > _MUCH_MORE * traffic.written:
        return "read"
    of_operands = {(each.dtype, each.shape) for each in _operand_types(instruction, around)}
    updated = [each for each in _large(instruction.arrays) if (each.dtype, each.shape) in of_operands]
    return "update" if len(updated) >= _LEAST_UPDATED else None


def _large(arrays: Sequence[ArrayType]) -> list[ArrayType]:
    return [each for each in arrays if each.num_bytes > cost_model().negligible_bytes]


def updated_inside_tiles(instruction: Instruction, around: Computation) -> int:
    """Returns the bytes of the tiles that an update of an array changes in part; 0 for any other instruction.

    The dimension in which a part differs from the whole is one of the two innermost ones of the layout.
    """
    if instruction.opcode != "dynamic-update-slice":
        return 0
    update = around.by_name.get(instruction.operands[1])
    if update is None or not update.arrays or not instruction.arrays:
        return 0
    tiles = instruction.arrays[0].touched_bytes(update.arrays[0].shape)
    return tiles if tiles > update.num_bytes else 0


def _read_of(parameter: Instruction, inner: Computation, flow: Flow) -> int:
    """Returns the bytes of a parameter that a fusion reads: the slices of one that is only sliced, even through a
    view."""
    read = 0
    uses = flow.uses(ModuleValue(inner, parameter), through=NAMES_IN_FUSION, within=inner)
    for use in uses:
        if use.place or use.is_result:
            return parameter.num_bytes
        if use.reader.opcode in PARTS:
            read += use.reader.num_bytes
        elif use.reader.opcode != "dynamic-update-slice":
            return parameter.num_bytes
    return read if uses else parameter.num_bytes


def instruction_kind(instruction: Instruction, module: Module, ops: Sequence[KernelOwner] = ()) -> ComputeKind:
    """Returns the kind of an instruction's compute: that of its operation, else that of the kernels that it calls."""
    if (kind := _kind_by_operation(instruction, ops)) is not None:
        return kind
    if re.search(r"splash|fmha", f"{instruction.name} {instruction.op_name}") or is_attention(instruction):
        return "attention"
    within = _within(instruction, module)
    has_matmul = any(is_matmul(each) or _kind_by_operation(each, ops) == "matmul" for each in within)
    return "matmul" if has_matmul else "other"


def _within(instruction: Instruction, module: Module) -> tuple[Instruction, ...]:
    """Returns an instruction and all that it calls."""
    called = (name for name in instruction.called if name in module.computations)
    return (instruction, *(inner for name in called for inner in module.all_within(name)))


def _kind_by_operation(instruction: Instruction, ops: Sequence[KernelOwner]) -> ComputeKind | None:
    name, is_kernel = OperationName(instruction.op_name), is_pallas(instruction)
    return next((kind for op in ops if (kind := op.compute_kind(name, is_pallas=is_kernel)) is not None), None)


def _operand_types(instruction: Instruction, around: Computation) -> tuple[ArrayType, ...]:
    found = (around.by_name.get(name) for name in instruction.operands)
    return tuple(array for each in found if each is not None for array in parse_type(each.type_text))


def _bytes_of(name: str, around: Computation) -> int:
    found = around.by_name.get(name)
    return found.num_bytes if found is not None else 0
