"""RunSpec: the typed, frozen declaration of a run. Its defaults are in `conf/`, each written there once.

Quantities end in their unit, counts start with `num_`, batch sizes are global unless they say otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from meshloom.models import AnyModelConfig
from meshloom.models.config import Config

from ..core.config_types import FloatType, Fraction, NumBytes, Seed, Text
from ..optim.lr_schedules import ScheduleSpec
from ..optim.optimizers import OptimizerSpec
from .data_spec import DataSpec, ShardsSpec
from .environment_values import Sources, as_compared, as_written
from .overlap_spec import OverlapSpec, StrategyChoice
from .target_spec import TargetSpec

# Slowest link first: replicas across slices, tensor shards side by side.
MeshAxis = Literal["replica", "data", "fsdp", "stage", "context", "expert", "tensor"]
RematPolicy = Literal["none", "full", "save_dots", "save_names", "offload"]


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


def _compiler_option(value: Any) -> Any:
    """Gives one error, where a union gives one for each of its types."""
    if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**63):
        return value
    context = {
        "what": f"{value} is not true, false, a number of 64 bits or text",
        "fix": "give a value of the option's type",
    }
    raise PydanticCustomError("choice", "{what}", context)


CompilerOption = Annotated[bool | int | float | str, BeforeValidator(_compiler_option)]
AxisSize = Annotated[int, AfterValidator(_axis_size)]


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

    logical: Annotated[tuple[Text, ...], Field(min_length=1)]
    mesh: Annotated[tuple[MeshAxis, ...], AfterValidator(_each_once)]


class ShardingSpec(Config):
    """Ordered rules per kind of array: for each dimension the first rule that is free takes it.

    gradients: which of the two tables gradients lie by while they are accumulated. Where the optimizer's splits more
    than the parameters', `parameters` sums whole gradients and splits them once per step (ZeRO-1), `optimizer` splits
    each gradient as soon as it is made (ZeRO-2).
    """

    parameters: tuple[Rule, ...]
    gradients: Literal["parameters", "optimizer"]
    optimizer: tuple[Rule, ...]  # the optimizer's state and the master weights; never split less than the parameters
    activations: tuple[Rule, ...]
    replicated_bytes_threshold: NumBytes  # of a parameter, or its state, that every device holds whole
    on_replicated: Literal["error", "warn", "allow"]  # where one is larger


class LossScaleSpec(Config):
    """Dynamic loss scaling, Micikevicius et al. 2018, arXiv:1710.03740. Gradients are those of the loss times a scale,
    so that small ones are not lost in float16; where one overflows, the update is skipped and the scale is lowered."""

    initial: PositiveFloat
    growth_factor: Annotated[float, Field(ge=1)]
    growth_interval: PositiveInt  # updates without an overflow until the scale grows
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]


class PrecisionSpec(Config):
    parameters: FloatType  # as stored and saved, and read by the forward pass
    master: Literal["float32"] | None  # what is updated, where not the parameters; lies as optimizer state
    compute: Literal["float32", "bfloat16", "float16"]  # parameters are cast to it once per step, and gathered in it
    gradients: FloatType  # they are accumulated in it over layers' uses and microbatches
    gradient_reduction: FloatType  # gradients cross the network in it
    frozen: FloatType | None  # frozen parameters are stored in it; None: as the others
    loss_scale: LossScaleSpec | None  # for float16 alone

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.master == self.parameters:
            raise _mistake("master", "parameters are float32 already, and need no master", "set precision.master=null")
        if self.compute == "float16" and self.loss_scale is None:
            what = "float16 loses small gradients without a loss scale"
            raise _mistake("loss_scale", what, "choose precision=float16, or precision.compute=bfloat16")
        if self.compute != "float16" and self.loss_scale is not None:
            what = f"a loss scale is for float16, and compute is {self.compute}"
            raise _mistake("loss_scale", what, "set precision.loss_scale=null, or precision.compute=float16")
        return self


class RematSpec(Config):
    """What of a layer's forward pass is kept for the backward pass; the rest is computed again."""

    policy: RematPolicy  # of every stack of layers
    stacks: dict[str, RematPolicy]  # of single stacks, by name
    names: tuple[Text, ...]  # of the activations that save_names keeps and offload moves to the host's memory

    @model_validator(mode="after")
    def _check(self) -> Self:
        used = [policy for policy in (self.policy, *self.stacks.values()) if policy in ("save_names", "offload")]
        if used and not self.names:
            what = f"{used[0]} keeps activations by name, and no name is given"
            raise _mistake("names", what, "set remat.names=[...], such as [attended, hidden]")
        if self.names and not used:
            what = f"{', '.join(self.names)} given, and policy {self.policy} keeps none by name"
            raise _mistake("names", what, "set remat.names=[], or choose remat=save_names or remat=offload")
        return self


class LossSpec(Config):
    """Mean cross-entropy per target, in float32."""

    z_loss_weight: NonNegativeFloat  # of log(z)^2, which keeps logits from drifting (PaLM: 1e-4); 0: none
    # Float32 logits held at once, per device: the larger of the two. The head is run on as few tokens at a time.
    max_logits_bytes: NumBytes
    max_logits_share: Fraction  # of a device's memory


