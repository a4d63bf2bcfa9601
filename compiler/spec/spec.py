"""RunSpec: the typed, frozen declaration of a run. Each default is written once, in `conf/`.

Quantities end in their unit, counts start with `num_`, batch sizes are global unless they say otherwise.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, get_args

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

from meshloom.models import ModelConfig
from meshloom.models.config import Config

from ..core.config_types import CachePlace, CheckpointPlace, FloatType, Fraction, LocalPath, NumBytes, Seed, Text
from ..core.errors import use_one_of
from ..optim.contract import OptimizerConfig, ScheduleConfig
from .calibration_spec import Calibration
from .data_spec import DataSpec, ShardsSpec
from .launch_spec import LaunchSpec
from .logging_spec import LoggingSpec
from .overlap_spec import OverlapSpec, StrategyChoice
from .secrets import Sources, as_compared, as_written
from .target_spec import TargetSpec
from .tune_spec import TuneSpec

# The axes that rules may name. Slowest link first: replicas across slices, tensor shards on neighbouring chips.
MeshAxis = Literal["replica", "data", "fsdp", "context", "expert", "tensor"]
TokenOrderName = Literal["zigzag", "contiguous"]
RematPolicy = Literal["none", "full", "save_dots", "save_names", "offload"]


def _axis_size(size: int) -> int:
    if size == -1 or size >= 1:
        return size
    raise PydanticCustomError("axis_size", "{size} is not a valid axis size", {"size": size, "fix": "use 1 or more, or -1 for all remaining devices"})  # fmt: skip  # noqa: E501


def _each_once(axes: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(axes)) == len(axes):
        return axes
    raise PydanticCustomError(
        "twice", "{axes} names a mesh axis twice", {"axes": ", ".join(axes), "fix": "name it once"}
    )


def _placed_axis(entry: str) -> str:
    """Returns "fsdp", or "expert:2x2", an axis with the block of chips that its devices are."""
    axis, colon, block = entry.partition(":")
    if axis not in get_args(MeshAxis):
        context = {"what": f"there is no mesh axis '{axis}'", "fix": use_one_of(axis, get_args(MeshAxis))}
        raise PydanticCustomError("choice", "{what}", context)
    if colon and not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", block):
        context = {
            "what": f"'{block}' is no block of chips",
            "fix": f"write {axis}:2x2, chips along x and y, or {axis}:2x2x1",
        }
        raise PydanticCustomError("choice", "{what}", context)
    return entry


def _each_axis_once(entries: tuple[str, ...]) -> tuple[str, ...]:
    _each_once(tuple(entry.partition(":")[0] for entry in entries))
    return entries


def _compiler_option(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**63):
        return value
    context = {
        "what": f"{value} is not true, false, a number of 64 bits or text",
        "fix": "give a value of the option's type",
    }
    raise PydanticCustomError("choice", "{what}", context)


CompilerOption = Annotated[bool | int | float | str, BeforeValidator(_compiler_option)]
AxisSize = Annotated[int, AfterValidator(_axis_size)]
PlacedAxis = Annotated[str, AfterValidator(_placed_axis)]


class MeshSpec(Config):
    """Devices along each mesh axis; one of them may be -1: all remaining devices. replica: None: one for each slice of
    the target, two in a single slice. stage: of a pipeline; no key offers it before pipelines are implemented."""

    replica: AxisSize | None
    data: AxisSize
    fsdp: AxisSize
    stage: AxisSize = Field(default=1, repr=False)
    context: AxisSize
    expert: AxisSize
    tensor: AxisSize


class Rule(Config):
    """Dimensions with one of these logical axes are sharded over these mesh axes (none: replicated).

    alternatives: where the target's compiler handles shards of one of them badly, the dimensions of the array that may
    be sharded instead (docs/sharding.md).
    """

    logical: Annotated[tuple[Text, ...], Field(min_length=1)]
    mesh: Annotated[tuple[MeshAxis, ...], AfterValidator(_each_once)]
    alternatives: tuple[Text, ...] = ()


class ShardingSpec(Config):
    """Ordered rules per kind of array: each dimension takes the first matching rule whose mesh axes are free.

    mesh_axes: the mesh axes that rules split over, which leave out all others; null: all that they name. optimizer: the
    rules of what does not lie as its parameter; once validated, those of everything else follow. gradients: the table
    that gradients are laid out by while they are accumulated. If the optimizer's splits more than the parameters',
    `parameters` sums whole gradients and splits them once per step (ZeRO-1), and `optimizer` splits each gradient as
    soon as it is computed (ZeRO-2).
    """

    mesh_axes: Annotated[tuple[MeshAxis, ...], AfterValidator(_each_once)] | None = None
    parameters: tuple[Rule, ...]
    gradients: Literal["parameters", "optimizer"]
    optimizer: tuple[Rule, ...]  # optimizer state and master weights; never split less than the parameters
    activations: tuple[Rule, ...]
    replicated_bytes_threshold: NumBytes  # the largest parameter, or its state, that may be replicated on every device
    on_replicated: Literal["error", "warn", "allow"]  # if one is larger

    @model_validator(mode="after")
    def _complete(self) -> Self:
        parameters = rules_over(self.parameters, self.mesh_axes)
        optimizer = with_rules_of_others(rules_over(self.optimizer, self.mesh_axes), parameters)
        activations = rules_over(self.activations, self.mesh_axes)
        tables = {"parameters": parameters, "optimizer": optimizer, "activations": activations}
        return self.model_copy(update=tables)


def rules_over(rules: tuple[Rule, ...], mesh_axes: tuple[MeshAxis, ...] | None) -> tuple[Rule, ...]:
    """Returns a table of rules without the other mesh axes; what no rule splits then is whole. None: the table.

    [embed -> fsdp, expert; mlp -> tensor; layers -> whole] over (data, fsdp) is [embed -> fsdp; layers, mlp -> whole].
    """
    if mesh_axes is None:
        return rules
    kept: list[Rule] = []
    for rule in rules:
        mesh = tuple(axis for axis in rule.mesh if axis in mesh_axes)
        last = kept[-1] if kept else None
        if rule.mesh and not mesh:
            continue
        if (
            last
            and last.mesh == mesh
            and (mesh != rule.mesh or last not in rules or set(rule.logical) <= set(last.logical))
        ):  # what told them apart is left out
            kept[-1] = _of_these_too(last, rule.logical)
        else:
            kept.append(rule.model_copy(update={"mesh": mesh}))
    named = {name for rule in kept for name in rule.logical}
    whole = tuple(dict.fromkeys(name for rule in rules for name in rule.logical if name not in named))
    if whole:
        last = kept.pop() if kept and not kept[-1].mesh else Rule(logical=whole, mesh=())
        kept.append(_of_these_too(last, whole))
    return tuple(kept)


def _of_these_too(rule: Rule, logical: tuple[str, ...]) -> Rule:
    return rule.model_copy(update={"logical": tuple(dict.fromkeys((*rule.logical, *logical)))})


def with_rules_of_others(rules: tuple[Rule, ...], others: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns the rules, and after them those of other logical axes: [embed -> data] and [embed, mlp -> whole] are
    [embed -> data; mlp -> whole]."""
    if not rules:
        return others
    named = {name for rule in rules for name in rule.logical}
    left = [(rule, tuple(name for name in rule.logical if name not in named)) for rule in others]
    return (*rules, *(rule.model_copy(update={"logical": names}) for rule, names in left if names))


