"""Sorts operations of a jaxpr by primitive into kinds, as the fused program treats them.

The lists are closed. A primitive of none of them, such as one that a user defines or a later JAX adds, is "unknown": it
is not taken for a cheap one, and the estimate says what it does not know of it (unknown.py).
"""

from typing import Any

from ..core.collectives import CollectiveKind
from .program import Kind

_MOVES = {
    "reshape", "squeeze", "expand_dims", "transpose", "name", "sharding_constraint", "copy", "reshard",
}  # fmt: skip
COLLECTIVES: dict[str, CollectiveKind] = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "ppermute": "collective-permute",
}  # fmt: skip
LANES = 128  # of a row of a TPU's registers, which arrays in memory are tiled by
ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # cuDNN's kernels (cudnn.py)
CUDNN_BLOCK = 128  # keys

GROUPED = ("ragged_dot_general", "pallas_call")  # in the scope of experts: matmuls of the rows that are filled
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}  # sums of products: flops.py
_OTHERS = {  # an array in, an array out
    "gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "sort", "top_k",
    "approx_top_k", "dynamic_slice", "dynamic_update_slice", "cholesky", "triangular_solve", "fft", "reduce_window",
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter", "select_and_scatter_add",
    "select_and_gather_add", "optimization_barrier",
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "reduce",
    "argmax", "argmin",
}  # fmt: skip
_CUMULATIVE = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
CALLS = {  # of one jaxpr, whose arguments are the operands
    "jit", "pjit", "call", "closed_call", "core_call", "remat", "remat2", "checkpoint", "composite", "custom_jvp_call",
    "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call", "custom_partitioning", "xla_metadata_call",
}  # fmt: skip
_ARITHMETIC = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "cos", "cosh", "digamma", "div", "eq", "eq_to",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag",
    "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min", "mul",
    "mulhi", "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reciprocal",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "zeta",
}  # fmt: skip
_TYPES_AND_PARTS = {  # other bytes of the same numbers, or some of them
    "bitcast_convert_type", "broadcast_in_dim", "broadcast_to", "concatenate", "convert_element_type", "device_put",
    "from_edtype", "pad", "reduce_precision", "rev", "slice", "split", "stack", "stop_gradient",
    "tile", "to_edtype", "unstack",
}  # fmt: skip
_MADE = {"empty", "empty2", "iota", "zeros_like"}  # of no operand
_RANDOM = {
    "iota_2x32_shape", "philox2x32", "philox4x32", "prng_join", "prng_random_bits", "prng_seed", "prng_split",
    "random_bits", "random_clone", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap",
    "random_wrap", "rng_bit_generator", "rng_uniform", "threefry2x32", "threefry4x32",
}  # fmt: skip
_NO_WORK = {  # for the tracer and the host, or a number that the device has
    "axis_index", "create_token", "after_all", "debug_callback", "debug_print", "inspect_sharding", "layout_constraint",
    "pbroadcast", "platform_index", "preduced", "pvary", "reduced_vary_cast_p", "vary_unreduced_cast_p",
    "with_memory_space_constraint",
}  # fmt: skip
_POINTWISE = _ARITHMETIC | _TYPES_AND_PARTS | _MADE | _RANDOM | _NO_WORK


def equation_kind(equation: Any) -> Kind:
    """Returns what an equation that calls no other is to the fused program."""
    name = equation.primitive.name
    if name in PRODUCTS:
        return "matmul"
    if name == "pallas_call" or name.startswith(ATTENTION):
        return "kernel"
    if name in COLLECTIVES:
        return "collective"
    if name in _MOVES or (name == "broadcast_in_dim" and equation.invars[0].aval.size == equation.outvars[0].aval.size):
        return "move"
    if name in REDUCTIONS | _CUMULATIVE:
        return "reduce"
    if name in _OTHERS:
        return "other"
    return "pointwise" if name in _POINTWISE else "unknown"


def is_ours(kernel: Any) -> bool:
    """Returns whether a kernel is one that the plan chose for attention, so that all of its costs are known."""
    return kernel.primitive.name.startswith(ATTENTION) or splash_blocks(kernel) is not None


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


def cudnn_flops(kernel: Any, num_queries: int, used: tuple[int, int] | None) -> int:
    """FLOPs of cuDNN's attention. num_queries: elements of the queries on this device. used: blocks that are seen, and
    all of them, where the kernel's name says so; None: the mask is causal.

    Two matmuls forward; backward the scores again and a gradient of each of four factors (arXiv:2205.14135).
    """
    num_matmuls = 2 if kernel.primitive.name.startswith(ATTENTION[0]) else 5
    num_keys = kernel.invars[1].aval.shape[2 if kernel.params["layout"] else 1]
    flops, blocks = 2 * num_matmuls * num_queries * num_keys, max(1, num_keys // CUDNN_BLOCK)
    return causal_flops(flops, blocks, blocks) if used is None else flops * used[0] // used[1]
