"""Times the operations of a pipeline before its step is traced, to choose the form of its table.

The estimate of the traced step (compiler/estimate) says how long the step takes; this compares tables with each other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from meshloom.models import Model, Stack

from ..core.kernels import AttentionCall
from ..core.partition_spec import STAGE
from ..pipeline.makespan import OpSeconds
from ..pipeline.stage_layers import StageLayers
from ..pipeline.table import PipelineOp, PipelineTable
from ..sharding.arrays import EXPERTS
from ..sharding.sharding import ShardingPlan
from ..spec.cost_model import cost_model
from ..spec.step_spec import RematSpec
from ..target.target import TargetPlan
from .operation import OpInputs

NO_MATMULS = ("none", "minimal", "save_dots")  # remat policies under which no matmul is computed again
RESIDUAL = "residual"  # the name of the stream that layers add to (models/decoder.py)
NOT_OF_LAYERS = ("embedded", "head_input", "logits", "gradient of ")  # activations that no layer makes for its backward


@dataclass(frozen=True)
class LayerTimes:
    """The seconds of one microbatch in one layer of a stack. matmuls, attention: of a forward pass. moved: to write
    what the layer makes, or to read it. left: the same of what B leaves to W. added: to add the gradients of its
    weights to their sums. recomputed: the share of a forward pass that the backward pass runs again."""

    matmuls: float
    attention: float
    moved: float
    left: float
    added: float
    recomputed: float

    def seconds(self, op: PipelineOp, *, is_recomputed_apart: bool) -> float:
        """Returns the seconds of an operation. The matmuls of dx and of dw take as long as a forward pass each,
        attention's gradients are all in B, which also reads what the layer made, and writes and reads the gradient of
        each. What R leaves to B, and B to W, is copied into a buffer and out of it."""
        numbers = cost_model()
        of_input = self.matmuls + numbers.attention_backward * self.attention + 3 * self.moved
        again = self.recomputed * (self.matmuls + self.attention)
        if is_recomputed_apart:
            again, of_input = again + numbers.copy_passes * self.moved, of_input + numbers.copy_passes * self.moved
        return {
            PipelineOp.FORWARD: self.matmuls + self.attention,
            PipelineOp.RECOMPUTE: again,
            PipelineOp.INPUT_GRADIENT: of_input + numbers.copy_passes * self.left,
            PipelineOp.WEIGHT_GRADIENT: self.matmuls + numbers.copy_passes * self.left + self.added,
            PipelineOp.BACKWARD: of_input + self.matmuls + self.added,
        }[op]


@dataclass(frozen=True)
class StageTimes:
    """The seconds of one microbatch in a layer of each stack, in the head, forward, and of one permute. head_sent: what
    stages send each other where they share the head; None if not known."""

    layers: tuple[LayerTimes, ...]
    head: float
    permute: float
    head_sent: float | None

    def head_seconds(self, num_stages: int) -> float:
        """Returns the seconds of the head, forward and backward, where these stages share it."""
        return cost_model().head_passes * self.head / num_stages + (self.head_sent or 0.0)

    def op_seconds(self, layers: StageLayers, table: PipelineTable, *, shares_head: bool = False) -> OpSeconds:
        """Returns the seconds of each operation of a table, on stages with these layers. The head runs forward and
        backward in F, unless stages share it."""
        placement, apart = table.placement, PipelineOp.RECOMPUTE in table.ops
        of_layer = {
            op: [times.seconds(op, is_recomputed_apart=apart) for times in self.layers]
            for op in (*table.ops, PipelineOp.RECOMPUTE)
        }
        head = 0.0 if shares_head else cost_model().head_passes * self.head

        def of_slot(op: PipelineOp, stage: int, chunk: int) -> float:
            virtual = placement.virtual(stage, chunk)
            is_last = op == PipelineOp.FORWARD and virtual == placement.num_virtual - 1
            of_layers = sum(n * each for n, each in zip(layers.counts[virtual], of_layer[op], strict=True))
            return of_layers + (head if is_last else 0.0)

        return of_slot


def plan_stage_times(inputs: OpInputs) -> StageTimes:
    """Returns the times by the products of tokens with parameters and with each other, and
    by the bytes of the layers' activations, at the rates that its programs reach."""
    spec, mesh, model, sharding = inputs.spec, inputs.mesh, inputs.model, inputs.sharding
    speeds, roles = _speeds(inputs.target), sharding.roles
    tokens = inputs.batch.tokens_of_device
    shards = mesh.num_shards(roles.partitioner)
    num_multiplied = {
        piece: _num_multiplied(model, sharding, piece) / shards
        for piece in ("head", *(stack.name for stack in model.stacks))
    }
    flops, head_dim = _attention_flops(sharding, spec.sequence_length)
    permute = mesh.alone_seconds("collective-permute", x_bytes(sharding), (STAGE,)) if speeds.is_known else None
    of_head = [x_bytes(sharding)] * 2 + [4 * tokens] * 3  # y and its gradient; float32 sums of each token
    sent = [mesh.alone_seconds("all-reduce", size, (STAGE,)) if speeds.is_known else None for size in of_head]
    itemsize = jnp.dtype(spec.precision.gradients).itemsize
    moved = _made_bytes(sharding) / speeds.memory
    left = moved * _left_to_weights(spec.remat)

    def of_layer(stack: Stack) -> LayerTimes:
        of_weights = num_multiplied[stack.name] / stack.num_layers
        return LayerTimes(
            matmuls=2 * tokens * of_weights / speeds.matmul,
            attention=flops / speeds.attention(head_dim, spec.sequence_length),
            moved=moved,
            left=left,
            added=3 * of_weights * itemsize / speeds.memory,  # two read, one written
            recomputed=1.0 if recomputes_layers(spec.remat) else 0.0,
        )

    return StageTimes(
        tuple(map(of_layer, model.stacks)),
        head=2 * tokens * num_multiplied["head"] / speeds.matmul,
        permute=permute or 0.0,
        head_sent=None if None in sent else sum(each for each in sent if each is not None),
    )


