"""Declares how a pipeline over the mesh axis `stage` runs the layers."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt

from meshloom.models.config import mistake

from ..core.config_types import Fraction, LocalPath
from .program_keys import ProgramKeys

HeadPlace = Literal["last", "stages"]


def _stage_layers(value: Any) -> Any:
    """Raises one error, where a union would raise one for each of its types."""
    is_list = isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value)
    if value and is_list:
        return tuple(value)
    if value in ("even", "balanced"):
        return value
    raise mistake(f"{value} is not even, balanced or a number of layers for each part", "give one of them")


StageLayersSpec = Annotated[Literal["even", "balanced"] | tuple[NonNegativeInt, ...], BeforeValidator(_stage_layers)]


class StepPipeline(ProgramKeys):
    """The schedule of a pipeline; without stages of the mesh nothing reads it.

    schedule: one of compiler/pipeline/schedules.py. num_chunks: the parts of the model that each stage holds.
    layers: those of each virtual stage (compiler/pipeline/stage_layers.py): as many on each as can be, or fewer on the
    last where that takes less time, or the number on each. ticks:
    the operations of a stage in a tick (compiler/pipeline/table.py); auto: the form that is predicted to take the least
    time, or those of the file. head: whether the last stage runs the head, or each of them with its part of the
    vocabulary (parallel/shared_head.py); auto: what is predicted to take less time. gather: when a stage gathers the
    weights of its layers (parallel/pipeline_plan.py); auto: once per step if the target's memory has room for that.
    table: a schedule of the user's own, instead of `schedule`: a CSV file with its chunks (pipeline/table_file.py), or
    module:Class (pipeline/own_schedule.py).
    """

    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "interleaved_1f1b_breadth_first", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"
    ]
    num_chunks: PositiveInt
    layers: StageLayersSpec
    ticks: Literal["auto", "multi", "unit"]
    head: HeadPlace | Literal["auto"]
    gather: Literal["auto", "step", "use"]
    table: LocalPath | None


class PipelineSpec(StepPipeline):
    """A schedule, and the limit of its bubble."""

    max_bubble: Fraction | None  # share of the predicted step that stages wait for others; compiling fails above it
