"""A model, as the compiler sees it, is three pure pieces over parameters whose dimensions have names.

A model is written with Flax NNX modules; `build_piece` turns a module into abstract parameters, their logical axes, an
initialiser and a pure function. From there on nothing but plain nested dicts of arrays is passed around. The compiler
owns the loop over layers, so a model never says how its layers are run.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.tree_util import register_dataclass

from .attention import Mask, attend
from .parts import NO_EXPERT, ONE_GROUP, ExpertGroups, apply_experts

if TYPE_CHECKING:
    from .adapter import Adapter, Matrix

# Logical axes are resolved by compiler/sharding/sharding.py; NNX must not look for a mesh when a Param is made.
flax.config.update("flax_always_shard_variable", False)

Params = dict[str, Any]  # nested dict of arrays
IGNORED_TARGET = -1  # a target without loss: the end of a document that is kept apart from the next
PADDING_TARGET = -2  # the target of a place that holds no token
COUNTED = "counted"  # the part of a layer whose parameters hold counts: `is_counted`
ADAPTED_WEIGHT = "adapted_weight"  # the kind of operation whose result is used as its first operand, a parameter, is
LogicalAxes = tuple[str | None, ...]  # one name per dimension; None: a dimension that is never sharded


def embedding_lookup(table: Array, ids: Array) -> Array:
    """Returns rows of a table: `ids` (...) of `table` (rows, columns) -> (..., columns)."""
    return table[ids]


def matmul(x: Array, weight: Array, *, subscripts: str, precision: str | None = None) -> Array:
    """Returns the product of an activation and a weight, as `jnp.einsum` writes it: "bte,ehd->bthd". precision: that of
    `jax.lax.Precision`; None: as the compute type has it."""
    operands, result = subscripts.split("->")
    of_x, of_weight = operands.split(",")
    num_contracted = sum(letter not in result for letter in of_x)
    kept = len(of_x) - num_contracted
    if of_x[kept:] == of_weight[:num_contracted] and result == of_x[:kept] + of_weight[num_contracted:]:
        # einsum contracts the last dimension first, for which XLA then transposes the gradient of a weight.
        return jnp.tensordot(x, weight, num_contracted, precision=precision)
    return jnp.einsum(subscripts, x, weight, precision=precision)


def plain_operation(kind: str, name: str, plain: Callable[..., Array], *operands: Any, **options: Any) -> Array:
    """Runs an operation as the model wrote it: `Context.operation` where nothing is planned."""
    del kind, name
    return plain(*operands, **options)


def remember_nothing(name: str, x: Array, *logical_axes: str | None) -> Array:
    """Returns `x` itself: `Context.remember` where all tokens of a sequence are at hand."""
    del name, logical_axes
    return x


def run_at_once(layer: Callable[[Array], Any], x: Array) -> Any:
    """Returns `layer(x)`: `Context.run_layer` where nothing of a layer is computed again."""
    return layer(x)


@dataclass(frozen=True)
class Context:
    """The values and functions that the compiler hands to a piece besides its parameters and its input.

    positions_BT: int32 (batch or 1, length), the position of each token in its document.
    segment_ids_BT: int32 (batch, length), the document of each token within its sequence, 0 for padding; tokens attend
        within their document only. None: a sequence is one document.
    activation: `activation(name, x, *logical_axes)` returns `x` laid out by the activation rules. The name is what
        tables, errors and remat policies show; wherever a model uses it, it has the same dimensions. With
        `gradient=logical_axes` the gradient of `x` is laid out by those, where forward gathers and backward scatters.
    operation: `operation(kind, name, plain, *operands, **options)` returns what `plain(*operands, **options)` does, run
        by the strategy that the plan chose for the operation of this kind and name in this piece (compiler/parallel).
        An operand that is a parameter of the model is recognised as such. The methods below call it; a model calls it
        itself for an operation of its own.
    dropout_keys_B: a key for each sequence, of this piece alone. None: nothing is dropped.
    is_token_BT: bool (batch, length), False for padding. None: there is no padding. What counts tokens, or sums over
        them, leaves padding out by `where_token`.
    remember: `remember(name, x, *logical_axes)` returns what a layer has made of all tokens so far, from `x` (batch,
        length, ...), what it makes of the tokens at hand. In training and evaluation that is `x` itself. While text is
        generated, the tokens at hand may be the newest alone: those before come from the layer's cache
        (compiler/step/decode.py). Whatever a token reads of other tokens has to go through it, and through `attend`.
    run_layer: `run_layer(layer, x)` returns what `layer(x)` does, x or (x, auxiliary outputs). A piece that consists of
        several layers runs each of them so: then the backward pass computes one of them again at a time.
    """

    positions_BT: Array
    activation: Callable[..., Array]
    operation: Callable[..., Array] = plain_operation
    segment_ids_BT: Array | None = None
    dropout_keys_B: Array | None = None
    is_token_BT: Array | None = None
    remember: Callable[..., Array] = remember_nothing
    run_layer: Callable[[Callable[[Array], Any], Array], Any] = run_at_once

    def where_token(self, x: Array, otherwise: float = 0) -> Array:
        """Returns `x` (batch, length, ...) with `otherwise` at padding."""
        if self.is_token_BT is None:
            return x
        is_token = self.is_token_BT.reshape(*self.is_token_BT.shape, *[1] * (x.ndim - 2))
        return jnp.where(is_token, x, jnp.asarray(otherwise, x.dtype))

    def attend(
        self, q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, sinks_H: Array | None = None,
        *, scale: float, mask: Mask, soft_cap: float | None = None,
    ) -> Array:  # fmt: skip
        """Returns attention within documents, as `models.attention.attend`."""
        operands = (q_BTHD, k_BSKD, v_BSKD, self.segment_ids_BT, *(() if sinks_H is None else (sinks_H,)))
        options = {"scale": scale, "mask": mask, "soft_cap": soft_cap}
        return self.operation("attention", "attention", attend, *operands, **options)

    def embedding_lookup(self, name: str, table: Array, ids: Array) -> Array:
        """Returns rows of a table, as `embedding_lookup` above. A parameter of the embedding that is read in no other
        way need not be whole anywhere: devices may exchange rows."""
        return self.operation("embedding", name, embedding_lookup, table, ids)

    def matmul(self, name: str, subscripts: str, x: Array, weight: Array, *, precision: str | None = None) -> Array:
        """Returns `x` times a weight, as `matmul` above. name: that of the activation that it makes. weight: a
        parameter as the module holds it, `self.up[...]`, or an array that is computed from parameters: the choices of
        a plan for single parameters do not reach that. Where a mesh axis splits what is contracted, partial results
        may be summed around a ring while they are made."""
        options = {} if precision is None else {"precision": precision}
        return self.operation("matmul", name, matmul, x, weight, subscripts=subscripts, **options)

    def apply_experts(
        self, name: str, x_BTE: Array, weights_BTK: Array, ids_BTK: Array, gate_XEM: Array, up_XEM: Array,
        down_XME: Array, *biases: Array, activation: str, groups: ExpertGroups = ONE_GROUP,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Returns what each token's experts make of it, and how many choices were dropped, as
        `models.parts.apply_experts`. The weights have the logical axes ("experts", "embed", "mlp"), down ("experts",
        "mlp", "embed"); biases, one for each of them or none at all, ("experts", "mlp") and ("experts", "embed").
        Experts may be on other devices: tokens are sent to them, and `groups` says to how many. Padding is sent to
        none."""
        ids_BTK = self.where_token(ids_BTK, NO_EXPERT)
        operands = (x_BTE, weights_BTK, ids_BTK, gate_XEM, up_XEM, down_XME, *biases)
        options = {"groups": groups} if groups.num > 1 else {}
        y: Any = self.operation("experts", name, apply_experts, *operands, activation=activation, **options)
        return y

    def jitter(self, x: Array, amount: float, *, site: int) -> Array:
        """Returns `x` (batch, ...), each entry times a random number from 1 - amount to 1 + amount, by the keys of
        dropout."""
        if self.dropout_keys_B is None or amount == 0:
            return x
        draw = partial(jax.random.uniform, shape=x.shape[1:], minval=1 - amount, maxval=1 + amount)
        return x * jax.vmap(lambda key: draw(jax.random.fold_in(key, site)))(self.dropout_keys_B).astype(x.dtype)

    def dropout(self, x: Array, rate: float, *, site: int) -> Array:
        """Returns `x` (batch, ...) with a share `rate` of it set to zero, and the rest scaled up. site: tells the
        calls within a piece apart. What is dropped depends on the sequence alone: not on how the batch is split over
        devices."""
        if self.dropout_keys_B is None or rate == 0:
            return x
        keys_B = jax.vmap(lambda key: jax.random.fold_in(key, site))(self.dropout_keys_B)
        is_kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys_B)
        return jnp.where(is_kept, x / (1 - rate), 0).astype(x.dtype)


