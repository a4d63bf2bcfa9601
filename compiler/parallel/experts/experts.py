"""How tokens reach their experts, if a mesh axis that splits the batch splits the experts too.

Each device then has some tokens and some experts. Three exchanges drop nothing unless a declared buffer is too small
(`moe.max_imbalance`); one gives each expert a fixed number of rows (dispatch.py):

    ragged    rows of each expert, as many as there are        TPUs, where the compiler has it
    padded    rows of each expert, padded to a declared size   everywhere
    gathered  all tokens, from which each device takes its own everywhere; cheap for a few devices
    capacity  a fixed number of rows for each expert           by name alone: it drops tokens

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

from meshloom.models.parts import added, gated

from ...core.errors import ConfigError, Problem
from ...core.format import human_seconds
from ...core.kernels import KernelCall, KernelCost
from ...core.partition_spec import Axes, axes_of, keep_axes
from ...core.scopes import OperationName, fact_scope, nested_scope
from ...core.traffic import ComputeKind
from ...sharding.arrays import EXPERTS, Operand, OpSite
from ...sharding.rules import ArrayPlan
from ...target.target import TargetPlan
from ..operation import Cost, Exposed, Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, refused
from ..quantized import Arithmetic
from ..weight_plan import parts_of
from ..weights import gather_dims, scatter_dims
from .dispatch import (
    Dispatch,
    Experts,
    RunExperts,
    dispatch_capacity,
    dispatch_gathered,
    dispatch_local,
    dispatch_padded,
    dispatch_ragged,
)
from .expert_exchange import CAPACITY, GATHERED, PADDED, RAGGED, ExchangeSizes, exchange_legs, exchange_time, sent_once
from .grouped_matmul import Kernels, grouped_cost, grouped_matmul, of_group
from .quantized_groups import quantized_equal_groups, quantized_rows

Multiply = Callable[[Array, Array], Array]
_ROWS = 128  # buffers have a multiple of these rows: grouped matmuls on TPUs work on as many at once


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
    """How a layer's experts run. rows: the rows of a buffer, for the tokens of one chunk: those that a device receives
    (ragged), takes of all tokens (gathered), sends to each device (padded), or that an expert takes of each device
    (capacity). most_rows: the rows with which nothing is ever dropped. filled: the share of the rows of all buffers
    that tokens fill. may_pad: some tokens may go to no expert. waited_share: the exposed part of the time of a layer's
    exchanges. arithmetic: how the matrices are multiplied; None: in the type of the operands."""

    how: str
    experts: Experts
    rows: int
    most_rows: int
    filled: float
    num_chunks: int
    kernels: Kernels
    layout: ExpertLayout
    may_pad: bool
    waited_share: float = 1.0
    arithmetic: Arithmetic | None = None

    @property
    def is_dropless(self) -> bool:
        return self.rows >= self.most_rows


FILLED = "filled"  # the fact in a scope: the share of the rows of buffers that tokens fill


def filled_share(name: OperationName) -> float:
    """Returns the share of the rows of buffers that tokens fill, for an operation of experts; 1.0 for any other."""
    return float(name.fact(FILLED) or 1.0)


def experts_scope(site: str, filled: float) -> str:
    """Returns the scope of a layer's experts and of the exchanges of their tokens."""
    return nested_scope(fact_scope(ExpertsOp.kind, site), fact_scope(FILLED, f"{filled:.4f}"))


