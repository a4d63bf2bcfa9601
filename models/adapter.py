"""Adapters: the matrices of a model stay as they are, and a change of low rank is learned beside each.

    lora      y = x W + alpha / rank (x A) B, with W frozen, A (in, rank) random and B (rank, out) zeros at first
              (arXiv:2106.09685)
    rslora    the same with alpha / sqrt(rank) (arXiv:2312.03732)
    dora      the columns of W + alpha / rank A B are scaled to lengths that are learned (arXiv:2402.09353)

`adapt` makes one model of another, without a word in either's code: it runs each piece with a context that recognises a
matrix by identity where a matmul reads it. An adapter's parameters are parameters of the piece, under
`adapter/PATH OF THE MATRIX/`, with the logical axes of the matrix, so that every sharding lays them out.

Experts compute with W + scale A B, made once per layer: every way of sending tokens to them works with it.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .config import AdapterConfig
from .contract import ADAPTED_WEIGHT, Context, LogicalAxes, Model, Params, Piece, is_logical_axes, matmul

ADAPTER = "adapter"  # the part of a piece's parameters that adapters are
LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "magnitude"
_RANK = "Z"  # the letter of the rank in subscripts
_OF_EXPERTS = {3: "xem", 4: "xem", 5: "xme"}  # the letters of the matrices among the operands of `apply_experts`
_FIRST_SITE = 1 << 20  # of dropout: pieces count their own from 0
_LEAST_SQUARE = 1e-30  # of a column's length: a column of zeros is not divided by 0


@dataclass(frozen=True)
class Matrix:
    """How a parameter multiplies. letters: one for each of its dimensions. shared: those of copies, as of experts.
    contracted: those that an input is summed over; the others are the output's. is_of_experts: experts read it."""

    letters: str
    shared: str
    contracted: str
    is_of_experts: bool = False

    @property
    def out(self) -> str:
        return "".join(letter for letter in self.letters if letter not in self.shared + self.contracted)


@dataclass(frozen=True)
class Adapter:
    """The adapter of one matrix. number: tells the adapters of a model apart."""

    matrix: Matrix
    config: AdapterConfig
    number: int

    @property
    def letters(self) -> dict[str, str]:
        """Returns the letters of its parameters, by name."""
        shared, contracted, out = self.matrix.shared, self.matrix.contracted, self.matrix.out
        found = {LORA_A: shared + contracted + _RANK, LORA_B: shared + _RANK + out}
        return found | ({MAGNITUDE: shared + out} if self.config.has_magnitude else {})

    def along(self, of_matrix: tuple[Any, ...], rank: Any) -> dict[str, tuple[Any, ...]]:
        """Returns what the dimensions of its parameters are, by name. of_matrix: what those of the matrix are. rank:
        what the rank is."""
        known = dict(zip(self.matrix.letters, of_matrix, strict=True)) | {_RANK: rank}
        return {name: tuple(known[letter] for letter in letters) for name, letters in self.letters.items()}

    def fan_in(self, shape: tuple[int, ...]) -> int:
        """Returns how many numbers of an input each number of the output is made of. shape: that of the matrix."""
        sizes = dict(zip(self.matrix.letters, shape, strict=True))
        return math.prod(sizes[letter] for letter in self.matrix.contracted)