@register_dataclass
@dataclass(frozen=True)
class Aux:
    """A layer or the head may return auxiliary values: `return x, Aux(losses={"router_z": 1e-3 * sum_of_squares})`.

    Each value is a sum over the tokens that the piece is handed, a part of the global batch, without padding
    (`Context.where_token`); the compiler adds them up over microbatches and devices, and divides by the tokens of the
    global batch. All layers of a stack return the same names; metrics show each as STACK/NAME, averaged over the
    layers. Which tokens a piece is handed depends on the mesh: what is not a sum over tokens is made of totals, by
    `AuxOfTotals` for a microbatch, by `Measure` for the global batch.

    losses: scalars, multiplied with the weight that the model chooses; those of all layers are added to the objective.
    statistics: arrays that are reported and have no gradient. totals: arrays without gradient that the rules and the
    measures of a stack read (`UpdateRule`, `Measure`); they stay sums over the global batch.
    """

    losses: Mapping[str, Array] = field(default_factory=dict)
    statistics: Mapping[str, Array] = field(default_factory=dict)
    totals: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class AuxOfTotals:
    """Auxiliary outputs of a layer that depend on more tokens than it is handed: those of the whole microbatch.

    totals: arrays, sums over the tokens that the layer is handed. make: takes the same summed over all tokens of the
    microbatch, on all devices, without a gradient, and returns the `Aux` of the layer's own tokens.
    """

    totals: Mapping[str, Array]
    make: Callable[[Mapping[str, Array]], Aux]


