"""The head's matmul: with the whole vocabulary at once, with one chunk of it after another, or over all stages.

Whole, its weights are gathered before the head begins, with nothing beside it; and for the gradient, as wide as the
vocabulary, XLA may make an all-reduce. In chunks the next one is gathered beside the matmul of the one before, and the
gradient of each, as wide as XLA can reduce-scatter, is reduced beside the matmuls that make the others.

The stages of a pipeline may share the head: each multiplies with its part of the vocabulary.

    last virtual stage    y, the result of all layers       all-reduce: to all stages
    all stages            their own logits, and of each
                          token the largest, the sum of
                          exponentials, and the target's    small all-reduces
                          their parts of the gradient of y  all-reduce: to the last virtual stage

So no stage waits for the one that would have the head. Weights of the head, their gradients and their updates stay in
parts. A table that the embedding shares is split in the same way. The stage that looks tokens up has it whole, gathered
once per step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Context, Model, Params, is_logical_axes
from meshloom.models.loss import VocabShard

from ..core.format import human_seconds
from ..core.partition_spec import STAGE, Axes
from ..core.traffic import Traffic
from ..core.trees import leaves_by_path, like
from ..jaxpr.read_jaxpr import read_jaxpr
from ..sharding.arrays import VOCAB, OpSite
from ..sharding.rules import ArrayPlan, DimensionPlan
from ..sharding.sharding import ShardingPlan, accumulated_layouts, gathered_bytes, over_stages
from ..spec.compiler_traits import odd_part
from ..spec.cost_model import cost_model
from ..spec.plan_spec import PlanSpec
from ..target.compiler_options import hidden_kinds
from ..target.mesh import MeshPlan
from .operation import Cost, OpInputs, OpPlan, ParallelOp, Refusal, Strategy, WeightUse, moved, refused

WHOLE, VOCAB_CHUNKS = "whole", "vocab_chunks"
ALIGNED = 8  # parts of a vocabulary that is a power of two are multiples of this share of it


class LmHeadOp(ParallelOp):
    kind = "lm_head"
    title = "head"
    names = (WHOLE, VOCAB_CHUNKS)
    fallback = WHOLE
    after = ("loss",)

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        return (OpSite(self.kind, "head", "head"),)

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        spec, model, sharding, mesh = inputs.spec, inputs.model, inputs.sharding, inputs.mesh
        gathers = [(plan, gathered_bytes(plan, mesh, sharding.roles)) for plan in _with_vocab(sharding)]
        num_bytes, axes = sum(size for _, size in gathers), _gathered_over(sharding)
        whole = Strategy(
            WHOLE,
            "of the whole vocabulary",
            (spec.model.vocab_size,),
            _moved([size for _, size in gathers], axes, mesh.num_shards(axes)) if axes else (),
            reason="in one matmul",
        )
        if refusal := _cannot_be_cut(spec, model, sharding):
            return Strategy(VOCAB_CHUNKS, "", refusal=Refusal(refusal)), whole
        (vocab_size,) = _vocab_sizes(sharding)
        sizes = chunk_sizes(vocab_size, inputs.target.compiler.max_odd_factor(mesh.num_shards(axes)))
        shown = ", ".join(f"{size:,}" for size in sizes)
        chunks = Strategy(
            VOCAB_CHUNKS,
            f"in chunks of {shown} entries of the vocabulary",
            sizes,
            _moved([num_bytes * size // vocab_size for size in sizes], axes, mesh.num_shards(axes)),
            refusal=refused(_objection(inputs), is_hard=False),
            weights="chunked",
        )
        # The gather of the whole head, which nothing hides; for chunks, the added passes over the head's input.
        gather = mesh.alone_seconds("all-gather", num_bytes, axes)
        bandwidth = inputs.target.hbm_bytes_per_second_per_device
        if gather is None or bandwidth is None:
            return replace(chunks, reason="how long the head's gather takes is not known"), whole
        input_bytes = inputs.batch.tokens_of_device * num_bytes // vocab_size
        passes = cost_model().head_chunk_passes * (len(sizes) - 1) * input_bytes / bandwidth
        figures = f"{human_seconds(gather)} of gather, {human_seconds(passes)} for its input read more often"
        return (
            replace(chunks, cost=Cost(passes, "seconds"), reason=figures),
            replace(whole, cost=Cost(gather, "seconds"), reason=figures),
        )

    def weight_use(self, plan: OpPlan, weight: ArrayPlan) -> WeightUse | None:
        is_of_vocabulary = weight.array.path.startswith("head/") and VOCAB in weight.array.logical_axes
        return plan.chosen.weights if is_of_vocabulary else None


def _moved(sizes: Sequence[int], axes: Axes, group_size: int) -> tuple[Traffic, ...]:
    """Returns a gather forward and a reduce-scatter backward of each of these sizes in bytes."""
    gathers = (moved("all-gather", axes, group_size, size, 1, "forward") for size in sizes)
    return (*gathers, *(moved("reduce-scatter", axes, group_size, size, 1, "backward") for size in sizes))


def _objection(inputs: OpInputs) -> str | None:
    """Returns why chunks would hide nothing here; None where they may."""
    target = inputs.target
    if not target.compiler.gathers_before_loops:
        return f"the compiler for {target.name} does not wait for the head's gather before the layers"
    if "all-gather" not in hidden_kinds(inputs.spec.overlap.flag_presets, "weights", target):
        return "with these flag presets no gather runs beside the head's matmuls"
    ((loss,),) = inputs.after
    if loss.chosen.parameters > 1:
        return f"each of {loss.chosen.parameters} chunks of tokens needs the whole vocabulary"
    return None


def chunk_sizes(vocab_size: int, max_odd_factor: int | None) -> tuple[int, ...]:
    """Returns the vocabulary in few chunks, the first one small: nothing hides its gather. max_odd_factor: the
    largest o of a chunk o 2^k with which its gradient is reduce-scattered; None: any.

    128,256 entries, max_odd_factor 26: 256, 25 x 1,024, 25 x 4,096.
    """
    step = min(vocab_size & -vocab_size, max(1, vocab_size // ALIGNED))  # as well aligned as all of it
    left, sizes = vocab_size, list[int]()
    while left:
        most = min(left, int(vocab_size * cost_model().head_largest_part)) // step * step
        sizes.append(
            next(size for size in range(most, 0, -step) if not max_odd_factor or odd_part(size) <= max_odd_factor)
        )
        left -= sizes[-1]
    return tuple(reversed(sizes))


def _cannot_be_cut(spec: PlanSpec, model: Model, sharding: ShardingPlan) -> str | None:
    """Returns why its parameters cannot be used in parts; None where they can."""
    if VOCAB in jax.tree.leaves([axes for name, axes in model.head.logical_axes.items() if name in model.tied]):
        return "the embedding has the same weights"
    layouts = (*sharding.parameters, *accumulated_layouts(spec, sharding), *sharding.optimizer)
    of_vocab = [d for plan in _of_head(layouts) for d in plan.dimensions if d.logical == VOCAB]
    if not of_vocab:
        return "it has no parameter with a dimension 'vocab'"
    if len(_vocab_sizes(sharding)) > 1:
        return "its parameters have vocabularies of different sizes"
    if axes := dict.fromkeys(axis for d in of_vocab for axis in d.axes):
        return f"the vocabulary is split over {' and '.join(axes)}"
    if not _gathered_over(sharding):
        return "its weights are whole on every device"
    return cut_refusal(spec, model)


def _of_head(layouts: tuple[ArrayPlan, ...]) -> Iterator[ArrayPlan]:
    return (plan for plan in layouts if plan.array.path.split("/")[0] == "head")


def _vocab_sizes(sharding: ShardingPlan) -> set[int]:
    """Returns the sizes that the parameters have for the vocabulary, which a model may fill up."""
    return {d.size for plan in _of_head(sharding.parameters) for d in plan.dimensions if d.logical == VOCAB}


def _gathered_over(sharding: ShardingPlan) -> tuple[str, ...]:
    """Returns the mesh axes over which the parameters with a vocabulary are gathered."""
    axes = (axis for plan in _with_vocab(sharding) for d in plan.dimensions for axis in d.axes)
    return tuple(dict.fromkeys(axis for axis in axes if axis in sharding.roles.tokens))


def _with_vocab(sharding: ShardingPlan) -> tuple[ArrayPlan, ...]:
    return tuple(plan for plan in _of_head(sharding.parameters) if VOCAB in plan.array.logical_axes)


def cut_refusal(spec: PlanSpec, model: Model) -> str | None:
    """Returns why a part of the parameters' vocabulary does not make that part of the logits alone; None where it does.

    Split over two devices along the vocabulary, they exchange nothing, and each has half of the logits.
    """
    num_devices, length = 2, 2
    axes_of_head = leaves_by_path(model.head.logical_axes, is_leaf=is_logical_axes)
    places = {path: axes.index(VOCAB) for path, axes in axes_of_head.items() if VOCAB in axes}
    every = leaves_by_path(model.head.abstract_in(spec.precision.compute))
    layouts = {p: tuple((VOCAB,) if d == places.get(p) else () for d in range(x.ndim)) for p, x in every.items()}

    def smaller(path: str) -> jax.ShapeDtypeStruct:
        sizes = zip(every[path].shape, layouts[path], strict=True)
        return jax.ShapeDtypeStruct(tuple(num_devices if axes else size for size, axes in sizes), every[path].dtype)

    def logits(head: Params, embed: Params, tokens_BT: jax.Array) -> jax.Array:
        context = Context(jnp.arange(length)[None], lambda name, x, *_, **__: x)
        return model.head.apply(head, model.embed.apply(embed, tokens_BT, context), context)

    head = like(model.head.abstract, {path: smaller(path) for path in every})
    tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    try:
        traced = jax.make_jaxpr(logits)(head, model.embed.abstract, tokens_BT).jaxpr
    except Exception as error:
        if ":" not in spec.model.family:
            raise  # our own heads take any vocabulary
        said = next(iter(str(error).splitlines()), "")
        return f"it does not take a part of the vocabulary ({type(error).__name__}: {said})"
    alone = "its logits are not each made of their own entries of the parameters"
    if len(traced.outvars) > 1:
        return alone  # auxiliary outputs are made of whole logits
    others = [((),) * x.aval.ndim for x in traced.invars[len(layouts) :]]
    program = read_jaxpr(traced, [*layouts.values(), *others], {VOCAB: num_devices})
    (made,) = traced.outvars
    is_split = program.sizes[program.outputs[0]] * num_devices == made.aval.size * made.aval.dtype.itemsize
    return None if is_split and not any(operation.collective for operation in program.operations) else alone


SHARED = "each stage has its part of the head"


def why_not_shared(inputs: OpInputs) -> str | None:
    """Returns why stages cannot share the head; None where they can. inputs: with the layouts without that."""
    spec, mesh, model, sharding = inputs.spec, inputs.mesh, inputs.model, inputs.sharding
    stored, updated = (list(_vocabularies(plans)) for plans in (sharding.parameters, sharding.optimizer))
    if not stored:
        return "it has no parameter with a dimension 'vocab'"
    if whole := [name for name in model.tied if VOCAB not in model.head.logical_axes[name]]:
        return f"the embedding has '{whole[0]}' too, which has no dimension 'vocab'"
    if len({d.size for d in stored}) > 1:
        return "its parameters have vocabularies of different sizes"
    tokens = sharding.roles.tokens
    if len({_within(d, tokens) for d in stored}) > 1:
        return "its parameters have their vocabularies over different mesh axes"
    accumulated = _vocabularies(accumulated_layouts(spec, sharding))
    if model.tied and any(d.axes != own.axes for d, own in zip(accumulated, stored, strict=True)):
        return "its gradient, with that of the lookup, is accumulated in parts of its vocabulary"
    for d in (*stored, *updated):
        if 0 < len(_within(d, tokens)) < len(d.axes):
            return f"its vocabulary is over {' and '.join(d.axes)}"
        if d.size % (num_shards := mesh.num_shards((*d.axes, STAGE))):
            return f"its vocabulary of {d.size:,} is not a multiple of {num_shards}"
    return cut_refusal(spec, model)


def share_head(sharding: ShardingPlan, mesh: MeshPlan) -> ShardingPlan:
    """Returns the layouts with the vocabulary of the head over stages, of logits too. A part of it is within those that
    are gathered for use, and around those of the partitioner and of the update."""
    num_gathered = len(_gathered(sharding))

    def split(plan: ArrayPlan) -> ArrayPlan:
        at = plan.array.logical_axes.index(VOCAB)
        note = "; ".join(filter(None, (plan.dimensions[at].note, SHARED)))
        return over_stages(plan, at, mesh, place=num_gathered, note=note)

    parameters, optimizer = (
        tuple(split(plan) if _is_of_head(plan) else plan for plan in plans)
        for plans in (sharding.parameters, sharding.optimizer)
    )
    logits = (split(plan) if VOCAB in plan.array.logical_axes else plan for plan in sharding.activations)
    return replace(sharding, parameters=parameters, optimizer=optimizer, activations=tuple(logits))


def vocab_shard(sharding: ShardingPlan, mesh: MeshPlan) -> VocabShard:
    """Returns this stage's part of the vocabulary. sharding: the layouts with a shared head."""
    size, num_stages = next(_vocabularies(sharding.parameters)).size, mesh.sizes[STAGE]
    in_a_row = size // (mesh.num_shards(_gathered(sharding)) * num_stages)

    def place(targets: Array) -> Array:
        part, within = targets // in_a_row, targets % in_a_row
        is_here = part % num_stages == jax.lax.axis_index(STAGE)
        return jnp.where(is_here, part // num_stages * in_a_row + within, -1)

    return VocabShard(place, _total, _log_sum_exp, lambda x: jax.lax.pmax(x, STAGE))


def stage_total(sharding: ShardingPlan) -> Callable[[Array], Array]:
    """Returns a function that adds arrays that lie as the results of layers over the stages. All mesh axes are manual
    in it, as in all reductions (weights.py)."""
    spec, partitioner = sharding.auto_spec("batch", "sequence_parallel_length", "embed"), sharding.roles.partitioner

    def add(x: Array) -> Array:
        return jax.lax.psum(x, STAGE)

    if not partitioner:
        return add
    return jax.shard_map(add, in_specs=spec, out_specs=spec, axis_names=set(partitioner), check_vma=False)


def given_by(source: int, x: Any, total: Callable[[Array], Array]) -> Any:
    """Returns what a stage has, on all stages; the gradient of it is the sum of theirs. total: of `stage_total`."""

    @jax.custom_vjp
    def given(x: Array) -> Array:
        return total(jnp.where(jax.lax.axis_index(STAGE) == source, x, jnp.zeros_like(x)))

    given.defvjp(lambda x: (given(x), None), lambda _, gradient: (total(gradient),))
    return jax.tree.map(given, x)


def _vocabularies(plans: Sequence[ArrayPlan]) -> Iterator[DimensionPlan]:
    """Yields the dimension of the vocabulary of each parameter of the head that has one."""
    of_head = (plan for plan in plans if _is_of_head(plan))
    return (d for plan in of_head for d in plan.dimensions if d.logical == VOCAB)


def _is_of_head(plan: ArrayPlan) -> bool:
    is_own = plan.array.path.split("/")[0] == "head"
    return VOCAB in plan.array.logical_axes and (is_own or plan.array.is_tied)


def _within(d: DimensionPlan, axes: Axes) -> Axes:
    return tuple(axis for axis in d.axes if axis in axes)


def _gathered(sharding: ShardingPlan) -> Axes:
    """Returns the axes over which the vocabulary of the head's weights is gathered for use."""
    return _within(next(_vocabularies(sharding.parameters)), sharding.roles.tokens)


@jax.custom_vjp
def _total(x: Array) -> Array:
    return jax.lax.psum(x, STAGE)


_total.defvjp(lambda x: (_total(x), None), lambda _, gradient: (gradient,))


@jax.custom_vjp
def _log_sum_exp(x: Array) -> Array:
    largest = jax.lax.pmax(x, STAGE)
    return largest + jnp.log(jax.lax.psum(jnp.exp(x - largest), STAGE))


def _with_share(x: Array) -> tuple[Array, Array]:
    total = _log_sum_exp(x)
    return total, jnp.exp(x - total)


_log_sum_exp.defvjp(_with_share, lambda share, gradient: (share * gradient,))
