"""Declares how a pipeline over the mesh axis `stage` runs the layers."""

from typing import Literal

from .narrow import Narrow


class StepPipeline(Narrow):
    """The schedule of a pipeline; without stages of the mesh nothing reads it.

    schedule: one of compiler/pipeline/schedules.py. ticks: the operations of a stage in a tick
    (compiler/pipeline/ticks.py); auto: the form that is predicted to take the least time.
    """

    schedule: Literal["gpipe", "1f1b", "zb_h1", "zb_h2"]
    ticks: Literal["auto", "multi", "unit"]
