"""Cross-entropy from the output of the last layer, never holding more float32 logits than the declaration allows.

The head is run on a part of the tokens at a time, forward and again backward: logits are not kept. Its weights'
gradient is added up in float32 over the parts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux, Params, split_aux
from meshloom.models.numbers import divisors

from ..core.format import human_bytes
from ..sharding.arrays import OpSite
from .operation import OpInputs, OpPlan, ParallelOp, Refusal, Strategy

# (parameters, x_BTE, targets_BT) -> logits_BTV or (logits_BTV, Aux), pointwise in length
Head = Callable[[Params, Array, Array], Any]
VocabChunks = Sequence[Params]  # the head's parameters, a tree for each part of the vocabulary
FLOAT32_BYTES = 4
AT_ONCE, SEQUENCE_CHUNKS = "at_once", "sequence_chunks"


class LossOp(ParallelOp):
    """Chunked cross-entropy: where the logits of all tokens are too large, head and loss run on some at a time."""

    kind = "loss"
    title = "loss"
    names = (AT_ONCE, SEQUENCE_CHUNKS)
    fallback = SEQUENCE_CHUNKS
    is_declared = False

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        del inputs
        return (OpSite(self.kind, "cross_entropy", "head"),)

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        del site
        spec, mesh = inputs.spec, inputs.mesh
        most = max(spec.loss.max_logits_bytes, spec.loss.max_logits_share * (inputs.target.hbm_bytes_per_device or 0))
        shards = {d.logical: mesh.num_shards(d.axes) for plan in inputs.sharding.activations for d in plan.dimensions}
        per_token = inputs.sequences_of_device * spec.model.vocab_size * FLOAT32_BYTES // shards.get("vocab", 1)
        # What comes in shards of its length is not regrouped.
        length = inputs.length_of_device
        most_chunks = length // shards.get("sequence_parallel_length", 1)
        fitting = (n for n in divisors(most_chunks) if length // n * per_token <= most)
        num_chunks = next(fitting, most_chunks)
        logits = f"float32 logits of {human_bytes(length * per_token)}"
        limit = f"loss.max_logits_bytes and max_logits_share allow {human_bytes(int(most))}"
        chunked = Strategy(
            SEQUENCE_CHUNKS, f"in {num_chunks} chunks of tokens", num_chunks, reason=f"{logits}, {limit}"
        )
        refusal = Refusal(f"{logits} are held at once, and {limit}") if num_chunks > 1 else None
        return Strategy(AT_ONCE, "of all tokens at once", 1, reason=logits, refusal=refusal), chunked


def num_loss_chunks(operations: Iterable[OpPlan]) -> int:
    """Returns the number of chunks of tokens in which the loss is computed."""
    (chosen,) = (each.chosen for each in operations if isinstance(each.op, LossOp))
    return chosen.parameters


def sum_losses(
    head: Head, parts: VocabChunks, x_BTE: Array, targets_BT: Array, *, z_loss_weight: float, num_blocks: int
) -> tuple[Array, Aux]:
    """Returns (objective, cross-entropy), each summed over all targets that are not ignored, float32 (2,); and the
    head's auxiliary outputs, which a head in parts of the vocabulary does not have (lm_head.py)."""

    def of_block(parts: VocabChunks, x_BTE: Array, targets_BT: Array) -> tuple[Array, Aux]:
        logits, aux = zip(*(split_aux(head(params, x_BTE, targets_BT)) for params in parts), strict=True)
        return cross_entropy_sums(logits, targets_BT, z_loss_weight=z_loss_weight), aux[0]

    if num_blocks == 1:
        return of_block(parts, x_BTE, targets_BT)
    return _blocked(of_block)(parts, _blocks(x_BTE, num_blocks), _blocks(targets_BT, num_blocks))


def has_loss(targets_BT: Array) -> Array:
    """Returns True for targets that count: neither IGNORED_TARGET nor PADDING_TARGET."""
    return targets_BT >= 0


def cross_entropy_sums(parts_BTV: Sequence[Array], targets_BT: Array, *, z_loss_weight: float) -> Array:
    """(objective, cross-entropy), each a sum over tokens: -log softmax(logits)[target] in float32, and for the
    objective z_loss_weight log(z)^2 more (PaLM, arXiv:2204.02311, section 5). Splits over a sharded vocabulary.

    parts_BTV: logits, in parts along the vocabulary.
    """
    target_logit_BT, log_z_BT = _of_part(parts_BTV[0], targets_BT)
    first = parts_BTV[0].shape[-1]
    for part_BTV in parts_BTV[1:]:
        of_part, log_z_of_part = _of_part(part_BTV, targets_BT - first)
        target_logit_BT, log_z_BT = target_logit_BT + of_part, jnp.logaddexp(log_z_BT, log_z_of_part)
        first += part_BTV.shape[-1]
    is_counted_BT = has_loss(targets_BT)
    cross_entropy = jnp.sum(jnp.where(is_counted_BT, log_z_BT - target_logit_BT, 0.0))
    if z_loss_weight == 0:  # 0 x infinity would be no number
        return jnp.stack([cross_entropy, cross_entropy])
    z_loss = z_loss_weight * jnp.sum(jnp.where(is_counted_BT, jnp.square(log_z_BT), 0.0))
    return jnp.stack([cross_entropy + z_loss, cross_entropy])


def _of_part(logits_BTV: Array, targets_BT: Array) -> tuple[Array, Array]:
    """(the target's logit, 0 where it is in another part; log of the sum of exponentials), float32."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1), jax.nn.logsumexp(logits_BTV, axis=-1)


def _blocked(of_block: Callable[[VocabChunks, Array, Array], Any]) -> Callable[[VocabChunks, Array, Array], Any]:
    """The sum of `of_block` over the first dimension of x and targets, logits made again in the backward pass."""

    @jax.custom_vjp
    def total(parts: VocabChunks, x: Array, targets: Array) -> Any:
        def add(sums: Any, block: tuple[Array, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, of_block(parts, *block)), None

        shapes = jax.eval_shape(of_block, parts, x[0], targets[0])
        return jax.lax.scan(add, jax.tree.map(lambda sums: jnp.zeros(sums.shape), shapes), (x, targets))[0]

    def forward(parts: VocabChunks, x: Array, targets: Array) -> tuple[Any, Any]:
        return total(parts, x, targets), (parts, x, targets)

    def backward(kept: Any, cotangent: Any) -> tuple[VocabChunks, Array, None]:
        parts, x, targets = kept

        def add(gradient: VocabChunks, block: tuple[Array, Array]) -> tuple[VocabChunks, Array]:
            _, vjp = jax.vjp(lambda parts, x: of_block(parts, x, block[1]), parts, block[0])
            of_parts, of_x = vjp(cotangent)
            return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradient, of_parts), of_x

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), parts)
        gradient, of_x = jax.lax.scan(add, zeros, (x, targets))
        return jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, parts), of_x, None

    total.defvjp(forward, backward)
    return total


def _blocks(x_BT: Array, num_blocks: int) -> Array:
    """(batch, length, ...) -> (blocks, batch, length / blocks, ...). A block takes every num_blocks-th token, so that
    a sharded length stays sharded."""
    split = x_BT.reshape(x_BT.shape[0], -1, num_blocks, *x_BT.shape[2:])
    return jnp.moveaxis(split, 2, 0)
