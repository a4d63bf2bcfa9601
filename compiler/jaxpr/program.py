"""A step as operations on values, which estimates are made from. read_jaxpr.py makes it of a traced step.

Operations are sorted by primitive into kinds, as the fused program treats them. The lists are closed. A
primitive in none of them, such as one that a user defines or a later JAX adds, is "unknown": it is not taken for a
cheap one, and the estimate names what it does not know about it (unknown.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ..core.kernels import RatedBy
from ..core.traffic import CollectiveKind, DeviceTraffic
from .unknown import UnknownPrimitive

# move: the same bytes under another shape. pointwise: fused with its neighbours. reduce: fused with what it reads.
# unknown: a primitive that no list names; it reads and writes arrays, like other. loop, branches: they run bodies.
Kind = Literal["matmul", "kernel", "collective", "loop", "branches", "move", "pointwise", "reduce", "other", "unknown"]


@dataclass(frozen=True)
class Body:
    """A program that an operation runs: the body of a loop, or a branch. executions: their number in one execution of
    the operation, on each stage of the mesh; a single value where all stages have the same."""

    program: "Program"
    executions: tuple[float, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of the step.

    inputs, outputs: indices of values. scope: the names of the parts that it belongs to. flops: those of a device;
    None: unknown. stage_pairs: of a permute between stages, the senders with their receivers. hbm_bytes: the bytes that
    it declares to read and write. bodies: the body of a loop, or the branches; their inputs are the last ones of the
    operation. rated_by: of a kernel, what its rate depends on. num_carried: the number of the loop's first results that
    each trip hands to the next; the others are stacked. chosen: of a slot of a pipeline, the branch that each stage
    runs, by tick. unknown: the record of what is not known of it. is_reordered: True for a gather of an activation
    along a dimension behind another one, so that the parts of the result lie apart in memory.
    """

    kind: Kind
    name: str
    scope: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int | None = 0
    collective: DeviceTraffic | None = None
    stage_pairs: tuple[tuple[int, int], ...] = ()
    bodies: tuple[Body, ...] = ()
    num_carried: int = 0
    hbm_bytes: int | None = None
    chosen: tuple[tuple[int, ...], ...] = ()
    unknown: UnknownPrimitive | None = None
    rated_by: RatedBy | None = None
    is_reordered: bool = False

    @property
    def is_product(self) -> bool:
        """Returns True for a matmul, and for a kernel that has a matmul's rate."""
        return self.kind == "matmul" or (self.kind == "kernel" and self.rated_by is None and bool(self.flops))


@dataclass(frozen=True)
class Program:
    """A sequence of operations on values. sizes: the bytes of each value on a device, by its index. host_sizes: the
    bytes of a device's part of it in host memory; a value lies in one of the two. dtypes: the type of each. donates:
    True if results may take the place of inputs."""

    operations: tuple[Operation, ...]
    sizes: tuple[int, ...]
    host_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donates: bool = True

    @cached_property
    def makers(self) -> Mapping[int, Operation]:
        """The operation that makes each value; none for an input."""
        return {made: operation for operation in self.operations for made in operation.outputs}

    def walk(self) -> Iterator[Operation]:
        """Yields the operations, each before those of its bodies."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body.program.walk()


def origins_of(operation: Operation) -> Mapping[int, int]:
    """Returns the results of a loop or of branches that are written in place of an operand, with that operand: a branch
    that runs on a part of the stages writes a buffer or hands it on as it is, and a loop writes it layer by layer."""
    found = ((result, _origin_in(operation, place)) for place, result in enumerate(operation.outputs))
    return {result: origin for result, origin in found if origin is not None}


def _origin_in(operation: Operation, place: int) -> int | None:
    """Returns the operand in whose place a result of a loop or of branches is written, or None. Only this result is
    followed into the bodies: they are nested, and following all of them takes a time that is exponential in the
    depth."""
    if not operation.bodies or (operation.kind == "loop" and place >= operation.num_carried):
        return None
    programs = [body.program for body in operation.bodies]
    origins = (origin_of(each, each.outputs[place]) for each in programs)
    places = {None if i is None else each.inputs.index(i) for each, i in zip(programs, origins, strict=True)}
    origin, first = places.pop(), len(operation.inputs) - len(programs[0].inputs)
    return None if places or origin is None else operation.inputs[first + origin]


def origin_of(program: Program, value: int) -> int | None:
    """Returns the argument whose buffer this value reuses, or None."""
    while value not in program.inputs:
        operation = program.makers.get(value)
        if operation is None:
            return None
        if operation.kind == "move" or operation.name == "dynamic_update_slice":
            value = operation.inputs[0]
        elif operation.name == "optimization_barrier":
            value = operation.inputs[operation.outputs.index(value)]
        elif (origin := _origin_in(operation, operation.outputs.index(value))) is not None:
            value = origin
        else:
            return None
    return value


_MOVES = {
    "reshape", "squeeze", "expand_dims", "transpose", "name", "sharding_constraint", "copy", "reshard",
}  # fmt: skip
COLLECTIVES: dict[str, CollectiveKind] = {
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "ppermute": "collective-permute",
}  # fmt: skip
LANES = 128  # in a row of a TPU's registers; arrays in memory are tiled by it
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}  # sums of products: flops.py
_OTHERS = {  # they read an array and write an array
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
CALLS = {  # they call one jaxpr, whose arguments are the operands
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
_TYPES_AND_PARTS = {  # they return the same numbers in other bytes, or some of them
    "bitcast_convert_type", "broadcast_in_dim", "broadcast_to", "concatenate", "convert_element_type", "device_put",
    "from_edtype", "pad", "reduce_precision", "rev", "slice", "split", "stack", "stop_gradient",
    "tile", "to_edtype", "unstack",
}  # fmt: skip
_MADE = {"empty", "empty2", "iota", "zeros_like"}  # without operands
_RANDOM = {
    "iota_2x32_shape", "philox2x32", "philox4x32", "prng_join", "prng_random_bits", "prng_seed", "prng_split",
    "random_bits", "random_clone", "random_fold_in", "random_gamma", "random_seed", "random_split", "random_unwrap",
    "random_wrap", "rng_bit_generator", "rng_uniform", "threefry2x32", "threefry4x32",
}  # fmt: skip
_NO_WORK = {  # they tell the tracer or the host something, or return a number that the device has
    "axis_index", "create_token", "after_all", "debug_callback", "debug_print", "inspect_sharding", "layout_constraint",
    "pbroadcast", "platform_index", "preduced", "pvary", "reduced_vary_cast_p", "vary_unreduced_cast_p",
    "with_memory_space_constraint",
}  # fmt: skip
_POINTWISE = _ARITHMETIC | _TYPES_AND_PARTS | _MADE | _RANDOM | _NO_WORK


def equation_kind(equation: Any) -> Kind:
    """Returns the kind of an equation that calls no jaxpr."""
    name = equation.primitive.name
    if name in PRODUCTS:
        return "matmul"
    if name == "pallas_call":
        return "kernel"
    if name in COLLECTIVES:
        return "collective"
    if name in _MOVES or (name == "broadcast_in_dim" and equation.invars[0].aval.size == equation.outvars[0].aval.size):
        return "move"
    if name in REDUCTIONS or name in _CUMULATIVE:
        return "reduce"
    if name in _OTHERS:
        return "other"
    return "pointwise" if name in _POINTWISE else "unknown"
