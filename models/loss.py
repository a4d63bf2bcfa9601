"""Cross-entropy of logits, on one device and all at once, and losses of pairs of sequences, of which people prefer one.

Shapes: B batch, T length, V vocab, or a part of it, P pairs: sequence 2i of a batch is the chosen one of pair i, 2i + 1
the rejected one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .contract import Aux, Params, split_aux

# (parameters, x_BTE, targets_BT) -> logits_BTV or (logits_BTV, Aux), pointwise in length
Head = Callable[[Params, Array, Array], Any]
VocabChunks = Sequence[Params]  # the head's parameters, a tree for each part of the vocabulary


@dataclass(frozen=True)
class VocabShard:
    """A device's part of a vocabulary that several devices share, for the same tokens.

    place: targets -> the place of each among this device's own logits; one that no logit has where another device has
    the target. total, log_sum_exp, largest: combine what each of the devices has. Each device gets the gradient of its
    own part, as all of them make the same loss.
    """

    place: Callable[[Array], Array]
    total: Callable[[Array], Array]
    log_sum_exp: Callable[[Array], Array]
    largest: Callable[[Array], Array]


def sum_losses(
    head: Head,
    parts: VocabChunks,
    x_BTE: Array,
    targets_BT: Array,
    *,
    z_loss_weight: float,
    by_sequence: bool = False,
    counts_misses: bool = False,
    shard: VocabShard | None = None,
) -> tuple[Array, Aux]:
    """Returns (objective, cross-entropy), each summed over all targets that are not ignored, float32 (2,), or with
    `by_sequence` over those of each sequence, (2, B); and the head's auxiliary outputs, which a head in parts of the
    vocabulary does not have. counts_misses: a third sum, of targets that another token is likelier than. shard: the
    part of the vocabulary that the parameters have; None: all of it."""
    logits, aux = zip(*(split_aux(head(params, x_BTE, targets_BT)) for params in parts), strict=True)
    sums = cross_entropy_sums(logits, targets_BT, z_loss_weight=z_loss_weight, by_sequence=by_sequence, shard=shard)
    if counts_misses:
        misses = _num_misses(logits, targets_BT, shard, axis=-1 if by_sequence else None)
        sums = jnp.concatenate([sums, misses[None]])
    return sums, aux[0]


def has_loss(targets_BT: Array) -> Array:
    """Returns True for targets that count: neither IGNORED_TARGET nor PADDING_TARGET."""
    return targets_BT >= 0


def cross_entropy_sums(
    parts_BTV: Sequence[Array],
    targets_BT: Array,
    *,
    z_loss_weight: float,
    by_sequence: bool = False,
    shard: VocabShard | None = None,
) -> Array:
    """Returns (objective, cross-entropy), each a sum over tokens: -log softmax(logits)[target] in float32, and for the
    objective z_loss_weight log(z)^2 more (PaLM, arXiv:2204.02311, section 5). It splits over a sharded vocabulary.

    parts_BTV: logits, in parts along the vocabulary. by_sequence: sums over the tokens of each sequence. shard: the
    part of the vocabulary that they are of; None: all of it.
    """
    places_BT = shard.place(targets_BT) if shard else targets_BT
    target_logit_BT, log_z_BT = _of_part(parts_BTV[0], places_BT)
    first = parts_BTV[0].shape[-1]
    for part_BTV in parts_BTV[1:]:
        of_part, log_z_of_part = _of_part(part_BTV, places_BT - first)
        target_logit_BT, log_z_BT = target_logit_BT + of_part, jnp.logaddexp(log_z_BT, log_z_of_part)
        first += part_BTV.shape[-1]
    if shard:
        target_logit_BT, log_z_BT = shard.total(target_logit_BT), shard.log_sum_exp(log_z_BT)
    is_counted_BT = has_loss(targets_BT)
    axis = -1 if by_sequence else None
    cross_entropy = jnp.sum(jnp.where(is_counted_BT, log_z_BT - target_logit_BT, 0.0), axis=axis)
    if z_loss_weight == 0:  # 0 x infinity would be NaN
        return jnp.stack([cross_entropy, cross_entropy])
    z_loss = z_loss_weight * jnp.sum(jnp.where(is_counted_BT, jnp.square(log_z_BT), 0.0), axis=axis)
    return jnp.stack([cross_entropy + z_loss, cross_entropy])


def _num_misses(parts_BTV: Sequence[Array], targets_BT: Array, shard: VocabShard | None, axis: int | None) -> Array:
    """Returns the number of targets whose logit is not the largest of their token, as float32."""
    places_BT = shard.place(targets_BT) if shard else targets_BT
    largest_BT = jnp.max(jnp.stack([jnp.max(part_BTV, axis=-1) for part_BTV in parts_BTV]), axis=0)
    starts = itertools.accumulate((part_BTV.shape[-1] for part_BTV in parts_BTV), initial=0)
    each = zip(parts_BTV, starts, strict=False)
    target_logit_BT = jnp.sum(jnp.stack([_of_part(part_BTV, places_BT - start)[0] for part_BTV, start in each]), axis=0)
    if shard:
        target_logit_BT, largest_BT = shard.total(target_logit_BT), shard.largest(largest_BT)
    is_miss_BT = has_loss(targets_BT) & (target_logit_BT < largest_BT.astype(jnp.float32))
    return jnp.sum(is_miss_BT, axis=axis).astype(jnp.float32)


def _of_part(logits_BTV: Array, targets_BT: Array) -> tuple[Array, Array]:
    """Returns the target's logit, 0 where it is in another part, and the logarithm of the sum of exponentials, both in
    float32."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    return jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1), jax.nn.logsumexp(logits_BTV, axis=-1)


def dpo_losses(log_probs_B: Array, reference_B: Array, *, beta: float, label_smoothing: float) -> tuple[Array, Array]:
    """Returns the loss of each pair, and its margin beta ((chosen - its reference) - (rejected - its reference)).

    log_probs_B, reference_B: sums of log-probabilities over a sequence's targets, by the model that is trained and by
    the reference (Rafailov et al. 2023, arXiv:2305.18290, equation 7). label_smoothing: the share of pairs that are
    taken to be labelled the wrong way round (Mitchell 2023, "A note on DPO with noisy preferences", equation 3).
    """
    margins_P = beta * _differences(log_probs_B - reference_B)
    right, wrong = -jax.nn.log_sigmoid(margins_P), -jax.nn.log_sigmoid(-margins_P)
    return (1 - label_smoothing) * right + label_smoothing * wrong, margins_P


def simpo_losses(log_probs_B: Array, num_targets_B: Array, *, beta: float, margin: float) -> tuple[Array, Array]:
    """Returns the loss of each pair, and its margin beta (mean of chosen - mean of rejected), by mean log-probabilities
    of targets (Meng et al. 2024, arXiv:2405.14734, equation 6). margin: what a margin is to exceed."""
    margins_P = beta * _differences(log_probs_B / jnp.maximum(num_targets_B, 1))
    return -jax.nn.log_sigmoid(margins_P - margin), margins_P


def _differences(x_B: Array) -> Array:
    return x_B[0::2] - x_B[1::2]