class LossScaleSpec(Config):
    """Dynamic loss scaling: Micikevicius et al. 2018, arXiv:1710.03740. The loss is multiplied by a scale, so that
    small gradients are not lost in float16. If a gradient overflows, the update is skipped and the scale is lowered."""

    initial: PositiveFloat
    growth_factor: Annotated[float, Field(ge=1)]
    growth_interval: PositiveInt  # updates without an overflow until the scale grows
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]


class PrecisionSpec(Config):
    parameters: FloatType  # as stored and saved, and read by the forward pass
    master: Literal["float32"] | None  # the updated weights, laid out as optimizer state; None: the parameters
    compute: Literal["float32", "bfloat16", "float16"]  # parameters are cast to it once per step, and gathered in it
    gradients: FloatType  # the type in which they are accumulated over layers' uses and microbatches
    gradient_reduction: FloatType  # the type in which gradients are reduced over the network
    frozen: FloatType | None  # the type in which frozen parameters are stored; None: as the others
    loss_scale: LossScaleSpec | None  # for float16 only

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.master == self.parameters:
            raise _mistake("master", "parameters in float32 need no master copy", "set precision.master=null")
        if self.compute == "float16" and self.loss_scale is None:
            what = "float16 loses small gradients without a loss scale"
            raise _mistake("loss_scale", what, "choose precision=float16, or precision.compute=bfloat16")
        if self.compute != "float16" and self.loss_scale is not None:
            what = f"a loss scale is only for float16, and precision.compute is {self.compute}"
            raise _mistake("loss_scale", what, "set precision.loss_scale=null, or precision.compute=float16")
        return self


