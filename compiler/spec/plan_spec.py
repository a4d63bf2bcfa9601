"""PlanSpec: all that the compiler reads of a declaration: its step, the devices that it is compiled for, and what is
judged and searched."""

import re
from typing import Annotated, get_args

from pydantic import AfterValidator, Field
from typing_extensions import TypeVar

from meshloom.models.config import Config, mistake

from ..core.config_types import CompilerOption
from ..core.errors import use_one_of
from .overlap_spec import OverlapSpec
from .sharding_spec import MeshAxis, ShardingSpec, each_once
from .step_spec import StepSpec
from .target_spec import TargetSpec
from .tune_spec import TuneSpec


def _axis_size(size: int) -> int:
    if size == -1 or size >= 1:
        return size
    raise mistake(f"{size} is not a valid axis size", "use 1 or more, or -1 for all remaining devices")


def _placed_axis(entry: str) -> str:
    """Returns "fsdp", or "expert:2x2", an axis with the block of chips that its devices are."""
    axis, colon, block = entry.partition(":")
    if axis not in get_args(MeshAxis):
        raise mistake(f"there is no mesh axis '{axis}'", use_one_of(axis, get_args(MeshAxis)))
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
    the target, two in a single slice. stage: of a pipeline; no key offers it before pipelines are implemented."""

    replica: AxisSize | None
    data: AxisSize
    fsdp: AxisSize
    stage: AxisSize = Field(default=1, repr=False)
    context: AxisSize
    expert: AxisSize
    tensor: AxisSize


class PlanSpec(StepSpec):
    """A step with its place: what a plan is made from."""

    target: TargetSpec
    mesh: MeshSpec
    # Mesh axes, nearest devices first; with a colon the block of chips that an axis is: expert:2x2
    device_order: Annotated[tuple[PlacedAxis, ...], AfterValidator(_each_axis_once)]
    sharding: ShardingSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    overlap: OverlapSpec  # pyright: ignore[reportIncompatibleVariableOverride] (frozen)
    compiler_options: dict[str, CompilerOption]  # by XLA's names
    tune: TuneSpec  # what `meshloom tune` searches


AnyPlanSpec = TypeVar("AnyPlanSpec", bound=PlanSpec, default=PlanSpec, covariant=True)  # a PlanSpec, or one with more
