"""How tokens reach their experts, if a mesh axis that splits the batch splits the experts too.

Each device then has some tokens and some experts. Five exchanges drop nothing unless a declared buffer is too small
(`moe.max_imbalance`); one gives each expert a fixed number of rows (dispatch.py):

    ragged        rows of each expert, as many as there are         TPUs, where the compiler has it
    deduplicated  each token once to each device that needs it      everywhere; as many as there are, where ragged runs
    hierarchical  each token once to each node that needs it, and   GPUs, over several nodes
                  there to each device
    padded        rows of each expert, padded to a declared size    everywhere
    gathered      all tokens, from which each device takes its own  everywhere; cheap for a few devices
    capacity      a fixed number of rows for each expert            by name alone: it drops tokens

`auto` takes the one that a layer waits for least (expert_exchange.py). Where no axis splits the experts there is
nothing to send: tokens are sorted by expert, or put into rows of the capacity.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshloom.models.parts import ONE_GROUP

from ...core.errors import ConfigError, Problem
from ...core.format import human_seconds
from ...core.kernels import KernelCall, KernelCost
from ...core.partition_spec import Axes, axes_of, keep_axes
from ...core.scopes import FILLED, LARGEST_TILE, SENT, OperationName, RowTile, fact_scope, nested_scope, tile_scope
from ...core.traffic import ComputeKind
from ...formats.element import element_formats
from ...sharding.arrays import EXPERTS, Operand, OpSite
from ...sharding.rules import ArrayPlan
from ...spec.kernel_rates import grouped_kernels
from ...target.target import TargetPlan
from ..encodings import decoded_weight
from ..operation import Cost, Exposed, Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, refused
from ..quantized import Arithmetic
from ..weight_plan import parts_of
from ..weights import gather_dims, scatter_dims
from .dispatch import (
    AS_THEY_ARE,
    Dispatch,
    Experts,
    RunExperts,
    dispatch_capacity,
    dispatch_deduplicated,
    dispatch_gathered,
    dispatch_local,
    dispatch_padded,
    dispatch_ragged,
)
from .exchange_refusals import nodes_of, why_not_ragged
from .expert_exchange import (
    CAPACITY,
    DEDUPLICATED,
    GATHERED,
    HIERARCHICAL,
    PADDED,
    RAGGED,
    ExchangeBuffers,
    ExchangeSizes,
    ExchangeTime,
    Leg,
    buffers_of,
    exchange_in_words,
    exchange_legs,
    exchange_time,
    sent_once,
)
from .expert_mlp import Multiply, experts_mlp
from .grouped_matmul import ROWS, Kernels, best_tile, grouped_cost, grouped_matmuls
from .hierarchical import dispatch_hierarchical
from .quantized_groups import quantized_equal_groups, quantized_rows
from .row_types import row_type_problems, row_types
from .transfer import RowTypes


@dataclass(frozen=True)
class ExpertLayout:
    """How the operands lie over the partitioner's axes. tokens: arrays (batch, length, ...). into, out_of: the experts'
    first matrices (experts, embed, mlp) and the last (experts, mlp, embed)."""

    tokens: PartitionSpec
    into: PartitionSpec
    out_of: PartitionSpec
    partitioner: Axes

    @property
    def summed_axes(self) -> Axes:
        """Returns the mesh axes that split the experts' hidden dimension: results are partial sums."""
        return axes_of(self.into[2])

    @property
    def axes_of_rows(self) -> Axes:
        """Returns the mesh axes that split the tokens of experts: those that split the hidden dimension share them."""
        return tuple(axis for e in self.tokens for axis in axes_of(e) if axis not in self.summed_axes)


@dataclass(frozen=True)
class ExpertsPlan:
    """How a layer's experts run. num_nodes: as of `ExchangeSizes`. is_ragged: the exchange is a ragged one. may_pad:
    some tokens may go to no expert.
    waited_share: the exposed part of the time of a layer's exchanges. arithmetic: how the matrices are multiplied;
    None: in the type of the operands. types: how rows are written on their way to experts."""

    how: str
    experts: Experts
    buffers: ExchangeBuffers
    num_chunks: int
    kernels: Kernels
    layout: ExpertLayout
    may_pad: bool
    num_nodes: int = 1
    is_ragged: bool = False
    waited_share: float = 1.0
    arithmetic: Arithmetic | None = None
    types: RowTypes = AS_THEY_ARE