def find_matrices(model: Model, *, length: int) -> dict[str, Matrix]:
    """Returns how each parameter that a matmul or experts read multiplies, by its path in the model. Nothing is
    computed. Left out is what the head shares with the embedding, and what is read in several ways."""
    found: dict[str, Matrix | None] = {}

    def recording(name: str, params: Params) -> Context:
        paths = {id(leaf): f"{name}/{path}" for path, leaf in _by_path(params).items()}

        def operation(kind: str, _: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
            for place, operand in enumerate(operands):
                read, path = _matrix_of(kind, place, options), paths.get(id(operand))
                if read and path:
                    found[path] = read if found.get(path, read) == read else None
            return plain(*operands, **options)

        return Context(jnp.arange(length)[None], lambda _, x, *axes, **__: x, operation)

    def forward(params: Params, tokens_BT: Array) -> Any:
        x: Any = model.embed.apply(params["embed"], tokens_BT, recording("embed", params["embed"]))
        for stack in model.stacks:
            output = stack.layer.apply(params[stack.name], x, recording(stack.name, params[stack.name]))
            x = output[0] if isinstance(output, tuple) else output
        model.head.apply(params["head"], x, recording("head", params["head"]))

    pieces = {"embed": model.embed, "head": model.head, **{stack.name: stack.layer for stack in model.stacks}}
    abstract = {name: piece.abstract for name, piece in pieces.items()}
    jax.eval_shape(forward, abstract, jax.ShapeDtypeStruct((1, length), jnp.int32))
    return {path: read for path, read in found.items() if read and path.removeprefix("head/") not in model.tied}


def _matrix_of(kind: str, place: int, options: Mapping[str, Any]) -> Matrix | None:
    """Returns how an operand multiplies; None where it does not."""
    if kind == "experts" and place in _OF_EXPERTS:
        letters = _OF_EXPERTS[place]
        return Matrix(letters, letters[0], letters[1], is_of_experts=True)
    if kind != "matmul" or place != 1:
        return None
    x, weight, result = _split(options["subscripts"])
    contracted = "".join(letter for letter in weight if letter in x and letter not in result)
    shared = "".join(letter for letter in weight if letter in x and letter in result)
    return Matrix(weight, shared, contracted) if contracted else None


def _split(subscripts: str) -> tuple[str, str, str]:
    operands, result = subscripts.split("->")
    x, weight = operands.split(",")
    return x, weight, result


def adapt(model: Model, config: AdapterConfig, targets: Mapping[str, Matrix]) -> Model:
    """Returns the model with an adapter beside each target, by its path in the model. At first it computes what the
    model does. The rules of stacks are left out: the parameters of the base stay as they are."""
    adapters = {path: Adapter(targets[path], config, number) for number, path in enumerate(sorted(targets))}

    def adapted(name: str, base: Piece) -> Piece:
        own = {path.removeprefix(f"{name}/"): one for path, one in adapters.items() if path.startswith(f"{name}/")}
        return _adapted_piece(base, own) if own else base

    return replace(
        model,
        embed=adapted("embed", model.embed),
        stacks=tuple(replace(each, layer=adapted(each.name, each.layer), rules={}) for each in model.stacks),
        head=adapted("head", model.head),
        adapters=adapters,
    )


def adapter_path(path: str) -> str:
    """Returns the path of a matrix's adapter: layers/mlp/up_EM -> layers/adapter/mlp/up_EM."""
    piece, _, within = path.partition("/")
    return f"{piece}/{ADAPTER}/{within}"


def is_adapter(path: str) -> bool:
    """Returns True for the path of an adapter's parameter, such as layers/adapter/mlp/up_EM/lora_A."""
    return path.split("/")[1:2] == [ADAPTER]


def _adapted_piece(base: Piece, adapters: Mapping[str, Adapter]) -> Piece:
    """Returns a piece with adapters, by the paths of their matrices in it."""
    if ADAPTER in base.abstract:
        raise ValueError(f"{base.name} calls a part '{ADAPTER}', where adapters would lie: give it another name")
    shapes, axes = _by_path(base.abstract), _by_path(base.logical_axes, is_leaf=is_logical_axes)
    abstract, names, bounds = dict[str, Any](), dict[str, LogicalAxes](), dict[str, float]()
    for path, one in adapters.items():
        for name, shape in one.along(shapes[path].shape, one.config.rank).items():
            abstract[f"{path}/{name}"] = jax.ShapeDtypeStruct(shape, jnp.float32)
            bounds[f"{path}/{name}"] = one.fan_in(shapes[path].shape) ** -0.5 if name == LORA_A else 0.0
        names |= {f"{path}/{name}": along for name, along in one.along(axes[path], None).items()}

    def init(key: Array) -> Params:
        drawn = {path: _drawn(path, x.shape, bounds[path], key) for path, x in abstract.items()}
        return base.init(key) | {ADAPTER: _nested(drawn)}

    def apply(params: Params, x: Any, context: Context) -> Any:
        own = {name: node for name, node in params.items() if name != ADAPTER}
        own = jax.tree.map(
            lambda w: w if isinstance(w, Array) else jnp.asarray(w), own
        )  # a NumPy array has no identity
        used = set[str]()
        output = base.apply(own, x, _adapting(context, own, params[ADAPTER], adapters, used))
        if unread := adapters.keys() - used:
            raise RuntimeError(f"no matmul of {base.name} read {', '.join(sorted(unread))}, and each has an adapter")
        return output

    return replace(
        base,
        abstract=base.abstract | {ADAPTER: _nested(abstract)},
        logical_axes=base.logical_axes | {ADAPTER: _nested(names)},
        init=init,
        apply=apply,
    )


def _drawn(path: str, shape: tuple[int, ...], bound: float, key: Array) -> Array:
    """Returns a new parameter: A is uniform within 1 / sqrt(in), as in PEFT; the others are zeros. A magnitude is what
    a column's length differs by from the base's, so that it starts right whatever base is loaded."""
    if not bound:
        return jnp.zeros(shape)
    own = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return jax.random.uniform(own, shape, minval=-bound, maxval=bound)


def _adapting(
    context: Context, own: Params, trained: Params, adapters: Mapping[str, Adapter], used: set[str]
) -> Context:
    """Returns the context of a piece, in which its matrices are adapted where they are read. own: the parameters of the
    piece. trained: those of its adapters. used: gets the paths of the matrices that are read."""
    paths, parts = {id(leaf): path for path, leaf in _by_path(own).items()}, _by_path(trained)
    plain_operation = context.operation

    def of(operand: Any) -> tuple[Adapter, dict[str, Array]] | None:
        if (one := adapters.get(path := paths.get(id(operand), ""))) is None:
            return None
        used.add(path)
        return one, {name: parts[f"{path}/{name}"] for name in one.letters}

    def operation(kind: str, name: str, plain: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        if kind == "matmul" and (found := of(operands[1])):
            x, weight = operands
            return _adapted_matmul(context, name, plain, x, weight, *found, **options)
        if kind == "experts":
            operands = tuple(
                plain_operation(
                    ADAPTED_WEIGHT, f"{name}_{place}", partial(_adapted_weight, found[0]), x, *found[1].values()
                )
                if (found := of(x))
                else x
                for place, x in enumerate(operands)
            )
        return plain_operation(kind, name, plain, *operands, **options)

    return replace(context, operation=operation)


def _adapted_matmul(
    context: Context, name: str, plain: Callable[..., Array], x: Array, weight: Array, one: Adapter,
    parts: Mapping[str, Array], *, subscripts: str, **options: Any,
) -> Array:  # fmt: skip
    """Returns x times the adapted matrix. Three matmuls: x W, x A and that times B."""
    of_x, _, result = _split(subscripts)
    y = context.operation("matmul", name, plain, x, weight, subscripts=subscripts, **options)
    dropped = context.dropout(x, one.config.dropout, site=_FIRST_SITE + one.number)
    low = "".join(letter for letter in of_x if letter not in one.matrix.contracted) + _RANK
    into, out_of = f"{of_x},{one.letters[LORA_A]}->{low}", f"{low},{one.letters[LORA_B]}->{result}"
    h = context.operation("matmul", f"{name}_lora_A", matmul, dropped, parts[LORA_A], subscripts=into, **options)
    if low == f"bt{_RANK}":
        h = context.activation(f"{name}_lora", h, "batch", "length", None)
    change = context.operation("matmul", f"{name}_lora_B", matmul, h, parts[LORA_B], subscripts=out_of, **options)
    y = y + one.config.scale * change
    if not one.config.has_magnitude:
        return y
    stretch = _stretch(one, weight, *parts.values())
    return (y.astype(jnp.float32) * _beside(stretch, one.letters[MAGNITUDE], result)).astype(y.dtype)


def _stretch(one: Adapter, weight: Array, a: Array, b: Array, magnitude: Array, **options: Any) -> Array:
    """Returns what each column of W + scale A B is multiplied by, so that it has its learned length, in float32.

    Lengths have no gradient (arXiv:2402.09353, section 4.3). The matrix A B is not made: a column of b has
    |w + s A b|^2 = |w|^2 + 2 s (A'w) b + s^2 b' (A'A) b.
    """
    weight, a, b = jax.lax.stop_gradient((weight, a, b.astype(jnp.float32)))
    einsum = partial(jnp.einsum, preferred_element_type=jnp.float32, **options)
    of_a, of_b, shared, scale = one.letters[LORA_A], one.letters[LORA_B], one.matrix.shared, one.config.scale
    axes = tuple(one.matrix.letters.index(letter) for letter in one.matrix.contracted)
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=axes)
    crossed = einsum(f"{of_a},{one.matrix.letters}->{of_b}", a, weight)
    gram = einsum(f"{of_a},{of_a.replace(_RANK, 'Y')}->{shared}{_RANK}Y", a, a)
    within = einsum(f"{shared}{_RANK}Y,{of_b.replace(_RANK, 'Y')}->{of_b}", gram, b)
    added = jnp.sum(b * (2 * scale * crossed + scale**2 * within), axis=len(shared))
    before, now = (jnp.sqrt(jnp.maximum(each, _LEAST_SQUARE)) for each in (squares, squares + added))
    return (before + magnitude.astype(jnp.float32)) / now


def _beside(factors: Array, letters: str, others: str) -> Array:
    """Returns factors as they are broadcast: "hd" beside "bthd" is (1, 1, h, d)."""
    ordered = jnp.transpose(factors, sorted(range(len(letters)), key=lambda place: others.index(letters[place])))
    sizes = dict(zip(letters, factors.shape, strict=True))
    return ordered.reshape([sizes.get(letter, 1) for letter in others])


def _adapted_weight(one: Adapter, weight: Array, *parts: Array, **options: Any) -> Array:
    """Returns the matrix that a matrix and its adapter make, in the matrix's type. parts: the adapter's parameters, in
    the order of `one.letters`."""
    a, b, *more = parts
    subscripts = f"{one.letters[LORA_A]},{one.letters[LORA_B]}->{one.matrix.letters}"
    change = jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32, **options)
    adapted = weight.astype(jnp.float32) + one.config.scale * change
    for magnitude in more:
        stretch = _stretch(one, weight, a, b, magnitude, **options)
        adapted *= _beside(stretch, one.letters[MAGNITUDE], one.matrix.letters)
    return adapted.astype(weight.dtype)