class RematSpec(Config):
    """Rematerialisation saves some results of a layer's forward pass for the backward pass, and recomputes the rest."""

    policy: RematPolicy  # of every stack of layers
    stacks: dict[str, RematPolicy]  # of single stacks, by name
    names: tuple[Text, ...]  # the activations that save_names saves and offload moves to host memory

    @model_validator(mode="after")
    def _check(self) -> Self:
        used = [policy for policy in (self.policy, *self.stacks.values()) if policy in ("save_names", "offload")]
        if used and not self.names:
            what = f"is empty, and {used[0]} saves activations by name"
            raise _mistake("names", what, "set remat.names=[...], such as [attended, hidden]")
        if self.names and not used:
            what = f"names {', '.join(self.names)}, but the policy {self.policy} saves no activations by name"
            raise _mistake("names", what, "set remat.names=[], or choose remat=save_names or remat=offload")
        return self


class LossSpec(Config):
    """Mean cross-entropy per target, in float32."""

    z_loss_weight: NonNegativeFloat  # weight of log(z)^2, which keeps logits from drifting (PaLM: 1e-4); 0: off
    # Float32 logits held at once per device are limited to the larger of the two; the head runs on chunks of that size.
    max_logits_bytes: NumBytes
    max_logits_share: Fraction  # of a device's memory


class MoeSpec(Config):
    """Tokens are sent to experts by these limits (docs/experts.md)."""

    max_imbalance: Annotated[float, Field(ge=1)] | None  # rows of a buffer, over the mean; None: for any imbalance
    capacity_factor: PositiveFloat  # parallel.experts=capacity: rows of an expert, over the mean
    num_chunks: PositiveInt  # of a device's tokens: one is sent while another's experts run


class CheckpointSpec(Config):
    """When checkpoints are saved, and which are retained: those that any of the three retention keys selects.

    Without an interval, in steps or minutes, nothing is saved, not even at the end.
    """

    every_num_steps: PositiveInt | None
    every_num_minutes: PositiveFloat | None  # whenever the last one is this old
    keep: PositiveInt  # the latest ones
    keep_best: NonNegativeInt  # the ones with the lowest held-out loss
    keep_every_num_steps: PositiveInt | None  # the ones whose step is a multiple of this
    directory: CheckpointPlace | None  # a path, gs:// or s3://; None: RUN_DIR/checkpoints
    restore_from: CheckpointPlace | None  # RUN_DIR, or a folder of checkpoints, or one of them, to start from

    @property
    def is_saving(self) -> bool:
        return self.every_num_steps is not None or self.every_num_minutes is not None


