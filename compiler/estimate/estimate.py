"""Estimates of a step without a compiler: peak memory, communication, and the bound of each part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..core.kernels import RatedBy
from ..core.known import Unknown, all_known, each_known, or_unknown
from ..figures import StepFigures
from ..jaxpr.unknown import UnknownPrimitive
from ..plan import Plan
from ..schema import RooflinePart
from ..spec.overlap_spec import OverlapSpec
from ..target.accuracy import ProgramKind, kinds_in_types, range_figures
from ..target.target import TargetPlan
from .communication import PlannedCollective, plan_communication
from .estimated_step import plan_assumed, read_step
from .liveness import MemoryClass, find_peak, host_bytes
from .regions import matmul_types, price_regions
from .roofline import NO_RATES, find_unknown, plan_roofline
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
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        moving = self.working_parameters + self.gathered_weights + self.gradients + self.activations + self.temporaries
        return self.state_bytes + self.batch_bytes + moving


@dataclass(frozen=True)
class StepEstimate:
    """The estimate of a step. unknown: primitives of the step whose arithmetic, traffic, layout or number of executions
    is not known. overlap: the overlap of the estimated step. kernels: what the rates of its kernels depend on.
    stage_buffers: those of a pipeline's stages."""

    memory: MemoryEstimate
    communication: tuple[PlannedCollective, ...]
    roofline: tuple[RooflinePart, ...]
    figures: StepFigures
    unknown: tuple[UnknownPrimitive, ...]
    overlap: OverlapSpec
    kernels: frozenset[RatedBy] = frozenset()
    stage_buffers: tuple[StageBuffer, ...] = ()


def why_uncounted(unknown: Sequence[UnknownPrimitive]) -> str | None:
    """Returns the primitives that are not counted, with their places; None if there are none."""
    return "; ".join(str(one) for one in unknown if one.why) or None


def memory_figures(
    target: TargetPlan,
    peak: int | Unknown,
    host: int | Unknown,
    *,
    limit: int | None = None,
    fits: bool | Unknown | None = None,
) -> dict[str, Any]:
    """Returns the figures of memory, as StepFigures has them. peak, host, limit: bytes of a device; the target has the
    limit if none is given. fits: if the compiler says it."""
    per_chip = target.used_devices_per_chip
    most = or_unknown(target.hbm_bytes_per_device if limit is None else limit, NO_LIMIT)
    host_limit = or_unknown(target.host_bytes_per_device, HOST_UNKNOWN)

    def of_chip(of_device: int | Unknown) -> int | Unknown:
        return each_known(of_device, lambda count: count * per_chip)

    return {
        "peak_bytes": of_chip(peak),
        "limit_bytes": of_chip(most),
        "fits": all_known((peak, most), lambda both: both[0] <= both[1]) if fits is None else fits,
        "host_bytes": of_chip(host),
        "host_limit_bytes": of_chip(host_limit),
        "host_fits": True if host == 0 else all_known((host, host_limit), lambda both: both[0] <= both[1]),
    }


def time_figures(target: TargetPlan, kinds: Sequence[ProgramKind], time: StepTime[float] | Unknown) -> dict[str, Any]:
    """Returns the figures of an estimated time, as StepFigures has them. kinds: of the program."""
    return range_figures(target, kinds, each_known(time, lambda time: time.seconds), "estimated") | {
        "step_seconds": each_known(time, lambda time: time.seconds),
        "compute_seconds": each_known(time, lambda time: time.compute_seconds),
        "exposed_seconds": each_known(time, lambda time: time.exposed_seconds),
        "bubble_seconds": each_known(time, lambda time: time.bubble_seconds),
        "exposed_by_axes": {"+".join(axes): seconds for axes, seconds in time.exposed.items()} if time else {},
    }


def estimate_step(plan: Plan) -> StepEstimate:
    """Returns the estimate of a plan's step. It traces the step, which takes a second or two and no devices.

    Where the overlap is left to a search, memory, communication and time are those of the step that the search is
    expected to find.
    """
    return estimate_declared(plan_assumed(plan))


def estimate_declared(plan: Plan) -> StepEstimate:
    """Returns the estimate of the plan's own program, from which a search begins."""
    read = read_step(plan)
    step = price_regions(read, plan.target.compiler)
    peak = find_peak(step)
    memory = MemoryEstimate(
        plan.memory.state_bytes,
        plan.memory.batch,
        **{name: peak.num_bytes.get(name, 0) for name in get_args(MemoryClass)},
        part=peak.at,
        host_bytes=plan.memory.on_host + host_bytes(step),
    )
    unknown = find_unknown(plan.model.stacks, step)
    why = why_uncounted(unknown)
    time = Unknown(why) if why else or_unknown(estimate_time(plan, step), NO_RATES.why)
    figures = StepFigures(
        **memory_figures(plan.target, memory.peak_bytes, memory.host_bytes),
        **time_figures(plan.target, kinds_in_types(plan.kinds, matmul_types(step)), time),
    ).rated(plan.work)
    communication = plan_communication(plan, step)
    roofline = plan_roofline(plan.model.stacks, plan.mesh, step, why)
    buffers = read_stage_buffers(plan.pipeline.table, step) if plan.pipeline else ()
    kernels = frozenset(each.rated_by for each in read.walk() if each.rated_by is not None)
    return StepEstimate(memory, communication, roofline, figures, unknown, plan.spec.overlap, kernels, buffers)
