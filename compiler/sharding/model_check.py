"""Checks what the compiler requires of a model, so that a mistake in a user's model is one clear error.

With the length of sequences split over devices, only a model can run in which no token sees another but by attention,
which exchanges keys and values itself (compiler/parallel/attention/context.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from meshloom.models import Aux, AuxOfTotals, Context, Model, Stack, is_counted, is_logical_axes, split_aux
from meshloom.models.contract import COUNTED, Piece

from ..core.errors import ConfigError, Problem, raise_if_any
from ..core.trees import leaves_by_path
from ..jaxpr.fusion import needed
from ..jaxpr.program import Program
from ..jaxpr.read_jaxpr import read_jaxpr
from ..jaxpr.subprograms import subprograms
from ..spec.step_spec import StepSpec
from .roles import AxisRoles

WHERE = "model.family"
ArrayShape = tuple[int, ...]


def check_model(family: str, model: Any) -> Model:
    """Returns the model unchanged. Raises ConfigError if `build` did not return a Model whose components fit
    together."""
    if not isinstance(model, Model):
        what = f"{family}: build() returned {_kind(model)}, not a Model"
        raise ConfigError([Problem(WHERE, what, "return Model(embed=..., stacks=..., head=...)")])
    raise_if_any(Problem(WHERE, f"{family}: build() returned a Model whose {what}", fix) for what, fix in _wrong(model))
    return model


def _wrong(model: Model) -> Iterator[tuple[str, str]]:
    for name in ("embed", "head"):
        if not isinstance(piece := getattr(model, name), Piece):
            yield f"{name} is {_kind(piece)}", f"give {name}=build_piece(lambda rngs: ...)"
    if not isinstance(model.stacks, tuple) or not model.stacks:
        yield f"stacks are {_kind(model.stacks)}", "give a tuple of at least one: (Stack(name, layer, num_layers),)"
        return
    names = []
    for stack in model.stacks:
        if not isinstance(stack, Stack) or not isinstance(stack.layer, Piece):
            yield f"stacks hold {_kind(stack)}", "give Stack(name, build_piece(lambda rngs: ...), num_layers)"
            return
        names.append(stack.name)
        if type(stack.num_layers) is not int or stack.num_layers < 1:
            yield f"stack '{stack.name}' has {stack.num_layers!r} layers", "give a whole number of at least 1"
    if len({*names, "embed", "head"}) < len(names) + 2:
        yield f"stacks are named {', '.join(names)}", "give each a different name, other than 'embed' and 'head'"
    if model.max_length is not None and (type(model.max_length) is not int or model.max_length < 1):
        yield f"max_length is {model.max_length!r}", "give the longest sequence in tokens, or None for any"
    yield from _wrong_ties(model)
    for stack in model.stacks:
        parameters = leaves_by_path(stack.layer.abstract)
        for path in stack.rules:
            if path not in parameters:
                yield f"stack '{stack.name}' has a rule for '{path}'", f"use one of {', '.join(parameters)}"
    yield from _wrong_counts(model)


def _wrong_counts(model: Model) -> Iterator[tuple[str, str]]:
    ruled = model.rules
    for path in leaves_by_path(model.abstract()):
        if is_counted(path) and path not in ruled:
            yield f"'{path}' is in a part called '{COUNTED}', and no rule updates it", "rename the part, or give a rule"


def _wrong_ties(model: Model) -> Iterator[tuple[str, str]]:
    if not isinstance(model.embed, Piece) or not isinstance(model.head, Piece):
        return
    for own, shared in model.tied.items():
        axes = [leaves_by_path(piece.logical_axes, is_leaf=is_logical_axes) for piece in (model.head, model.embed)]
        for name, known, piece in ((own, axes[0], "head"), (shared, axes[1], "embed")):
            if name not in known:
                yield f"tied names '{name}', which {piece} does not have", f"use one of {', '.join(known)}"


def check_totals(stack: Stack, aux: Aux) -> None:
    """Raises ConfigError if a rule or a measure of the stack reads a total that its layer does not return, a rule
    changes the shape or type of its parameter, or a measure is not a number."""
    parameters = leaves_by_path(stack.layer.abstract)
    readers = {f"the rule for '{path}' of stack '{stack.name}'": rule.total for path, rule in stack.rules.items()}
    readers |= {f"the measure '{name}' of stack '{stack.name}'": each.total for name, each in stack.measures.items()}
    for where, total in readers.items():
        if total not in aux.totals:
            what = f"{where} reads the total '{total}', which {stack.layer.name} does not return"
            raise ConfigError([Problem(WHERE, what, f"return x, Aux(totals={{{total!r}: ...}})")])
    for name, measure in stack.measures.items():
        value = jax.eval_shape(measure.of, aux.totals[measure.total])
        if value.shape or name in (*aux.losses, *aux.statistics, *aux.totals):
            what = f"the measure '{name}' of stack '{stack.name}' is not a scalar, or has a name that is used"
            raise ConfigError([Problem(WHERE, what, "return a scalar, under a name that the layer's Aux does not use")])
    for path, rule in stack.rules.items():
        where = f"the rule for '{path}' of stack '{stack.name}'"
        before = parameters[path]
        after = jax.eval_shape(rule.update, before, aux.totals[rule.total])
        if after.shape != before.shape or after.dtype != before.dtype:
            what = f"{where} makes an array of shape {_shape(after.shape)} and type {after.dtype} of it"
            raise ConfigError([Problem(WHERE, what, f"keep its shape {_shape(before.shape)} and type {before.dtype}")])


def check_output(
    piece: str, output: Any, expected: ArrayShape, *, dtype: str | None = None, is_last_more: bool = False
) -> None:
    """Raises ConfigError if a model component did not return one array of this shape.

    dtype: its required type; None: any floating-point type. is_last_more: its last dimension may be larger.
    """
    fix = f"return an array of shape {_shape(expected)}" + (f" and type {dtype}" if dtype else "")
    if not isinstance(output, jax.Array):
        raise _output_error(piece, output, fix)
    shape, fits = output.shape, output.shape == expected
    if is_last_more:
        fits = len(shape) == len(expected) and shape[:-1] == expected[:-1] and shape[-1] >= expected[-1]
    is_of_type = output.dtype == dtype if dtype else jnp.issubdtype(output.dtype, jnp.floating)
    if not fits or not is_of_type:
        raise _output_error(piece, output, fix)


def check_embedded(piece: str, output: Any, tokens: ArrayShape) -> None:
    """Raises ConfigError if the embedding did not return one vector for each token."""
    if not isinstance(output, jax.Array) or output.ndim != 3:
        raise _output_error(piece, output, f"return an array of shape {_shape((*tokens, 'width'))}")
    check_output(piece, output, (*tokens, output.shape[-1]))


def check_of_head(piece: str, output: Any) -> None:
    """Raises ConfigError if the head returned auxiliary outputs of totals: it may run on some tokens at a time."""
    if isinstance(output, tuple) and isinstance(output[-1], AuxOfTotals):
        what = f"{piece} is the head, which runs on some tokens of a microbatch at a time, and returned AuxOfTotals"
        raise ConfigError([Problem(WHERE, what, "return Aux, whose values are sums over tokens, or do so in a layer")])


def check_aux(piece: str, aux: Aux) -> None:
    """Raises ConfigError if a loss is not a scalar, if another output is not an array of numbers, or for names that
    cannot be used."""
    names = [*aux.losses, *aux.statistics, *aux.totals]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or names.count(name) > 1:
            what = f"{piece} returned an auxiliary output named {name!r}"
            fix = "name each loss, statistic and total once, by letters, digits and underscores"
            raise ConfigError([Problem(WHERE, what, fix)])
    for name, loss in aux.losses.items():
        if not isinstance(loss, jax.Array) or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            what = f"{piece} returned {_found(loss)} as the loss '{name}'"
            raise ConfigError([Problem(WHERE, what, "return its sum over all tokens: a scalar of floating point")])
    others = [("statistic", *each) for each in aux.statistics.items()] + [("total", *t) for t in aux.totals.items()]
    for kind, name, value in others:
        if not isinstance(value, jax.Array) or jnp.issubdtype(value.dtype, jnp.complexfloating):
            what = f"{piece} returned {_found(value)} as the {kind} '{name}'"
            raise ConfigError([Problem(WHERE, what, "return its sum over all tokens: an array of real numbers")])


def _output_error(piece: str, output: Any, fix: str) -> ConfigError:
    return ConfigError([Problem(WHERE, f"{piece}.__call__ returned {_found(output)}", fix)])


def _found(output: Any) -> str:
    is_array = isinstance(output, jax.Array)
    return f"an array of shape {_shape(output.shape)} and type {output.dtype}" if is_array else _kind(output)


def _shape(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"


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