def merged(model: Model, params: Params) -> Params:
    """Returns the parameters of the base with the adapters merged into them: pure, and can be jitted. One layer of a
    stack is merged at a time, in float32."""
    stacks = {stack.name for stack in model.stacks}
    leaves = _by_path(params)
    for path, one in model.adapters.items():
        parts = [leaves[f"{adapter_path(path)}/{name}"].astype(jnp.float32) for name in one.letters]
        merge = partial(_adapted_weight, one, precision="highest")
        if path.split("/")[0] in stacks:
            leaves[path] = jax.lax.map(lambda each, merge=merge: merge(*each), (leaves[path], *parts))
        else:
            leaves[path] = merge(leaves[path], *parts)
    return without_adapters(_nested(leaves))


def without_adapters(params: Params) -> Params:
    """Returns a tree of the model's parameters without those of adapters: that of the base."""
    return {piece: {name: node for name, node in own.items() if name != ADAPTER} for piece, own in params.items()}


def only_adapters(params: Params) -> Params:
    """Returns the adapters' part of a tree of the model's parameters."""
    return {piece: {ADAPTER: own[ADAPTER]} for piece, own in params.items() if isinstance(own, dict) and ADAPTER in own}


def saved_part(state: Params) -> Params:
    """Returns what a checkpoint holds of a train state: of the parameters the adapters alone, if there are any."""
    adapters = only_adapters(state.get("params", {}))
    return state | {"params": adapters} if adapters else state


def _by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def _nested(leaves: Mapping[str, Any]) -> Params:
    tree: Params = {}
    for path, leaf in leaves.items():
        node, (*outer, last) = tree, path.split("/")
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