class DistributedSpec(Config):
    """The processes of the run, each with its part of the devices, and how they find each other."""

    cluster: Literal["auto", "none", "slurm", "ompi", "mpi4py", "gketpu", "gcetpu"]  # what started them, by JAX's names
    coordinator_address: Text | None  # host:port that process 0 opens for the others; None: as the cluster says
    num_processes: PositiveInt | None
    process_id: NonNegativeInt | None  # of this process
    local_device_ids: tuple[NonNegativeInt, ...] | None  # GPUs of this process; None: all, or one under SLURM, Open MPI
    initialization_timeout_seconds: PositiveInt  # to wait until all have connected
    compile_timeout_seconds: PositiveInt  # how long the first process to finish compiling waits for the last
    heartbeat_timeout_seconds: PositiveInt  # without a heartbeat for this long, a process counts as dead
    shutdown_timeout_seconds: PositiveInt  # to wait until all have finished


class SweepSpec(Config):
    """Settings of `-m` that hold for every launcher."""

    objective: Text | None  # the figure that its table is sorted by; None: step_seconds, of training final_loss
    retry: tuple[
        Literal["failed", "aborted", "timed_out", "out_of_memory"], ...
    ]  # points that the same command runs again


class EvaluationSpec(Config):
    every_num_steps: PositiveInt
    num_batches: PositiveInt  # always the same batches


class CompileSpec(Config):
    """timeout_seconds: what the compiler may take for one program of `meshloom compile`; None: what it takes."""

    timeout_seconds: PositiveInt | None


class WatchdogSpec(Config):
    """A step may take factor times the median of the steps before it, and min_seconds at least."""

    factor: PositiveFloat
    min_seconds: PositiveFloat
    abort: bool  # end the processes, so that what launched them starts the run again


def _first_and_last(steps: tuple[int, ...]) -> tuple[int, ...]:
    if len(steps) == 2 and steps[0] <= steps[1]:
        return steps
    what = f"[{', '.join(map(str, steps))}] is not a first and a last step"
    fix = "give both, such as [10,13]: steps 10, 11, 12 and 13"
    raise PydanticCustomError("choice", "{what}", {"what": what, "fix": fix})


class StragglersSpec(Config):
    """every_num_steps: how often processes tell process 0 of their times. cost_share: of a step; a process that costs
    more is named."""

    every_num_steps: PositiveInt
    cost_share: PositiveFloat


class ReplaySpec(Config):
    """Steps that run again from the state before them, which is kept for it.

    spike_factor: with `on_nonfinite=replay`, how many times the median of the losses before it makes a loss suspect.
    check_every_num_steps: how often a step that is not suspect runs twice, and replicas of the state are compared.
    """

    spike_factor: Annotated[float, Field(gt=1)]
    check_every_num_steps: PositiveInt | None


class ProfileSpec(Config):
    """steps: the first and the last step of a trace, by the numbers in metrics.jsonl."""

    steps: Annotated[tuple[PositiveInt, ...], AfterValidator(_first_and_last)] | None


class RunLabels(Config):
    """The names and notes of a run are saved, logged and shown, but are not part of any program."""

    name: Text | None  # also in the name of its job, if it is launched
    tags: tuple[Text, ...]
    notes: Text | None
    extra: dict[str, Any]  # a user's own keys


@dataclass(frozen=True)
class Origin:
    """The command line that a declaration came from: its overrides, an extra folder of configs, and modules whose code
    it may run. It is not part of the declaration: any two compare equal. overrides: None if the declaration was not
    typed.
    """

    overrides: tuple[str, ...] | None = field(default=None, compare=False)
    config_dir: str | None = field(default=None, compare=False)
    code_allowed_from: tuple[str, ...] = field(default=(), compare=False)


