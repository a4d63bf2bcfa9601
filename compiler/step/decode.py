"""Builds the programs that generate text: the model's pieces, with what its layers remember in a cache.

    prefill  prompts of a batch, padded at the left to one length      -> logits after the last token, cache
    decode   the newest token of each sequence, and the cache          -> logits after it, cache

    slots          0    1    2    3    4    5 ..       a slot of the cache is a place of the padded batch
    sequence 0     -    -    The  sun  is   warm       positions 0 1 2 3, padding 2
    sequence 1     A    cat  sat  on   it   .          positions 0 1 2 3 4 5

Padding is at the left, so that the newest tokens of all sequences have one slot: a cache is written in place, by one
`dynamic_update_slice`, and the head reads the last slot alone. A token attends to no padding.

Layers run in a scan that carries the cache of its whole stack: as an input and an output of the scan it would be copied
for each token (32 MiB more for a cache of 32 MiB, and a third of the speed, on 8 CPU devices). The programs take the
parameters in their compute types, as they lie in the state. All axes of the mesh are the partitioner's, and activations
are laid out by their rules, where these divide a dimension; a batch may have any size.

The next token of each sequence is chosen from the logits greedily, or by chance with a temperature, top-k and top-p. A
choice is a function of the seed, the number of the sequence and the number of its token alone: not of the batch that
the sequence is in, nor of the mesh.

Shapes: B sequences, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from meshloom.models import Context, LogicalAxes, Model, Params, split_aux, split_output
from meshloom.models.contract import Piece

from ..core.errors import Problem, raise_if_any
from ..core.scopes import piece_scope
from ..core.user_code import blamed_on_user
from ..parallel.operation import Lowered, NewestTokens, ParallelOp, cached_operation, per_token_operation
from ..parallel.weight_plan import WeightPlan
from ..plan import Plan
from ..sharding.model_check import LENGTH, WHERE, mixing_pieces
from ..spec.sharding_spec import Rule, ShardingRules
from ..spec.step_spec import StepSpec
from ..target.mesh import MeshPlan

_TYPES = (np.uint32, np.float32, np.int32, np.float32, np.int32)


@register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, as values that one compiled program takes.

    seed: uint32. temperature: 0 takes the likeliest token. top_k: how many of the likeliest tokens are eligible; the
    size of the vocabulary for all. top_p: of these, the fewest whose probabilities reach it; 1 for all. num_tokens: the
    tokens that the tokenizer has: a model's vocabulary may be larger.
    """

    seed: Array
    temperature: Array
    top_k: Array
    top_p: Array
    num_tokens: Array

    @classmethod
    def of(
        cls, *, seed: int, temperature: float, top_k: int | None, top_p: float | None, num_tokens: int
    ) -> "Sampling":
        """Returns the values as NumPy scalars. None: nothing is cut."""
        top_k = num_tokens if top_k is None else min(top_k, num_tokens)
        values = (seed, temperature, top_k, 1.0 if top_p is None else top_p, num_tokens)
        return cls(*(dtype(value) for dtype, value in zip(_TYPES, values, strict=True)))  # type: ignore[arg-type]

    @classmethod
    def abstract(cls) -> "Sampling":
        """Returns the shapes and types of the values."""
        return cls(*(jax.ShapeDtypeStruct((), dtype) for dtype in _TYPES))  # type: ignore[arg-type]


def sample(logits_BV: Array, sampling: Sampling, sequences_B: Array, count: Array) -> Array:
    """Returns the next token of each sequence, int32 (B,). sequences_B: the number of each sequence. count: the tokens
    that were generated before."""
    logits_BV = jnp.where(
        jnp.arange(logits_BV.shape[-1]) < sampling.num_tokens, logits_BV.astype(jnp.float32), -jnp.inf
    )

    def by_chance(logits_BV: Array) -> Array:
        scaled_BV = logits_BV / jnp.maximum(sampling.temperature, jnp.finfo(jnp.float32).tiny)
        is_cut = (sampling.top_k < sampling.num_tokens) | (sampling.top_p < 1)
        eligible_BV = jax.lax.cond(is_cut, lambda x: cut(x, sampling.top_k, sampling.top_p), lambda x: x, scaled_BV)
        return jax.vmap(jax.random.categorical)(keys_of(sampling.seed, sequences_B, count), eligible_BV)

    def greedily(logits_BV: Array) -> Array:
        return jnp.argmax(logits_BV, axis=-1)

    return jax.lax.cond(sampling.temperature > 0, by_chance, greedily, logits_BV).astype(jnp.int32)


