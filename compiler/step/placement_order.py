"""Brings the layers of a pipeline from where the state holds them to the stages that run them, and back.

Where all virtual stages have as many layers, each stage holds some whole layers, in natural order:

    2 stages, 2 chunks      stage 0   stage 1
    natural order           0 1       2 3        of virtual stages: as in the state and in checkpoints
    placement order         0 2       1 3        what a loop runs; a V runs 0 3 | 1 2

With one chunk for each stage both orders are equal. Else permutes bring chunks to their stages, in *rounds*. Where
virtual stages differ in their layers, each stage holds a part of every layer (sharding/sharding.py), and an
all-to-all gives it its own layers.

Once per step each stage sends its shards of weights where they are used, in the compute type, and gets back the
gradients of its own. So a state has one form, whatever runs it: it is saved, restored, exported and sampled from as
without stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshloom.models import Params

from ..core.partition_spec import STAGE, without
from ..formats.block import ELEMENTS
from ..parallel.weight_plan import WeightPlan
from ..parallel.weights import on_shards
from ..pipeline.stage_layers import StageLayers
from ..pipeline.table import StagePlacement
from .schedule import Batch, LayerSchedule, ModelFunctions, ModelWeights, Sums


@dataclass(frozen=True)
class ChunkRound:
    """A permute in which each stage sends one chunk and gets one. to: the stage that each stage sends to. sends: the
    place of the chunk that each stage sends. puts: the place of the one that each stage gets."""

    to: tuple[int, ...]
    sends: tuple[int, ...]
    puts: tuple[int, ...]

    @property
    def reverse(self) -> "ChunkRound":
        """Returns the permute that undoes this one."""
        back = tuple(self.to.index(stage) for stage in range(len(self.to)))
        return ChunkRound(back, self.puts, self.sends)


@dataclass(frozen=True)
class FromState:
    """A `LayerSchedule` whose weights and gradients are where the state holds them. schedule: the pipeline, which has
    those of its own layers on each stage."""

    schedule: LayerSchedule
    layers: StageLayers

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        placed = _moved(weights.layouts, self.layers, _to_stage, weights.working)
        own = replace(weights, stored=_shaped(weights.layouts, placed), working=placed)
        sums, gradients = self.schedule.run(model, own, batch, gradient_scale=gradient_scale)
        if gradients is not None:
            gradients = _moved(weights.layouts, self.layers, _to_state, gradients)
        return sums, gradients


def _shaped(layouts: Any, placed: Any) -> Any:
    """Returns arrays of the shapes of what is stored, of which nothing else is read."""
    return jax.tree.map(lambda layout, x: x[ELEMENTS] if layout.encoding.sent else x, layouts, placed)


@cache
def plan_rounds(placement: StagePlacement) -> tuple[ChunkRound, ...]:
    """Returns as many permutes as a stage has chunks, which together bring every virtual stage to its stage."""
    num_chunks, stages = placement.num_chunks, range(placement.num_stages)
    left = [list(range(stage * num_chunks, (stage + 1) * num_chunks)) for stage in stages]
    rounds = list[ChunkRound]()
    for _ in range(num_chunks):
        sent = _matched(left, placement)
        for virtual, own in zip(sent, left, strict=True):
            own.remove(virtual)
        to = tuple(placement.stage(virtual) for virtual in sent)
        puts = tuple(placement.chunk(sent[to.index(stage)]) for stage in stages)
        rounds.append(ChunkRound(to, tuple(virtual % num_chunks for virtual in sent), puts))
    return tuple(rounds)


def _matched(left: Sequence[Sequence[int]], placement: StagePlacement) -> list[int]:
    """Returns a virtual stage of each stage such that no two go to the same one. There is a choice, as each stage has
    as many left to send as to get (König 1916); it is found by augmenting paths."""
    chosen: dict[int, tuple[int, int]] = {}  # by where it goes: the stage that sends it, and the virtual stage

    def assign(stage: int, seen: set[int]) -> bool:
        for virtual in left[stage]:
            to = placement.stage(virtual)
            if to not in seen:
                seen.add(to)
                if to not in chosen or assign(chosen[to][0], seen):
                    chosen[to] = stage, virtual
                    return True
        return False

    for stage in range(len(left)):
        assign(stage, set())
    return [virtual for _, virtual in sorted(chosen.values())]


Move = Callable[[WeightPlan, StageLayers, str, Array], Array]


def _moved(layouts: Any, layers: StageLayers, move: Move, arrays: Any) -> Any:
    """Returns weights, or their gradients, with those of layers elsewhere. layouts: a WeightPlan for each."""

    def moved(stack: str, layout: WeightPlan, x: Any) -> Any:
        with layout.scope:
            if x is None:  # what is frozen has no gradient
                return None
            of_part = partial(_moved_part, layout, layers, stack, move)
            constant = layout.encoding.constant() if isinstance(x, dict) else frozenset[int]()
            return jax.tree.map(of_part, constant, x)

    return arrays | {
        stack: jax.tree.map(partial(moved, stack), layouts[stack], arrays[stack]) for stack in layers.stacks
    }


def _moved_part(
    layout: WeightPlan, layers: StageLayers, stack: str, move: Move, constant: frozenset[int], part: Array
) -> Array:
    """Moves one array of a weight. constant: dimensions along which it has one entry, the same on all stages."""
    at, spec = layout.over_stages, without(layout.auto_stored_spec, constant)
    at = None if at is None or at - part.ndim in constant else at
    return move(replace(layout, over_stages=at, auto_stored_spec=spec), layers, stack, part)


def _to_stage(layout: WeightPlan, layers: StageLayers, stack: str, x: Array) -> Array:
    """Returns the layers of this stage: (chunks x room, ...). A place without a layer has any one."""
    if layout.over_stages == 0:
        return _in_rounds(plan_rounds(layers.placement), x)
    rows, at = np.minimum(layers.rows(stack), len(x) - 1), layout.over_stages
    if at is None:
        return x[jnp.asarray(rows)[jax.lax.axis_index(STAGE)]]

    def exchange(x: Array) -> Array:
        parts = jax.lax.all_to_all(x[rows], STAGE, split_axis=0, concat_axis=at)
        return jax.lax.collapse(parts, at, at + 2)

    return on_shards(exchange, layout.auto_stored_spec)(x)


def _to_state(layout: WeightPlan, layers: StageLayers, stack: str, x: Array) -> Array:
    """Returns what the state holds of every layer on this stage, from the layers of each: undoes `_to_stage`."""
    if layout.over_stages == 0:
        return _in_rounds([each.reverse for each in plan_rounds(layers.placement)], x)
    rows, at = layers.rows(stack), layout.over_stages
    places = np.argsort(rows, axis=None)[: layers.first(stack, layers.placement.num_virtual)]

    def exchange(x: Array) -> Array:
        if at is None:
            parts = jax.lax.all_gather(x, STAGE)
        else:
            parts = x.reshape(*x.shape[:at], len(rows), -1, *x.shape[at + 1 :])
            parts = jax.lax.all_to_all(parts, STAGE, split_axis=at, concat_axis=0)
        return jax.lax.collapse(parts, 0, 2)[places]

    return on_shards(exchange, layout.auto_stored_spec)(x)


def _in_rounds(rounds: Sequence[ChunkRound], x: Array) -> Array:
    """Returns the layers of a stage with its chunks on other stages."""
    if len(rounds) == 1:
        return x
    stage, chunks = jax.lax.axis_index(STAGE), x.reshape(len(rounds), -1, *x.shape[1:])
    found = jnp.zeros_like(chunks)
    for each in rounds:
        sent = jax.lax.dynamic_index_in_dim(chunks, jnp.array(each.sends)[stage], keepdims=False)
        got = jax.lax.ppermute(sent, STAGE, list(enumerate(each.to)))
        found = jax.lax.dynamic_update_index_in_dim(found, got, jnp.array(each.puts)[stage], 0)
    return found.reshape(x.shape)
