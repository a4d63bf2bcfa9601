"""How long compute takes on a chip, from what is in the program: the best that is known of each operation.

cycles   the TPU compiler's own estimate, over the clock
bound    a matmul whose estimate is longer than arithmetic at the chip's measured share of the peak, and memory traffic,
         both need: it takes the longer of these two
flops    matmuls and attention kernels without an estimate: arithmetic at a measured share of the peak
bytes    all else: what is read and written at a measured share of the memory's bandwidth
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.scopes import OperationName
from ..hlo import Computation, Instruction, Module
from ..hlo.types import ArrayType, parse_type
from .steps import Compute, ComputeKind, PricedBy

# Of grouped matmuls of experts, an assumption: the share of the peak on TPUs, and on GPUs that of what cuBLAS reaches.
GROUPED_EFFICIENCY = 0.6
KERNEL_SECONDS = 2e-6  # a GPU kernel cannot be shorter, launched from a graph
# From the end of a kernel to the start of the next: 3.4 us for each of 2.9 us, launched from a graph
# (https://developer.nvidia.com/blog/cuda-graphs).
KERNEL_GAP_SECONDS = 0.5e-6

# They do no work, or work that runs beside the compute unit: copies between memories, what other instructions do.
_FREE = frozenset({
    "add-dependency", "after-all", "bitcast", "constant", "copy-done", "copy-start", "domain", "dynamic-slice-done",
    "dynamic-slice-start", "dynamic-update-slice-done", "dynamic-update-slice-start", "get-tuple-element", "iota",
    "opt-barrier", "parameter", "partition-id", "replica-id", "slice-done", "slice-start", "tuple",
})  # fmt: skip
_FREE_TARGETS = frozenset({
    "AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding", "SliceBuffer",
})  # fmt: skip
TRITON = "__gpu$xla.gpu.triton"  # a custom call: a kernel of Pallas
_NEGLIGIBLE_BYTES = 4096  # on TPUs, scalars beside the vector unit
_MATMULS = frozenset({"convolution", "dot", "ragged-dot"})
_ATTENTION_MATMULS = {"dkv": 4, "_dq": 3, "backward": 5, "bwd": 5}  # by a part of the kernel's name; forward 2
_DECLARED_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_SLICES = frozenset({"dynamic-slice", "gather", "slice"})
_VIEWS = frozenset({"bitcast", "reshape"})
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_DIMENSIONS = re.compile(r'"?(lhs|rhs)_(contracting|batch)_dim(?:ension)?s"?[:=]\s*[\[{]([^\]}]*)[\]}]')


@dataclass(frozen=True)
class Chip:
    """What prices rest on. Figures of one JAX device; peak: by type of the operands. The shares of the peaks are those
    that single large kernels reach. matrix_unit: rows and columns of a TPU's. factors: by kind of compute, how much
    longer it takes, by a calibration."""

    platform: str  # tpu, gpu
    clock_hz: float | None
    peak_flops_per_second: Mapping[str, float]
    hbm_bytes_per_second: float
    matmul_share: float = 1.0
    attention_share: float = 1.0
    memory_share: float = 1.0
    matrix_unit: int = 1
    factors: Mapping[ComputeKind, float] = field(default_factory=dict)


def price(instruction: Instruction, around: Computation, module: Module, chip: Chip) -> Compute | None:
    """Returns the compute of an instruction that is neither a collective nor a loop; None if it takes no time."""
    if instruction.opcode in _FREE or instruction.attribute("custom_call_target") in _FREE_TARGETS:
        return None
    price = _price(instruction, around, module, chip)
    if price.seconds == 0:
        return None
    kind = kind_of(instruction, module)
    factor = chip.factors.get(kind, 1.0)
    return Compute(
        name=instruction.name,
        kind=kind,
        seconds=None if price.seconds is None else price.seconds * factor,
        priced_by=price.by,
        op_name=instruction.op_name,
        estimated_seconds=None if price.estimated is None else price.estimated * factor,
    )


@dataclass(frozen=True)
class _Price:
    """seconds: None where nothing is known. estimated: the compiler's estimate where the price is another."""

    seconds: float | None
    by: PricedBy
    estimated: float | None = None


def _price(instruction: Instruction, around: Computation, module: Module, chip: Chip) -> _Price:
    estimated = None
    if chip.clock_hz and (cycles := instruction.estimated_cycles) is not None:
        estimated = cycles / chip.clock_hz
    operands = _operand_types(instruction, around)
    flops, dtype, share = _flops(instruction, operands, module, chip)
    if estimated is not None and not flops:
        return _Price(estimated, "cycles")
    moved = moved_bytes(instruction, around, module)
    memory_seconds = moved / (chip.hbm_bytes_per_second * chip.memory_share)
    if flops is None:
        return _Price(None, "nothing")
    if chip.platform == "tpu" and not flops and moved <= _NEGLIGIBLE_BYTES:
        return _Price(0.0, "bytes")
    peak = chip.peak_flops_per_second.get(dtype)
    if flops and peak is None:
        return _Price(estimated, "nothing" if estimated is None else "cycles")
    flops_seconds = flops / (peak * share) if flops and peak else 0.0
    allowed = max(flops_seconds, memory_seconds)
    if estimated is not None:
        return _Price(allowed, "bound", estimated) if estimated > allowed else _Price(estimated, "cycles")
    seconds = max(allowed, KERNEL_SECONDS) + KERNEL_GAP_SECONDS if chip.platform == "gpu" else allowed
    return _Price(seconds, "flops" if flops_seconds > memory_seconds else "bytes")