class CheckpointSpec(Config):
    """What is saved when, and which checkpoints stay: those that any of the three keys about keeping wants.

    Without an interval, neither of steps nor of minutes, nothing is saved, not at the end either.
    """

    every_num_steps: PositiveInt | None
    every_num_minutes: PositiveFloat | None  # whenever the last one is that old
    num_kept: PositiveInt  # the last ones
    num_best_kept: NonNegativeInt  # those with the lowest held-out loss
    keep_every_num_steps: PositiveInt | None  # those of steps that this divides
    restore_from: Text | None  # RUN_DIR or RUN_DIR/checkpoints/STEP: another run's checkpoint is the start of this one

    @property
    def is_saving(self) -> bool:
        return self.every_num_steps is not None or self.every_num_minutes is not None


class DistributedSpec(Config):
    """The processes that run this together, each with its part of the devices, and how they find each other."""

    cluster: Literal["auto", "none", "slurm", "ompi", "mpi4py", "gketpu", "gcetpu"]  # who started them; names of JAX
    coordinator_address: Text | None  # host:port that process 0 opens for the others; None: as the cluster says
    num_processes: PositiveInt | None
    process_id: NonNegativeInt | None  # of this process
    local_device_ids: tuple[NonNegativeInt, ...] | None  # GPUs of this process; None: all, or one under SLURM, Open MPI
    initialization_timeout_seconds: PositiveInt  # until all have come
    compile_timeout_seconds: PositiveInt  # that the first to have compiled waits for the last
    heartbeat_timeout_seconds: PositiveInt  # after which one that is not heard of counts as dead
    shutdown_timeout_seconds: PositiveInt  # until all have finished


class LoggingSpec(Config):
    every_num_steps: PositiveInt  # of plain lines where there is no terminal; every step goes to metrics.jsonl
    tensorboard: bool


class EvaluationSpec(Config):
    every_num_steps: PositiveInt
    num_batches: PositiveInt  # always the same ones


@dataclass(frozen=True)
class Origin:
    """What a declaration was typed as: its overrides, a folder of configs beside ours, and modules whose code it may
    run. It is not part of what is declared: any two are equal. overrides: None where nothing that is typed declares it.
    """

    overrides: tuple[str, ...] | None = field(default=None, compare=False)
    config_dir: str | None = field(default=None, compare=False)
    code_allowed_from: tuple[str, ...] = field(default=(), compare=False)


class RunSpec(Config):
    """A whole run. `global_batch_size` is in sequences, over all devices and microbatches."""

    model: AnyModelConfig
    target: TargetSpec
    mesh: MeshSpec
    sharding: ShardingSpec
    precision: PrecisionSpec
    remat: RematSpec
    overlap: OverlapSpec
    loss: LossSpec
    parallel: dict[Text, StrategyChoice]  # by operation (compiler/parallel/registry.py)
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    data: DataSpec
    shards: ShardsSpec
    checkpoint: CheckpointSpec
    distributed: DistributedSpec
    logging: LoggingSpec
    evaluation: EvaluationSpec
    frozen_parameters: tuple[Text, ...]  # by patterns of paths, such as embed/*: they have no gradient and no update
    on_nonfinite: Literal["stop", "skip"]  # a step whose loss or gradient norm is no finite number; skip: no update
    num_skips_allowed: NonNegativeInt  # one after the other, where such steps are skipped
    on_too_little_memory: Literal["refuse", "try"]  # a run that needs more memory than there is
    compilation_cache: Text | None  # directory of compiled programs; None: compile at each start
    compiler_options: dict[str, CompilerOption]  # by XLA's own names
    artifact: Text | None  # a compiled train step to load instead of compiling
    seed: Seed
    num_steps: PositiveInt
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    num_microbatches: PositiveInt
    notes: dict[str, Any]  # a user's own keys: they are kept and logged, and nothing here reads them

    _sources: Sources = PrivateAttr(default_factory=dict)  # of values that came from the environment
    _origin: Origin = PrivateAttr(default=Origin())

    def with_sources(self, sources: Sources) -> Self:
        """The same declaration, which knows where values came from: they are not written in clear."""
        copied = self.model_copy()
        copied._sources = sources
        return copied

    def with_origin(self, origin: Origin) -> Self:
        """The same declaration, which knows what it was typed as."""
        copied = self.model_copy()
        copied._origin = origin
        return copied

    @property
    def origin(self) -> Origin:
        """What it was typed as."""
        return self._origin

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """The same with other values; its overrides are then not those that were typed."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._origin = replace(self._origin, overrides=None)
        return copied

    def as_written(self) -> dict[str, Any]:
        """The declaration as JSON values for files and people: `${oc.env:TOKEN}` instead of what it stands for."""
        return as_written(self.model_dump(mode="json"), self._sources)

    def as_compared(self) -> dict[str, Any]:
        """As JSON values that are equal where, and only where, the declarations are: with digests of such values."""
        return as_compared(self.model_dump(mode="json"), self._sources)

    def compared_value(self, key: str, value: Any) -> Any:
        """One value of the declaration, as JSON, in the same form."""
        return as_compared(value, self._sources, key)

    @property
    def may_skip(self) -> bool:
        """True where a step that is not finite is left out; a loss scale finds its size by such steps."""
        return self.on_nonfinite == "skip" or self.precision.loss_scale is not None

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


def _mistake(key: str, what: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("choice", "{what}", {"what": what, "key": key, "fix": fix})
