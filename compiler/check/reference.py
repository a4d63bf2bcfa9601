"""Defines the step that a check compares with: on one device, in float32, without any of our step.

Layers run one after the other, microbatches one after the other; nothing is sharded, computed again, gathered or
exchanged. Only the pieces of the model and the optimizer are the declaration's own. A parameter that embedding and
head share is two here, whose gradients are added.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from meshloom.models import PADDING_TARGET, Aux, Context, Model, Params, split_aux

from ..core.trees import combined, leaves_by_path, nested_dict, pick
from ..sharding.batch import REFERENCE
from ..spec.objective_spec import Dpo, Simpo
from ..spec.step_spec import StepSpec

PlainBatch = Mapping[str, Array]


def plain_context(
    inputs: Array, positions: Array | None = None, segment_ids: Array | None = None, is_token: Array | None = None
) -> Context:
    """Returns the context of a piece where nothing is planned: each operation runs as the model wrote it."""
    positions = jnp.arange(inputs.shape[1])[None] if positions is None else positions
    return Context(
        positions,
        lambda name, x, *axes, **_: x,
        segment_ids_BT=segment_ids,
        is_token_BT=is_token,
    )


def forward(
    model: Model, params: Params, head: Params, inputs: Array, context: Context
) -> tuple[Array, dict[str, Any], Aux]:
    """Returns logits in float32, the auxiliary outputs of each stack, a list of one for each layer, and the head's.
    head: all parameters of the head, also those that are the embedding's."""
    x, auxiliary = model.embed.apply(params["embed"], inputs, context), dict[str, Any]()
    for stack in model.stacks:
        found = list[Aux]()
        for i in range(stack.num_layers):
            x, aux = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
            found.append(aux)
        auxiliary[stack.name] = found
    logits, of_head = split_aux(model.head.apply(head, x, context))
    return logits.astype(jnp.float32), auxiliary, of_head


