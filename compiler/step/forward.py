"""Makes the model functions of local batches: embedding, layers, head and loss. A schedule calls them (schedule.py).

Where sequences are compared in pairs, a pair is two neighbouring rows of the batch, and lies on one device in one
microbatch (sharding/batch.py). Where devices split the length of sequences, each has a part of every sum, and its share
of every loss.

Shapes: B sequences of a microbatch on a device, P pairs, T tokens, E embed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from meshloom.models import PADDING_TARGET, Aux, Context, LogicalAxes, Model, Params, Stack, split_aux, split_output
from meshloom.models.loss import dpo_losses, has_loss, simpo_losses, sum_losses

from ..core.partition_spec import Axes, axes_in, keep_axes
from ..core.scopes import layout_scope, piece_scope
from ..parallel.delayed import Magnitudes, with_scales
from ..parallel.encodings import decoded_weights, with_encoded
from ..parallel.operation import OpPlan, lower_operations
from ..parallel.remat import RunLayer, build_policy, layer_runner, marked
from ..parallel.shared_head import stage_total, vocab_shard
from ..parallel.weights import Weights
from ..plan import Plan
from ..sharding.arrays import LAYER_INPUT, PAIR_METRICS, gradient_name, vocab_dimensions
from ..sharding.batch import REFERENCE, TokenOrder
from ..sharding.sharding import ShardingPlan
from ..spec.objective_spec import Dpo, Simpo
from ..spec.step_spec import StepSpec
from ..target.mesh import MeshPlan
from .schedule import Batch, HeadOutput, LayerFunction, Microbatch, ModelFunctions, StackFunctions
from .turns import RunParts, run_each, run_in_turns, takes_turns, turn_names

BatchSplit = tuple[Any, ...]  # a tree for each part of the batch


def build_functions(
    plan: Plan,
    num_targets: Array,
    num_tokens: Array | float,
    dropout_key: Array | None,
    *,
    is_by_sequence: bool = False,
    counts_misses: bool = False,
) -> ModelFunctions:
    """Returns the plan's model as functions of local arrays; x is a tuple of the parts of the batch.

    num_targets, num_tokens: counts over the global batch. dropout_key: None for no dropout. is_by_sequence: the loss is
    the log-probabilities of sequences, (global_batch_size,), with 0 for those that are not in the microbatch.
    counts_misses: below them in (2, global_batch_size) the number of targets that another token is likelier than.
    """
    model, spec, num_parts = plan.model, plan.spec, plan.spec.overlap.layers.batch_split
    make_context = _context_maker(model, plan.operations, plan.sharding)
    head = _Head(plan, make_context, num_targets, num_tokens, is_by_sequence, counts_misses)

    def prepare(batch: Batch, scales: Magnitudes) -> Microbatch:
        shared = _shared(batch, dropout_key, plan.roles.length, plan.batch.token_order)
        shared = replace(shared, is_token_BT=_is_token(spec, batch["targets"]), scales=scales)
        parts = _parts_of_batch(shared, num_parts)
        return Microbatch(batch["inputs"], batch["targets"], shared, parts, batch["row"], batch.get(REFERENCE))

    def embed(weights: Weights, microbatch: Microbatch) -> tuple[BatchSplit, Params]:
        with jax.named_scope(piece_scope("embed")):
            whole = weights.gathered()
            x_BTE = model.embed.apply(whole, microbatch.inputs_BT, make_context("embed", microbatch.context, 0))
        return _parts_of_batch(x_BTE, num_parts), whole

    def over_batch(tree: Any) -> Any:
        """Sums a tree of arrays over all devices that hold tokens of a microbatch. The sum has no gradient."""
        tree, axes = jax.tree.map(jax.lax.stop_gradient, tree), plan.roles.tokens
        return jax.lax.psum(tree, axes) if axes else tree

    def run_parts(stack: Stack) -> RunParts:
        """Runs in turns what a compiler then schedules so."""
        if num_parts == 1 or not takes_turns(stack, plan.arrays, plan.target):
            return run_each
        own = [each for each in plan.operations if each.site.piece == stack.name]
        return partial(run_in_turns, turn_names(plan.sharding, own))

    before = itertools.accumulate((stack.num_layers for stack in model.stacks), initial=1)
    stacks = (
        StackFunctions(
            stack.name,
            stack.num_layers,
            _layer(
                stack,
                layer_runner(spec.remat, stack.name),
                run_parts(stack),
                make_context,
                over_batch,
                first,
                num_tokens,
            ),
            build_policy(spec.remat, stack.name, plan.arrays, spec.precision.compute),
        )
        for stack, first in zip(model.stacks, before, strict=False)
    )
    return ModelFunctions(prepare, embed, tuple(stacks), head, stage_total(plan.sharding))


@dataclass(frozen=True)
class _Head:
    """The head and the loss, as a function of `ModelFunctions`. make_context: makes the context of a part of the model.
    The other fields are arguments of `build_functions`."""

    plan: Plan
    make_context: "ContextMaker"
    num_targets: Array
    num_tokens: Array | float
    is_by_sequence: bool
    counts_misses: bool

    def __call__(self, weights: Weights, embed: Params, x_parts: BatchSplit, microbatch: Microbatch) -> HeadOutput:
        x_BTE = jnp.concatenate(x_parts)
        with jax.named_scope(piece_scope("head")):
            sums, aux = self._summed(weights, embed, x_BTE, microbatch)
            if self.is_by_sequence:
                return HeadOutput(jnp.zeros(()), self._of_batch(sums, microbatch), aux)
            if self.plan.spec.has_pairs:
                return compare_pairs(self.plan.spec, self.plan.mesh, self.plan.roles.length, -sums[1], microbatch, aux)
            objective, loss = sums
        return HeadOutput(objective / jnp.maximum(self.num_targets, 1), loss, aux)

    def _summed(self, weights: Weights, embed: Params, x_BTE: Array, microbatch: Microbatch) -> tuple[Any, Aux]:
        """Returns what `sum_losses` does, with the head's outputs as parts of means."""
        plan, model, spec = self.plan, self.plan.model, self.plan.spec
        undropped = replace(microbatch.context, dropout_keys_B=None)
        parts = _head_parts(model, plan.operations, weights, x_BTE)

        def apply(params: Params, x_BTE: Array, targets_BT: Array) -> tuple[Any, Aux]:
            context = self.make_context("head", replace(undropped, is_token_BT=_is_token(spec, targets_BT)), 0)
            logits, aux = split_aux(model.head.apply(params, x_BTE, context))
            return logits, _parts_of_means(aux, self.num_tokens)

        of_parts = tuple(model.head_params(part, embed) for part in parts)
        operands = (apply, of_parts, x_BTE, microbatch.targets_BT)
        shard = vocab_shard(plan.sharding, plan.mesh) if plan.pipeline and plan.pipeline.shares_head else None
        options = {"z_loss_weight": spec.loss.z_loss_weight, "counts_misses": self.counts_misses, "shard": shard}
        options["by_sequence"] = self.is_by_sequence or spec.has_pairs
        run: Any = lower_operations(plan.operations, "head")
        return run("loss", "cross_entropy", sum_losses, *operands, **options)

    def _of_batch(self, sums: Array, microbatch: Microbatch) -> Array:
        """Returns the log-probabilities of sequences at their places in the global batch."""
        values = jnp.stack([-sums[1], sums[2]]) if self.counts_misses else -sums[1]
        of_batch = jnp.zeros((*values.shape[:-1], self.plan.spec.global_batch_size))
        return of_batch.at[..., microbatch.rows_B].set(values)