class RunSpec(Config):
    """A whole run. `global_batch_size` is in sequences, over all devices and microbatches."""

    model: ModelConfig
    target: TargetSpec
    calibration: Calibration
    mesh: MeshSpec
    sharding: ShardingSpec
    precision: PrecisionSpec
    remat: RematSpec
    overlap: OverlapSpec
    loss: LossSpec
    moe: MoeSpec
    parallel: dict[Text, StrategyChoice]  # by operation (compiler/parallel/registry.py)
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    data: DataSpec
    shards: ShardsSpec
    checkpoint: CheckpointSpec
    distributed: DistributedSpec
    logging: LoggingSpec
    evaluation: EvaluationSpec
    sweep: SweepSpec
    frozen_parameters: tuple[Text, ...]  # patterns of paths, such as embed/*: no gradient and no update
    on_nonfinite: Literal["stop", "skip", "replay"]  # for a step whose loss or gradient norm is not finite: no update,
    # or run again to tell the data from the hardware
    num_skips_allowed: NonNegativeInt  # in a row, if such steps are skipped
    on_out_of_memory: Literal["refuse", "try"]  # if a run needs more memory than there is
    compilation_cache: CachePlace | None  # directory of compiled programs; None: compile at each start
    compile: CompileSpec
    compiler_options: dict[str, CompilerOption]  # by XLA's names
    artifact: LocalPath | None  # a compiled train step to load instead of compiling
    seed: Seed
    num_steps: PositiveInt
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    token_order: TokenOrderName  # of the tokens of a sequence, where mesh axes split its length
    # Mesh axes, nearest devices first; with a colon the block of chips that an axis is: expert:2x2
    device_order: Annotated[tuple[PlacedAxis, ...], AfterValidator(_each_axis_once)]
    num_microbatches: PositiveInt
    tune: TuneSpec  # what `meshloom tune` searches
    launch: LaunchSpec  # how `meshloom launch` starts the run on its hosts
    watchdog: WatchdogSpec | None  # None: a run that hangs is not noticed
    stragglers: StragglersSpec | None  # None: processes do not tell of their times
    replay: ReplaySpec
    profile: ProfileSpec
    run: RunLabels

    _sources: Sources = PrivateAttr(default_factory=dict)  # of values that came from the environment
    _origin: Origin = PrivateAttr(default=Origin())

    def with_sources(self, sources: Sources) -> Self:
        """Returns the declaration with the sources of its values, so that values from the environment are not
        written."""
        copied = self.model_copy()
        copied._sources = sources
        return copied

    def with_origin(self, origin: Origin) -> Self:
        """Returns the declaration with its origin."""
        copied = self.model_copy()
        copied._origin = origin
        return copied

    @property
    def origin(self) -> Origin:
        """Returns how the declaration was typed."""
        return self._origin

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns the same with other values; the typed overrides then no longer declare it."""
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._origin = replace(self._origin, overrides=None)
        return copied

    def as_written(self) -> dict[str, Any]:
        """Returns the declaration as JSON values for files and people, with `${oc.env:TOKEN}` instead of its value."""
        return as_written(self.model_dump(mode="json"), self._sources)

    def as_compared(self) -> dict[str, Any]:
        """Returns the declaration as JSON values that are equal exactly if the declarations are, with digests of
        secrets."""
        return as_compared(self.model_dump(mode="json"), self._sources)

    def compared_value(self, key: str, value: Any) -> Any:
        """Returns one value of the declaration in the same form."""
        return as_compared(value, self._sources, key)

    @property
    def may_skip(self) -> bool:
        """Returns True if a non-finite step is skipped; a loss scale always skips them, to find its size."""
        return self.on_nonfinite == "skip" or self.precision.loss_scale is not None

    @property
    def keeps_state(self) -> bool:
        """Returns True if the state before a step is kept until it is known what came of the step."""
        return self.on_nonfinite == "replay" or self.replay.check_every_num_steps is not None

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


def _mistake(key: str, what: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("choice", "{what}", {"what": what, "key": key, "fix": fix})
