"""Prices compute on a chip, by the best source that the program has for each operation.

bytes    for what only passes over memory: what is read and written, at the measured share of the memory's bandwidth
         (passes.py)
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

from ...core.kernels import KernelCost, KernelOwner
from ...core.scopes import OperationName
from ...core.traffic import ComputeKind, PassKind
from ...spec.cost_model import cost_model
from ...spec.kernel_rates import AttentionKernel, kernel_flops_per_second
from ..hlo import Computation, Instruction, Module
from ..hlo.opcodes import FREE
from ..hlo.types import ArrayType
from .kernels import is_attention, is_matmul, is_pallas, kernel_work
from .passes import HbmTraffic, PartOfTiles, hbm_traffic, is_pass, operand_types, pass_kind, within
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
    large kernels reach; matmul_shares: those of types that reach another one. attention: the kernel that attention is
    priced with; None: at the peak. kernels_share: what a lower power limit leaves of the rate of attention and grouped
    matmuls. matmuls: measured times of matmuls; None: their share of the peak counts. passes: the shares of the
    bandwidth that some kinds of passes over memory reach instead. factors: how much longer each kind of compute takes,
    by a calibration.
    """

    platform: str  # tpu, gpu
    clock_hz: float | None
    peak_flops_per_second: Mapping[str, float]
    hbm_bytes_per_second: float
    matmul_share: float = 1.0
    matmul_shares: Mapping[str, float] = field(default_factory=dict)
    attention: AttentionKernel | None = None
    kernels_share: float = 1.0
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
    work = _work_of(instruction, operand_types(instruction, around), module, ops)
    price = _price(instruction, around, module, chip, work)
    if price.seconds == 0:
        return None
    kind = instruction_kind(instruction, module, ops)
    factor = chip.factors.get(kind, 1.0)
    if sends and any(map(is_matmul, within(instruction, module))):
        factor *= cost_model().sending_matmul
    return Compute(
        name=instruction.name,
        kind=kind,
        seconds=None if price.seconds is None else price.seconds * factor,
        priced_by=price.by,
        op_name=instruction.op_name,
        estimated_seconds=None if price.estimated is None else price.estimated * factor,
        unknown=price.unknown,
        dtype=work.dtype if work.flops else "",
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


def _price(instruction: Instruction, around: Computation, module: Module, chip: Chip, work: KernelCost) -> _Price:
    estimated, numbers = None, cost_model()
    if chip.clock_hz and (cycles := instruction.estimated_cycles) is not None:
        estimated = cycles / chip.clock_hz
    only_moves = bool(chip.passes) and not work.flops and is_pass(instruction, around, module)
    if estimated is not None and not work.flops and not only_moves:
        return _Price(estimated, "cycles")
    traffic = hbm_traffic(instruction, around, module) if work.num_bytes is None else HbmTraffic(0, work.num_bytes)
    if chip.platform == "tpu" and not work.flops and traffic.num_bytes <= numbers.negligible_bytes:
        return _Price(None, "nothing", unknown=work.unknown) if work.unknown else _Price(0.0, "bytes")
    kind = pass_kind(instruction, around, module, traffic) if only_moves else None
    memory_seconds = _memory_seconds(traffic, chip, kind)
    if only_moves:
        memory_seconds = max(memory_seconds, numbers.pass_seconds + traffic.num_bytes / chip.hbm_bytes_per_second)
    peak = chip.peak_flops_per_second.get(work.dtype)
    if work.flops and peak is None and estimated is not None:
        return _Price(estimated, "cycles")
    flops_seconds = _arithmetic_seconds(work, peak, chip) if work.flops and peak else 0.0
    allowed = max(flops_seconds, memory_seconds)
    if estimated is not None and not only_moves and estimated > allowed:
        return _Price(allowed, "bound", estimated)
    if estimated is not None and not only_moves and not _is_measured(work, chip):
        return _Price(estimated, "cycles")
    seconds = max(allowed, numbers.kernel_seconds) + numbers.kernel_gap_seconds if chip.platform == "gpu" else allowed
    if work.unknown or (work.flops and peak is None):
        return _Price(seconds, "nothing", unknown=work.unknown or f"{work.dtype} arithmetic")
    return _Price(seconds, "flops" if flops_seconds > memory_seconds else "bytes")


def _memory_seconds(traffic: HbmTraffic, chip: Chip, kind: PassKind | None) -> float:
    """Returns the time of an operation's traffic at the shares of the bandwidth that its kind reaches."""
    share, inside = (chip.passes.get(each, chip.memory_share) if each else chip.memory_share for each in (kind, "tile"))
    moved = (traffic.read + traffic.written) / share + 2 * traffic.inside / inside
    return moved / chip.hbm_bytes_per_second


def seconds_inside_tiles(part: PartOfTiles, chip: Chip) -> float:
    """Returns by how much a slice or an update takes longer because it lies inside tiles."""
    is_update = part.kind == "update"
    tiles = HbmTraffic(0, 0, part.tile_bytes) if is_update else HbmTraffic(part.tile_bytes, 0)
    return _memory_seconds(tiles, chip, None) - _memory_seconds(HbmTraffic(part.num_bytes, 0), chip, None)


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
    if (of := work.rated_by) is not None:
        return kernel_flops_per_second(of, peak, chip.attention) * chip.kernels_share
    return peak * chip.matmul_shares.get(work.dtype, chip.matmul_share)


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
            found = _work_of(inner, operand_types(inner, computation), module, ops)
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


def instruction_kind(instruction: Instruction, module: Module, ops: Sequence[KernelOwner] = ()) -> ComputeKind:
    """Returns the kind of an instruction's compute: that of its operation, else that of the kernels that it calls."""
    if (kind := _kind_by_operation(instruction, ops)) is not None:
        return kind
    if re.search(r"splash|fmha", f"{instruction.name} {instruction.op_name}") or is_attention(instruction):
        return "attention"
    inside = within(instruction, module)
    has_matmul = any(is_matmul(each) or _kind_by_operation(each, ops) == "matmul" for each in inside)
    return "matmul" if has_matmul else "other"


def _kind_by_operation(instruction: Instruction, ops: Sequence[KernelOwner]) -> ComputeKind | None:
    name, is_kernel = OperationName(instruction.op_name), is_pallas(instruction)
    return next((kind for op in ops if (kind := op.compute_kind(name, is_pallas=is_kernel)) is not None), None)