def experts_scope(site: str, filled: float, sent: float = 1.0, tile: RowTile = LARGEST_TILE) -> str:
    """Returns the scope of a layer's experts and of the exchanges of their tokens. sent: the share of the rows of the
    smaller buffer of a ragged exchange. tile: of grouped matmuls."""
    scope = nested_scope(fact_scope(ExpertsOp.kind, site), fact_scope(FILLED, f"{filled:.4f}"))
    scope = nested_scope(scope, tile_scope(tile))
    return scope if sent == 1 else nested_scope(scope, fact_scope(SENT, f"{sent:.4f}"))


class ExpertsOp(ParallelOp):
    kind = "experts"
    title = "experts"
    names = (RAGGED, DEDUPLICATED, HIERARCHICAL, PADDED, GATHERED, CAPACITY)
    fallback = PADDED
    passes_over_rows = True

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        sizes = _sizes_of(site, inputs)
        capacity = _capacity(site, inputs, sizes)
        if not sizes.experts.axes:
            none = "no mesh axis of the batch splits the experts"
            others = (RAGGED, GATHERED, DEDUPLICATED, HIERARCHICAL)
            exchanges = (Strategy(name, "", refusal=Refusal(none)) for name in others)
            plan = _plan(PADDED, site, inputs, sizes, ExchangeBuffers(rows=0, most_rows=0, filled=1.0))
            alone = Strategy(PADDED, "on each device by itself", plan, is_trivial=True, has_spare_room=True)
            return alone, *exchanges, capacity
        names = (RAGGED, GATHERED, DEDUPLICATED, HIERARCHICAL, PADDED)
        return (*(_exchange(name, site, inputs, sizes) for name in names), capacity)

    def problems(self, inputs: OpInputs, plans: Sequence[OpPlan]) -> Sequence[Problem]:
        has_exchange = any(plan.chosen.parameters.experts.axes for plan in plans)
        return row_type_problems(inputs, has_experts=bool(plans), has_exchange=has_exchange)

    def small_keys(self, plans: Sequence[OpPlan]) -> Mapping[str, tuple[Any, str]]:
        why = "nothing is dropped, since that depends on the mesh"
        has_capacity = any(plan.chosen.name == CAPACITY for plan in plans)
        return {"moe.max_imbalance": (None, why)} | ({"moe.capacity_factor": (8.0, why)} if has_capacity else {})

    def multiplied(self, site: OpSite) -> Sequence[Operand]:
        return site.operands[3:6]

    def summed_dims(self, site: OpSite) -> tuple[int, ...]:
        return (1,)

    def why_not_few_bits(self, plan: OpPlan, target: TargetPlan) -> str | None:
        is_equal = plan.chosen.name == CAPACITY
        return None if is_equal or target.platform != "gpu" else "grouped matmuls of GPUs multiply in 16 bits"

    def lower(self, plan: OpPlan) -> Lowered:
        used = plan.precision.arithmetic if plan.precision else None
        # Results lie as the exchange makes them: nothing here is the partitioner's.
        used = used and replace(used, result_spec=None, gradient_spec=None)
        chosen: ExpertsPlan = replace(plan.chosen.parameters, arithmetic=used)

        def apply(x: Array, weights: Array, ids: Array, *matrices: Any, activation: str, **_: Any) -> Any:
            if chosen.layout.partitioner:  # elements would need layouts over its axes
                matrices = tuple(map(decoded_weight, matrices))
            return apply_planned(x, weights, ids, matrices, activation, chosen)

        return apply

    def per_token(self, plain: Lowered, *operands: Any, **options: Any) -> tuple[Array, Array]:
        """Returns each token times the sum of its weights: experts sort tokens, and put them back."""
        x, weights, *_ = operands
        return x * jnp.sum(weights, axis=-1, keepdims=True).astype(x.dtype), jnp.zeros(())

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None:
        return "matmul" if is_pallas and name.fact(self.kind) else None

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        if not call.name.fact(self.kind):
            return None
        return grouped_cost(call, call.name.filled_share, call.name.row_tile)

    def scope(self, plan: OpPlan) -> str:
        chosen: ExpertsPlan = plan.chosen.parameters
        return experts_scope(plan.site.name, chosen.buffers.filled, chosen.buffers.sent, chosen.kernels.tile)

    def hiding(self, plan: OpPlan, target: TargetPlan) -> Exposed:
        return Exposed(plan.chosen.parameters.waited_share)

    def source(self, name: OperationName) -> str | None:
        """Returns 'routed, tokens to experts and back' for the collectives of an exchange."""
        site = name.fact(self.kind)
        return f"{site}, tokens to experts and back" if site else None


