"""Prices kernels of libraries, which a program only calls by name: what each family computes and moves.

cuBLAS, cuDNN          matmuls, convolutions, attention, by dimension numbers and shapes
Transformer Engine     matmuls, also grouped, and attention by shapes and attributes; casts, norms and activations move
                       bytes
Mosaic                 what its `cost_estimate` says; splash by its shapes
Triton                 attention; what has a computation by it (prices.py); else only its name is known
cuDNN's attention      the intermediate tensor (batch, heads, queries, keys), the mask and its window
other attention        the shapes of queries and keys, under a causal mask
sort                   its passes over keys and values
solvers, transforms    FFT, Cholesky: what they move at least

These are public libraries, which programs without a plan call too: that is why their tables are here, and not in the
files of operations. An operation is asked first, and says what it alone knows of its kernel, such as the rows that
tokens fill or the blocks of a ring (`ParallelOp.kernel_cost`).

Other kernels are known by what they write alone, and the step takes at least that; those that communicate are named so.
All rows of a library's grouped matmul count, as no shape says how many its groups fill.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.float_types import XLA_NAMES, numpy_name, peak_name
from ...core.kernels import AttentionCall, KernelArray, KernelCall, KernelCost, KernelOwner, ask_owners, contracted_size
from ...core.scopes import OperationName
from ...spec.cost_model import cost_model
from ..hlo import Instruction
from ..hlo.types import ArrayType

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
    elif _is_gemm(target):
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
    return "gemm" in target or "matmul" in target.lower() or target.endswith("blockScaledDot")


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
    if flops is None:
        return None
    return KernelCost(flops, peak_name(operands[0].dtype), num_results=instruction.arrays[0].num_elements)


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
        return KernelCost(2.0 * math.prod(sizes.values()), peak_name(operands[0].dtype), "grouped", grouped="library")
    ranks = (*(len(each.shape) for each in matrices), len(result.shape))
    if ranks == (2, 3, 2):
        flops = contraction(matrices[0], _of_group(matrices[1]), result)
    elif ranks == (2, 2, 3):
        flops = contraction(matrices[0], matrices[1], _of_group(result))
    else:
        return None
    return None if flops is None else KernelCost(flops, peak_name(matrices[0].dtype), "grouped", grouped="library")


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


# Matmuls by a part of the kernel's name: forward 2, the scores and their product with the values; all gradients 5.
# A kernel of keys' gradients that also returns partial sums of the queries', by blocks of keys, computes all five.
_DKV_MATMULS = 4
_MATMULS = {"dkv": _DKV_MATMULS, "_dq": 3, "backward": 5, "bwd": 5}
_NAMED = re.compile(r"splash|attention|fmha|fused_attn|\bmha|flash")
_INTERMEDIATE = re.compile(r'intermediate_tensor_shape\\?":\s*\{.*?dimensions\\?":\s*\[([^\]]*)\]')
_MASK = re.compile(r'mask_type\\?":\s*\\?"(\w+)')
_WINDOW = re.compile(r'sliding_window_length\\?":\s*\\?"?(\d+)')
_TE_ATTRIBUTE = re.compile(r"\b(\w+) = (-?\d+)")
_TE_WHOLE, _TE_PACKED = (0, 1), 10  # NVTE_Mask_Type without a causal mask, and NVTE_QKV_Layout from THD on


@dataclass(frozen=True)
class _Square:
    """The scores of all heads together, queries x keys. share: the part of them that is computed."""

    num_queries: int
    num_keys: int
    depth: int
    share: float


def is_attention(instruction: Instruction) -> bool:
    """Returns True for a kernel that is named as attention."""
    return _NAMED.search(kernel_name(instruction)) is not None


def is_ragged(instruction: Instruction) -> bool:
    """Returns True for attention over packed sequences whose lengths are data, in the layouts THD: no shape says how
    much of the square is computed."""
    return _told(instruction).get("qkv_layout", 0) >= _TE_PACKED


def _told(instruction: Instruction) -> dict[str, int]:
    """Returns the attributes of a kernel of Transformer Engine."""
    if "te_" not in _target(instruction):
        return {}
    return {key: int(value) for key, value in _TE_ATTRIBUTE.findall(instruction.attributes)}


def attention_work(instruction: Instruction, operands: tuple[ArrayType, ...]) -> KernelCost | None:
    """Returns the arithmetic of an attention kernel: two matmuls of queries x keys x depth each forward, for keys and
    values four, for queries three; of the square what the mask leaves. None if its shapes do not say."""
    arrays = [each for each in operands if each.dtype in XLA_NAMES.values() or each.dtype.startswith("f8")]
    queries = next((each for each in arrays if len(each.shape) in (3, 4, 5)), None)
    if queries is None:
        return None
    if is_ragged(instruction):
        return None
    told = _of_transformer_engine(_told(instruction)) or _of_cudnn(instruction.attributes, queries)
    square = told or _of_shapes(instruction, arrays, queries)
    name = kernel_name(instruction)
    count = next((count for key, count in _MATMULS.items() if key in name), 2)
    count += count == _DKV_MATMULS and any(len(each.shape) > len(queries.shape) for each in instruction.arrays)
    place = arrays.index(queries)
    values = next(
        (x.shape[-1] for x in arrays[place + 2 : place + 3] if len(x.shape) == len(queries.shape)), square.depth
    )
    flops = 2.0 * square.num_queries * square.num_keys * contracted_size(count, square.depth, values) * square.share
    attention = AttentionCall(square.depth, square.num_keys, matmuls=count)
    return KernelCost(flops, peak_name(queries.dtype), "attention", attention=attention)


def _of_transformer_engine(told: dict[str, int]) -> _Square | None:
    needed = ("input_batch", "attn_heads", "q_max_seqlen", "kv_max_seqlen")
    depth = told.get("head_dim", told.get("qk_head_dim"))
    if depth is None or any(key not in told for key in needed):
        return None
    batch, heads, length, keys = (told[key] for key in needed)
    is_whole, window = told.get("mask_type") in _TE_WHOLE, told.get("window_size_left", -1)
    return _Square(batch * heads * length, keys, depth, _share(is_whole, window, keys))


def _of_cudnn(text: str, queries: ArrayType) -> _Square | None:
    found = _INTERMEDIATE.search(text)
    sizes = [int(size) for size in re.findall(r"\d+", found[1])] if found else []
    if len(sizes) != 4:
        return None
    batch, heads, length, keys = sizes
    mask, window = _MASK.search(text), _WINDOW.search(text)
    is_whole = mask is not None and mask[1] in ("NO_MASK", "PADDING", "ALIBI")
    depth = queries.num_elements // max(1, batch * heads * length)
    return _Square(batch * heads * length, keys, depth, _share(is_whole, int(window[1]) if window else 0, keys))


def _of_shapes(instruction: Instruction, arrays: list[ArrayType], queries: ArrayType) -> _Square:
    """Returns the scores by the shapes of operands.

    Queries are (B, H, T, D) or (B, T, H, D), or (H, T, D) for a single sequence, or packed with keys and values (B, T,
    3, H, D). Keys follow them, of the same rank or packed with the values (B, T, 2, H, D).
    """
    shape = queries.shape
    if len(shape) == 5:
        shape = tuple(size for n, size in enumerate(shape) if n != (2 if shape[2] == 3 else 3))
    *batches, first, second, depth = shape
    length, heads = max(first, second), min(first, second)
    others = [each.shape for each in arrays[arrays.index(queries) + 1 :]]
    packed = next((each[1] for each in others if len(each) == 5), length)
    keys = next((max(each[-3:-1]) for each in others if len(each) == len(queries.shape) == len(shape)), packed)
    mask = _MASK.search(instruction.attributes)
    share = 1.0 if mask and mask[1] == "NO_MASK" else cost_model().unnamed_mask_share
    return _Square(math.prod(batches) * heads * length, keys, depth, share)


def _share(is_whole: bool, window: int, num_keys: int) -> float:
    """Returns the part of the square that a mask leaves: all, half, or a band of the window's width within half."""
    if is_whole and not 0 < window < num_keys:
        return 1.0
    if not 0 < window < num_keys:
        return 0.5
    return window / num_keys - (window / num_keys) ** 2 / 2


