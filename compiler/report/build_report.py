"""A compiled program as a Report. What is read in its text comes from outside, as a ScheduleAnalysis and a PeakMemory,
or is unknown."""

from dataclasses import dataclass
from typing import Any, Literal

from ..analysis.exposure import find_too_exposed
from ..analysis.lint import lint
from ..analysis.program_memory import Class, PeakMemory
from ..analysis.program_text import Unread
from ..analysis.schedule_analysis import ScheduleAnalysis
from ..core.format import human_bytes
from ..estimate.estimate import HOST_UNKNOWN, MemoryEstimate, StepEstimate, fits_host
from ..estimate.roofline import roofline_seconds
from ..plan import Plan
from ..schema import (
    SCHEMA_VERSION,
    BuildReport,
    Change,
    MemoryReport,
    ProgramReport,
    Report,
    SearchReport,
    StepReport,
    TargetReport,
)
from ..xla.aot import Built
from ..xla.fingerprint import Fingerprint

TOLD_APART: tuple[Class, ...] = ("working_weights", "gradients", "activations")  # of the temporaries of XLA
NO_PROGRAM = "the compiler refused the program: what it would keep at its peak is not known"
LARGEST_ERROR = 0.1  # of XLA's peak


@dataclass(frozen=True)
class BuildFacts:
    """How the program came to be. cache: whether it was compiled before. model: what its declaration calls it, where it
    has a name (model_choice.py)."""

    fingerprint: Fingerprint
    lower_seconds: float
    cache: Literal["hit", "miss", "off"]
    overrides: tuple[str, ...]
    options_left_out: tuple[str, ...]
    model: str | None


def build_report(
    plan: Plan,
    built: Built,
    facts: BuildFacts,
    estimate: StepEstimate,
    schedule: ScheduleAnalysis | Unread,
    peak: PeakMemory | Unread,
    *,
    changes: tuple[Change, ...] = (),
    search: SearchReport | None = None,
) -> Report:
    """The report. estimate: what was planned without XLA. changes: that would make it fit. search: of which this
    program is the best."""
    target, unknown = _target(plan), dict[str, str]()
    figures = ("hbm_bytes_per_chip", "hbm_bytes_per_second", "peak_flops_per_second")
    unknown |= {f"target.{name}": "the chip is not known" for name in figures if getattr(target, name) is None}
    memory = _memory(plan, built, peak, unknown, estimate.memory, changes)
    if isinstance(schedule, Unread):
        schedule = _unanalysed(schedule.why)
    bound = roofline_seconds(estimate.roofline)
    if bound is None:
        is_rated = target.peak_flops_per_second is not None and target.hbm_bytes_per_second is not None
        rates = "the target's peak or bandwidths are not known"
        why = (estimate.why_uncounted if is_rated else None) or rates
        unknown |= dict.fromkeys(("step.roofline_seconds", "roofline"), why)
    if estimate.why_uncounted:
        figures = ("flops", "hbm_bytes", "link_bytes")
        unknown |= dict.fromkeys((f"roofline[*].{name}" for name in figures), estimate.why_uncounted)
    if plan.model_flops.why_unknown:
        unknown["program.model_flops_per_step"] = plan.model_flops.why_unknown
    too_exposed = None
    if built.text:
        too_exposed = find_too_exposed(plan, schedule.step, schedule.collectives, is_searched=search is not None)
    found = lint(
        plan,
        schedule.collectives,
        schedule.matches,
        estimate.communication,
        built.notes,
        held=() if isinstance(peak, Unread) else peak.held,
    )
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        program=_program(plan, facts.model),
        memory=memory,
        collectives=schedule.collectives,
        step=schedule.step.model_copy(update={"roofline_seconds": bound}),
        roofline=estimate.roofline,
        findings=(*([too_exposed] if too_exposed else []), *found),
        search=search,
        build=_build(built, facts),
        overrides=facts.overrides,
        unknown=unknown | schedule.unknown,
    )


