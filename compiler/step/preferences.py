"""The objective of pairs of sequences: from the log-probabilities of a device's sequences to its part of the mean.

A pair is two neighbouring rows of the batch, and lies on one device in one microbatch (sharding/batch.py). Where
devices split the length of sequences, each has a part of every sum, and its share of every loss.

Shapes: B sequences of a microbatch on a device, P pairs, T tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux
from meshloom.models.loss import has_loss
from meshloom.models.preferences import dpo_losses, simpo_losses

from ..core.partition_spec import Axes
from ..sharding.arrays import PAIR_METRICS
from ..spec.objective_spec import Dpo, Simpo
from ..spec.step_spec import StepSpec
from ..target.mesh import MeshPlan
from .schedule import HeadOutput

# (log-probabilities (B,), targets (B, T), the same of the reference (B,) or None, outputs of the head)
PairObjective = Callable[[Array, Array, Array | None, Aux], HeadOutput]


def compare_pairs(spec: StepSpec, mesh: MeshPlan, axes: Axes) -> PairObjective:
    """Returns the declared objective, as a function of a device's sequences. axes: the mesh axes that split the length.

    Its loss is the sum over pairs, and its metrics are means over pairs: the share of pairs whose chosen sequence is
    above the rejected one, the margin between them, and the log-probabilities of both.
    """
    declared, num_shards, num_pairs = spec.objective, mesh.num_shards(axes), spec.global_batch_size // 2

    def whole(x: Array) -> Array:
        return jax.lax.psum(x, axes) if axes else x

    def compare(log_probs_B: Array, targets_BT: Array, reference_B: Array | None, aux: Aux) -> HeadOutput:
        log_probs_B, num_targets_B = whole(log_probs_B), whole(jnp.sum(has_loss(targets_BT), axis=-1))
        match declared:
            case Dpo():
                assert reference_B is not None
                losses_P, margins_P = dpo_losses(
                    log_probs_B, reference_B, beta=declared.beta, label_smoothing=declared.label_smoothing
                )
            case Simpo():
                losses_P, margins_P = simpo_losses(
                    log_probs_B, num_targets_B, beta=declared.beta, margin=declared.margin
                )
            case _:
                raise ValueError(f"objective={declared.kind} compares no pairs")
        loss = jnp.sum(losses_P) / num_shards
        count = num_pairs * num_shards
        values = zip(PAIR_METRICS, (margins_P > 0, margins_P, log_probs_B[0::2], log_probs_B[1::2]), strict=True)
        means = {name: jax.lax.stop_gradient(jnp.sum(x) / count).astype(jnp.float32) for name, x in values}
        return HeadOutput(loss / num_pairs, loss, Aux(aux.losses, {**aux.statistics, **means}, aux.totals))

    return compare
