"""Prices kernels of libraries, which a program only calls by name: what each family computes and moves.

cuBLAS, cuDNN          matmuls, convolutions, attention, by dimension numbers and shapes
Transformer Engine     matmuls, also grouped, and attention by shapes and attributes; casts, norms and activations move
                       bytes
Mosaic                 what its `cost_estimate` says; splash by its shapes
Triton                 attention; what has a computation by it (prices.py); else only its name is known
sort                   its passes over keys and values
solvers, transforms    FFT, Cholesky: what they move at least

These are public libraries, which programs without a plan call too: that is why their tables are here, and not in the
files of operations. An operation is asked first, and says what it alone knows of its kernel, such as the rows that
tokens fill (`ParallelOp.kernel_cost`).

Other kernels are known by what they write alone, and the step takes at least that; those that communicate are named so.
All rows of a library's grouped matmul count, as no shape says how many its groups fill.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from ...core.float_types import numpy_name, peak_name
from ...core.kernels import KernelArray, KernelCall, KernelCost, KernelOwner, ask_owners
from ...core.scopes import OperationName
from ..hlo import Instruction
from ..hlo.types import ArrayType
from .attention_kernels import attention_work, is_attention, is_ragged, kernel_name
from .work import Convolution, contraction, convolution_flops, dot_flops

TRITON = "__gpu$xla.gpu.triton"  # a custom call: a kernel of Pallas
MOSAIC = "tpu_custom_call"
MATMULS = frozenset({"convolution", "dot", "ragged-dot", "scaled-dot"})

# These kernels read their operands and write their results once.
_STREAMS = re.compile(
    r"te_(?:(?:layer|rms)?norm|d?act|dgelu|gelu|silu|dsilu|gated|dgated|cast|d?bias|dbias|(?:grouped_)?quantize"
    r"|dequantize|transpose|scaled_|grouped_gemm_d2h)|^Assume\w+InBounds?$|^(?:GatherScatterIndicesBitpacked|GetRngSeed"
    r"|PadToStatic|SetBound|SliceId|SliceToDynamic|ZeroCrop)$|cudnn\$(?:norm|softmax)|TopK$|cu_threefry2x32|MoveToHost|MoveToDevice|annotate_device_placement"
)
_COMMUNICATES = re.compile(r"nccl|nvshmem|collective|comm_gemm|all_?(?:reduce|gather|to_?all)|mpi_", re.IGNORECASE)
_RADIX = re.compile(r"__cub\$DeviceRadixSort")
_RADIX_BITS = 8  # bits of a key that one pass of a radix sort orders: https://nvidia.github.io/cccl/cub
_SIZE = re.compile(r'"?\b([MNK])"? ?[=:] ?"?(\d+)')
_COST = {key: re.compile(rf'"{key}":\s*"?(\d+)') for key in ("flops", "bytes_accessed")}
# Opcodes whose shapes say neither their arithmetic nor their passes; they read and write at least once.
_AT_LEAST_ONCE = frozenset({"cholesky", "fft", "triangular-solve"})
_LOG_TILE = 11  # XLA's bitonic sort for GPUs orders tiles of 2,048 in shared memory: xla/backends/gpu, EmitSort


def kernel_work(
    instruction: Instruction, operands: tuple[ArrayType, ...], ops: Sequence[KernelOwner] = ()
) -> KernelCost:
    """Returns the work of one instruction that calls no computation of the program. ops: operations that know
    their own kernels."""
    if instruction.opcode == "custom-call":
        return _called(instruction, operands, ops)
    if instruction.opcode in MATMULS:
        return _matmul(instruction, operands) or KernelCost(unknown=instruction.opcode)
    if instruction.opcode == "sort":
        return _bitonic_sort(instruction, operands)
    return KernelCost(unknown=instruction.opcode if instruction.opcode in _AT_LEAST_ONCE else "")


def label(instruction: Instruction) -> str:
    """Returns what a kernel without a known time is called: its target, or its name without a number."""
    target = instruction.attribute("custom_call_target")
    if target in (MOSAIC, TRITON, None):
        named = re.search(r'\bname = "([\w.\-]+)"', instruction.attributes)
        return named[1] if named else re.sub(r"(\.\d+)+$", "", instruction.name)
    return target


def is_pallas(instruction: Instruction) -> bool:
    """Returns True for a kernel that is written in Pallas."""
    return instruction.attribute("custom_call_target") in (MOSAIC, TRITON)


def is_matmul(instruction: Instruction) -> bool:
    """Returns True for a matmul or a convolution."""
    target = instruction.attribute("custom_call_target") or ""
    return instruction.opcode in MATMULS or _is_gemm(target) or "cudnn$conv" in target


def _called(instruction: Instruction, operands: tuple[ArrayType, ...], ops: Sequence[KernelOwner]) -> KernelCost:
    """Returns what an operation says of its own kernel, else what is known of public libraries."""
    stated = _of_library(instruction, operands, instruction.attribute("custom_call_target") or "")
    call = KernelCall(
        kernel=kernel_name(instruction),
        name=OperationName(instruction.op_name),
        operands=tuple(map(_array, operands)),
        results=tuple(map(_array, instruction.arrays)),
        stated=stated,
        is_pallas=is_pallas(instruction),
    )
    if (own := ask_owners(ops, call)) is not None:
        return replace(own, dtype=peak_name(own.dtype) if own.dtype else _dtype_of_rows(operands))
    return stated or _unknown(instruction)


def _array(array: ArrayType) -> KernelArray:
    return KernelArray(array.shape, numpy_name(array.dtype))


def _of_library(instruction: Instruction, operands: tuple[ArrayType, ...], target: str) -> KernelCost | None:
    if target == MOSAIC and instruction.name.startswith("ragged-dot-metadata"):
        found = KernelCost()  # it computes the places of groups, for the kernel after it
    elif is_attention(instruction):
        found = attention_work(instruction, operands)
    elif target == MOSAIC:
        found = _declared(instruction, operands)
    elif "cudnn$conv" in target:
        found = _convolution(instruction, operands, target)
    elif _STREAMS.search(target):
        found = KernelCost()
    elif _is_gemm(target) or target.endswith("blockScaledDot"):
        found = (_grouped_by_shapes if "group" in target.lower() else _matmul)(instruction, operands)
        if found and _COMMUNICATES.search(target):  # it also communicates, over links that nothing names
            found = replace(found, unknown=_named(instruction))
    elif _RADIX.search(target):
        found = _radix_sort(operands)
    else:
        found = None
    return found


def _unknown(instruction: Instruction) -> KernelCost:
    """Returns a lower bound: a kernel may read only a part of its operands, but writes its results, unless they are
    operands."""
    places = re.findall(r"\{([\d, ]*)\}: ?\(\d+", instruction.attribute("output_to_operand_aliasing") or "")
    given = {int(place.split(",")[0] or 0) for place in places}
    written = sum(each.num_bytes for n, each in enumerate(instruction.arrays) if n not in given)
    return KernelCost(num_bytes=written, unknown=_named(instruction))


def _named(instruction: Instruction) -> str:
    """Returns the name of a kernel without a known time, with what is known of the reason."""
    name = label(instruction)
    if _COMMUNICATES.search(name):
        return f"communication by {name}"
    return f"{name} over sequences of any length" if is_ragged(instruction) else name


def _is_gemm(target: str) -> bool:
    return "gemm" in target or "matmul" in target.lower()


def _matmul(instruction: Instruction, operands: tuple[ArrayType, ...]) -> KernelCost | None:
    """Returns the work of a matmul: by its dimension numbers, else by shapes that only one contraction has."""
    if len(operands) < 2 or not instruction.arrays:
        return None
    if instruction.opcode == "convolution":
        shapes = Convolution(operands[0].shape, operands[1].shape, instruction.arrays[0].shape)
        flops = convolution_flops(instruction, shapes)
    else:
        flops = dot_flops(instruction, operands)
    if flops is None and instruction.opcode == "custom-call":
        matrices = [each for each in operands if len(each.shape) > 1][:2]  # scales and biases are vectors
        flops = contraction(matrices[0], matrices[1], instruction.arrays[0]) if len(matrices) == 2 else None
    return None if flops is None else KernelCost(flops, peak_name(operands[0].dtype))


def _convolution(instruction: Instruction, operands: tuple[ArrayType, ...], target: str) -> KernelCost | None:
    """Returns the work of one of cuDNN's convolutions: forward, or of the gradient of its inputs or of its kernel; each
    has as many multiply-adds as the forward one."""
    if len(operands) < 2 or not instruction.arrays:
        return None
    first, second, result = operands[0].shape, operands[1].shape, instruction.arrays[0].shape
    shapes = Convolution(first, second, result)
    if "BackwardInput" in target:
        shapes = Convolution(result, second, first)
    elif "BackwardFilter" in target:
        shapes = Convolution(first, result, second)
    flops = convolution_flops(instruction, shapes)
    return None if flops is None else KernelCost(flops, peak_name(operands[0].dtype))


def _declared(instruction: Instruction, operands: tuple[ArrayType, ...]) -> KernelCost | None:
    """Returns what the author of a kernel declared of it: FLOPs and bytes."""
    _, found, estimate = instruction.attributes.partition('"cost_estimate":')
    told = {key: int(match[1]) for key, form in _COST.items() if (match := form.search(estimate.partition("}")[0]))}
    if not found or "flops" not in told:
        return None
    return KernelCost(told["flops"], _dtype_of_rows(operands), "grouped", told.get("bytes_accessed") or None)


def _grouped_by_shapes(instruction: Instruction, operands: tuple[ArrayType, ...]) -> KernelCost | None:
    """Returns the work of a grouped matmul of a library: 2 M N K, which Transformer Engine says, whose matrices are
    flat. Else rows (M, K) by one matrix (G, K, N) for each group, or the gradient of these (G, K, N), of (M, K) and
    (M, N): each row meets one group."""
    if not operands or not instruction.arrays:
        return None
    sizes = {key: int(size) for key, size in _SIZE.findall(instruction.attributes.partition("backend_config=")[2])}
    matrices, result = [each for each in operands if len(each.shape) > 1][:2], instruction.arrays[0]
    if len(sizes) == 3 and result.shape[-2:] == (sizes["M"], sizes["N"]):
        return KernelCost(2.0 * math.prod(sizes.values()), peak_name(operands[0].dtype), "grouped")
    ranks = (*(len(each.shape) for each in matrices), len(result.shape))
    if ranks == (2, 3, 2):
        flops = contraction(matrices[0], _of_group(matrices[1]), result)
    elif ranks == (2, 2, 3):
        flops = contraction(matrices[0], matrices[1], _of_group(result))
    else:
        return None
    return None if flops is None else KernelCost(flops, peak_name(matrices[0].dtype), "grouped")


def _of_group(array: ArrayType) -> ArrayType:
    return replace(array, shape=array.shape[1:])


def _dtype_of_rows(operands: tuple[ArrayType, ...]) -> str:
    """Returns the type of the first matrix: before it are the places of groups."""
    return next((peak_name(each.dtype) for each in operands if len(each.shape) > 1), "float32")


def _radix_sort(operands: tuple[ArrayType, ...]) -> KernelCost:
    """Returns the work of a radix sort: it reads and writes keys and values once for each digit of the keys."""
    bits = operands[0].num_bytes * 8 // max(1, operands[0].num_elements) if operands else 0
    num_passes = math.ceil(bits / _RADIX_BITS)
    return KernelCost(num_bytes=2 * num_passes * sum(each.num_bytes for each in operands))


def _bitonic_sort(instruction: Instruction, operands: tuple[ArrayType, ...]) -> KernelCost:
    """Returns the work of a sort on a GPU: within tiles in one pass; of each longer stage a pass for each distance that
    is longer than a tile, and one for all others."""
    along = int((instruction.attribute("dimensions") or "{0}").strip("{}") or 0)
    length = operands[0].shape[along] if operands and operands[0].shape else 1
    num_long = max(0, math.ceil(math.log2(max(length, 1))) - _LOG_TILE)
    num_passes = 1 + sum(stage + 1 for stage in range(1, num_long + 1))
    return KernelCost(num_bytes=2 * num_passes * sum(each.num_bytes for each in operands))
