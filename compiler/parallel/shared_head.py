"""The head of a pipeline over all of its stages: each multiplies with its part of the vocabulary.

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

from meshloom.models.loss import VocabShard

from ..core.partition_spec import STAGE, Axes
from ..sharding.arrays import VOCAB
from ..sharding.rules import ArrayPlan, DimensionPlan
from ..sharding.sharding import ShardingPlan, accumulated_layouts, over_stages
from ..target.mesh import MeshPlan
from .lm_head import cut_refusal
from .operation import OpInputs

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