def _unanalysed(why: str) -> ScheduleAnalysis:
    names = [name for name in StepReport.model_fields if name.endswith(("_seconds", "_fraction", "_mfu"))]
    step: Any = dict.fromkeys(names)
    unknown: dict[str, str] = dict.fromkeys(("step", "collectives"), why)
    return ScheduleAnalysis((), {}, StepReport(**step, compute_seconds_by_kind={}, num_unpriced=0), (), unknown)


def _memory(
    plan: Plan,
    built: Built,
    peak: PeakMemory | Unread,
    unknown: dict[str, str],
    estimate: MemoryEstimate,
    changes: tuple[Change, ...],
) -> MemoryReport:
    """Of the compiled program; where it was refused, what the compiler said that it needs."""
    limit, needed, per_chip = limit_bytes(plan), needed_bytes(plan, built, peak), used_devices_per_chip(plan)
    planned = plan.memory
    known = {"parameters": planned.parameters, "master": planned.master, "optimizer": planned.optimizer,
             "scalars": planned.scalars, "batch": planned.batch}  # fmt: skip
    code = None
    if built.memory is not None:
        code = built.memory.code_bytes
        known["outputs"] = built.memory.outputs_bytes - built.memory.aliased_bytes
    rest = None if needed is None else max(0, needed - sum(known.values()))
    why = _cannot_tell_apart(plan, built, peak, rest)
    within = {name: None if why or isinstance(peak, Unread) else peak.by_class.get(name, 0) for name in TOLD_APART}
    rest = rest if rest is None else rest - sum(count or 0 for count in within.values())
    breakdown = {name: count * per_chip for name, count in known.items()} | {
        **{name: count * per_chip if count is not None else None for name, count in within.items()},
        "temporaries": rest * per_chip if rest is not None else None,
        "code": code * per_chip if code is not None else None,
        "reserved": plan.target.hbm_bytes_per_chip - limit if limit and plan.target.hbm_bytes_per_chip else None,
    }
    unknown |= {f"memory.breakdown.{name}": why for name in TOLD_APART if why}
    if needed is None:
        names = ("memory.peak_bytes_per_chip", "memory.breakdown.temporaries")
        refused = "the compiler refused the program and did not say what it needs"
        unknown |= dict.fromkeys(names, peak.why if built.memory and isinstance(peak, Unread) else refused)
    if code is None:
        unknown["memory.breakdown.code"] = "the compiler refused the program"
    if limit is None:
        names = ("memory.limit_bytes_per_chip", "memory.fits", "memory.breakdown.reserved")
        unknown |= dict.fromkeys(names, "the chip's memory is not known")
    host, host_limit = host_bytes(built), plan.target.host_bytes_per_device
    if host is None:
        unknown |= dict.fromkeys(("memory.host_bytes_per_chip", "memory.host_fits"), "the compiler refused the program")
    if host_limit is None:
        names = ("memory.host_limit_bytes_per_chip", *(["memory.host_fits"] if host else []))
        unknown |= dict.fromkeys(names, HOST_UNKNOWN)
    return MemoryReport(
        peak_bytes_per_chip=needed * per_chip if needed is not None else None,
        limit_bytes_per_chip=limit,
        fits=does_fit(plan, built),
        breakdown=breakdown,
        estimate_bytes_per_chip=estimate.peak_bytes * per_chip,
        host_bytes_per_chip=host * per_chip if host is not None else None,
        host_limit_bytes_per_chip=host_limit * per_chip if host_limit else None,
        host_fits=does_fit_host(plan, built),
        host_estimate_bytes_per_chip=estimate.host_bytes * per_chip,
        changes=changes,
    )