def split_output(output: Any) -> tuple[Any, AuxOfTotals]:
    """Splits what a piece returned into its output and its auxiliary outputs as functions of totals."""
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Aux | AuxOfTotals):
        x, aux = output
        return x, AuxOfTotals({}, lambda _: aux) if isinstance(aux, Aux) else aux
    return output, AuxOfTotals({}, lambda _: Aux())


def join_auxes(parts: Mapping[str, AuxOfTotals]) -> AuxOfTotals:
    """Returns the auxiliary outputs of several layers as those of one, each under PART_NAME."""

    def together(of_parts: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
        return {f"{part}_{name}": x for part, values in of_parts.items() for name, x in values.items()}

    def make(totals: Mapping[str, Array]) -> Aux:
        made = {part: aux.make({name: totals[f"{part}_{name}"] for name in aux.totals}) for part, aux in parts.items()}
        kinds = ("losses", "statistics", "totals")
        return Aux(*(together({part: getattr(aux, kind) for part, aux in made.items()}) for kind in kinds))

    return AuxOfTotals(together({part: aux.totals for part, aux in parts.items()}), make)


def split_aux(output: Any) -> tuple[Any, Aux]:
    """Splits what a piece returned for a whole microbatch into its output and its auxiliary outputs, which are empty if
    it returned none."""
    x, aux = split_output(output)
    return x, aux.make(jax.tree.map(jax.lax.stop_gradient, dict(aux.totals)))


@dataclass(frozen=True)
class Piece:
    """One pure function of a model and the parameters that it takes. name: the class that it is made from. float32: the
    paths of the parameters that it takes in float32, whatever type it computes in."""

    abstract: Params  # nested dict of jax.ShapeDtypeStruct
    logical_axes: Params  # the same tree, of LogicalAxes
    init: Callable[[Array], Params]  # key -> parameters
    apply: Callable[..., Any]  # (parameters, x, Context) -> x, or (x, Aux) for a layer or the head
    name: str = "a piece"
    float32: frozenset[str] = frozenset()

    def abstract_in(self, dtype: str) -> Params:
        """Returns the parameters as `apply` takes them where the model computes in a type: abstract, in a tree."""

        def typed(keys: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
            return jax.ShapeDtypeStruct(x.shape, jnp.dtype("float32" if path in self.float32 else dtype))

        return jax.tree_util.tree_map_with_path(typed, self.abstract)


@dataclass(frozen=True)
class UpdateRule:
    """A rule updates a parameter of each layer once per step without a gradient, the optimizer or weight decay.

    total: the name of what it reads in the layer's `Aux.totals`, summed over all tokens of the global batch: over
    microbatches and devices. update: (parameter, total) of one layer -> the parameter, of the same shape and type.
    """

    total: str
    update: Callable[[Array, Array], Array]


def is_counted(path: str) -> bool:
    """Returns True for the path of a parameter that holds what a rule counts of a global batch, for the next step: one
    in a part of its layer that is called `counted`. It is no weight: it is not frozen with weights, published folders
    do not have it, and where weights come without it, it begins as it is drawn."""
    return COUNTED in path.split("/")[1:-1]


@dataclass(frozen=True)
class Measure:
    """A number of a layer that metrics report, a function of one of its totals over the global batch.

    total: the name of what it reads in the layer's `Aux.totals`. of: the total of one layer -> a scalar.
    """

    total: str
    of: Callable[[Array], Array]


@dataclass(frozen=True)
class Stack:
    """`num_layers` equal layers, run one after the other; parameters are stacked along a first dimension `layers`.
    rules: the parameters that a rule updates and not the optimizer, by their paths in the layer. measures: by the names
    that metrics give them."""

    name: str
    layer: Piece
    num_layers: int
    rules: Mapping[str, UpdateRule] = field(default_factory=dict)
    measures: Mapping[str, Measure] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Model:
    """embed: tokens_BT -> x_BTE; each stack's layer: x_BTE -> x_BTE; head: x_BTE -> logits_BTV. A layer and the head
    may also return losses and statistics (`Aux`).

    No piece looks from one sequence at another: each device, microbatch and part of the batch has some of them. The
    head is pointwise along the length, too: the compiler may run it on some tokens at a time. Where each logit is made
    of its own entries of the parameters' dimensions `vocab`, it may run it on some of those at a time, too.

    tied: parameters of the head that are those of the embedding, by name: {"table_VE": "table_VE"}. max_length: the
    longest sequence that the model can read, in tokens; None: any. A longer sequence_length is refused.
    num_active_experts: the entries of each dimension `experts` that one token meets; None: all. adapters: by the path
    of the matrix beside which each lies (adapter.py); where there are some, nothing else is trained. matrices: how each
    matrix of the model below them multiplies, by path.
    """

    embed: Piece
    stacks: tuple[Stack, ...]
    head: Piece
    tied: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None
    num_active_experts: int | None = None
    adapters: Mapping[str, "Adapter"] = field(default_factory=dict)
    matrices: Mapping[str, "Matrix"] = field(default_factory=dict)

    def abstract(self) -> Params:
        """Returns the parameters as `jax.ShapeDtypeStruct`: nothing is allocated."""
        stacked = {
            stack.name: jax.tree.map(
                lambda x, n=stack.num_layers: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), stack.layer.abstract
            )
            for stack in self.stacks
        }
        return {"embed": self.embed.abstract, **stacked, "head": self._own(self.head.abstract)}

    def logical_axes(self) -> Params:
        """Returns the logical axis of every dimension of every parameter, as a tree of tuples like `abstract()`."""
        stacked = {
            stack.name: jax.tree.map(lambda axes: ("layers", *axes), stack.layer.logical_axes, is_leaf=is_logical_axes)
            for stack in self.stacks
        }
        return {"embed": self.embed.logical_axes, **stacked, "head": self._own(self.head.logical_axes)}

    @property
    def float32(self) -> frozenset[str]:
        """Returns the paths of the parameters that are stored, gathered and used in float32, in any precision."""
        pieces = {"embed": self.embed, "head": self.head} | {stack.name: stack.layer for stack in self.stacks}
        return frozenset(f"{name}/{path}" for name, piece in pieces.items() for path in piece.float32)

    @property
    def rules(self) -> dict[str, UpdateRule]:
        """Returns the rules of all stacks, by the paths of their parameters."""
        return {f"{stack.name}/{path}": rule for stack in self.stacks for path, rule in stack.rules.items()}

    def init(self, key: Array) -> Params:
        """Returns initial parameters. It is pure, so it can be compiled with output shardings: every device makes its
        own shard."""
        embed_key, head_key, *stack_keys = jax.random.split(key, 2 + len(self.stacks))
        stacked = {
            stack.name: jax.vmap(stack.layer.init)(jax.random.split(stack_key, stack.num_layers))
            for stack, stack_key in zip(self.stacks, stack_keys, strict=True)
        }
        return {"embed": self.embed.init(embed_key), **stacked, "head": self._own(self.head.init(head_key))}

    def head_params(self, head: Params, embed: Params) -> Params:
        """Returns the parameters that the head's `apply` takes: its own, and the ones that it shares with the
        embedding."""
        return head | {name: embed[original] for name, original in self.tied.items()}

    def _own(self, head: Params) -> Params:
        return {name: node for name, node in head.items() if name not in self.tied}


def is_logical_axes(node: Any) -> bool:
    """Returns True for a leaf of a tree of logical axes (JAX treats a tuple as a tree)."""
    return isinstance(node, tuple)


def build_piece(make: Callable[[nnx.Rngs], nnx.Module]) -> Piece:
    """Turns an NNX module into a `Piece`.

    `make(rngs)` builds the module; every `nnx.Param` in it carries `out_sharding=(logical axis, ...)`, one name (or
    None) per dimension; `in_float32=True` keeps it in float32 in any precision. Raises TypeError where a Param has no
    axes, where the module holds state that is not a Param, or where it cannot be called with its input and a Context.
    """
    module = nnx.eval_shape(lambda: _checked(make(nnx.Rngs(params=0))))
    graphdef, params, other = nnx.split(module, nnx.Param, ...)
    if jax.tree.leaves(other):
        raise TypeError(f"{type(module).__name__} has variables that are not nnx.Param: {other}")
    variables = nnx.to_flat_state(params)
    return Piece(
        abstract=nnx.to_pure_dict(params),
        logical_axes=_nested([(path, _axes_of(path, variable)) for path, variable in variables]),
        init=lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), nnx.Param)),
        apply=lambda params, *args: nnx.merge(graphdef, params)(*args),
        name=type(module).__name__,
        float32=frozenset("/".join(map(str, path)) for path, v in variables if v.get_metadata("in_float32", False)),
    )


def _checked(module: Any) -> nnx.Module:
    """Returns the module as it is. Raises TypeError where it cannot be called as a piece is."""
    name, expected = type(module).__name__, "the compiler calls it as __call__(self, x, context)"
    if not isinstance(module, nnx.Module):
        raise TypeError(f"{name} is not an nnx.Module, and {expected}")
    if not callable(module):
        raise TypeError(f"{name} has no __call__, and {expected}")
    signature = inspect.signature(type(module).__call__)
    try:
        signature.bind(module, "x", "context")
    except TypeError:
        raise TypeError(f"{name} has __call__{signature}, and {expected}") from None
    return module


def _axes_of(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> LogicalAxes:
    axes = variable.get_metadata("out_sharding", None)
    shape = variable.get_value().shape
    if axes is None or len(axes) != len(shape):
        name = "/".join(map(str, path))
        raise TypeError(f"parameter {name} of shape {shape} needs out_sharding with {len(shape)} names, has {axes}")
    return tuple(axes)


def _nested(items: list[tuple[tuple[Any, ...], Any]]) -> Params:
    tree: Params = {}
    for path, value in items:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree
