"""Brings the layers of a pipeline from the order in which the state holds them to the stages that run them, and back.

    2 stages, 2 chunks      stage 0   stage 1
    natural order           0 1       2 3        of virtual stages: as in the state and in checkpoints
    placement order         0 2       1 3        what a loop runs; a V runs 0 3 | 1 2

Once per step each stage sends its shards of weights where they are used, in the compute type, and gets back the
gradients of its own. With one chunk for each stage both orders are equal. So a state has one form, whatever runs it: it
is saved, restored, exported and sampled from as without stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models import Params

from ..core.partition_spec import STAGE
from ..parallel.weight_plan import WeightPlan
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
class InNaturalOrder:
    """A `LayerSchedule` whose weights and gradients have their layers in natural order. schedule: the pipeline."""

    schedule: LayerSchedule
    placement: StagePlacement

    def run(
        self, model: ModelFunctions, weights: ModelWeights, batch: Batch, *, gradient_scale: Array | None
    ) -> tuple[Sums, Params | None]:
        (stack,), rounds = model.stacks, plan_rounds(self.placement)
        layouts = weights.layouts[stack.name]
        placed = weights.working | {stack.name: _moved(layouts, weights.working[stack.name], rounds)}
        sums, gradients = self.schedule.run(
            model, replace(weights, working=placed), batch, gradient_scale=gradient_scale
        )
        if gradients is not None:
            back = [each.reverse for each in rounds]
            gradients = gradients | {stack.name: _moved(layouts, gradients[stack.name], back)}
        return sums, gradients


def plan_rounds(placement: StagePlacement) -> list[ChunkRound]:
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
    return rounds


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


def _moved(layouts: Any, arrays: Any, rounds: Sequence[ChunkRound]) -> Any:
    """Returns weights of layers, or their gradients, with their chunks on other stages. layouts: a WeightPlan for
    each."""
    stage = jax.lax.axis_index(STAGE)

    def moved(x: Array) -> Array:
        chunks = x.reshape(len(rounds), -1, *x.shape[1:])
        found = jnp.zeros_like(chunks)
        for each in rounds:
            sent = jax.lax.dynamic_index_in_dim(chunks, jnp.array(each.sends)[stage], keepdims=False)
            got = jax.lax.ppermute(sent, STAGE, list(enumerate(each.to)))
            found = jax.lax.dynamic_update_index_in_dim(found, got, jnp.array(each.puts)[stage], 0)
        return found.reshape(x.shape)

    def named(layout: WeightPlan, x: Array | None) -> Array | None:
        with layout.scope:
            return None if x is None else moved(x)  # what is frozen has no gradient

    return jax.tree.map(named, layouts, arrays)