def _cannot_tell_apart(plan: Plan, built: Built, peak: PeakMemory | Unread, rest: int | None) -> str | None:
    """Why it is not said what the temporaries are; None where it is. rest: all of them."""
    if built.memory is None or rest is None:
        return NO_PROGRAM
    if isinstance(peak, Unread):
        return peak.why
    memory, counted = built.memory, peak.num_bytes
    # XLA's peak of a CPU's program is that of arguments and results alone.
    found = memory.taken_bytes if plan.target.platform == "cpu" else memory.peak_bytes
    if memory.host_bytes:  # that peak may be the host's
        found = counted
    is_near = abs(counted - found) <= LARGEST_ERROR * found
    if is_near and sum(peak.by_class.get(name, 0) for name in TOLD_APART) <= rest:
        return None
    said = f"{human_bytes(counted)} per device, and the compiler counts {human_bytes(found)}"
    return f"part of the temporaries: what lives at the peak was counted as {said}"


def limit_bytes(plan: Plan) -> int | None:
    """What a program may take of a chip."""
    per_device = plan.target.hbm_bytes_per_device
    return per_device and per_device * used_devices_per_chip(plan)


def needed_bytes(plan: Plan, built: Built, peak: PeakMemory | Unread) -> int | None:
    """What the step needs of a device; None where the compiler refused it without a number, or where its number is not
    the device's and the program cannot be read: then we count it, in the scheduled program."""
    memory = built.memory
    if memory is None:
        return built.out_of_memory.needed_bytes if built.out_of_memory else None
    needed = memory.needed_bytes(plan.target.platform)
    if needed is not None or isinstance(peak, Unread):
        return needed
    return peak.num_bytes


def does_fit(plan: Plan, built: Built) -> bool | None:
    """The verdict: for TPUs the compiler's, which refuses what does not fit; else by what the program takes, as
    compilers for GPUs refuse nothing. None: unknown."""
    if built.memory is None:
        return False
    if plan.target.platform == "tpu":
        return True
    per_device = plan.target.hbm_bytes_per_device
    return None if per_device is None else built.memory.taken_bytes <= per_device


def host_bytes(built: Built) -> int | None:
    """What the step keeps in the host's memory for a device; None where the compiler refused it."""
    return None if built.memory is None else built.memory.host_bytes


def does_fit_host(plan: Plan, built: Built) -> bool | None:
    """Whether a device's share of its host's memory holds what the step keeps there. None: unknown."""
    num_bytes = host_bytes(built)
    return None if num_bytes is None else fits_host(num_bytes, plan.target.host_bytes_per_device)


def _target(plan: Plan) -> TargetReport:
    target, peak = plan.target, plan.target.peak_flops_per_second
    return TargetReport(
        name=target.name,
        chip=target.chip.name if target.chip else target.platform,
        num_chips=target.num_chips,
        num_devices=target.num_devices,
        num_slices=target.num_slices,
        hbm_bytes_per_chip=target.hbm_bytes_per_chip,
        hbm_bytes_per_second=target.chip.hbm_bytes_per_second if target.chip else None,
        peak_flops_per_second=peak * used_devices_per_chip(plan) if peak else None,
        placement=plan.mesh.placement.describe(),
    )


def _program(plan: Plan, model: str | None) -> ProgramReport:
    return ProgramReport(
        model=model or plan.spec.model.family,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_parameters,
        tokens_per_step=plan.spec.tokens_per_step,
        model_flops_per_step=plan.model_flops_per_step,
    )


def _build(built: Built, facts: BuildFacts) -> BuildReport:
    environment = facts.fingerprint.environment
    return BuildReport(
        lower_seconds=facts.lower_seconds,
        compile_seconds=built.compile_seconds,
        cache=facts.cache,
        jax=environment["jax"],
        jaxlib=environment["jaxlib"],
        plugin=environment.get("plugin"),
        compiler_options={**facts.fingerprint.options_without_device, **facts.fingerprint.compiler_options},
        compiler_options_left_out=facts.options_left_out,
        fingerprint=facts.fingerprint.digest,
    )


def used_devices_per_chip(plan: Plan) -> int:
    """Of JAX, by which figures of a device become those of a chip: one where a run takes a part of a chip."""
    return max(1, plan.target.num_devices // plan.target.num_chips)