def _target(instruction: Instruction) -> str:
    return instruction.attribute("custom_call_target") or ""


def kernel_name(instruction: Instruction) -> str:
    """Returns all names of a kernel: the instruction's, its target's, and that of a Triton kernel."""
    found = re.search(r'\bname = "(\w+)"', instruction.attributes)
    return f"{instruction.name} {_target(instruction)} {found[1] if found else ''}".lower()


# Both forms of JSON: plain, and within a string with escaped quotes.
_DIMENSIONS = re.compile(r'(lhs|rhs)_(contracting|batch|ragged)_dim(?:ension)?s\\?"?[:=]\s*[\[{]([^\]}]*)[\]}]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_TAPS = re.compile(r"window=\{([^}]*)\}")


def dot_flops(instruction: Instruction, operands: tuple[ArrayType, ...]) -> float | None:
    """Returns 2 FLOPs for each multiply-add: the elements of the result times the contracted sizes. A sum over groups
    of rows multiplies each row once. None if the program does not say what is contracted."""
    named = {(side, kind): [int(d) for d in re.findall(r"\d+", found)]
             for side, kind, found in _DIMENSIONS.findall(instruction.attributes)}  # fmt: skip
    contracted = named.get(("lhs", "contracting"))
    if contracted is None or len(operands) < 2 or max(contracted, default=0) >= len(operands[0].shape):
        return None
    depth = math.prod(operands[0].shape[d] for d in contracted)
    is_summed_by_group = bool(set(contracted) & set(named.get(("lhs", "ragged"), ())))
    num_groups = instruction.arrays[0].shape[0] if is_summed_by_group else 1
    return 2.0 * instruction.arrays[0].num_elements * depth / num_groups


def contraction(left: ArrayType, right: ArrayType, result: ArrayType) -> float | None:
    """Returns the FLOPs of a product of two matrices by their shapes alone: rows x depth by depth x columns. None if
    the shapes do not fit."""
    if not (left.num_elements and right.num_elements and result.num_elements):
        return None
    squared, rest = divmod(left.num_elements * right.num_elements, result.num_elements)
    depth = math.isqrt(squared)
    if rest or depth * depth != squared or not _fits(depth, left.shape) or not _fits(depth, right.shape):
        return None
    return 2.0 * result.num_elements * depth


def _fits(depth: int, shape: tuple[int, ...]) -> bool:
    """Returns True if the first or the last dimensions of a shape have that size together."""
    ends = (shape[:n] for n in range(1, len(shape))), (shape[n:] for n in range(1, len(shape)))
    return any(math.prod(sizes) == depth for several in ends for sizes in several)


@dataclass(frozen=True)
class Convolution:
    """The shapes of a convolution: inputs, kernel and outputs, whichever of them it computes."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]


def convolution_flops(instruction: Instruction, shapes: Convolution) -> float | None:
    """Returns the FLOPs of a convolution, the form in which TPUs write matmuls: 2 for each tap of the window that lies
    on the input, not on its padding or between its elements. Batches of matmuls are spatial dimensions with such
    windows."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None or any(len(shape) != len(labels[1]) for shape in (shapes.image, shapes.kernel, shapes.out)):
        return None
    left, right, result = labels.groups()
    out, image, kernel = shapes.out, shapes.image, shapes.kernel
    window = dict(part.split("=", 1) for part in (_TAPS.search(instruction.attributes) or ("", ""))[1].split())
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