def _sizes_of(site: OpSite, inputs: OpInputs) -> ExchangeSizes:
    """Raises ConfigError where the chunks do not divide a device's tokens."""
    (*_, width), num_experts = site.operands[0].shape, site.operands[3].shape[0]
    axes = _expert_axes(site, inputs)
    num_parts, num_chunks = inputs.spec.overlap.layers.batch_split, inputs.spec.moe.num_chunks
    tokens = inputs.batch.tokens_of_device // num_parts
    if tokens % num_chunks:
        what = f"{tokens} tokens of a device are not divisible by {num_chunks} chunks"
        raise ConfigError([Problem("moe.num_chunks", what, f"use a divisor of {tokens}")])
    experts = Experts(num_experts, axes, inputs.mesh.num_shards(axes))
    types, num_chosen = row_types(inputs), site.operands[1].shape[-1]
    of_types = (each and width * element_formats()[each.element].bits // 8 for each in (types.tokens, types.gradients))
    row_bytes = width * jnp.dtype(inputs.spec.precision.compute).itemsize
    num_nodes = nodes_of(experts, inputs)[0] if axes else 1
    of_run = tokens // num_chunks, num_chosen, row_bytes, num_parts * num_chunks
    groups = dict(site.options).get("groups", ONE_GROUP)
    return ExchangeSizes(experts, *of_run, *of_types, num_nodes=num_nodes, groups=groups)


def _weights(site: OpSite, inputs: OpInputs) -> tuple[ArrayPlan, ArrayPlan]:
    """Returns the layouts of the experts' first matrix and of their last one. Raises ConfigError where the model hands
    over arrays that are no parameters."""
    layouts = {plan.array.path: plan for plan in inputs.sharding.parameters}
    gate, up, down = (operand.parameters for operand in site.operands[3:6])
    if not (gate and up and down):
        what = f"apply_experts('{site.name}') in '{site.piece}' gets a weight that is not a parameter of the model"
        raise ConfigError([Problem("model.family", what, "pass each parameter as the module holds it: self.up[...]")])
    return layouts[gate[0]], layouts[down[0]]


def _expert_axes(site: OpSite, inputs: OpInputs) -> Axes:
    """Returns the mesh axes that split a layer's experts. Raises ConfigError for those that do not split the batch.

    Stages may store parts of the experts: each brings its own layers together before it runs them.
    """
    plan = _weights(site, inputs)[0]
    (dimension,) = (d for d in plan.dimensions if d.logical == EXPERTS)
    axes = tuple(axis for axis in dimension.axes if axis not in inputs.roles.stage)
    others = [axis for axis in axes if axis not in inputs.roles.tokens]
    if others:
        what = f"'{plan.array.path}' has its experts over {', '.join(others)}, which does not split the batch"
        fix = "split them over an axis that the rule for batch names, such as expert, or split mlp instead"
        raise ConfigError([Problem(f"sharding.parameters[{dimension.rule}]", what, fix)])
    return axes


def _layout(site: OpSite, inputs: OpInputs) -> ExpertLayout:
    into, out_of = (PartitionSpec(*plan.spec[-3:]) for plan in _weights(site, inputs))
    axes = inputs.roles.partitioner
    tokens = inputs.sharding.auto_spec("batch", "sequence_parallel_length", None)
    return ExpertLayout(tokens, keep_axes(into, axes), keep_axes(out_of, axes), axes)


def _plan(
    how: str, site: OpSite, inputs: OpInputs, sizes: ExchangeSizes, buffers: ExchangeBuffers, *, is_ragged: bool = False
) -> ExpertsPlan:
    num_chunks, kernels, layout = inputs.spec.moe.num_chunks, _kernels(inputs, sizes), _layout(site, inputs)
    may_pad, num_nodes = inputs.spec.data.may_pad, sizes.num_nodes
    plan = ExpertsPlan(how, sizes.experts, buffers, num_chunks, kernels, layout, may_pad, num_nodes, is_ragged)
    return replace(plan, types=row_types(inputs))


def _kernels(inputs: OpInputs, sizes: ExchangeSizes) -> Kernels:
    """Raises ConfigError for a tile of rows of other chips than TPUs. A processor computes without kernels."""
    declared = inputs.spec.moe.tile_rows
    if inputs.target.platform == "gpu":
        if declared is not None:
            what = f"{declared} rows are for megablox, whose kernels run on TPUs; tiles for Triton have {ROWS}"
            raise ConfigError([Problem("moe.tile_rows", what, "leave it out: moe.tile_rows=null")])
        return Kernels("none" if inputs.spec.precision.compute == "float32" else "triton")
    if inputs.target.platform != "tpu":
        return Kernels("none")
    chip, kernels = inputs.target.chip.known_as if inputs.target.chip else "", grouped_kernels()
    times = kernels["megablox"].row_tiles.get(chip, {})
    if declared is not None:
        return Kernels("megablox", RowTile(declared, times.get(declared, 1.0)), multiplies_forward=True)
    tiles = [RowTile(rows, time) for rows, time in times.items()]
    best = best_tile(tiles, sizes.choices, sizes.experts.num_local)
    (ragged,) = kernels["ragged_dot"].row_tiles.get(chip, (best.ragged,))
    return Kernels("megablox", best._replace(ragged=ragged))


def _exchange(name: str, site: OpSite, inputs: OpInputs, sizes: ExchangeSizes) -> Strategy:
    """Returns one of the exchanges that drop nothing unless `moe.max_imbalance` is too small."""
    over, imbalance = " and ".join(sizes.experts.axes), inputs.spec.moe.max_imbalance
    no_ragged = why_not_ragged(inputs, sizes.experts)
    is_ragged = name in (RAGGED, DEDUPLICATED) and no_ragged is None
    buffers, legs, time = _timed(name, site, inputs, sizes, is_ragged=is_ragged)
    plan = _plan(name, site, inputs, sizes, buffers, is_ragged=is_ragged)
    room = "for any imbalance" if buffers.is_dropless else f"for {imbalance:g} times the mean, what is more is dropped"
    refusals = {RAGGED: refused(no_ragged), HIERARCHICAL: nodes_of(sizes.experts, inputs)[1]}
    refusal, words = refusals.get(name), exchange_in_words(name, over, buffers, is_ragged=is_ragged)
    what = f"{words}{plan.types.how}: {room}"
    strategy = Strategy(name, what, plan, sent_once(legs), refusal=refusal, has_spare_room=buffers.is_dropless)
    if time is None:
        return replace(strategy, reason="the first that runs here; the time of its exchanges is not known")
    waited, sent = human_seconds(time.waited_seconds), human_seconds(time.sent_seconds)
    figures = f"a layer waits {waited} of the {sent} of its exchanges, the least"
    plan = replace(plan, waited_share=time.waited_seconds / time.sent_seconds)
    return replace(strategy, parameters=plan, cost=Cost(time.waited_seconds, "seconds"), reason=figures)


def _timed(
    name: str, site: OpSite, inputs: OpInputs, sizes: ExchangeSizes, *, is_ragged: bool
) -> tuple[ExchangeBuffers, Sequence[Leg], ExchangeTime | None]:
    """Returns the buffers of an exchange, its transfers, and their time; None if it is not known. In two steps tokens
    go to the nodes of their experts, or all go to all nodes: whichever makes a layer wait less."""
    buffers = buffers_of(name, sizes, inputs.spec.moe.max_imbalance, is_ragged=is_ragged)
    ways = [buffers]
    if buffers.tokens_to_node is not None:
        ways.append(replace(buffers, tokens_to_node=None))
    sent = [(each, exchange_legs(name, sizes, each, is_ragged=is_ragged)) for each in ways]
    timed = [(each, legs, exchange_time(legs, site, inputs, sizes.num_runs)) for each, legs in sent]
    return min(timed, key=lambda each: math.inf if each[2] is None else each[2].waited_seconds)


def _capacity(site: OpSite, inputs: OpInputs, sizes: ExchangeSizes) -> Strategy:
    factor, experts = inputs.spec.moe.capacity_factor, sizes.experts
    each = sizes.choices / experts.num_experts
    rows = int(factor * each)
    least = math.ceil(1000 / each) / 1000
    refusal = Refusal("it drops tokens, so it runs by name alone", is_hard=False)
    if rows < 1:
        why = f"moe.capacity_factor={factor:g} leaves an expert no row for {each:g} choices of a device"
        refusal = Refusal(f"{why}: all would be dropped; use {least:g} or more")
    buffers = ExchangeBuffers(rows, most_rows=sizes.tokens, filled=min(1.0, 1 / factor))
    plan = _plan(CAPACITY, site, inputs, sizes, buffers)
    collectives = sent_once(exchange_legs(CAPACITY, sizes, buffers)) if experts.axes else ()
    what = f"{rows:,} rows for each expert from each device{plan.types.how}, what is more is dropped"
    return Strategy(CAPACITY, what, plan, collectives, refusal=refusal, has_spare_room=buffers.is_dropless)


def apply_planned(
    x: Array, weights: Array, ids: Array, matrices: tuple[Any, ...], activation: str, plan: ExpertsPlan
) -> tuple[Array, Array]:
    """Returns what `models.parts.apply_experts` does, as planned, of this device's tokens and experts: x (batch,
    length, embed). matrices: those into an expert, gate and up, and out of it, and after them maybe their biases."""
    layout = plan.layout
    run = partial(_apply_on_shards, plan=plan, activation=activation)
    if not layout.partitioner:
        return run(x, weights, ids, *matrices)
    into, out_of = PartitionSpec(layout.into[0], layout.into[2]), PartitionSpec(layout.out_of[0], None)
    biases = (into, into, out_of) if len(matrices) > 3 else ()
    return jax.shard_map(
        run,
        in_specs=(layout.tokens, layout.tokens, layout.tokens, layout.into, layout.into, layout.out_of, *biases),
        out_specs=(layout.tokens, PartitionSpec()),
        axis_names=set(layout.partitioner),
        check_vma=False,
    )(x, weights, ids, *matrices)


def _apply_on_shards(
    x: Array, weights: Array, ids: Array, *matrices: Any, plan: ExpertsPlan, activation: str
) -> tuple[Array, Array]:
    """Returns the same as `apply_planned`, of shards over all mesh axes. Devices that share an expert's hidden
    dimension need all tokens of one another, and add their results up."""
    layout, (gate, up, down, *biases) = plan.layout, matrices
    together = parts_of([tuple(axis for axis in axes_of(e) if axis in layout.summed_axes) for e in layout.tokens])
    tokens_apart = layout.axes_of_rows
    x, weights, ids = (gather_dims(each, together) for each in (x, weights, ids))
    gate, up = (gather_dims(each, parts_of([(), axes_of(layout.into[1])])) for each in (gate, up))
    down = gather_dims(down, parts_of([(), (), axes_of(layout.out_of[2])]))
    if biases and layout.summed_axes:  # of what is added up, one device has the bias
        *of_hidden, last = biases
        biases = [*of_hidden, jnp.where(jax.lax.axis_index(layout.summed_axes) == 0, last, 0)]
    mlp = experts_mlp((gate, up, down), biases, activation, partial(_multipliers, plan=plan))
    y, num_dropped = _apply_in_chunks(x, weights, ids, mlp, plan)
    y = scatter_dims(y, together)
    rest = tuple(axis for axis in layout.summed_axes if all(axis not in axes for _, axes in together))
    y = jax.lax.psum(y, rest) if rest else y
    num_dropped = jax.lax.stop_gradient(num_dropped)
    return y, jax.lax.psum(num_dropped, tokens_apart) if tokens_apart else num_dropped


def _apply_in_chunks(x: Array, weights: Array, ids: Array, run: RunExperts, plan: ExpertsPlan) -> tuple[Array, Array]:
    """Returns the results of all chunks. Chunks do not depend on one another: one is sent while another's matmuls
    run."""
    tokens = (x.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1]), ids.reshape(-1, ids.shape[-1]))
    if plan.may_pad:  # NO_EXPERT is the number after the last expert
        tokens = (*tokens[:2], jnp.minimum(tokens[2], plan.experts.num_experts))
    dispatch: Any = _dispatch(plan)
    chunks = zip(*(jnp.split(each, plan.num_chunks) for each in tokens), strict=True)
    y, num_dropped = zip(*(dispatch(*chunk, run) for chunk in chunks), strict=True)
    return jnp.concatenate(y).reshape(x.shape), sum(num_dropped, start=jnp.zeros(()))