def compare_pairs(
    spec: StepSpec, mesh: MeshPlan, axes: Axes, log_probs_B: Array, microbatch: Microbatch, aux: Aux
) -> HeadOutput:
    """Returns the declared objective of a device's sequences. axes: the mesh axes that split the length. aux: outputs
    of the head.

    Its loss is the sum over pairs, and its metrics are means over pairs: the share of pairs whose chosen sequence is
    above the rejected one, the margin between them, and the log-probabilities of both.
    """
    declared, num_shards, num_pairs = spec.objective, mesh.num_shards(axes), spec.global_batch_size // 2

    def whole(x: Array) -> Array:
        return jax.lax.psum(x, axes) if axes else x

    log_probs_B, num_targets_B = whole(log_probs_B), whole(jnp.sum(has_loss(microbatch.targets_BT), axis=-1))
    match declared:
        case Dpo(beta=beta, label_smoothing=smoothing):
            assert microbatch.reference_B is not None
            losses_P, margins_P = dpo_losses(log_probs_B, microbatch.reference_B, beta=beta, label_smoothing=smoothing)
        case Simpo(beta=beta, margin=margin):
            losses_P, margins_P = simpo_losses(log_probs_B, num_targets_B, beta=beta, margin=margin)
        case _:
            raise ValueError(f"objective={declared.kind} compares no pairs")
    loss, count = jnp.sum(losses_P) / num_shards, num_pairs * num_shards
    values = zip(PAIR_METRICS, (margins_P > 0, margins_P, log_probs_B[0::2], log_probs_B[1::2]), strict=True)
    means = {name: jax.lax.stop_gradient(jnp.sum(x) / count).astype(jnp.float32) for name, x in values}
    return HeadOutput(loss / num_pairs, loss, Aux(aux.losses, {**aux.statistics, **means}, aux.totals))


