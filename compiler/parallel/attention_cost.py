"""The arithmetic of the kernels that attention runs: those of splash and of cuDNN.

    traced splash      the matmuls of the kernel's body, once for each block of its grid that the mask leaves
    traced cuDNN       queries x keys x depth by shapes, of the blocks that the mask leaves
    compiled splash    the square by shapes, of the blocks that the mask leaves
    compiled cuDNN     nothing to add: its own text says what it computes (xla/schedule/attention_kernels.py)

The scope says how many of the blocks of queries x keys are computed (`blocks_scope`); without one the mask is causal.
"""

import math
from dataclasses import replace

from ..core.kernels import KernelCall, KernelCost
from ..jaxpr.flops import matmul_flops
from ..jaxpr.subprograms import subprograms

_CUDNN = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # JAX's primitives (cudnn.py)
_CUDNN_BLOCK = 128  # keys of a block of cuDNN's kernels


def attention_cost(call: KernelCall) -> KernelCost | None:
    """Returns the cost of a call of splash or cuDNN; None for other kernels, and where only their text says it."""
    if not call.is_traced:
        return _compiled_splash(call) if call.is_pallas else None
    if call.is_pallas:
        return _traced_splash(call) if "splash" in call.kernel else None
    return _traced_cudnn(call) if call.kernel.startswith(_CUDNN) else None


def _traced_splash(call: KernelCall) -> KernelCost:
    grid = call.parameters["grid_mapping"].grid
    rows, entries = grid[-3 if "dkv" in call.kernel else -2], grid[-1]  # of the table of blocks that it runs over
    num_calls = math.prod(n for n in grid if isinstance(n, int))
    flops = num_calls * sum(matmul_flops(inner) for inner in subprograms(call.parameters))
    used = call.name.used_blocks
    return _cost(_causal_flops(flops, rows, entries) if used is None else flops * used[0] // (rows * entries))


def _traced_cudnn(call: KernelCall) -> KernelCost:
    # Two matmuls forward; backward the scores again, and a gradient of each of four factors (arXiv:2205.14135).
    queries, keys = (each.shape for each in call.operands[:2])
    num_keys = keys[2 if call.parameters["layout"] else 1]
    count = 2 if call.kernel.startswith(_CUDNN[0]) else 5
    flops, blocks = 2 * count * math.prod(queries) * num_keys, max(1, num_keys // _CUDNN_BLOCK)
    used = call.name.used_blocks
    return _cost(_causal_flops(flops, blocks, blocks) if used is None else flops * used[0] // used[1])


def _compiled_splash(call: KernelCall) -> KernelCost | None:
    """A table of public libraries takes the mask for causal, and counts half of the square."""
    used, stated = call.name.used_blocks, call.stated
    if used is None or stated is None or stated.unit != "attention":
        return None
    return replace(stated, flops=2 * stated.flops * used[0] / used[1])


def _cost(flops: int) -> KernelCost:
    return KernelCost(flops, unit="attention")


def _causal_flops(flops: int, rows: int, entries: int) -> int:
    """Returns the FLOPs of the blocks that a causal mask leaves, of those of all entries: at the edge a row has one,
    two, three, .. and all other rows have all of them."""
    return flops * (2 * rows - entries + 1) // (2 * rows)
