"""The forward pass over local batches: embedding, stacks of layers, head and loss, each with its weights gathered."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import register_dataclass

from meshloom.models import Context, LogicalAxes, Params

from ..core.partition_spec import axes_in, keep_axes
from ..core.scopes import piece_scope
from ..parallel.lm_head import vocab_dimensions
from ..parallel.loss import sum_losses
from ..parallel.operation import lower_operations
from ..parallel.remat import build_policy, marked
from ..parallel.weights import Weights, hoist
from ..plan import Plan
from ..sharding.arrays import LAYER_INPUT, gradient_of
from .layers import run_layers

Batch = dict[str, Array]  # int32 (sequences, sequence_length), by the names of batch_arrays
Parts = tuple[Any, ...]  # of the batch, a tree each


def forward(plan: Plan, weights: Weights, part: Batch, dropout_key: Array | None) -> Array:
    """The forward pass of one microbatch of this device: (objective, cross-entropy), summed over its targets.

    weights: of the model. dropout_key: None for no dropout.
    """
    model = plan.model
    make_context, shared = _context_maker(plan), _shared(part, dropout_key)
    with jax.named_scope(piece_scope("embed")):
        embed = weights.piece("embed").gathered()
        x_BTE = model.embed.apply(embed, part["inputs"], make_context(shared, 0))
    loop = plan.spec.overlap.layers
    run = partial(run_layers, loop=loop, skip_idle=plan.target.compiler.synchronous_collectives)
    shared_parts, x_parts = (_parts_of_batch(tree, loop.batch_parts) for tree in (shared, x_BTE))
    num_before = 1
    for stack in model.stacks:

        def layer(params: Params, shared: Parts, index: Array, x: Parts, stack=stack, num_before=num_before) -> Parts:
            contexts = (make_context(part, num_before + index) for part in shared)
            named = (marked(LAYER_INPUT, part) for part in x)
            return tuple(stack.layer.apply(params, *part) for part in zip(named, contexts, strict=True))

        policy = build_policy(plan.spec.remat, stack.name)
        with jax.named_scope(piece_scope(stack.name)):
            x_parts = run(layer, hoist(weights.piece(stack.name)), shared_parts, x_parts, policy=policy)
        num_before += stack.num_layers
    x_BTE = jnp.concatenate(x_parts)
    with jax.named_scope(piece_scope("head")):
        context = make_context(replace(shared, dropout_keys_B=None), 0)
        parts = _head_parts(plan, weights.piece("head"), x_BTE)
        return sum_losses(
            lambda params, x_BTE: model.head.apply(params, x_BTE, context),
            tuple(model.head_params(part, embed) for part in parts),
            x_BTE,
            part["targets"],
            z_loss_weight=plan.spec.loss.z_loss_weight,
            num_blocks=plan.operation("loss").chosen.parameters,
        )


def _head_parts(plan: Plan, weights: Weights, x_BTE: Array) -> list[Params]:
    """The head's own weights, gathered: a tree for each part of the vocabulary."""
    sizes: tuple[int, ...] = plan.operation("lm_head").chosen.parameters
    if len(sizes) == 1:
        return [weights.gathered()]
    return weights.gathered_in_parts(vocab_dimensions(plan.model), sizes, after=x_BTE)


@register_dataclass
@dataclass(frozen=True)
class Shared:
    """What all layers read beside their weights. dropout_keys_B: a key for each sequence; None for no dropout."""

    positions_BT: Array
    segment_ids_BT: Array | None
    dropout_keys_B: Array | None


def _shared(part: Batch, dropout_key: Array | None) -> Shared:
    positions_BT = part["positions"] if "positions" in part else jnp.arange(part["inputs"].shape[1])[None]
    keys_B = None if dropout_key is None else jax.vmap(partial(jax.random.fold_in, dropout_key))(part["row"])
    return Shared(positions_BT, part.get("segment_ids"), keys_B)


def _parts_of_batch(tree: Any, num_parts: int) -> Parts:
    """A tree for each part of the sequences; what is one for all sequences is in each."""
    leaves, structure = jax.tree.flatten(tree)
    is_whole = [num_parts == 1 or x.shape[0] == 1 for x in leaves]
    cut = [[x] * num_parts if one else jnp.split(x, num_parts) for x, one in zip(leaves, is_whole, strict=True)]
    return tuple(structure.unflatten(part) for part in zip(*cut, strict=True))


def _context_maker(plan: Plan) -> Callable[[Shared, Array | int], Context]:
    """(shared, number of the piece: 0 for the embedding, from 1 on for the layers) -> Context."""
    activation, operation = _activation_layout(plan), lower_operations(plan.operations)

    def make(shared: Shared, index: Array | int) -> Context:
        keys_B = shared.dropout_keys_B
        if keys_B is not None:
            keys_B = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys_B)
        return Context(shared.positions_BT, activation, operation, shared.segment_ids_BT, keys_B)

    return make


def _activation_layout(plan: Plan) -> Callable[..., Array]:
    """Activation rules over the automatic mesh axes, as constraints; the batch axes are split already. Each activation
    is marked with its name, for remat."""
    automatic = plan.auto_axes
    specs = {planned.array.path: keep_axes(planned.spec, automatic) for planned in plan.sharding.activations}

    def activation(name: str, x: Array, *_: str | None, gradient: LogicalAxes | None = None) -> Array:
        if not automatic:
            return marked(name, x)
        forward, backward = specs[name], specs[gradient_of(name) if gradient else name]
        return marked(name, _laid_out(x, forward, backward))

    return activation


def _laid_out(x: Array, spec: PartitionSpec, of_gradient: PartitionSpec) -> Array:
    """`x` in one layout, its gradient in another: P(None, None, None) and P(None, 'tensor', None) gather a length in
    front of a matmul, and reduce-scatter it behind the matmuls of the gradient."""
    constrain = jax.lax.with_sharding_constraint

    def crossed(x: Array, here: PartitionSpec, there: PartitionSpec) -> Array:
        # What is gathered is a shard until then: else what made it would be computed whole on every device.
        is_gathered = not set(axes_in(here)) <= set(axes_in(there))
        return constrain(constrain(x, here) if is_gathered else x, there)

    @jax.custom_vjp
    def use(x: Array) -> Array:
        return crossed(x, of_gradient, spec)

    use.defvjp(lambda x: (crossed(x, of_gradient, spec), None), lambda _, g: (crossed(g, spec, of_gradient),))
    return use(x)
