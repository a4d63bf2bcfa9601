"""Counts the arithmetic of a traced program: its matmuls, convolutions and FFTs, and names what cannot be counted.

As in every published MFU, arithmetic of single elements counts as zero. Unknown is never counted as zero: a primitive
in no list (program.py) is priced by JAX's own analysis, or reported by name (unknown.py).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from meshloom.models import Context, Model, Piece, split_aux

from ..core.kernels import KernelArray, KernelCall, KernelCost, KernelOwner, ask_owners
from ..core.scopes import OperationName
from ..core.trees import combined, leaves_by_path, pick
from ..spec.step_spec import StepSpec
from .program import CALLS, PRODUCTS, equation_kind
from .subprograms import scan_of, subprograms
from .unknown import CallCost, UnknownPrimitive, ask_jax, unknown_of

NO_ESTIMATE = "the kernel has no cost estimate"
TRIPS = "the number of its trips is not known before it runs"
_COMPLEX_FFT = 5  # FLOPs per element and level of a radix-2 FFT (Cooley and Tukey 1965); half of it for a real one


@dataclass(frozen=True)
class FlopCount:
    """A count of FLOPs.

    products: sums of products, whose backward pass takes twice as many: a gradient of each factor. transforms: linear
    maps without a weight, whose backward pass takes as many. unknown: what is in neither. masked: the part of the
    products that makes scores which attention's mask hides, or reads them.
    """

    products: int = 0
    transforms: int = 0
    unknown: tuple[UnknownPrimitive, ...] = ()
    masked: int = 0

    @property
    def known(self) -> int:
        return self.products + self.transforms

    def times(self, count: int) -> "FlopCount":
        return FlopCount(count * self.products, count * self.transforms, self.unknown, count * self.masked)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of a model.

    per_step: those of a step; None where `unknown` names something that cannot be counted. masked_per_step: those that
    attention's mask makes needless, forward and backward.
    """

    per_step: int | None
    unknown: tuple[UnknownPrimitive, ...]
    masked_per_step: int = 0

    @property
    def least_per_step(self) -> int | None:
        """Returns the FLOPs that every program of the step needs; None where they cannot be counted."""
        return None if self.per_step is None else max(0, self.per_step - self.masked_per_step)

    @property
    def why_unknown(self) -> str | None:
        """Returns the names of what cannot be counted, with their places; None where everything is."""
        return "; ".join(map(str, self.unknown)) or None


class CountedOp(KernelOwner, Protocol):
    """An operation, as far as the FLOPs of a model depend on it (`ParallelOp`)."""

    kind: ClassVar[str]

    def masked_share(self, spec: StepSpec, *operands: Any, **options: Any) -> Fraction: ...


def count_model_flops(
    model: Model, spec: StepSpec, ops: Sequence[CountedOp], frozen: Collection[str] = ()
) -> ModelFlops:
    """Returns the FLOPs of forward and backward over a global batch; what is computed twice counts once.

    The backward pass takes twice the forward pass: a gradient for each of the two factors of a product (an FFT has
    one). Attention counts the whole square of scores, even where a mask hides half of it, as PaLM's MFU does (Chowdhery
    et al. 2022, arXiv:2204.02311, appendix B).

    frozen: paths of parameters that are not trained. Their gradients are not counted, nor those of what they alone
    make.
    """
    total = forward = _count_forward(model, spec, ops)
    flops = 3 * total.products + 2 * total.transforms
    if frozen:
        total = _count_with_frozen(model, spec, ops, frozen)
        flops = total.known
    batch, masked = spec.global_batch_size, 3 * forward.masked  # an upper bound if some parameters are frozen
    return ModelFlops(None if total.unknown else flops * batch, total.unknown, masked * batch)


