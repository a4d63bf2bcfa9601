"""The head of a pipeline: on the stage of the last virtual stage alone, or over all stages (parallel/shared_head.py).

It runs forward and backward at once, in the tick in which the last virtual stage has made its input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Params

from ..core.partition_spec import STAGE
from ..parallel.shared_head import given_by
from ..parallel.weight_plan import WeightPlan
from ..parallel.weights import Weights
from .pipeline_state import zeros_of
from .schedule import HeadOutput, Microbatch, ModelFunctions, objective


@dataclass(frozen=True)
class PipelineHead:
    """The head, with what it adds to the state of the loop over ticks.

    weights: those of all pieces. scale: the cotangent of the loss; None if there are no gradients. last_stage: the
    stage of the last virtual stage.
    """

    model: ModelFunctions
    weights: Weights
    scale: Array | None
    last_stage: int

    @cached_property
    def is_shared(self) -> bool:
        """Returns True if all stages run it, each with its part of the vocabulary."""
        ends = jax.tree.leaves((self.weights.layouts["embed"], self.weights.layouts["head"]))
        return any(layout.over_stages is not None for layout in ends)

    @property
    def accumulators(self) -> tuple[Any, Any]:
        """Returns those that it adds to: its own, and those of what it shares with the embedding."""
        embed = self.weights.piece("embed")
        shared = _only_shared(embed.layouts, embed.accumulators) if self.is_shared else embed.accumulators
        return self.weights.accumulators["head"], shared

    @property
    def writes(self) -> Sequence[str]:
        """Returns what it changes of the state. of_tied: gradients of a vocabulary that stages and the embedding
        share."""
        return "loss", "auxiliary", "of_head", "of_tied" if self.is_shared else "of_embed"

    def begin(self, x: Any, microbatch: Microbatch) -> dict[str, Any]:
        """Returns what it adds to, besides gradients of the embedding. x, microbatch: shapes."""
        _, output = jax.eval_shape(partial(self._apply, *self.accumulators), x, microbatch)
        sums = {"loss": zeros_of(output.loss), "auxiliary": {"head": zeros_of(output.aux)}}
        if self.scale is None:
            return sums
        embed = self.weights.piece("embed")
        of_tied = zeros_of(_only_shared(embed.layouts, embed.accumulators))
        return sums | {"of_head": zeros_of(self.weights.accumulators["head"]), "of_tied": of_tied}

    def run(self, state: dict[str, Any], x: Any, microbatch: Microbatch) -> tuple[dict[str, Any], Any]:
        """Runs it for the result `x` of all layers. Returns the state, and the gradient of `x`; None without gradients.
        Where stages share the head, each has its whole loss, which is that of one of them."""
        state, dx = dict(state), None
        if self.scale is None:
            _, output = self._apply(*self.accumulators, x, microbatch)
        else:

            def of(head: Any, embed: Any, x: Any) -> tuple[Array, HeadOutput]:
                return self._apply(head, embed, x, microbatch)

            _, pull_back, output = jax.vjp(of, *self.accumulators, x, has_aux=True)
            head, embed, dx = pull_back(self.scale)
            for key, gradient in (("of_tied" if self.is_shared else "of_embed", embed), ("of_head", head)):
                state[key] = jax.tree.map(jnp.add, state[key], gradient)
        loss, aux = output.loss, output.aux
        if self.is_shared:
            is_last = jax.lax.axis_index(STAGE) == self.last_stage
            loss, aux = jax.tree.map(lambda a: jnp.where(is_last, a, jnp.zeros_like(a)), (loss, aux))
        auxiliary = {**state["auxiliary"], "head": jax.tree.map(jnp.add, state["auxiliary"]["head"], aux)}
        return state | {"loss": state["loss"] + loss, "auxiliary": auxiliary}, dx

    def total(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of the embedding and of the head over all stages, from the state after the last
        tick."""
        embed, head = self.weights.layouts["embed"], self.weights.layouts["head"]
        return {
            "embed": _total_of_lookup(embed, state["of_embed"], state["of_tied"]),
            "head": _total_of_head(head, state["of_head"]),
        }

    def _apply(self, head: Any, embed: Any, x: Any, microbatch: Microbatch) -> tuple[Array, HeadOutput]:
        if self.is_shared:
            x = given_by(self.last_stage, x, self.model.stage_total)
        tied = replace(self.weights.piece("embed"), accumulators=embed).gathered()
        output = self.model.head(replace(self.weights.piece("head"), accumulators=head), tied, x, microbatch)
        return objective(output, {"head": output.aux}), output


def with_whole_vocabulary(embed: Weights) -> Weights:
    """Returns the weights of the embedding for its lookup, with what other stages have of a table that they share."""
    whole = partial(_whole_vocabulary, embed.layouts)
    return replace(
        embed, accumulators=zeros_of(jax.eval_shape(whole, embed.accumulators)), working=whole(embed.working)
    )


def _only_shared(layouts: Params, tree: Any) -> Any:
    """Returns a tree like the weights of a piece, with None for the weights that every stage has whole."""
    return jax.tree.map(lambda layout, x: None if layout.over_stages is None else x, layouts, tree)


def _whole_vocabulary(layouts: Params, tree: Any) -> Any:
    """Returns a tree like the weights of a piece, with the parts of all stages."""

    def gathered(layout: WeightPlan, x: Array | None) -> Array | None:
        if x is None or layout.over_stages is None:
            return x
        with layout.scope:
            return jax.lax.all_gather(x, STAGE, axis=layout.over_stages, tiled=True)

    return jax.tree.map(gathered, layouts, tree)


def _total_of_lookup(layouts: Params, gradients: Any, of_head: Any) -> Any:
    """Returns the gradients of the embedding over all stages. gradients: with the parts of all stages. of_head: what
    the head adds to this stage's part of those that are shared; None for others."""

    def total(layout: WeightPlan, gradient: Array | None, more: Array | None) -> Array | None:
        if gradient is None:
            return None
        if more is None or layout.over_stages is None:
            return jax.lax.psum(gradient, STAGE)
        with layout.scope:
            return more + jax.lax.psum_scatter(gradient, STAGE, scatter_dimension=layout.over_stages, tiled=True)

    return jax.tree.map(total, layouts, gradients, of_head)


def _total_of_head(layouts: Params, gradients: Any) -> Any:
    """Returns the gradients of the head over all stages: those of a part of the vocabulary are all on its stage."""

    def total(layout: WeightPlan, gradient: Array | None) -> Array | None:
        return gradient if gradient is None or layout.over_stages is not None else jax.lax.psum(gradient, STAGE)

    return jax.tree.map(total, layouts, gradients)
