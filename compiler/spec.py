"""RunSpec: the typed, frozen declaration of a run. Its defaults are in `conf/`, each written there once.

Quantities end in their unit, counts start with `num_`, batch sizes are global unless they say otherwise.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from meshloom.models import ModelConfig
from meshloom.models.config import Config

# Slowest link first: replicas across slices, tensor shards side by side.
MeshAxis = Literal["replica", "data", "fsdp", "stage", "context", "expert", "tensor"]
FloatType = Literal["float32", "bfloat16"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _axis_size(size: int) -> int:
    if size == -1 or size >= 1:
        return size
    raise PydanticCustomError("axis_size", "{size} is no number of devices", {"size": size, "fix": "use 1 or more, or -1 for all that are left"})  # fmt: skip  # noqa: E501


def _each_once(axes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(axes)) == len(axes):
        return axes
    raise PydanticCustomError(
        "twice", "{axes} names a mesh axis twice", {"axes": ", ".join(axes), "fix": "name it once"}
    )


AxisSize = Annotated[int, AfterValidator(_axis_size)]


class TargetSpec(Config):
    """The hardware that the step is compiled for."""

    name: str  # as its users say it: cpu-8
    kind: Literal["cpu", "local"]  # cpu: simulated devices; local: what is attached
    num_devices: PositiveInt | None  # None: as many as are attached
    peak_flops_per_second: PositiveFloat | None  # per device, in the compute type; None: unknown, and so is MFU
    hbm_bytes_per_device: PositiveInt | None  # None: unknown


class MeshSpec(Config):
    """Devices along each mesh axis; at most one of them -1: all devices that are left."""

    replica: AxisSize
    data: AxisSize
    fsdp: AxisSize
    stage: AxisSize
    context: AxisSize
    expert: AxisSize
    tensor: AxisSize


class Rule(Config):
    """Dimensions with one of these logical axes are sharded over these mesh axes (none: replicated)."""

    logical: Annotated[tuple[str, ...], Field(min_length=1)]
    mesh: Annotated[tuple[MeshAxis, ...], AfterValidator(_each_once)]


class ShardingSpec(Config):
    """Ordered rules per kind of array: for each dimension the first rule that is free takes it."""

    parameters: tuple[Rule, ...]
    optimizer: tuple[Rule, ...]
    activations: tuple[Rule, ...]


class PrecisionSpec(Config):
    parameters: FloatType  # as stored, updated and saved
    compute: FloatType  # parameters are cast to it once per step, and gathered in it
    gradient_reduction: FloatType  # gradients cross the network in it; they are accumulated in float32 always


class RematSpec(Config):
    """What of a layer's forward pass is kept for the backward pass; the rest is computed again."""

    policy: Literal["none", "full", "save_dots"]


class OptimizerSpec(Config):
    """AdamW (arXiv:1711.05101) behind clipping by global norm, with linear warm-up and cosine decay."""

    name: Literal["adamw"]
    learning_rate: PositiveFloat  # its peak
    num_warmup_steps: NonNegativeInt
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)]  # of the peak, reached at the last step
    b1: Fraction
    b2: Fraction
    epsilon: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat  # gradients with a larger global norm are scaled down to it


class DataSpec(Config):
    source: Literal["python_stdlib", "synthetic"]
    tokenizer: Literal["bytes"]
    held_out_fraction: Annotated[float, Field(gt=0, lt=1)]  # of the documents
    shuffle_seed: NonNegativeInt
    num_prefetch_threads: PositiveInt


class CheckpointSpec(Config):
    every_num_steps: PositiveInt | None  # None: no checkpoints at all, not at the end either
    num_kept: PositiveInt  # the last ones
    restore_from: str | None  # the directory of another run; its latest checkpoint is the start of this one


class DistributedSpec(Config):
    """The processes that run this together, each with its part of the devices, and how they find each other."""

    cluster: Literal["auto", "none", "slurm", "ompi", "mpi4py", "gketpu", "gcetpu"]  # who started them; names of JAX
    coordinator_address: str | None  # host:port that process 0 opens for the others; None: as the cluster says
    num_processes: PositiveInt | None
    process_id: NonNegativeInt | None  # of this process
    local_device_ids: tuple[NonNegativeInt, ...] | None  # GPUs of this process; None: all, or one under SLURM, Open MPI
    initialization_timeout_seconds: PositiveInt  # until all have come
    heartbeat_timeout_seconds: PositiveInt  # after which one that is not heard of counts as dead
    shutdown_timeout_seconds: PositiveInt  # until all have finished


class LoggingSpec(Config):
    every_num_steps: PositiveInt  # of plain lines where there is no terminal; every step goes to metrics.jsonl
    tensorboard: bool


class EvaluationSpec(Config):
    every_num_steps: PositiveInt
    num_batches: PositiveInt  # always the same ones


class RunSpec(Config):
    """A whole run. `global_batch_size` is in sequences, over all devices and microbatches."""

    model: ModelConfig
    target: TargetSpec
    mesh: MeshSpec
    sharding: ShardingSpec
    precision: PrecisionSpec
    remat: RematSpec
    optimizer: OptimizerSpec
    data: DataSpec
    checkpoint: CheckpointSpec
    distributed: DistributedSpec
    logging: LoggingSpec
    evaluation: EvaluationSpec
    seed: NonNegativeInt
    num_steps: PositiveInt
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    num_microbatches: PositiveInt

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length