def _dispatch(plan: ExpertsPlan) -> Dispatch:
    experts, rows, types = plan.experts, plan.buffers.rows, plan.types
    if plan.how == CAPACITY:
        return partial(dispatch_capacity, experts=experts, rows=rows, types=types)
    if not experts.axes:
        return partial(dispatch_local, experts=experts, types=types)
    if plan.how == DEDUPLICATED:
        of_tokens: Any = partial(dispatch_deduplicated, tokens=plan.buffers.tokens, is_ragged=plan.is_ragged)
        return partial(of_tokens, experts=experts, rows=rows, types=types)
    if plan.how == HIERARCHICAL:
        buffers = plan.buffers
        over: Any = partial(dispatch_hierarchical, num_nodes=plan.num_nodes, tokens_to_node=buffers.tokens_to_node)
        return partial(over, tokens=buffers.tokens, experts=experts, rows=rows, types=types)
    chosen: Any = {RAGGED: dispatch_ragged, PADDED: dispatch_padded, GATHERED: dispatch_gathered}[plan.how]
    return partial(chosen, experts=experts, rows=rows, types=types)


def _multipliers(sizes: Array | None, plan: ExpertsPlan) -> tuple[Multiply, Multiply]:
    """Returns what multiplies rows with the first matrices of experts, and with their last one. sizes: of the groups;
    None: they have as many rows each."""
    arithmetic, hidden = plan.arithmetic, plan.layout.summed_axes
    if arithmetic is None:
        plain: Any = partial(grouped_matmuls, sizes_G=sizes, how=plan.kernels) if sizes is not None else _each(_equal)
        return plain, plain
    rows = arithmetic.tokens + plan.layout.axes_of_rows
    of_rows: Any = quantized_equal_groups
    if sizes is not None:
        of_rows = partial(quantized_rows, sizes_G=sizes, how=plan.kernels)
    of_rows = partial(of_rows, arithmetic, experts=plan.experts.axes, rows=rows)
    return _each(partial(of_rows, into=(), out_of=hidden)), _each(partial(of_rows, into=hidden, out_of=()))


def _each(multiply: Callable[[Array, Any], Array]) -> Multiply:
    return lambda x, matrices: tuple(multiply(x, w) for w in matrices)


def _equal(x_LCE: Array, w_LEM: Array) -> Array:
    return jnp.einsum("lce,lem->lcm", x_LCE, w_LEM)