def keys_of(seed: Array, sequences_B: Array, count: Array) -> Array:
    """Returns the key of each sequence's token of this number."""
    key = jax.random.key(seed)
    return jax.vmap(lambda number: jax.random.fold_in(jax.random.fold_in(key, number), count))(sequences_B)


def cut(logits_BV: Array, top_k: Array, top_p: Array) -> Array:
    """Returns the logits with -infinity for tokens that are not eligible. The likeliest one always is; of tokens that
    are equally likely the first ones are."""
    order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    ordered_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    is_of_k = jnp.arange(logits_BV.shape[-1]) < top_k
    probabilities_BV = jax.nn.softmax(jnp.where(is_of_k, ordered_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
    is_eligible_BV = is_of_k & (before_BV < top_p)
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    is_eligible_BV = jnp.zeros_like(is_eligible_BV).at[rows_B1, order_BV].set(is_eligible_BV)
    return jnp.where(is_eligible_BV, logits_BV, -jnp.inf)


# By piece and name, such as layers/keys: (layers, sequences, slots, ...); `embed` has one layer.
Cache = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch that is generated, each a program of its own. prompt_length: that of prompts with their
    padding. num_slots: the length of the cache: prompts, and what is generated."""

    num_sequences: int
    prompt_length: int
    num_slots: int


def check_generates(spec: StepSpec, model: Model, ops: Sequence[ParallelOp]) -> None:
    """Raises ConfigError for a model of a user in which a token reads other tokens otherwise than by attention."""
    if ":" not in spec.model.family:
        return
    fix = "let tokens read one another through context.remember and context.attend alone (docs/generate.md)"
    with blamed_on_user(WHERE, f"tracing {spec.model.family}", is_theirs=True):
        mixing = list(mixing_pieces(spec, model, per_token_operation(ops)))
    what = "{} looks from one token at another otherwise than by attention, and could not be run token by token"
    raise_if_any(Problem(WHERE, what.format(name), fix) for name in mixing)


def plan_cache(plan: Plan, shape: BatchShape) -> tuple[Cache, Any]:
    """Returns the cache as ShapeDtypeStructs, and its layout: what each piece remembers of one token, for all slots.
    Raises ConfigError where that fails in a user's model."""
    check_generates(plan.spec, plan.model, plan.ops)
    dtype = plan.spec.precision.compute
    layout, family = _Layout(plan.spec.sharding, plan.mesh), plan.spec.model.family
    pieces = {"embed": (plan.model.embed, 1)} | {s.name: (s.layer, s.num_layers) for s in plan.model.stacks}
    x: Any = jax.ShapeDtypeStruct((shape.num_sequences, 1), jnp.int32)
    cache, specs = Cache(), dict[str, dict[str, PartitionSpec]]()
    for name, (piece, num_layers) in pieces.items():
        memory = _Finder(shape.num_slots)
        with blamed_on_user(WHERE, f"tracing {family} for one token", is_theirs=":" in family):
            x = _trace(piece, dtype, plan.ops, memory, x)
        cache[name], specs[name] = {}, {}
        for key, (one, axes) in memory.found.items():
            sizes = (num_layers, one.shape[0], shape.num_slots, *one.shape[2:])
            cache[name][key] = jax.ShapeDtypeStruct(sizes, one.dtype)
            specs[name][key] = PartitionSpec(None, *layout.spec(one.shape, axes))
    return {k: v for k, v in cache.items() if v}, {k: v for k, v in specs.items() if v}


def build_working(weights: Params) -> Callable[[Params], Params]:
    """Returns a function that turns the parameters of the state into the ones that programs take.

    weights: the plans of the parameters, in a tree.
    """

    def working(weight: WeightPlan, x: Array) -> Array:
        encoding = weight.encoding.as_stored
        return encoding.decode(encoding.encode(x))

    return lambda params: jax.tree.map(working, weights, params)


def build_prefill(
    model: Model, rules: ShardingRules, mesh: MeshPlan, cache: Cache
) -> Callable[[Params, Array, Array], tuple[Array, Cache]]:
    """Returns a function (parameters, tokens_BT, padding_B) -> (float32 logits_BV after the last token, cache).

    padding_B: how many of the first tokens of each sequence are padding. cache: its shapes.
    """
    run = _Runner(model, _Layout(rules, mesh))

    def prefill(params: Params, tokens_BT: Array, padding_B: Array) -> tuple[Array, Cache]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)
        slots_T = jnp.arange(tokens_BT.shape[1])
        is_token_BT = slots_T >= padding_B[:, None]
        tokens = _Tokens(slots_T, padding_B, _plain, is_token_BT.astype(jnp.int32), is_token_BT, reads_cache=False)
        return run.forward(params, tokens_BT, tokens, zeros)

    return prefill


def build_decode(
    model: Model, rules: ShardingRules, mesh: MeshPlan, ops: Sequence[ParallelOp], num_slots: int
) -> Callable[[Params, Cache, Array, Array, Array], tuple[Array, Cache]]:
    """Returns a function (parameters, cache, token_B, slot, padding_B) -> (float32 logits_BV after it, cache).

    slot: the place of the newest tokens in the cache, whose length is num_slots."""
    run = _Runner(model, _Layout(rules, mesh))

    def decode(params: Params, cache: Cache, token_B: Array, slot: Array, padding_B: Array) -> tuple[Array, Cache]:
        slots_T = slot + jnp.arange(1)
        operation = cached_operation(ops, NewestTokens(slots_T, padding_B, num_slots))
        return run.forward(params, token_B[:, None], _Tokens(slots_T, padding_B, operation, reads_cache=True), cache)

    return decode


def build_logits(
    model: Model, rules: ShardingRules, mesh: MeshPlan, weights: Params
) -> Callable[[Params, Array], Array]:
    """Returns a function (parameters of the state, tokens_BT) -> float32 logits_BTV after each token.

    Each row is one text from its first token on, without padding. weights: the plans of the parameters, in a tree."""
    layout, working = _Layout(rules, mesh), build_working(weights)

    def logits(params: Params, tokens_BT: Array) -> Array:
        params = working(params)
        context = Context(jnp.arange(tokens_BT.shape[1])[None], layout.activation)
        x_BTE = model.embed.apply(params["embed"], tokens_BT, context)
        for stack in model.stacks:

            def one(x_BTE: Array, layer: Params, piece: Piece = stack.layer) -> tuple[Array, None]:
                return split_output(piece.apply(layer, x_BTE, context))[0], None

            x_BTE, _ = jax.lax.scan(one, x_BTE, params[stack.name])
        head = model.head_params(params["head"], params["embed"])
        return split_aux(model.head.apply(head, x_BTE, context))[0].astype(jnp.float32)

    return logits


@dataclass(frozen=True)
class _Tokens:
    """The tokens at hand. reads_cache: whether earlier tokens are in the cache; else these are the first."""

    slots_T: Array
    padding_B: Array
    operation: Lowered
    segment_ids_BT: Array | None = None
    is_token_BT: Array | None = None
    reads_cache: bool = False

    @property
    def positions_BT(self) -> Array:
        return jnp.maximum(self.slots_T - self.padding_B[:, None], 0)

    def context(self, activation: Callable[..., Array], remember: Callable[..., Array]) -> Context:
        return Context(
            self.positions_BT, activation, self.operation, self.segment_ids_BT, None, self.is_token_BT, remember
        )


@dataclass(frozen=True)
class _Runner:
    """Runs a model over the tokens at hand, and writes what it remembers into the cache."""

    model: Model
    layout: "_Layout"

    def forward(self, params: Params, tokens_BT: Array, tokens: _Tokens, cache: Cache) -> tuple[Array, Cache]:
        model = self.model
        with jax.named_scope(piece_scope("embed")):
            own = cache.get("embed", {})
            x_BTE, made = self._run(model.embed, params["embed"], tokens_BT, tokens, own, jnp.zeros((), jnp.int32))
        written = {"embed": made} if made else {}
        for stack in model.stacks:
            with jax.named_scope(piece_scope(stack.name)):
                own = cache.get(stack.name, {})
                x_BTE, made = self._run_stack(stack.layer, params[stack.name], x_BTE, tokens, own, stack.num_layers)
            written |= {stack.name: made} if made else {}
        with jax.named_scope(piece_scope("head")):
            whole = model.head_params(params["head"], params["embed"])
            last = _Tokens(tokens.slots_T[-1:], tokens.padding_B, _plain)
            output = model.head.apply(whole, x_BTE[:, -1:], last.context(self.layout.activation, _head_remembers))
        return split_aux(output)[0][:, 0].astype(jnp.float32), written

    def _run_stack(
        self, layer: Piece, stacked: Params, x_BTE: Array, tokens: _Tokens, cache: Mapping[str, Array], num_layers: int
    ) -> tuple[Array, dict[str, Array]]:
        def one(carry: tuple[Array, Any], each: tuple[Params, Array]) -> tuple[tuple[Array, Any], None]:
            x_BTE, cache = carry
            params, index = each
            return self._run(layer, params, x_BTE, tokens, cache, index), None

        return jax.lax.scan(one, (x_BTE, dict(cache)), (stacked, jnp.arange(num_layers)))[0]

    def _run(
        self, piece: Piece, params: Params, x: Array, tokens: _Tokens, cache: Mapping[str, Array], index: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Runs one piece. Returns its output, and the cache of its stack with what it remembers."""
        memory = _Memory(dict(cache), index, tokens)
        output = piece.apply(params, x, tokens.context(self.layout.activation, memory.remember))
        return split_output(output)[0], memory.cache


class _Names:
    """Gives each call of `remember` within a piece a name of its own: keys, keys_1, .. for layers of a group."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}

    def name(self, name: str) -> str:
        count = self._calls.get(name, 0)
        self._calls[name] = count + 1
        return f"{name}_{count}" if count else name


@dataclass
class _Memory:
    """The cache of a stack while one of its layers is traced. index: the number of the layer."""

    cache: dict[str, Array]
    index: Array
    tokens: _Tokens
    names: _Names = field(default_factory=_Names)

    def remember(self, name: str, x: Array, *_: str | None) -> Array:
        key = self.names.name(name)
        start = (self.index, 0, self.tokens.slots_T[0], *[0] * (x.ndim - 2))
        self.cache[key] = jax.lax.dynamic_update_slice(self.cache[key], x[None], start)
        if not self.tokens.reads_cache:
            return x
        return jax.lax.dynamic_index_in_dim(self.cache[key], self.index, keepdims=False)


@dataclass
class _Finder:
    """Finds what a piece remembers of one token. found: an array and its logical axes, by name."""

    num_slots: int
    found: dict[str, tuple[Any, LogicalAxes]] = field(default_factory=dict)
    names: _Names = field(default_factory=_Names)

    def remember(self, name: str, x: Array, *axes: str | None) -> Array:
        if len(axes) != x.ndim or x.ndim < 2:
            raise ValueError(f"remember('{name}'): an array of shape {x.shape} needs {x.ndim} logical axes, has {axes}")
        if x.shape[1] != 1:
            raise ValueError(f"remember('{name}'): dimension 1 of {x.shape} is to be the length, which is 1 here")
        self.found[self.names.name(name)] = (jax.ShapeDtypeStruct(x.shape, x.dtype), axes)
        return jnp.broadcast_to(x, (x.shape[0], self.num_slots, *x.shape[2:]))


def _trace(piece: Piece, dtype: str, ops: Sequence[ParallelOp], memory: _Finder, x: Any) -> Any:
    """Returns the shape of a piece's output for one token of each sequence."""

    def apply(params: Params, x: Array) -> Array:
        zeros_B = jnp.zeros(x.shape[0], jnp.int32)
        operation = cached_operation(ops, NewestTokens(zeros_B[:1], zeros_B, memory.num_slots))
        tokens = _Tokens(zeros_B[:1], zeros_B, operation)
        return split_output(piece.apply(params, x, tokens.context(lambda _, x, *__, **___: x, memory.remember)))[0]

    return jax.eval_shape(apply, piece.abstract_in(dtype), x)


class _Layout:
    """Lays out activations over all axes of the mesh, by the rules for activations. A mesh axis that does not divide a
    dimension does not split it: a batch may be small. Nothing splits the length, which is that of one token."""

    def __init__(self, rules: ShardingRules, mesh: MeshPlan):
        self._rules: Sequence[Rule] = rules.activations
        self._sizes = mesh.sizes

    def spec(self, shape: Sequence[int], logical_axes: Sequence[str | None]) -> PartitionSpec:
        used, entries = set[str](), list[tuple[str, ...] | None]()
        for size, name in zip(shape, logical_axes, strict=True):
            rule = next((rule for rule in self._rules if name in rule.logical), None)
            axes = tuple(axis for axis in rule.mesh if self._sizes[axis] > 1) if rule and name != LENGTH else ()
            num_shards = 1
            for axis in axes:
                num_shards *= self._sizes[axis]
            is_split = bool(axes) and used.isdisjoint(axes) and size % num_shards == 0
            used |= set(axes) if is_split else set()
            entries.append(axes if is_split else None)
        return PartitionSpec(*entries)

    def activation(self, name: str, x: Array, *axes: str | None, gradient: LogicalAxes | None = None) -> Array:
        del name, gradient
        return jax.lax.with_sharding_constraint(x, self.spec(x.shape, axes))


def batch_spec(rules: ShardingRules, mesh: MeshPlan, num_sequences: int) -> PartitionSpec:
    """Returns the layout of an array with one entry for each sequence."""
    return _Layout(rules, mesh).spec((num_sequences,), ("batch",))


def _plain(kind: str, name: str, plain: Lowered, *operands: Any, **options: Any) -> Any:
    del kind, name
    return plain(*operands, **options)


def _head_remembers(name: str, x: Array, *_: str | None) -> Array:
    del x
    raise ValueError(f"remember('{name}'): the head reads each token by itself, and remembers nothing")