def _count_forward(model: Model, spec: StepSpec, ops: Sequence[CountedOp]) -> FlopCount:
    """Returns the FLOPs of the forward pass of one sequence."""
    tokens_BT = jax.ShapeDtypeStruct((1, spec.sequence_length), jnp.int32)

    def count(apply: Any, params: Any, x: Any, part: str) -> tuple[FlopCount, Any]:
        def forward(params: Any, x: Any) -> Any:  # positions are traced, so that no array of their length is made
            positions = jnp.arange(spec.sequence_length)[None]
            context = Context(positions, lambda _, x, *axes, **__: x, _marking_masks(spec, ops))
            return split_aux(apply(params, x, context))

        traced = jax.jit(forward).trace(params, x)
        return count_flops(traced.jaxpr.jaxpr, part, ops=ops), traced.out_info[0]

    embed, x_BTE = count(model.embed.apply, model.embed.abstract, tokens_BT, "embed")
    counts = [embed]
    for stack in model.stacks:
        one_layer, x_BTE = count(stack.layer.apply, stack.layer.abstract, x_BTE, stack.name)
        counts.append(one_layer.times(stack.num_layers))
    counts.append(count(model.head.apply, model.head.abstract, x_BTE, "head")[0])
    return added(counts)


_MASKED = "meshloom_masked"  # a call's name says which share of its products a mask hides: meshloom_masked_3_of_8


