"""PlanSpec: all that the compiler reads of a declaration: its step, the devices that it is compiled for, and what is
judged and searched."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from typing_extensions import TypeVar

from meshloom.models.config import Config, mistake

from ..core.config_types import CompilerOption, Text
from ..core.errors import use_one_of
from ..core.partition_spec import STAGE
from .overlap_spec import OverlapSpec
from .pipeline_spec import PipelineSpec
from .sharding_spec import MeshAxis, ShardingSpec, each_once
from .step_spec import StepSpec
from .target_spec import TargetSpec

Objective = Literal["step_time", "cost", "memory"]


def _number_of_tokens(value: Any) -> Any:
    """Returns 1.5e12 for "1.5T", and any other value unchanged."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", value) if isinstance(value, str) else None
    return float(match[1]) * _TIMES[match[2]] if match else value


_TIMES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
Tokens = Annotated[PositiveFloat, BeforeValidator(_number_of_tokens)]


class TuneSpec(Config):
    """The space of a search, its limits and its objective.

    groups: config groups with the options that are tried: {remat: [full, none]}. mesh: axes with the sizes that are
    tried; null: all that divide the devices. microbatches: the numbers that are tried; null: all that divide. pin:
    pins, by key: {mesh: {tensor: 8}, remat: full, num_microbatches: 4}.
    """

    objective: Objective  # step_time: shortest; cost: cheapest per token; memory: least
    price_per_chip_hour: dict[Text, PositiveFloat]  # by chip, in any currency: {v5p: 4.2}
    max_memory_share: Annotated[float, Field(gt=0, le=1)]  # the share of a device's memory that the estimate may take
    groups: dict[Text, tuple[Text, ...]]
    microbatches: tuple[PositiveInt, ...] | None
    mesh: dict[Text, tuple[PositiveInt, ...] | None]
    device_orders: Literal["declared", "all"]  # all: every device_order that places a mesh otherwise
    pin: dict[Text, Any]
    num_shown: PositiveInt  # the best candidates in the table and the page
    num_compiled: NonNegativeInt  # the best candidates that are compiled, so that their schedules decide
    max_candidates: PositiveInt  # candidates that are listed; in a larger space, Optuna chooses combinations of options
    num_trials: PositiveInt  # combinations of options that Optuna tries
    targets: tuple[Text, ...]  # several targets to compare; empty: the declared one
    tokens: Tokens | None  # tokens of the whole training, for its time and cost: 1.5e12, or 1.5T

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.objective == "cost" and not self.price_per_chip_hour:
            what = "is cost, and no price is known"
            fix = "set tune.price_per_chip_hour={v5p: PRICE}, in any currency"
            raise mistake(what, fix, "objective")
        return self


def _axis_size(size: int) -> int:
    if size == -1 or size >= 1:
        return size
    raise mistake(f"{size} is not a valid axis size", "use 1 or more, or -1 for all remaining devices")


PLACED_AXES = (*get_args(MeshAxis), STAGE)


def _placed_axis(entry: str) -> str:
    """Returns "fsdp", or "expert:2x2": an axis with the block of chips that its devices form."""
    axis, colon, block = entry.partition(":")
    if axis not in PLACED_AXES:
        raise mistake(f"there is no mesh axis '{axis}'", use_one_of(axis, PLACED_AXES))
    if colon and not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", block):
        fix = f"write {axis}:2x2, chips along x and y, or {axis}:2x2x1"
        raise mistake(f"'{block}' is no block of chips", fix)
    return entry


def _each_axis_once(entries: tuple[str, ...]) -> tuple[str, ...]:
    each_once(tuple(entry.partition(":")[0] for entry in entries))
    return entries


AxisSize = Annotated[int, AfterValidator(_axis_size)]
PlacedAxis = Annotated[str, AfterValidator(_placed_axis)]


class MeshSpec(Config):
    """Devices along each mesh axis; one of them may be -1: all remaining devices. replica: None: one for each slice of
    the target, two in a single slice. stage: the stages of a pipeline, each with a part of the layers.
    Axes that can cross slices come in the order in which they do, so that the devices of a slice follow each other."""

    replica: AxisSize | None
    stage: AxisSize
    data: AxisSize
    fsdp: AxisSize
    context: AxisSize
    expert: AxisSize
    tensor: AxisSize


class PlanSpec(StepSpec):
    """A step and its devices: everything that a plan is made from."""

    target: TargetSpec
    mesh: MeshSpec
    # Mesh axes, nearest devices first; after a colon the block of chips that an axis forms: expert:2x2
    device_order: Annotated[tuple[PlacedAxis, ...], AfterValidator(_each_axis_once)]
    sharding: ShardingSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    pipeline: PipelineSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    overlap: OverlapSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    compiler_options: dict[str, CompilerOption]  # by XLA's names
    tune: TuneSpec  # what `meshloom tune` searches


AnyPlanSpec = TypeVar("AnyPlanSpec", bound=PlanSpec, default=PlanSpec, covariant=True)  # a PlanSpec, or one with more
