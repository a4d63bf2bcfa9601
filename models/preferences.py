"""Losses of pairs of sequences, of which people prefer one.

Shapes: B sequences, P pairs: sequence 2i of a batch is the chosen one of pair i, 2i + 1 the rejected one.
"""

import jax
import jax.numpy as jnp
from jax import Array


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