def _layer(
    stack: Stack, run_layer: RunLayer, run_parts: RunParts, make_context: "ContextMaker",
    over_batch: Callable[[Any], Any], first: int, num_tokens: Array | float,
) -> LayerFunction:  # fmt: skip
    """Returns the function of a stack's layers. first: the number of the first one in the model, counted from 1."""

    def layer(weights: Any, shared: BatchSplit, index: Array, x: BatchSplit) -> tuple[BatchSplit, Aux]:
        params: Params = decoded_weights(weights)

        def run(part: tuple[Array, Shared]) -> Any:
            named, context = marked(LAYER_INPUT, part[0]), make_context(stack.name, part[1], first + index)
            of_layer = {name: each[index] for name, each in part[1].scales.get(stack.name, {}).items()}
            operation = with_scales(with_encoded(context.operation, weights), of_layer)
            return stack.layer.apply(params, named, replace(context, run_layer=run_layer, operation=operation))

        outputs = run_parts(run, tuple(zip(x, shared, strict=True)))
        x, aux = zip(*(split_output(output) for output in outputs), strict=True)
        # Summed over all parts and devices, so that results do not depend on how the microbatch is split.
        totals = over_batch(_sum_of([dict(each.totals) for each in aux]))
        return x, _sum_of([_parts_of_means(each.make(totals), num_tokens) for each in aux])

    return layer


def _sum_of(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *values: sum(values[1:], start=values[0]), *trees)


def _is_token(spec: StepSpec, targets_BT: Array) -> Array | None:
    """Returns False for padding; None if the data of the run have none."""
    return targets_BT != PADDING_TARGET if spec.data.may_pad else None


def _parts_of_means(aux: Aux, num_tokens: Array | float) -> Aux:
    """Returns losses and statistics as parts of the mean over the tokens of the global batch."""
    losses = {name: loss.astype(jnp.float32) / num_tokens for name, loss in aux.losses.items()}
    statistics = {
        name: jax.lax.stop_gradient(statistic.astype(jnp.float32)) / num_tokens
        for name, statistic in aux.statistics.items()
    }
    totals = {name: jax.lax.stop_gradient(total.astype(jnp.float32)) for name, total in aux.totals.items()}
    return Aux(losses, statistics, totals)


def _head_parts(model: Model, operations: Sequence[OpPlan], weights: Weights, x_BTE: Array) -> list[Params]:
    """Returns the head's own weights, gathered: a tree for each part of the vocabulary."""
    chunks = next((each.chosen.parameters for each in operations if each.chosen.weights == "chunked"), None)
    if chunks is None:
        return [weights.gathered()]
    return weights.gathered_in_parts(vocab_dimensions(model), chunks, after=x_BTE)


