"""Times the operations of a pipeline before its step is traced, to choose the form of its table.

The estimate of the traced step (compiler/estimate) says how long the step takes; this compares tables with each other.
"""

import math
from dataclasses import dataclass

from meshloom.models import Model

from ..core.partition_spec import STAGE
from ..pipeline.makespan import OpSeconds
from ..pipeline.table import PipelineOp, StagePlacement
from ..sharding.arrays import EXPERTS
from ..sharding.batch import sequences_of_device
from ..sharding.sharding import ShardingPlan
from ..spec.plan_spec import PlanSpec
from ..spec.step_spec import RematSpec
from ..target.mesh import MeshPlan
from ..target.target import TargetPlan

NO_MATMULS = ("none", "save_dots")  # remat policies under which no matmul is computed again
UNKNOWN_PEAK = 1e12  # FLOPs per second of a target whose peak is unknown: permutes take no time there


@dataclass(frozen=True)
class StageTimes:
    """layer: the seconds of a forward pass of one microbatch through the layers of the model. head: through the head.
    recomputed: the share of a layer's forward pass that its backward pass runs again. permute: of one permute."""

    layers: float
    head: float
    recomputed: float
    permute: float

    def op_seconds(self, placement: StagePlacement) -> OpSeconds:
        """Returns the seconds of each operation: dx and dw take as long as a forward pass each. The head runs forward
        and backward in F."""
        forward = self.layers / placement.num_virtual
        shares = {
            PipelineOp.FORWARD: 1.0,
            PipelineOp.RECOMPUTE: self.recomputed,
            PipelineOp.INPUT_GRADIENT: 1.0,
            PipelineOp.WEIGHT_GRADIENT: 1.0,
            PipelineOp.BACKWARD: 2.0,
        }

        def seconds(op: PipelineOp, stage: int, chunk: int) -> float:
            is_last = op == PipelineOp.FORWARD and placement.virtual(stage, chunk) == placement.num_virtual - 1
            return shares[op] * forward + (3 * self.head if is_last else 0.0)

        return seconds


def plan_stage_times(
    spec: PlanSpec, mesh: MeshPlan, model: Model, sharding: ShardingPlan, target: TargetPlan
) -> StageTimes:
    """Returns the times by the products of tokens with parameters, at the peak of the target."""
    roles, peak = sharding.roles, target.peak_flops_per_second
    tokens = sequences_of_device(spec, mesh, roles) * spec.sequence_length // mesh.num_shards(roles.length)
    per_parameter = 2 * tokens / mesh.num_shards(roles.partitioner) / (peak or UNKNOWN_PEAK)
    (stack,) = model.stacks
    permute = mesh.alone_seconds("collective-permute", _x_bytes(sharding), (STAGE,)) if peak else None
    return StageTimes(
        per_parameter * _num_multiplied(model, sharding, stack.name),
        per_parameter * _num_multiplied(model, sharding, "head"),
        1.0 if recomputes_layers(spec.remat) else 0.0,
        permute or 0.0,
    )


def recomputes_layers(remat: RematSpec) -> bool:
    """Returns True if matmuls of the forward pass are computed again."""
    return any(policy not in NO_MATMULS for policy in (remat.stacks.values() or [remat.policy]))


def _num_multiplied(model: Model, sharding: ShardingPlan, piece: str) -> int:
    """Returns the number of entries of a piece's matrices that a token is multiplied with."""
    total, is_layers = 0, piece != "head"
    for array in (plan.array for plan in sharding.parameters):
        is_tied = array.is_tied and not is_layers
        if (array.path.split("/")[0] == piece or is_tied) and len(array.shape) > 1 + is_layers:
            sizes = zip(array.logical_axes, array.shape, strict=True)
            active = model.num_active_experts
            total += math.prod(active if name == EXPERTS and active else size for name, size in sizes)
    return total


def _x_bytes(sharding: ShardingPlan) -> int:
    """Returns the bytes on a device of what stages send: those of the first activation that has the model's width."""
    return next((plan.bytes_per_device for plan in sharding.activations if plan.dimensions[-1].logical == "embed"), 0)
