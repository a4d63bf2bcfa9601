"""Estimates of a step without a compiler: peak memory, communication, and the bound of each part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart
from ..spec.overlap_spec import OverlapSpec
from .communication import PlannedCollective, plan_communication
from .estimated_step import plan_assumed, read_step
from .liveness import MemoryClass, find_peak, host_bytes
from .regions import price_regions
from .roofline import find_unknown, plan_roofline
from .stage_buffers import StageBuffer, read_stage_buffers
from .step_time import StepTime, estimate_time

NO_LIMIT = "the chip's memory is not known"
HOST_UNKNOWN = "the memory of the target's hosts is not known (target.chip.host_bytes)"


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes of a device at the peak of a step.

    state_bytes, batch_bytes: exact; they are always allocated. The other classes: the bytes that live at the peak
    besides these; a class may be larger at another moment. part: the scope of the operation at the peak. host_bytes: a
    device's arrays in host memory, which are not part of the peak.
    """

    state_bytes: int
    batch_bytes: int
    working_parameters: int
    gathered_weights: int
    gradients: int
    activations: int
    temporaries: int
    part: str
    limit_bytes: int | None  # what a program may use; None: unknown
    host_bytes: int
    host_limit_bytes: int | None  # a device's share of the host's memory; None: unknown

    @property
    def peak_bytes(self) -> int:
        moving = self.working_parameters + self.gathered_weights + self.gradients + self.activations + self.temporaries
        return self.state_bytes + self.batch_bytes + moving

    @property
    def fits(self) -> bool | None:
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    @property
    def host_fits(self) -> bool | None:
        return fits_host(self.host_bytes, self.host_limit_bytes)


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of a step. time: None where figures of the target, or the arithmetic of an operation, are not known.
    unknown: primitives of the step whose arithmetic, traffic, layout or number of executions is not known. overlap: the
    overlap of the estimated step. stage_buffers: those of a pipeline's stages."""

    memory: MemoryEstimate
    communication: tuple[PlannedCollective, ...]
    roofline: tuple[RooflinePart, ...]
    time: StepTime[float] | None
    unknown: tuple[UnknownPrimitive, ...]
    overlap: OverlapSpec
    stage_buffers: tuple[StageBuffer, ...] = ()

    @property
    def why_uncounted(self) -> str | None:
        """Returns why the step's bound is incomplete; None if every operation is counted."""
        return why_uncounted(self.unknown)


def why_uncounted(unknown: Sequence[UnknownPrimitive]) -> str | None:
    """Returns the primitives that are not counted, with their places; None if there are none."""
    return "; ".join(str(one) for one in unknown if one.why) or None


def fits_host(num_bytes: int, limit_bytes: int | None) -> bool | None:
    """Returns whether arrays fit in host memory; None if its size is unknown and there are any."""
    return True if num_bytes == 0 else None if limit_bytes is None else num_bytes <= limit_bytes


def estimate_step(plan: Plan) -> StepEstimate:
    """Returns the estimate of a plan's step. It traces the step, which takes a second or two and no devices.

    Where the overlap is left to a search, memory, communication and time are those of the step that the search is
    expected to find.
    """
    return estimate_declared(plan_assumed(plan))


def estimate_declared(plan: Plan) -> StepEstimate:
    """Returns the estimate of the plan's own program, from which a search begins."""
    step = price_regions(read_step(plan), plan.target.compiler)
    peak = find_peak(step)
    memory = MemoryEstimate(
        plan.memory.state_bytes,
        plan.memory.batch,
        **{name: peak.num_bytes.get(name, 0) for name in get_args(MemoryClass)},
        part=peak.at,
        limit_bytes=plan.target.hbm_bytes_per_device,
        host_bytes=host_bytes(step),
        host_limit_bytes=plan.target.host_bytes_per_device,
    )
    unknown = find_unknown(plan.model.stacks, step)
    time = None if any(one.why for one in unknown) else estimate_time(plan, step)
    communication = plan_communication(plan, step)
    roofline = plan_roofline(plan.model.stacks, plan.mesh, step, why_uncounted(unknown))
    buffers = read_stage_buffers(plan.pipeline.table, step) if plan.pipeline else ()
    return StepEstimate(memory, communication, roofline, time, unknown, plan.spec.overlap, buffers)