def _flops(
    instruction: Instruction, operands: tuple[ArrayType, ...], module: Module, chip: Chip
) -> tuple[float | None, str, float]:
    """Returns FLOPs, their type, and the share of the peak that they reach; None for an unknown kernel."""
    target = instruction.attribute("custom_call_target") or ""
    if target == "tpu_custom_call" and instruction.name.startswith("ragged-dot-metadata"):
        return 0, "float32", chip.matmul_share  # the places of groups, for the kernel after it
    name, is_kernel = OperationName(instruction.op_name), target == "tpu_custom_call"
    if (is_kernel and name.experts is None) or "fmha" in target or "cudnn$" in target:
        flops, dtype = _attention_flops(instruction, operands, chip)
        if flops is not None or not is_kernel:
            return flops, dtype, chip.attention_share
    if is_kernel:
        declared = _DECLARED_FLOPS.search(instruction.attributes)
        return float(declared[1]) * name.filled if declared else None, _dtype_of_rows(operands), GROUPED_EFFICIENCY
    if target == TRITON:
        flops = _grouped_flops(instruction, operands) * name.filled if name.experts is not None else None
        return flops, _dtype_of_rows(operands), GROUPED_EFFICIENCY * chip.matmul_share
    if "gemm" in target or "matmul" in target:
        return (*_matmul_flops(instruction, operands), chip.matmul_share)
    if instruction.opcode in _MATMULS:
        return (*_matmul_flops(instruction, operands), chip.matmul_share)
    if instruction.opcode not in ("fusion", "call"):
        return 0, "float32", chip.matmul_share
    total, dtype = 0.0, "float32"
    for name in instruction.called:
        computation = module.computations[name]
        for inner in computation.instructions:
            found, of_type, _ = _flops(inner, _operand_types(inner, computation), module, chip)
            total += found or 0
            dtype = of_type if found else dtype
    return total, dtype, chip.matmul_share


def _grouped_flops(instruction: Instruction, operands: tuple[ArrayType, ...]) -> float:
    """Returns the FLOPs of one of `grouped_triton`'s kernels, which say none on GPUs: each element of the rows meets a
    row of the group's matrix, or of the other rows; both are as long as the result's last dimension."""
    rows = next(each for each in operands if len(each.shape) > 1)
    return 2.0 * rows.num_elements * instruction.arrays[0].shape[-1]


def _dtype_of_rows(operands: tuple[ArrayType, ...]) -> str:
    """Returns the type of the first matrix: before it are the places of groups."""
    return next((_dtype(each.dtype) for each in operands if len(each.shape) > 1), "float32")


def _matmul_flops(instruction: Instruction, operands: tuple[ArrayType, ...]) -> tuple[float, str]:
    """Returns 2 FLOPs for each multiply-add: the elements of the result times the contracted sizes."""
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands), _dtype(operands[0].dtype if operands else "f32")
    text = instruction.attributes
    contracted = [int(d) for side, kind, found in _DIMENSIONS.findall(text) if (side, kind) == ("lhs", "contracting")
                  for d in re.findall(r"\d+", found)]  # fmt: skip
    depth = math.prod(operands[0].shape[d] for d in contracted) if operands else 0
    return 2.0 * instruction.arrays[0].num_elements * depth, _dtype(operands[0].dtype if operands else "f32")