class ExpertsOp(ParallelOp):
    kind = "experts"
    title = "experts"
    names = (RAGGED, PADDED, GATHERED, CAPACITY)
    fallback = PADDED
    passes_over_rows = True

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        sizes = _sizes_of(site, inputs)
        capacity = _capacity(site, inputs, sizes)
        if not sizes.experts.axes:
            none = "no mesh axis of the batch splits the experts"
            exchanges = (Strategy(name, "", refusal=Refusal(none)) for name in (RAGGED, GATHERED))
            plan = _plan(PADDED, site, inputs, sizes, rows=0, most_rows=0, filled=1.0)
            alone = Strategy(PADDED, "on each device by itself", plan, is_trivial=True, has_spare_room=plan.is_dropless)
            return alone, *exchanges, capacity
        return (*(_exchange(name, site, inputs, sizes) for name in (RAGGED, GATHERED, PADDED)), capacity)

    def small_keys(self, plans: Sequence[OpPlan]) -> Mapping[str, tuple[Any, str]]:
        why = "nothing is dropped, since that depends on the mesh"
        has_capacity = any(plan.chosen.name == CAPACITY for plan in plans)
        return {"moe.max_imbalance": (None, why)} | ({"moe.capacity_factor": (8.0, why)} if has_capacity else {})

    def multiplied(self, site: OpSite) -> Sequence[Operand]:
        return site.operands[3:6]

    def why_not_few_bits(self, plan: OpPlan, target: TargetPlan) -> str | None:
        is_equal = plan.chosen.name == CAPACITY
        return None if is_equal or target.platform != "gpu" else "grouped matmuls of GPUs multiply in 16 bits"

    def lower(self, plan: OpPlan) -> Lowered:
        used = plan.precision.arithmetic if plan.precision else None
        # Results lie as the exchange makes them: nothing here is the partitioner's.
        used = used and replace(used, result_spec=None, gradient_spec=None)
        chosen: ExpertsPlan = replace(plan.chosen.parameters, arithmetic=used)

        def apply(x: Array, weights: Array, ids: Array, *matrices: Array, activation: str) -> Any:
            return apply_planned(x, weights, ids, matrices, activation, chosen)

        return apply

    def per_token(self, plain: Lowered, *operands: Any, **options: Any) -> tuple[Array, Array]:
        """Returns each token times the sum of its weights: experts sort tokens, and put them back."""
        x, weights, *_ = operands
        return x * jnp.sum(weights, axis=-1, keepdims=True).astype(x.dtype), jnp.zeros(())

    def compute_kind(self, name: OperationName, *, is_pallas: bool) -> ComputeKind | None:
        return "matmul" if is_pallas and name.fact(self.kind) else None

    def kernel_cost(self, call: KernelCall) -> KernelCost | None:
        return grouped_cost(call, filled_share(call.name)) if call.name.fact(self.kind) else None

    def scope(self, plan: OpPlan) -> str:
        return experts_scope(plan.site.name, plan.chosen.parameters.filled)

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
    row_bytes = width * jnp.dtype(inputs.spec.precision.compute).itemsize
    num_chosen = site.operands[1].shape[-1]
    return ExchangeSizes(experts, tokens // num_chunks, num_chosen, row_bytes, num_parts * num_chunks)


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
    how: str, site: OpSite, inputs: OpInputs, sizes: ExchangeSizes, *, rows: int, most_rows: int, filled: float
) -> ExpertsPlan:
    num_chunks, kernels, layout = inputs.spec.moe.num_chunks, _kernels(inputs), _layout(site, inputs)
    may_pad = inputs.spec.data.may_pad
    return ExpertsPlan(how, sizes.experts, rows, most_rows, filled, num_chunks, kernels, layout, may_pad)


def _kernels(inputs: OpInputs) -> Kernels:
    if inputs.target.platform == "gpu":
        return "none" if inputs.spec.precision.compute == "float32" else "triton"
    return "megablox" if inputs.target.platform == "tpu" else "none"


def _exchange(name: str, site: OpSite, inputs: OpInputs, sizes: ExchangeSizes) -> Strategy:
    """Returns one of the exchanges that drop nothing unless `moe.max_imbalance` is too small."""
    experts, n, imbalance = sizes.experts, sizes.experts.num_devices, inputs.spec.moe.max_imbalance
    mean, most = sizes.choices, n * sizes.most_of_device
    if name == PADDED:
        mean, most = math.ceil(mean / n), sizes.most_of_device
    rows = most if imbalance is None else min(most, math.ceil(imbalance * mean))
    rows += -rows % _ROWS
    filled = min(1.0, mean / rows)
    plan = _plan(name, site, inputs, sizes, rows=rows, most_rows=most, filled=filled)
    over = " and ".join(experts.axes)
    buffer = "for any imbalance" if plan.is_dropless else f"for {imbalance:g} times the mean, what is more is dropped"
    words = {
        RAGGED: f"rows exchanged over {over}, as many as there are, {rows:,} received at most: {buffer}",
        PADDED: f"rows exchanged over {over}, {rows:,} for each device: {buffer}",
        GATHERED: f"all tokens gathered over {over}, {rows:,} rows of them taken: {buffer}",
    }
    legs = exchange_legs(name, sizes, rows)
    refusal = refused(_refusal(name, inputs, experts))
    strategy = Strategy(name, words[name], plan, sent_once(legs), refusal=refusal, has_spare_room=plan.is_dropless)
    time = exchange_time(legs, site, inputs, sizes.num_runs)
    if time is None:
        return replace(strategy, reason="the first that runs here; the time of its exchanges is not known")
    waited, sent = human_seconds(time.waited_seconds), human_seconds(time.sent_seconds)
    figures = f"a layer waits {waited} of the {sent} of its exchanges, the least"
    plan = replace(plan, waited_share=time.waited_seconds / time.sent_seconds)
    return replace(strategy, parameters=plan, cost=Cost(time.waited_seconds, "seconds"), reason=figures)


def _refusal(name: str, inputs: OpInputs, experts: Experts) -> str | None:
    """Returns why an exchange cannot run; None where it can."""
    if name != RAGGED:
        return None
    target = inputs.target
    most = target.compiler.max_chips_ragged_all_to_all
    if not target.compiler.ragged_all_to_all:
        return f"the compiler for {target.name} has no ragged all-to-all"
    if most is not None and target.num_chips > most:
        return f"the compiler for {target.name} has no ragged all-to-all on more than {most} chips"
    if len(experts.axes) > 1:
        return f"the experts are split over several mesh axes, {' and '.join(experts.axes)}"
    return None


