"""RunSpec: the whole declaration of a run. Each default is written once, in `conf/`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from meshloom.models.config import Config, mistake

from ..core.config_types import CachePlace, CheckpointPlace, LocalPath, Text, WeightsPlace
from ..core.errors import use_one_of
from ..core.places import PUBLISHED, is_published
from ..spec.plan_spec import PlanSpec
from ..spec.step_spec import ReplayCheck
from .data_spec import DataSpec, ShardsSpec
from .launch_spec import LaunchSpec
from .sections import EvaluationSpec, ExportSpec, GenerateSpec

TRACKERS = ("tensorboard", "wandb", "mlflow")


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in TRACKERS and ":" not in name:
            raise mistake(f"there is no '{name}'", use_one_of(name, [*TRACKERS, "module:Class"]))
    if twice := {name for name in names if names.count(name) > 1}:
        raise mistake(f"'{min(twice)}' comes twice", "name each once")
    return names


class WandbSpec(Config):
    """Weights & Biases. entity None: WANDB_ENTITY, or the account's own. offline: the run stays in the run
    directory."""

    project: Text
    entity: Text | None
    mode: Literal["online", "offline", "shared", "disabled"]  # what WANDB_MODE may be


class MlflowSpec(Config):
    """MLflow. uri: of its server; None: a file in the run directory."""

    uri: Text | None
    experiment: Text


class LoggingSpec(Config):
    every_num_steps: PositiveInt  # for plain lines without a terminal; every step goes to metrics.jsonl
    trackers: Annotated[tuple[Text, ...], AfterValidator(_known)]  # besides metrics.jsonl; a user's as module:Class
    layer_metrics: Literal["mean", "each"]  # of what layers return: the mean over a stack's layers, or a value of each
    wandb: WandbSpec
    mlflow: MlflowSpec


class CheckpointSpec(Config):
    """When checkpoints are saved, and which are retained: those that any of the three retention keys selects.

    Without an interval, in steps or minutes, nothing is saved, not even at the end.
    """

    every_num_steps: PositiveInt | None
    every_num_minutes: PositiveFloat | None  # when the last one is this old
    keep: PositiveInt  # the latest ones
    keep_best: NonNegativeInt  # the ones with the lowest held-out loss
    keep_every_num_steps: PositiveInt | None  # the ones whose step is a multiple of this
    directory: CheckpointPlace | None  # a path, gs:// or s3://; None: RUN_DIR/checkpoints
    restore_from: WeightsPlace | None  # RUN_DIR, or a folder of checkpoints, or one of them, to continue from
    weights_from: WeightsPlace | None  # the same, or hf:DIR: a new run starts from its weights alone
    base_from: WeightsPlace | None  # the base of the adapter that is continued or opened; None: where it was
    weights_skip: tuple[Text, ...]  # patterns of parameters, or of tensors in files, that are not taken from there

    @property
    def is_saving(self) -> bool:
        return self.every_num_steps is not None or self.every_num_minutes is not None

    @property
    def continued(self) -> str | None:
        """Returns the run or checkpoint that this run continues; None without one."""
        return None if self.restore_from is None or is_published(self.restore_from) else self.restore_from

    @property
    def weights(self) -> str | None:
        """Returns the place whose weights a new run starts from; None if they are drawn. Published weights have no
        step and no optimizer, so that to restore from them is to start from them."""
        return self.weights_from if self.weights_from or self.continued else self.restore_from

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights_from and self.restore_from:
            what = "a run continues checkpoint.restore_from, or starts anew from the weights of checkpoint.weights_from"
            raise mistake(what, "set one of them to null", "weights_from")
        if self.weights_skip and not self.weights:
            what = f"[{', '.join(self.weights_skip)}] leaves out weights, and none are read"
            raise mistake(
                what, f"set checkpoint.weights_from to RUN_DIR or {PUBLISHED}DIR, or leave it out", "weights_skip"
            )
        return self


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


class CompileSpec(Config):
    """timeout_seconds: the most time of the compiler for one program of `meshloom compile`; None: no limit."""

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
    raise mistake(what, fix)


class StragglersSpec(Config):
    """every_num_steps: how often processes report their times to process 0. cost_share: the share of a step that a
    process may cost the others; one that costs more is named."""

    every_num_steps: PositiveInt
    cost_share: PositiveFloat


class ReplaySpec(ReplayCheck):
    """Steps that run again from the state before them, which is saved for that.

    spike_factor: with `on_nonfinite=replay`, how many times the median of the losses before it makes a loss suspect.
    check_every_num_steps: how often a step that is not suspect runs twice, and replicas of the state are compared.
    """

    spike_factor: Annotated[float, Field(gt=1)]


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
    typed. predicts: as in a `Request`.
    """

    overrides: tuple[str, ...] | None = field(default=None, compare=False)
    config_dir: str | None = field(default=None, compare=False)
    code_allowed_from: tuple[str, ...] = field(default=(), compare=False)
    predicts: bool = field(default=False, compare=False)


class RunSpec(PlanSpec):
    """A whole run: its step, its place, and how the runtime runs it."""

    data: DataSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    shards: ShardsSpec
    checkpoint: CheckpointSpec
    distributed: DistributedSpec
    logging: LoggingSpec
    evaluation: EvaluationSpec
    sweep: SweepSpec
    num_skips_allowed: NonNegativeInt  # in a row, if such steps are skipped
    on_out_of_memory: Literal["refuse", "try"]  # if a run needs more memory than there is
    compilation_cache: CachePlace | None  # directory of compiled programs; None: compile at each start
    compile: CompileSpec
    artifact: LocalPath | None  # a compiled train step to load instead of compiling
    export: ExportSpec  # of `meshloom export`
    generate: GenerateSpec  # of `meshloom generate`
    launch: LaunchSpec  # how `meshloom launch` starts the run on its hosts
    watchdog: WatchdogSpec | None  # None: a run that hangs is not noticed
    stragglers: StragglersSpec | None  # None: processes do not report their times
    replay: ReplaySpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    profile: ProfileSpec
    run: RunLabels

    _origin: Origin = PrivateAttr(default=Origin())
    _counts_epochs: bool = PrivateAttr(default=False)
    _chosen_here: str | None = PrivateAttr(default=None)

    def counting_epochs(self) -> Self:
        """Returns the declaration whose number of steps is counted when its data are open; until then, it is a
        guess."""
        copied = self.model_copy()
        copied._counts_epochs = True
        return copied

    @property
    def counts_epochs(self) -> bool:
        """Returns True if `num_steps` is to be counted from `data.num_epochs`."""
        return self._counts_epochs

    def choosing_here(self, line: str | None) -> Self:
        """Returns the declaration with a line that says what was chosen for this machine."""
        copied = self.model_copy()
        copied._chosen_here = line
        return copied

    @property
    def chosen_here(self) -> str | None:
        """Returns the line that says what was chosen for this machine; None if nothing was."""
        return self._chosen_here

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
            copied._counts_epochs = self._counts_epochs and "num_steps" not in update
        return copied