def _convolution_flops(instruction: Instruction, operands: tuple[ArrayType, ...]) -> float:
    """Returns the FLOPs of a convolution, as which TPUs write matmuls: 2 for each tap of the window that lies on the
    input, not on its padding or between its elements. Batches of matmuls are spatial dimensions with such windows."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None or len(operands) < 2:
        return 0.0
    left, right, result = labels.groups()
    out, image, kernel = instruction.arrays[0].shape, operands[0].shape, operands[1].shape
    window = dict(part.split("=", 1) for part in (_WINDOW.search(instruction.attributes) or ("", ""))[1].split())
    spatial = sorted(label for label in result if label.isdigit())
    taps = 1
    for i, label in enumerate(spatial):
        size, stride, spread, dilation = (
            int(window[key].split("x")[i]) if key in window else 1
            for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
        )
        pad = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        num_outputs, num_inputs = out[result.index(label)], image[left.index(label)]
        places = (n * stride - pad + k * dilation for k in range(size) for n in range(num_outputs))
        taps *= sum(place % spread == 0 and 0 <= place < num_inputs * spread for place in places)
    return 2.0 * taps * out[result.index("b")] * out[result.index("f")] * kernel[right.index("i")]


def _attention_flops(instruction: Instruction, operands: tuple[ArrayType, ...], chip: Chip) -> tuple[float | None, str]:
    """Returns the FLOPs of an attention kernel: queries (B, H, T, D) or (B, T, H, D), or (H, T, D) of a single
    sequence, the first operand of that rank that is not a mask, and then keys. Forward two matmuls of T x S x D each,
    for keys and values four, for queries three; of the square the blocks that the kernel's name says, all of it where
    cuDNN's kernel has no mask, else half."""
    name = f"{instruction.name} {instruction.attribute('custom_call_target')}".lower()
    arrays = [array for array in operands if array.dtype in ("bf16", "f16", "f32") or array.dtype.startswith("f8")]
    queries = next((array for array in arrays if len(array.shape) in (3, 4)), None)
    if queries is None or not re.search(r"splash|attention|fmha", name):
        return None, ""
    count = next((count for key, count in _ATTENTION_MATMULS.items() if key in name), 2)
    *batches, first, second, depth = queries.shape
    length, heads = max(first, second), min(first, second)
    depth = math.ceil(depth / chip.matrix_unit) * chip.matrix_unit  # a smaller head leaves part of the unit idle
    others = (array for array in arrays[arrays.index(queries) + 1 :] if len(array.shape) == len(queries.shape))
    keys = next(others, queries)
    square = 2.0 * count * math.prod(batches) * heads * length * depth * max(keys.shape[-3:-1])
    if used := OperationName(instruction.op_name).used_blocks:
        return square * used[0] / used[1], _dtype(queries.dtype)
    is_whole = '"mask_type": "NO_MASK"' in instruction.attributes
    return square * (1.0 if is_whole else 0.5), _dtype(queries.dtype)


def moved_bytes(instruction: Instruction, around: Computation, module: Module) -> int:
    """Returns the bytes that an operation reads and writes. An operand that is only sliced counts its slices, and an
    operand that is updated in place counts the update."""
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes_of(instruction.operands[1], around)
    if instruction.opcode in _SLICES:
        return 2 * instruction.num_bytes
    if instruction.opcode != "fusion" or not instruction.called:
        return instruction.num_bytes + sum(_bytes_of(name, around) for name in instruction.operands)
    inner = module.computations[instruction.called[0]]
    read = sum(_read_of(parameter, inner) for parameter in inner.parameters)
    return read + _written(inner)


def _read_of(parameter: Instruction, inner: Computation) -> int:
    """Returns the bytes of a parameter that a fusion reads: of one that is only sliced, also behind another view of it,
    the slices."""
    views, users = {parameter.name}, list[Instruction]()
    for each in inner.instructions:  # operands come before their users
        if views.isdisjoint(each.operands):
            continue
        if each.opcode in _VIEWS:
            views.add(each.name)
        else:
            users.append(each)
    read = 0
    for each in users:
        is_sliced = each.operands[0] in views and views.isdisjoint(each.operands[1:])
        if is_sliced and each.opcode in _SLICES:
            read += each.num_bytes
        elif not (is_sliced and each.opcode == "dynamic-update-slice"):
            return parameter.num_bytes
    return read if users else parameter.num_bytes


def _written(inner: Computation) -> int:
    """Returns the bytes that a fusion writes: of an array that it updates in place, the update."""
    names = inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)
    outputs = [inner.by_name[name] for name in names if name in inner.by_name]
    return sum(_written_by(each, inner) for each in outputs)


def _written_by(output: Instruction, inner: Computation) -> int:
    while output.opcode in _VIEWS and output.operands[0] in inner.by_name:
        output = inner.by_name[output.operands[0]]
    return _bytes_of(output.operands[1], inner) if output.opcode == "dynamic-update-slice" else output.num_bytes


def kind_of(instruction: Instruction, module: Module) -> ComputeKind:
    name = OperationName(instruction.op_name)
    if name.is_attention or re.search(r"splash|fmha", f"{instruction.name} {name.text}"):
        return "attention"
    target = instruction.attribute("custom_call_target") or ""
    is_grouped = target in ("tpu_custom_call", TRITON) and name.experts is not None
    is_matmul = instruction.opcode in _MATMULS or "gemm" in target or "matmul" in target or is_grouped
    within = (inner.opcode for name in instruction.called if name in module.computations
              for inner in module.all_within(name))  # fmt: skip
    return "matmul" if is_matmul or any(opcode in _MATMULS for opcode in within) else "other"


def _operand_types(instruction: Instruction, around: Computation) -> tuple[ArrayType, ...]:
    found = (around.by_name.get(name) for name in instruction.operands)
    return tuple(array for each in found if each is not None for array in parse_type(each.type_text))


def _bytes_of(name: str, around: Computation) -> int:
    found = around.by_name.get(name)
    return found.num_bytes if found is not None else 0


def _dtype(text: str) -> str:
    """Returns the peak's name for XLA's name of a type: bf16 -> bfloat16, f8e4m3fn -> float8."""
    known = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "s8": "int8", "u8": "int8"}
    return known.get(text, "float8" if text.startswith("f8") else "float32")