def _capacity(site: OpSite, inputs: OpInputs, sizes: ExchangeSizes) -> Strategy:
    factor, experts = inputs.spec.moe.capacity_factor, sizes.experts
    each = sizes.choices / experts.num_experts
    rows = int(factor * each)
    least = math.ceil(1000 / each) / 1000
    refusal = Refusal("it drops tokens, so it runs by name alone", is_hard=False)
    if rows < 1:
        why = f"moe.capacity_factor={factor:g} leaves an expert no row for {each:g} choices of a device"
        refusal = Refusal(f"{why}: all would be dropped; use {least:g} or more")
    filled = min(1.0, 1 / factor)
    plan = _plan(CAPACITY, site, inputs, sizes, rows=rows, most_rows=sizes.tokens, filled=filled)
    collectives = sent_once(exchange_legs(CAPACITY, sizes, rows)) if experts.axes else ()
    what = f"{rows:,} rows for each expert from each device, what is more is dropped"
    return Strategy(CAPACITY, what, plan, collectives, refusal=refusal, has_spare_room=plan.is_dropless)


def apply_planned(
    x: Array, weights: Array, ids: Array, matrices: tuple[Array, ...], activation: str, plan: ExpertsPlan
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
    x: Array, weights: Array, ids: Array, *matrices: Array, plan: ExpertsPlan, activation: str
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
    y, num_dropped = _apply_in_chunks(x, weights, ids, _runner(gate, up, down, biases, activation, plan), plan)
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
    experts, rows = plan.experts, plan.rows
    if plan.how == CAPACITY:
        return partial(dispatch_capacity, experts=experts, rows=rows)
    if not experts.axes:
        return partial(dispatch_local, experts=experts)
    chosen: Any = {RAGGED: dispatch_ragged, PADDED: dispatch_padded, GATHERED: dispatch_gathered}[plan.how]
    return partial(chosen, experts=experts, rows=rows)


def _biases_of_rows(biases: Sequence[Array], sizes_X: Array, num_rows: int) -> list[Array | None]:
    """Returns the biases (R, M) of rows that are sorted by expert, of biases (X, M); zeros for rows of no expert; three
    times None if there are no biases."""
    return [of_group(each, sizes_X, num_rows) for each in biases] or [None, None, None]


def _runner(
    gate: Array, up: Array, down: Array, biases: Sequence[Array], activation: str, plan: ExpertsPlan
) -> RunExperts:
    def run(x: Array, sizes: Array | None, weights: Array) -> Array:
        if sizes is None:
            of_rows = [each[:, None] for each in biases] or [None] * 3
        else:
            of_rows = _biases_of_rows(biases, sizes, x.shape[0])
        return weighted_mlp(x, weights, (gate, up, down), of_rows, _multipliers(sizes, plan), activation)

    return run


def _multipliers(sizes: Array | None, plan: ExpertsPlan) -> tuple[Multiply, Multiply]:
    """Returns what multiplies rows with the first matrices of experts, and with their last one. sizes: of the groups;
    None: they have as many rows each."""
    arithmetic, hidden = plan.arithmetic, plan.layout.summed_axes
    if arithmetic is None:
        plain: Multiply = partial(grouped_matmul, sizes_G=sizes, how=plan.kernels) if sizes is not None else _equal
        return plain, plain
    rows = arithmetic.tokens + plan.layout.axes_of_rows
    of_rows: Any = quantized_equal_groups
    if sizes is not None:
        of_rows = partial(quantized_rows, sizes_G=sizes, how=plan.kernels)
    of_rows = partial(of_rows, arithmetic, experts=plan.experts.axes, rows=rows)
    return partial(of_rows, into=(), out_of=hidden), partial(of_rows, into=hidden, out_of=())


def _equal(x_LCE: Array, w_LEM: Array) -> Array:
    return jnp.einsum("lce,lem->lcm", x_LCE, w_LEM)


def weighted_mlp(
    x: Array,
    weights: Array,
    matrices: tuple[Array, Array, Array],
    biases: Sequence[Array | None],
    multiply: tuple[Multiply, Multiply],
    activation: str,
) -> Array:
    """Returns what experts make of rows, times the weights of the rows. biases: of the rows. multiply: rows with the
    first matrices of their expert, and with its last one.

    The product with the weight is one elementwise step with the activation, which is computed again in the backward
    pass: what would be saved of it is in float32.
    """
    gate, up = (added(multiply[0](x, w), bias) for w, bias in zip(matrices[:2], biases[:2], strict=True))

    @partial(jax.checkpoint, prevent_cse=False)
    def weighted(gate: Array, up: Array, weights: Array) -> Array:
        hidden: Array = gated(activation, gate, up)
        return (hidden.astype(jnp.float32) * weights[..., None]).astype(hidden.dtype)

    y: Array = multiply[1](weighted(gate, up, weights), matrices[2])
    bias = biases[2]
    return y if bias is None else (y + weights[..., None] * bias).astype(y.dtype)