def token_losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Returns -log softmax(logits)[target] and log(z) of each token, both 0 where there is no target."""
    has_target = targets >= 0
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(has_target, log_z - chosen, 0.0), jnp.where(has_target, log_z, 0.0)


@dataclass(frozen=True)
class StepOutput:
    """The figures of a step. gradients: of the trained parameters. loss: the mean. counts: of tokens. means: of
    auxiliary outputs, by STACK/NAME. totals: of those, by stack and name, for the rules of the model."""

    loss: Any
    gradients: Any
    counts: Mapping[str, Any]
    means: Mapping[str, Any]
    totals: Mapping[str, Mapping[str, Any]]


def build_reference(
    spec: StepSpec, model: Model, trained: frozenset[str]
) -> Callable[[Params, PlainBatch], StepOutput]:
    """Returns a function of parameters and a global batch, with its rows and tokens in their own order."""

    def objective(weights: Params, copies: Params, others: Params, batch: PlainBatch) -> tuple[Array, Any]:
        params = combined(others, weights)
        head = params.get("head", {}) | copies
        targets = batch["targets"]
        num_targets = jnp.sum(targets >= 0)
        is_padding = targets == PADDING_TARGET
        num_tokens = jnp.asarray(targets.size - (jnp.sum(is_padding) if spec.data.may_pad else 0), jnp.float32)
        num_pairs = spec.global_batch_size // 2

        def of_microbatch(_: None, part: PlainBatch) -> tuple[None, Any]:
            is_token = part["targets"] != PADDING_TARGET if spec.data.may_pad else None
            context = plain_context(part["inputs"], part.get("positions"), part.get("segment_ids"), is_token)
            logits, auxiliary, of_head = forward(model, params, head, part["inputs"], context)
            losses, log_z = token_losses(logits, part["targets"])
            if spec.has_pairs:
                loss = _pair_losses(spec, -jnp.sum(losses, axis=1), part)
                total = loss / num_pairs
            else:
                loss = jnp.sum(losses)
                total = (loss + spec.loss.z_loss_weight * jnp.sum(log_z**2)) / jnp.maximum(num_targets, 1)
            each = [*(aux for found in auxiliary.values() for aux in found), of_head]
            total += (
                sum((x.astype(jnp.float32) for aux in each for x in aux.losses.values()), jnp.zeros(())) / num_tokens
            )
            stacked = {name: jax.tree.map(lambda *x: jnp.stack(x), *found) for name, found in auxiliary.items()}
            return None, (total, loss, stacked, of_head)

        size = spec.num_microbatches
        parts = {name: x.reshape(size, x.shape[0] // size, *x.shape[1:]) for name, x in batch.items()}
        _, found = jax.lax.scan(of_microbatch, None, parts)
        total, loss, stacked, of_head = jax.tree.map(lambda x: jnp.sum(x, axis=0), found)
        counted = num_pairs if spec.has_pairs else num_targets
        counts = {"num_targets": num_targets, "num_padding": jnp.sum(is_padding)}
        auxiliary = {**stacked, "head": of_head}
        return total, (loss / jnp.maximum(counted, 1), counts, _means(auxiliary, num_tokens), auxiliary)

    def step(params: Params, batch: PlainBatch) -> StepOutput:
        weights, others = pick(params, trained), pick(params, frozenset(leaves_by_path(params)) - trained)
        copies = {name: params["embed"][original] for name, original in model.tied.items()}
        found, (loss, counts, means, auxiliary) = jax.grad(objective, (0, 1), has_aux=True)(
            weights, copies, others, batch
        )
        gradients, of_copies = leaves_by_path(found[0]), found[1]
        for name, original in model.tied.items():  # what both uses of a shared parameter want of it
            if (path := f"embed/{original}") in gradients:
                gradients[path] += of_copies[name]
        gradients = nested_dict(gradients)
        totals = {name: dict(aux.totals) for name, aux in auxiliary.items()}
        return StepOutput(loss, gradients, counts, means, totals)

    return step


def _pair_losses(spec: StepSpec, log_probs: Array, part: PlainBatch) -> Array:
    """Returns the sum of the losses of pairs of neighbours, the chosen one first (arXiv:2305.18290, 2405.14734)."""
    match spec.objective:
        case Dpo(beta=beta, label_smoothing=smoothing):
            above = log_probs - part[REFERENCE]
            margin = beta * (above[0::2] - above[1::2])
            losses = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
        case Simpo(beta=beta, margin=least):
            mean = log_probs / jnp.maximum(jnp.sum(part["targets"] >= 0, axis=1), 1)
            losses = -jax.nn.log_sigmoid(beta * (mean[0::2] - mean[1::2]) - least)
        case _:
            raise ValueError(f"objective={spec.objective.kind} compares no pairs")
    return jnp.sum(losses)


def _means(auxiliary: Mapping[str, Aux], num_tokens: Array) -> dict[str, Array]:
    """Returns the means of losses and statistics: of each layer for a stack, one number for the head."""
    return {
        f"{piece}/{name}": jnp.mean(x.astype(jnp.float32) / num_tokens, axis=tuple(range(piece != "head", x.ndim)))
        for piece, aux in auxiliary.items()
        for name, x in {**aux.losses, **aux.statistics}.items()
    }


def build_plain_update(
    model: Model, optimizer: optax.GradientTransformation, trained: frozenset[str]
) -> Callable[[Params, Any, StepOutput], tuple[Params, Any]]:
    """Returns a function of parameters, the optimizer's state and a step's output: the next two. optimizer: as it is
    planned for one device."""

    def update(params: Params, state: Any, found: StepOutput) -> tuple[Params, Any]:
        weights = pick(params, trained)
        updates, state = optimizer.update(found.gradients, state, weights)
        params = combined(params, optax.apply_updates(weights, updates))
        by_path, ruled = leaves_by_path(params), dict[str, Array]()
        for path, rule in model.rules.items():
            total = found.totals[path.split("/")[0]][rule.total]
            ruled[path] = jnp.stack([rule.update(x, one) for x, one in zip(by_path[path], total, strict=True)])
        return combined(params, nested_dict(ruled)), state

    return update


jax.tree_util.register_dataclass(StepOutput)
