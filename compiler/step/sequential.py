"""The sequential schedule: microbatches one after the other, each through all layers forward and then backward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Params

from ..core.scopes import piece_scope
from ..parallel.weights import Weights, hoist
from .schedule import Batch, ModelFunctions, ModelWeights, StackFunctions, split_microbatches


class StackLoop(Protocol):
    """Runs all layers of a stack, one after the other: (stack, its weights, what layers share, x) -> x."""

    def __call__(self, stack: StackFunctions, weights: Weights, shared: Any, x: Any, /) -> Any: ...


@dataclass(frozen=True)
class SequentialSchedule:
    """A `LayerSchedule`.

    run_stack: the loop over layers (scan.py, prefetch.py). reduce_in_backward: what is reduced once per step is reduced
    in the backward pass of the last microbatch, not after it.
    """

    run_stack: StackLoop
    num_microbatches: int
    reduce_in_backward: bool

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Array, Params | None]:
        in_backward = gradient_scale is not None and self.reduce_in_backward and weights.is_reduced_once
        one = partial(self._run_microbatch, model, weights, gradient_scale)
        run = _reduce_in_last if in_backward else _sum_over
        loss, gradients = run(one, batch, self.num_microbatches)
        if gradients is not None and not in_backward:
            gradients = weights.reduce(gradients)
        return loss, gradients

    def _run_microbatch(
        self,
        model: ModelFunctions,
        weights: ModelWeights,
        gradient_scale: Array | None,
        microbatch: Batch,
        before: Params | None = None,
        *,
        is_last: bool = False,
    ) -> tuple[Array, Params | None]:
        """Loss and gradients of a microbatch. before: gradients to add. is_last: they are reduced at once."""

        def objective(slots: Params) -> tuple[Array, Array]:
            return self._forward(model, weights.bound(slots, before, is_last=is_last), microbatch)

        slots = weights.gradient_slots(is_last=is_last)
        if gradient_scale is None:
            return objective(slots)[1], None
        _, pull_back, loss = jax.vjp(objective, slots, has_aux=True)
        return loss, pull_back(gradient_scale)[0]

    def _forward(self, model: ModelFunctions, weights: Weights, microbatch: Batch) -> tuple[Array, Array]:
        shared = model.shared(microbatch)
        x, tied = model.embed(weights.piece("embed"), microbatch)
        for stack in model.stacks:
            with jax.named_scope(piece_scope(stack.name)):
                x = self.run_stack(stack, hoist(weights.piece(stack.name)), shared, x)
        return model.head(weights.piece("head"), tied, x, microbatch)


def _sum_over(one: Callable[[Batch], Any], batch: Batch, num_microbatches: int) -> Any:
    """`one` on each microbatch of this device, in turn; results are added."""
    if num_microbatches == 1:
        return one(batch)
    return _added_up(one, split_microbatches(batch, num_microbatches))


def _reduce_in_last(one: Callable[..., Any], batch: Batch, num_microbatches: int) -> Any:
    """The same; the last microbatch runs after the loop over the others, takes the gradients that these have
    accumulated, and reduces the sum as it adds its own."""
    if num_microbatches == 1:
        return one(batch, is_last=True)
    parts = split_microbatches(batch, num_microbatches)
    loss, gradients = _added_up(one, jax.tree.map(lambda x: x[:-1], parts))
    own_loss, gradients = one(jax.tree.map(lambda x: x[-1], parts), gradients, is_last=True)
    return loss + own_loss, gradients


def _added_up(one: Callable[[Batch], Any], parts: Batch) -> Any:
    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(part)), None

    result = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return jax.lax.scan(add, zeros, parts)[0]