@register_dataclass
@dataclass(frozen=True)
class Shared:
    """The values that all layers read besides their weights. dropout_keys_B: a key for each sequence; None for no
    dropout. is_token_BT: False for padding; None if there is none. scales: of operands of all layers, from earlier
    steps."""

    positions_BT: Array
    segment_ids_BT: Array | None
    dropout_keys_B: Array | None
    is_token_BT: Array | None = None
    scales: Magnitudes = field(default_factory=dict)


def _shared(part: Batch, dropout_key: Array | None, length_axes: Axes, order: TokenOrder) -> Shared:
    """Returns the values that all layers share. Devices with parts of the same sequences count positions in the order
    in which the parts lie on them, and drop by keys of their own."""
    length = part["inputs"].shape[1]
    shard = jax.lax.axis_index(length_axes) if length_axes else None
    if "positions" in part:
        positions_BT = part["positions"]
    else:
        positions_BT = (jnp.arange(length) if shard is None else order.of_shard(length, shard))[None]
    if shard is not None and dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, shard)
    keys_B = None if dropout_key is None else jax.vmap(partial(jax.random.fold_in, dropout_key))(part["row"])
    return Shared(positions_BT, part.get("segment_ids"), keys_B)


def _parts_of_batch(tree: Any, num_parts: int) -> BatchSplit:
    """Returns a tree for each part of the sequences; a value that all sequences share is in each."""
    leaves, structure = jax.tree.flatten(tree)
    is_whole = [num_parts == 1 or x.shape[0] == 1 for x in leaves]
    cut = [[x] * num_parts if one else jnp.split(x, num_parts) for x, one in zip(leaves, is_whole, strict=True)]
    return tuple(structure.unflatten(part) for part in zip(*cut, strict=True))


ContextMaker = Callable[[str, Shared, Array | int], Context]


def _context_maker(model: Model, plans: Sequence[OpPlan], sharding: ShardingPlan) -> ContextMaker:
    """Returns a function of a piece, `Shared` and the number of the piece (0 for the embedding, from 1 on for the
    layers) that makes the piece's context."""
    activation, pieces = _activation_layout(sharding), ("embed", *(stack.name for stack in model.stacks), "head")
    operations = {piece: lower_operations(plans, piece) for piece in pieces}

    def make(piece: str, shared: Shared, index: Array | int) -> Context:
        keys_B = shared.dropout_keys_B
        if keys_B is not None:
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys_B)
        return Context(
            shared.positions_BT, activation, operations[piece], shared.segment_ids_BT, keys_B, shared.is_token_BT
        )

    return make


def _activation_layout(sharding: ShardingPlan) -> Callable[..., Array]:
    """Returns a function that applies the activation rules over the partitioner's axes, as constraints; manual axes
    split activations already. It marks each activation with its name, for remat."""
    axes = sharding.roles.partitioner
    specs = {planned.array.path: keep_axes(planned.spec, axes) for planned in sharding.activations}

    def activation(name: str, x: Array, *_: str | None, gradient: LogicalAxes | None = None) -> Array:
        if not axes:
            return marked(name, x)
        forward, backward = specs[name], specs[gradient_name(name) if gradient else name]
        with jax.named_scope(layout_scope(name)):
            x = _laid_out(x, forward, backward)
        return marked(name, x)

    return activation


def _laid_out(x: Array, spec: PartitionSpec, of_gradient: PartitionSpec) -> Array:
    """Returns `x` in one layout, with its gradient in another: P(None, None, None) and P(None, 'tensor', None) gather a
    length before a matmul, and reduce-scatter it after the matmuls of the gradient."""
    constrain = jax.lax.with_sharding_constraint

    def crossed(x: Array, here: PartitionSpec, there: PartitionSpec) -> Array:
        # A gathered array is a shard until here; otherwise every device would compute all of it.
        is_gathered = not set(axes_in(here)) <= set(axes_in(there))
        return constrain(constrain(x, here) if is_gathered else x, there)

    @jax.custom_vjp
    def use(x: Array) -> Array:
        return crossed(x, of_gradient, spec)

    use.defvjp(lambda x: (crossed(x, of_gradient, spec), None), lambda _, g: (crossed(g, spec, of_gradient),))
    return use(x)
