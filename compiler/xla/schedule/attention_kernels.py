"""Counts the arithmetic of fused attention, by what the text of each library's kernel says.

cuDNN                the intermediate tensor (batch, heads, queries, keys), the mask and its window
Transformer Engine   its attributes, or the shapes of packed queries, keys and values
splash, others       the shapes of queries and keys, under a causal mask

These are kernels of public libraries, which programs without a plan call too, and what they compute is said by their
text alone: so they are read here, not by an operation. What only an operation knows of its kernel, such as the blocks
of a ring, it says itself (parallel/attention/attention.py), and it is asked first.
"""

import math
import re
from dataclasses import dataclass

from ...core.float_types import XLA_NAMES, peak_name
from ...core.kernels import KernelCost
from ...spec.cost_model import cost_model
from ..hlo import Instruction
from ..hlo.types import ArrayType

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
    """The scores of all heads together, queries x keys.

    share: the part of them that is computed.
    """

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
    flops = 2.0 * count * square.num_queries * square.num_keys * square.depth * square.share
    return KernelCost(flops, peak_name(queries.dtype), "attention", head_dim=square.depth)


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
