"""Cross-entropy from the output of the last layer, never holding more float32 logits than the declaration allows.

The head is run on a part of the tokens at a time, forward and again backward: logits are not kept. Its weights'
gradient is added up in float32 over the parts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Aux
from meshloom.models.config import divisors
from meshloom.models.loss import Head, VocabChunks, sum_losses

from ..core.errors import Problem, raise_if_any, use_one_of
from ..core.format import human_bytes
from ..sharding.arrays import OpSite
from .operation import Lowered, OpInputs, OpPlan, ParallelOp, Refusal, Strategy

FLOAT32_BYTES = 4
AT_ONCE, SEQUENCE_CHUNKS = "at_once", "sequence_chunks"


class LossOp(ParallelOp):
    """Chunked cross-entropy: where the logits of all tokens are too large, head and loss run on some tokens at a
    time."""

    kind = "loss"
    title = "loss"
    names = (AT_ONCE, SEQUENCE_CHUNKS)
    fallback = SEQUENCE_CHUNKS
    is_declared = False

    def sites(self, inputs: OpInputs) -> Sequence[OpSite]:
        return (OpSite(self.kind, "cross_entropy", "head"),)

    def small_keys(self, plans: Sequence[OpPlan]) -> Mapping[str, tuple[Any, str]]:
        num_chunks = 2 if any(plan.chosen.num_trips > 1 for plan in plans) else 1
        return {"loss.num_chunks": (num_chunks, "several chunks of tokens if there were several")}

    def strategies(self, site: OpSite, inputs: OpInputs) -> Sequence[Strategy]:
        spec, mesh = inputs.spec, inputs.mesh
        most = max(spec.loss.max_logits_bytes, spec.loss.max_logits_share * (inputs.target.hbm_bytes_per_device or 0))
        shards = {d.logical: mesh.num_shards(d.axes) for plan in inputs.sharding.activations for d in plan.dimensions}
        per_token = inputs.batch.sequences_of_device * spec.model.vocab_size * FLOAT32_BYTES // shards.get("vocab", 1)
        # Logits that come in shards of their length are not regrouped.
        length = inputs.batch.length_of_device
        most_chunks = length // shards.get("sequence_parallel_length", 1)
        logits = f"float32 logits of {human_bytes(length * per_token)}"
        if spec.loss.num_chunks is not None:
            num_chunks, limit = spec.loss.num_chunks, f"loss.num_chunks={spec.loss.num_chunks}"
            if most_chunks % num_chunks:
                what = f"does not divide the {most_chunks} tokens of a sequence that a device has"
                raise_if_any([Problem("loss.num_chunks", what, use_one_of(num_chunks, _near(most_chunks, num_chunks)))])
        else:
            fitting = (n for n in divisors(most_chunks) if length // n * per_token <= most)
            num_chunks = next(fitting, most_chunks)
            limit = f"loss.max_logits_bytes and max_logits_share allow {human_bytes(int(most))}"
        what, reason = f"in {num_chunks} chunks of tokens", f"{logits}, {limit}"
        chunked = Strategy(SEQUENCE_CHUNKS, what, num_chunks, reason=reason, num_trips=num_chunks)
        refusal = Refusal(f"{logits} are held at once, and {limit}") if num_chunks > 1 else None
        return Strategy(AT_ONCE, "of all tokens at once", 1, reason=logits, refusal=refusal), chunked

    def lower(self, plan: OpPlan) -> Lowered | None:
        run: Any = partial(sum_losses_in_blocks, num_blocks=plan.chosen.parameters)
        return run if plan.chosen.parameters > 1 else None

    def scope(self, plan: OpPlan) -> str | None:
        """Returns None: its operations have the names of the head."""
        return None


def _near(number: int, wanted: int) -> list[str]:
    """Returns the divisors of a number around another number, two on each side."""
    below, above = ([n for n in divisors(number) if (n < wanted) == is_below] for is_below in (True, False))
    return [str(n) for n in (*below[-2:], *above[:2])]


def sum_losses_in_blocks(
    head: Head, parts: VocabChunks, x_BTE: Array, targets_BT: Array, *, num_blocks: int, **options: Any
) -> tuple[Array, Aux]:
    """Returns what `models.loss.sum_losses` does, of as many parts of the tokens one after the other. The backward
    pass computes logits again."""
    of_block = partial(sum_losses, head, **options)

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
    return total(parts, _blocks(x_BTE, num_blocks), _blocks(targets_BT, num_blocks))


def _blocks(x_BT: Array, num_blocks: int) -> Array:
    """Returns (blocks, batch, length / blocks, ...) of (batch, length, ...). A block takes every num_blocks-th token,
    so that a sharded length stays sharded."""
    split = x_BT.reshape(x_BT.shape[0], -1, num_blocks, *x_BT.shape[2:])
    return jnp.moveaxis(split, 2, 0)
