"""Defines the layer schedule: the order in which microbatches pass through embedding, layers and head, and back.

One object owns both loops, the one over microbatches and the one over layers, since a pipeline interleaves them:

    sequential    for each microbatch: embed, all layers, head; then backward      sequential.py
    a pipeline    for each tick: this stage's layers on one microbatch, forward or backward

A schedule is handed the model as functions of local arrays (`ModelFunctions`), this device's weights with how they are
gathered and how their gradients are reduced (`ModelWeights`), and this device's sequences; it returns sums over them
and gradients in the layout of the update. It runs within the `shard_map` of the step, so it may call any collective.

A pipeline over the mesh axis `stage` differentiates `embed`, each layer and `head` separately, and every loss that they
return has `gradient_scale` as its cotangent, since each is this device's part of the mean objective already.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from meshloom.models import Aux, Params

from ..core.partition_spec import Axes
from ..parallel.delayed import Magnitudes
from ..parallel.remat import Policy
from ..parallel.weights import Reduction, Weights, gradient_accumulator, reduce_gradient

Batch = dict[str, Array]  # int32 (sequences, sequence_length), by the names of batch_arrays; row: int32 (sequences,)

# (whole weights of a layer, what all layers share, index of the layer, x) -> (x, auxiliary outputs); x is a tree
LayerFunction = Callable[[Any, Any, Array, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class StackFunctions:
    """A stack of equal layers. layer: the function of one of them. policy: selects what a layer saves for its backward
    pass (remat.py)."""

    name: str
    num_layers: int
    layer: LayerFunction
    policy: Policy


@register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums over the microbatches of this device, as parts of the mean over the tokens of the global batch. loss:
    cross-entropy. auxiliary: outputs by stack, and of the head; each value of a stack has a first dimension
    `layers`. magnitudes: the largest of them all (delayed.py); empty where no scales come from earlier steps."""

    loss: Array
    auxiliary: dict[str, Aux]
    magnitudes: Magnitudes = field(default_factory=dict)

    def plus(self, other: "Sums") -> "Sums":
        """Returns the sums over the microbatches of both."""
        loss, auxiliary = jax.tree.map(jnp.add, (self.loss, self.auxiliary), (other.loss, other.auxiliary))
        return Sums(loss, auxiliary, jax.tree.map(jnp.maximum, self.magnitudes, other.magnitudes))


@register_dataclass
@dataclass(frozen=True)
class HeadOutput:
    """The result of the head. objective: a part of the mean objective over the targets of the global batch. loss:
    summed cross-entropy."""

    objective: Array
    loss: Array
    aux: Aux


@dataclass(frozen=True)
class ModelFunctions:
    """A model as functions of local arrays.

    prepare: (sequences, scales of layers' operands from earlier steps) -> the values that the other functions read.
    embed: (weights of `embed`, microbatch) -> (x, whole parameters that the head shares with the embedding). stacks:
    run one after the other. head: (weights of `head`, whole shared parameters, x, microbatch) -> HeadOutput.
    stage_total: adds an array like x over stages.

    The step differentiates the head's objective plus the auxiliary losses of layers and head (`objective`).
    """

    prepare: Callable[[Batch, Magnitudes], "Microbatch"]
    embed: Callable[[Weights, "Microbatch"], tuple[Any, Params]]
    stacks: tuple[StackFunctions, ...]
    head: Callable[[Weights, Params, Any, "Microbatch"], HeadOutput]
    stage_total: Callable[[Array], Array]


@register_dataclass
@dataclass(frozen=True)
class Microbatch:
    """Some sequences of this device. context: the values that embedding and head read. layers: the values that layers
    read besides their weights and x. rows_B: the numbers of the sequences in the global batch. reference_B: the
    log-probability of each sequence's targets by the reference of a DPO; None without one."""

    inputs_BT: Array
    targets_BT: Array
    context: Any
    layers: Any
    rows_B: Array
    reference_B: Array | None


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model on this device, as trees by piece.

    stored: the shards of the state. working: the same shards in the compute type. layouts: a WeightPlan for each.
    reduction: how gradients are reduced. num_shards: the number of devices along mesh axes. scales: of layers'
    operands, from earlier steps; empty: all come from the magnitudes now.
    """

    stored: Params
    working: Params
    layouts: Params
    reduction: Reduction
    num_shards: Callable[[Axes], int]
    scales: Magnitudes = field(default_factory=dict)

    @property
    def is_reduced_once(self) -> bool:
        """Returns True if some gradient has a reduction that runs once per step."""
        return any(layout.is_reduced_once for layout in jax.tree.leaves(self.layouts))

    def gradient_accumulators(self, *, is_last: bool) -> Params:
        """Returns zeros of the shapes and types of the gradients, None for frozen parameters. The compiler drops their
        values."""
        reduction = replace(self.reduction, is_last=is_last)
        return jax.tree.map(
            lambda layout, x: gradient_accumulator(x, layout, reduction, self.num_shards), self.layouts, self.stored
        )

    def bound(self, accumulators: Params, before: Params | None, *, is_last: bool) -> Weights:
        """Returns the weights of one pass. accumulators: arrays that receive its gradients. before: gradients to add.
        is_last: whether the backward pass itself reduces gradients to the layout of the update."""
        return Weights(accumulators, before, self.working, self.layouts, replace(self.reduction, is_last=is_last))

    def reduce(self, gradients: Params) -> Params:
        """Returns accumulated gradients in the layout of the update."""
        return jax.tree.map(lambda layout, g: reduce_gradient(g, layout, self.reduction), self.layouts, gradients)


class LayerSchedule(Protocol):
    """Runs a model over this device's sequences of a global batch."""

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        """Returns sums over this device's sequences, and the gradients of `gradient_scale` times the objective, in the
        layout of the update; None for the gradients if the scale is None."""
        ...


def cotangent_of(aux: Aux, scale: Any) -> Aux:
    """Returns the gradients of a layer's auxiliary outputs, of these shapes: every loss is a part of the mean objective
    already."""
    return Aux(
        jax.tree.map(lambda loss: jnp.broadcast_to(scale, loss.shape).astype(loss.dtype), aux.losses),
        *jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (aux.statistics, aux.totals)),
    )


def objective(output: HeadOutput, auxiliary: dict[str, Aux]) -> Array:
    """Returns the value to differentiate: this device's part of the mean objective over the global batch."""
    losses = [jnp.sum(loss) for aux in auxiliary.values() for loss in aux.losses.values()]
    return sum(losses, start=output.objective)


def split_microbatches(batch: Batch, num_microbatches: int) -> Batch:
    """Returns a batch split into microbatches: (sequences, ...) -> (microbatches, sequences of each, ...)."""
    return jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