def _marking_masks(spec: StepSpec, ops: Sequence[CountedOp]) -> Callable[..., Any]:
    """Returns the `Context.operation` that runs an operation which masks products as a call named after its mask."""

    def operation(kind: str, _: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        hidden = next((op.masked_share(spec, *operands, **options) for op in ops if op.kind == kind), Fraction(0))
        if not hidden:
            return plain(*operands, **options)
        masked = lambda *operands: plain(*operands, **options)  # noqa: E731
        masked.__name__ = f"{_MASKED}_{hidden.numerator}_of_{hidden.denominator}"
        return jax.jit(masked)(*operands)

    return operation


def _count_with_frozen(model: Model, spec: StepSpec, ops: Sequence[CountedOp], frozen: Collection[str]) -> FlopCount:
    """Returns the FLOPs of each piece's forward pass for one sequence, and of its derivative by what is trained."""

    def count(piece: Piece, name: str, x: Any, *, with_dx: bool, tied: Mapping[str, str]) -> tuple[FlopCount, Any]:
        """Returns the FLOPs of one piece, and its output. tied: paths of parameters that another piece has."""
        leaves = leaves_by_path(piece.abstract)
        trained = {path for path in leaves if tied.get(path, f"{name}/{path}") not in frozen}
        fixed = pick(piece.abstract, leaves.keys() - trained)

        def both_passes(params: Any, fixed: Any, x: Any) -> Any:  # positions are traced, as in `_count_forward`
            context = Context(jnp.arange(spec.sequence_length)[None], lambda _, x, *axes, **__: x)

            def forward(params: Any, x: Any) -> Any:
                return split_aux(piece.apply(combined(params, fixed), x, context))[0]

            if with_dx:
                y, pull_back = jax.vjp(forward, params, x)
            else:
                y, pull_back = jax.vjp(lambda params: forward(params, x), params)
            return y, pull_back(y)

        traced = jax.jit(both_passes).trace(pick(piece.abstract, trained), fixed, x)
        return count_flops(traced.jaxpr.jaxpr, name, ops=ops), traced.out_info[0]

    def is_trained(name: str) -> bool:
        return any(f"{name}/{path}" not in frozen for path in leaves_by_path(model.abstract()[name]))

    tokens_BT = jax.ShapeDtypeStruct((1, spec.sequence_length), jnp.int32)
    embed, x = count(model.embed, "embed", tokens_BT, with_dx=False, tied={})
    counts, with_dx = [embed], is_trained("embed")
    for stack in model.stacks:
        first, x = count(stack.layer, stack.name, x, with_dx=with_dx, tied={})
        with_dx |= is_trained(stack.name)
        others, _ = count(stack.layer, stack.name, x, with_dx=with_dx, tied={})
        counts += [first, others.times(stack.num_layers - 1)]
    tied = {name: f"embed/{original}" for name, original in model.tied.items()}
    counts.append(count(model.head, "head", x, with_dx=with_dx, tied=tied)[0])
    return added(counts)


def count_flops(jaxpr: Jaxpr, part: str, within: tuple[Any, ...] = (), *, ops: Sequence[KernelOwner] = ()) -> FlopCount:
    """Returns the FLOPs of a jaxpr: 2 for each multiply and add, the body of a scan once per trip, and the longest
    branch of a cond. within: the equations that call it. ops: operations that know their own kernels."""
    return added(_count(equation, part, within, ops) for equation in jaxpr.eqns)


def added(counts: Iterable[FlopCount]) -> FlopCount:
    """Returns the sum of counts, with each unknown primitive once."""
    counts = list(counts)
    unknown = dict.fromkeys(one for count in counts for one in count.unknown)
    products, transforms, masked = (sum(getattr(c, n) for c in counts) for n in ("products", "transforms", "masked"))
    return FlopCount(products, transforms, tuple(unknown), masked)


def _count(equation: Any, part: str, within: tuple[Any, ...], ops: Sequence[KernelOwner]) -> FlopCount:
    name, params = equation.primitive.name, equation.params
    count = partial(count_flops, part=part, within=(*within, equation), ops=ops)
    if name == "scan":
        scan = scan_of(params)
        return count(scan.body).times(scan.num_trips)
    if name == "cond":
        branches = [count(branch) for branch in subprograms(params)]
        most = max(branches, key=lambda branch: branch.known)
        masked = max(branch.masked for branch in branches)
        return FlopCount(most.products, most.transforms, added(branches).unknown, masked)
    if name == "while":
        body = added(count(inner) for inner in subprograms(params))
        own = (unknown_of(equation, part, TRIPS, within),) if body.known else ()  # no FLOPs in any number of trips
        return FlopCount(unknown=(*body.unknown, *own))
    if name == "shard_map" or calls_one(equation):
        name = params.get("name", "")
        inside = count(next(subprograms(params)))
        if not name.startswith(_MASKED):
            return inside
        hidden, _, whole = name.removeprefix(f"{_MASKED}_").partition("_of_")
        return replace(inside, masked=inside.products * int(hidden) // int(whole))
    cost = kernel_cost_of(equation, "", ops) or cost_of(equation)
    if isinstance(cost, str):
        return FlopCount(unknown=(unknown_of(equation, part, cost, within),))
    return FlopCount(transforms=cost.flops) if name == "fft" else FlopCount(products=cost.flops)


def calls_one(equation: Any) -> bool:
    """Returns whether an equation is a call whose jaxpr can be read in its place."""
    called = next(subprograms(equation.params), None) if equation.primitive.name in CALLS else None
    return called is not None and len(called.invars) == len(equation.invars)


def cost_of(equation: Any) -> CallCost | str:
    """Returns the cost of an equation that calls nothing, as its own program states it, over all devices; a str says
    why it is unknown."""
    name, kind = equation.primitive.name, equation_kind(equation)
    if name in PRODUCTS:
        return CallCost(_product_flops(equation), rated_by="ragged_dot" if name in _GROUPED else None)
    if name in _FORMULAS:
        return CallCost(_FORMULAS[name](equation))
    if name == "pallas_call":
        declared = equation.params.get("cost_estimate")
        return CallCost(int(declared.flops), int(declared.bytes_accessed), "declared") if declared else NO_ESTIMATE
    if kind != "unknown":
        return CallCost(0)
    flops = ask_jax(equation)
    return flops if isinstance(flops, str) else CallCost(flops)


def kernel_cost_of(equation: Any, scope: str, ops: Sequence[KernelOwner]) -> CallCost | None:
    """Returns what an operation says of a call of its kernel, over all devices; None where none of them knows it.

    Kernels are Pallas calls, grouped matmuls, whose groups may leave rows empty, and primitives that no list names.
    """
    name, kind = equation.primitive.name, equation_kind(equation)
    if kind not in ("kernel", "unknown") and name not in _GROUPED:
        return None
    stated = None if kind == "unknown" else cost_of(equation)
    unit = "grouped" if name in _GROUPED else "matmul"
    call = KernelCall(
        kernel=f"{name} {getattr(equation.params.get('jaxpr'), 'debug_info', '')}",
        name=OperationName(scope),
        operands=tuple(map(_array, equation.invars)),
        results=tuple(map(_array, equation.outvars)),
        stated=KernelCost(stated.flops, num_bytes=stated.hbm_bytes, unit=unit)
        if isinstance(stated, CallCost)
        else None,
        parameters=equation.params,
        is_pallas=name == "pallas_call",
    )
    cost = ask_owners(ops, call)
    return cost and CallCost(round(cost.flops), cost.num_bytes, cost.rated_by)


def _array(x: Any) -> KernelArray:
    return KernelArray(tuple(getattr(x.aval, "shape", ())), str(getattr(x.aval, "dtype", "")))


def contracted_dims(equation: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of the two factors of a product that it sums over, in pairs."""
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        is_grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
        return ((), ()) if is_grouped else ((numbers.lhs_spec[1],), (numbers.rhs_spec[1],))
    numbers = params.get("dimension_numbers")
    contracted, _ = numbers or params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return tuple(contracted[0]), tuple(contracted[1])


def _product_flops(equation: Any) -> int:
    """Returns the FLOPs of a matmul or convolution. A matmul takes 2 m k n; with groups of rows or of what is summed,
    each row meets one group's weights. A convolution takes 2 per element of the result and of the kernel that makes it;
    zeros around it count, as in attention's square; those that a dilation inserts do not."""
    left, right = (tuple(x.aval.shape) for x in equation.invars[:2])
    out = math.prod(equation.outvars[0].aval.shape)
    params = equation.params
    if equation.primitive.name == "conv_general_dilated":
        features = right[params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * math.prod(right) // max(1, features * math.prod(params["lhs_dilation"] or ()))
    (contracted_l, contracted_r) = contracted_dims(equation)
    if equation.primitive.name == "dot_general":
        return 2 * out * math.prod(left[d] for d in contracted_l)
    numbers = params["ragged_dot_dimension_numbers"]
    _, (_, batch_r) = numbers.dot_dimension_numbers
    gone = {*contracted_r, *batch_r, *numbers.rhs_group_dimensions}
    return 2 * math.prod(left) * math.prod(size for d, size in enumerate(right) if d not in gone)


def _fft_flops(equation: Any) -> int:
    """Returns 5 N log2 N for each transform of N complex numbers, half of it where one side is real."""
    lengths = equation.params["fft_lengths"]
    sides = [equation.invars[0].aval, equation.outvars[0].aval]
    size = max(math.prod(side.shape) for side in sides)  # half of a real transform's spectrum is left out
    is_real = any(jnp.issubdtype(side.dtype, jnp.floating) for side in sides)
    return round(_COMPLEX_FFT * size * math.log2(math.prod(lengths)) / (2 if is_real else 1))


def _cholesky_flops(equation: Any) -> int:
    """Returns a third of n^3 for each matrix."""
    shape = equation.invars[0].aval.shape
    return math.prod(shape) * shape[-1] // 3


def _triangular_solve_flops(equation: Any) -> int:
    """Returns n^2 for each right-hand side: half of a matmul."""
    matrix, sides = (x.aval.shape for x in equation.invars[:2])
    return math.prod(sides) * matrix[-1]


_GROUPED = ("ragged_dot_general",)
_FORMULAS = {"fft": _fft_flops, "cholesky": _cholesky_flops, "triangular_solve": _triangular_solve_flops}


def matmul_flops(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of the matmuls in the body of a kernel, whatever else is in it."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _product_flops(equation)
        inner = [matmul_flops(sub) for sub in subprograms(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner)
        else:
            total += equation.params.get("length", 1) * sum(inner) if equation.primitive.name == "scan" else sum(inner)
    return total
