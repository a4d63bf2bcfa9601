"""What an operation of a jaxpr is to the fused program: by its primitive."""

from typing import Any

from ..core.collectives import CollectiveKind
from .program import Kind

_MOVES = {
    "reshape", "squeeze", "expand_dims", "transpose", "name", "sharding_constraint", "copy", "optimization_barrier",
}  # fmt: skip
COLLECTIVES: dict[str, CollectiveKind] = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "ppermute": "collective-permute",
}  # fmt: skip
LANES = 128  # of a row of a TPU's registers, which arrays in memory are tiled by
OTHERS = {"gather", "scatter", "scatter-add", "sort", "top_k", "dynamic_update_slice", "cholesky", "triangular_solve"}
ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # cuDNN's kernels (cudnn.py)
KERNELS = ("pallas_call", *ATTENTION, "custom_call", "ffi_call")
CUDNN_BLOCK = 128  # keys


def kind_of(equation: Any) -> Kind:
    name = equation.primitive.name
    if name == "dot_general":
        return "matmul"
    if name.startswith(KERNELS):
        return "kernel"
    if name in COLLECTIVES:
        return "collective"
    if name in _MOVES or (name == "broadcast_in_dim" and equation.invars[0].aval.size == equation.outvars[0].aval.size):
        return "move"
    if name.startswith(("reduce_", "arg", "cum")):
        return "reduce"
    return "other" if name in OTHERS else "pointwise"


def splash_blocks(kernel: Any) -> tuple[int, int] | None:
    """(rows, entries of each) of the table of blocks that splash attention runs over (splash.py); None for another
    Pallas kernel."""
    name = str(getattr(kernel.params.get("jaxpr"), "debug_info", ""))
    grid = kernel.params["grid_mapping"].grid
    return (grid[-3 if "dkv" in name else -2], grid[-1]) if "splash" in name else None


def causal_flops(flops: int, rows: int, entries: int) -> int:
    """FLOPs of the blocks that a causal mask leaves, of those of all entries: at the edge a row has one, two, three, ..
    and all other rows have all of them."""
    return flops * (2 * rows - entries + 1) // (2 * rows)


def cudnn_flops(kernel: Any, num_queries: int) -> int:
    """FLOPs of cuDNN's causal attention. num_queries: elements of the queries on this device.

    Two matmuls forward; backward the scores again and a gradient of each of four factors (arXiv:2205.14135).
    """
    num_matmuls = 2 if kernel.primitive.name.startswith(ATTENTION[0]) else 5
    num_keys = kernel.invars[1].aval.shape[1]
    blocks = max(1, num_keys // CUDNN_BLOCK)
    return causal_flops(2 * num_matmuls * num_queries * num_keys, blocks, blocks)
