"""Which models can run with the length of sequences split over devices: those in which no token sees another but by
attention, which exchanges keys and values itself (compiler/parallel/attention/context.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from meshloom.models import Context, Model, split_aux
from meshloom.models.contract import Piece

from ..core.errors import Problem, raise_if_any
from ..jaxpr.fusion import needed
from ..jaxpr.program import Program
from ..jaxpr.read_jaxpr import read_jaxpr
from ..jaxpr.subprograms import subprograms
from ..spec.step_spec import StepSpec
from .roles import AxisRoles

LENGTH = "length"  # the logical axis
# Operations that read or write at other places along a dimension, beside those that only change its size.
_ALONG = {"rev": "dimensions", "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis",
          "cumlogsumexp": "axis", "sort": "dimension"}  # fmt: skip
_RESIZING = {"slice", "pad", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "reduce_window_sum",
             "reduce_window_max", "conv_general_dilated"}  # fmt: skip


def check_length_split(spec: StepSpec, model: Model, roles: AxisRoles, per_token: Callable[..., Any]) -> None:
    """Raises ConfigError where the rules split the length, and a layer or the head looks from one token at another
    otherwise than by attention. per_token: `Context.operation` without what an operation exchanges by itself
    (parallel/operation.py)."""
    axes = roles.length
    if not axes:
        return
    over = " and ".join(axes)
    fix = f"set {', '.join(f'mesh.{axis}=1' for axis in axes)}, or give 'length' a rule with mesh: []"
    what = "{} looks from one token at another, and the length is split over {}"
    raise_if_any(
        Problem("sharding.activations", what.format(name, over), fix) for name in mixing_pieces(spec, model, per_token)
    )


def mixing_pieces(spec: StepSpec, model: Model, per_token: Callable[..., Any]) -> Iterator[str]:
    """Yields the names of pieces that need other tokens than the one that they work on."""
    x: Any = jax.ShapeDtypeStruct((1, _recognisable_length(model)), jnp.int32)
    pieces = [model.embed, *(stack.layer for stack in model.stacks), model.head]
    for piece in pieces:
        is_pointwise, x = _traced(piece, spec, x, per_token)
        if not is_pointwise:
            yield piece.name


def _traced(piece: Piece, spec: StepSpec, x: Any, per_token: Callable[..., Any]) -> tuple[bool, Any]:
    """Returns True where two devices, each with half of the tokens, make their halves of the output and exchange
    nothing; and the shape of the whole output."""
    num_devices, params = 2, piece.abstract_in(spec.precision.compute)

    def apply(params: Any, positions_BT: jax.Array, segment_ids_BT: jax.Array, x: jax.Array) -> jax.Array:
        context = Context(positions_BT, lambda _, x, *__, **___: x, per_token, segment_ids_BT)
        return split_aux(piece.apply(params, x, context))[0]

    tokens = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)
    traced, output = jax.make_jaxpr(apply, return_shape=True)(params, tokens, tokens, x)
    num_params = len(jax.tree.leaves(params))
    layouts = [
        ((),) * v.aval.ndim if place < num_params else ((), (LENGTH,), *((),) * (v.aval.ndim - 2))
        for place, v in enumerate(traced.jaxpr.invars)
    ]
    program = read_jaxpr(traced.jaxpr, layouts, {LENGTH: num_devices})
    length = tokens.shape[1]
    is_split = not _moves_along(traced.jaxpr, length)
    is_split &= program.sizes[program.outputs[0]] * num_devices == output.size * output.dtype.itemsize
    return is_split and not _has_collective(program), output


def _recognisable_length(model: Model) -> int:
    """Returns an even length that no dimension of a parameter has, so that dimensions of this size are the length."""
    sizes = {size for x in jax.tree.leaves(model.abstract()) for size in x.shape}
    longest = min(model.max_length or 4096, 4096) // 2 * 2
    return next(length for length in range(longest, 0, -2) if length not in sizes)


def _moves_along(jaxpr: Jaxpr, length: int) -> bool:
    """Returns True where an operation takes what is at one place of the length to another, or runs a loop along it."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]  # type: ignore[attr-defined]
        if name in _ALONG:
            places = params[_ALONG[name]]
            if any(shapes[0][place] == length for place in (places if isinstance(places, tuple) else (places,))):
                return True
        elif name in _RESIZING:
            has_length = [length in shape for shape in shapes if len(shape) == len(shapes[-1])]
            if name == "conv_general_dilated" or len(set(has_length)) > 1 or _reads_at(equation, length):
                return True
        if name == "scan" and params["length"] == length:
            return True
        if any(_moves_along(inner, length) for inner in subprograms(params)):
            return True
    return False


def _reads_at(equation: Any, length: int) -> bool:
    """Returns True for a gather that takes single places of the length."""
    sizes = equation.params.get("slice_sizes", ()) if equation.primitive.name == "gather" else ()
    shape = equation.invars[0].aval.shape
    return any(size == length != taken for size, taken in zip(shape, sizes, strict=False))


def _has_collective(program: Program) -> bool:
    operations = needed(program)
    return any(each.collective or any(_has_collective(body.program) for body in each.bodies) for each in operations)
