"""What an operation of a jaxpr is to the fused program: by its primitive."""

from typing import Any

from .program import Kind
from .report import CollectiveKind

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
KERNELS = ("pallas_call", "dot_product_attention_fwd", "dot_product_attention_bwd", "custom_call", "ffi_call")


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


def causal_blocks(kernel: Any) -> int:
    """Blocks along the last axis of splash attention's grid; 0 of another kernel."""
    name = str(getattr(kernel.params.get("jaxpr"), "debug_info", ""))
    grid = kernel.params["grid_mapping"].grid
    return grid[-1] if "splash" in name and isinstance(grid[-1], int) else 0
