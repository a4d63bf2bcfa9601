"""Plans when a stage of a pipeline gathers the weights of its layers: once per step, or where each layer is used.

step   whole weights of the stage, and their gradients accumulated whole in it: little is sent, much is held
use    each layer gathers its weights in its forward pass and again in each part of its backward pass, and reduces its
       gradient there: sent for each microbatch, accumulated as shards
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from ..core.format import human_bytes
from ..sharding.arrays import EXPERTS
from ..sharding.rules import ArrayPlan
from ..sharding.sharding import gathered_bytes
from .operation import OpInputs
from .pipeline_plan import PipelinePlan
from .stage_times import x_bytes


@dataclass(frozen=True)
class StageGather:
    """When stages gather the weights of their layers, and why. weights, gradients: the bytes on a device of those of a
    stage, whole in the types in which they are used and accumulated; gradients: 0 if they are accumulated as shards."""

    when: Literal["step", "use"]
    reason: str
    weights: int
    gradients: int

    @property
    def how(self) -> str:
        where = {"step": "once per step", "use": "where a layer is used"}[self.when]
        return f"weights of layers are gathered {where}: {self.reason}"


def plan_gather(pipeline: PipelinePlan | None, inputs: OpInputs, state_bytes: int) -> StageGather | None:
    """Returns when the stages gather; None without stages. state_bytes: those of a device."""
    if pipeline is None:
        return None
    spec, mesh, sharding, target = inputs.spec, inputs.mesh, inputs.sharding, inputs.target
    chosen, tokens = spec.pipeline.gather, sharding.roles.tokens
    split = [each for each in sharding.parameters if _is_gathered(each, tokens)]
    weights = sum(gathered_bytes(each, mesh, sharding.roles) for each in split)
    gradients = sum(
        gathered_bytes(each, mesh, sharding.roles)
        * jnp.dtype(spec.precision.gradients).itemsize
        // jnp.dtype(each.array.compute_dtype).itemsize
        for each in split
        if each.array.is_trained and spec.sharding.gradients == "parameters"
    )
    whole, limit = weights + gradients, target.hbm_bytes_per_device
    if chosen != "auto":
        return StageGather(chosen, f"pipeline.gather={chosen}", weights, gradients)
    if not split:
        return StageGather("step", "each device holds them whole", 0, 0)
    if limit is None:
        return StageGather("step", "the memory of the target is unknown", weights, gradients)
    inputs_of_layers = max(pipeline.in_flight) * max(pipeline.layers.totals) * x_bytes(sharding)
    needed = state_bytes + whole + inputs_of_layers
    kinds = "whole weights and gradients" if gradients else "whole weights"
    told = f"with {human_bytes(whole)} of {kinds} a device needs {human_bytes(needed)} of {human_bytes(limit)}"
    return StageGather("step" if needed <= limit else "use", told, weights, gradients)


def _is_gathered(plan: ArrayPlan, tokens: tuple[str, ...]) -> bool:
    """Returns True for a parameter of layers that axes of the tokens split, besides its experts."""
    axes = {axis for d in plan.dimensions if d.logical != EXPERTS for axis in d.axes}
    return plan.dimensions[0].logical == "layers" and bool(axes & set(tokens))