def plan_slot_bytes(inputs: OpInputs, num_virtual: int) -> dict[str, float]:
    """Returns about the bytes of a slot of each buffer, by the planned activations, to compare tables. What a layer
    saves is its input if it runs again, else what it makes; R leaves what the layers make, and so, about, does B,
    unless the forward pass has saved a part of it."""
    sharding, remat = inputs.sharding, inputs.spec.remat
    num_layers = sum(stack.num_layers for stack in inputs.model.stacks) / num_virtual
    made = num_layers * _made_bytes(sharding)
    saved = num_layers * x_bytes(sharding) if recomputes_layers(remat) else made
    cut = made * _left_to_weights(remat)
    return {"x": x_bytes(sharding) + saved, "gradient": x_bytes(sharding), "residuals": made, "cut": cut}


def _left_to_weights(remat: RematSpec) -> float:
    """Returns about what B leaves to W, over what a layer makes."""
    return 1.0 if recomputes_layers(remat) else cost_model().left_to_weight_gradients


def _made_bytes(sharding: ShardingPlan) -> int:
    """Returns the bytes on a device of the activations that a layer makes."""
    made = (plan for plan in sharding.activations if not plan.array.path.startswith(NOT_OF_LAYERS))
    return sum(plan.bytes_per_device for plan in made)


@dataclass(frozen=True)
class _Speeds:
    """FLOPs and bytes per second. Where nothing is known of the target, all operations take about as many seconds as
    they have FLOPs."""

    matmul: float
    memory: float
    attention: Callable[[int, int], float]  # by the width of heads and the length
    is_known: bool


def _speeds(target: TargetPlan) -> _Speeds:
    chip, peak, bandwidth = target.chip, target.peak_flops_per_second, target.hbm_bytes_per_second_per_device
    if chip is None or peak is None or bandwidth is None:
        return _Speeds(1.0, math.inf, lambda head_dim, length: 1.0, is_known=False)
    share, peak = chip.efficiency, peak * chip.power_share

    def attention(head_dim: int, length: int) -> float:
        return target.kernel_rate(AttentionCall(head_dim, length)) or peak

    return _Speeds(peak * share.matmul, bandwidth * share.memory, attention, is_known=True)


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


def _attention_flops(sharding: ShardingPlan, length: int) -> tuple[int, int]:
    """Returns the FLOPs on a device of a layer's attention, forward, and the width of its heads: two matmuls of each
    query with the half of the sequence that it may see. No FLOPs for a model without."""
    queries = next((plan for plan in sharding.activations if plan.array.path == "queries"), None)
    if queries is None:
        return 0, 1
    num_entries = queries.bytes_per_device // jnp.dtype(queries.array.dtype).itemsize
    return 2 * length * num_entries, queries.array.shape[-1]


def x_bytes(sharding: ShardingPlan) -> int:
    """Returns the bytes on a device of what stages send: of the residual stream, or where the model names none, of the
    first activation that has the model's width."""
    wide = {plan.array.path: plan for plan in sharding.activations if plan.dimensions[-1].logical == "embed"}
    sent = wide.get(RESIDUAL) or next(iter(wide.values()), None)
    return sent.bytes_per_device if sent else 0
