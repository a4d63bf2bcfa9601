"""Builds the Report of a compiled step for people and tools. Facts that cannot be read in its text are unknown."""

from ..analysis.compiled_step import CompiledStep, limit_bytes, used_devices_per_chip
from ..analysis.program_text import Unavailable
from ..core.format import human_bytes
from ..estimate.estimate import HOST_UNKNOWN
from ..estimate.liveness import MemoryClass
from ..estimate.roofline import least_step_seconds, roofline_seconds
from ..estimate.stage_buffers import WHAT, bytes_in_use
from ..plan import Plan
from ..schema import (
    SCHEMA_VERSION,
    Alternative,
    BuildReport,
    Finding,
    MemoryChange,
    MemoryReport,
    PipelineReport,
    ProgramReport,
    Report,
    SearchReport,
    StageBufferReport,
    TargetReport,
)
from ..target.placement import Placement

# Classes that XLA counts among its temporaries.
TOLD_APART: tuple[MemoryClass, ...] = ("working_parameters", "gathered_weights", "gradients", "activations")
NO_PEAK = "the compiler refused the program: what it would keep at its peak is not known"
LIMITED = ("memory.limit_bytes_per_chip", "memory.fits", "memory.breakdown.reserved")  # unknown if there is no limit
NO_LIMIT = "the chip's memory is not known"
LARGEST_ERROR = 0.1  # the largest difference from XLA's peak, relative to it


def build_report(
    step: CompiledStep,
    findings: tuple[Finding, ...],
    *,
    overrides: tuple[str, ...],
    model: str | None,
    changes: tuple[MemoryChange, ...],
    search: SearchReport | None,
    alternatives: tuple[Alternative, ...],
) -> Report:
    """Returns the report. overrides: the overrides of the declaration. model: the declaration's name for its model, if
    it has one. changes: changes that would make the step fit. search: the search that chose this program. alternatives:
    other declarations, by the estimate."""
    plan, analysis, estimate = step.plan, step.analysis, step.estimate
    target = target_report(plan.mesh.placement)
    unknown = unknown_of_target(target)
    memory = _memory(step, unknown, changes)
    roofline, bound = roofline_seconds(estimate.roofline), least_step_seconds(plan)
    is_rated = target.peak_flops_per_second is not None and target.hbm_bytes_per_second is not None
    rates = "the target's peak or bandwidths are not known"
    if roofline is None:
        why = (estimate.why_uncounted if is_rated else None) or rates
        unknown |= dict.fromkeys(("step.roofline_seconds", "roofline"), why)
    if bound is None:
        unknown["step.bound_seconds"] = (plan.model_flops.why_unknown if is_rated else None) or rates
    if estimate.why_uncounted:
        figures = ("flops", "hbm_bytes", "link_bytes")
        unknown |= dict.fromkeys((f"roofline[*].{name}" for name in figures), estimate.why_uncounted)
    if plan.model_flops.why_unknown:
        unknown["program.model_flops_per_step"] = plan.model_flops.why_unknown
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        program=_program(plan, model),
        memory=memory,
        collectives=analysis.collectives,
        step=analysis.step.model_copy(update={"roofline_seconds": roofline, "bound_seconds": bound}),
        pipeline=_pipeline(step),
        roofline=estimate.roofline,
        findings=findings,
        search=search,
        alternatives=alternatives,
        build=_build(step),
        overrides=overrides,
        unknown=unknown | analysis.unknown,
    )


def _pipeline(step: CompiledStep) -> PipelineReport | None:
    """Returns the stages of a pipeline, with their buffers by the traced step."""
    plan, buffers = step.plan.pipeline, step.estimate.stage_buffers
    if plan is None:
        return None
    per_chip = used_devices_per_chip(step.plan.target)
    return PipelineReport(
        schedule=plan.table.name,
        num_stages=plan.num_stages,
        num_microbatches=plan.table.num_microbatches,
        in_flight_by_stage=plan.in_flight,
        buffers=tuple(
            StageBufferReport(
                name=each.name,
                what=WHAT[each.name],
                num_slots=each.num_slots,
                slot_bytes=each.slot_bytes * per_chip,
                in_use_by_stage=each.in_use,
            )
            for each in buffers
        ),
        bytes_allocated=sum(each.allocated_bytes for each in buffers) * per_chip,
        bytes_in_use_by_stage=tuple(each * per_chip for each in bytes_in_use(buffers)),
    )


def _memory(step: CompiledStep, unknown: dict[str, str], changes: tuple[MemoryChange, ...]) -> MemoryReport:
    """Returns the memory of the compiled program; if the compiler refused it, the memory that it says the program
    needs."""
    plan, built, peak, estimate = step.plan, step.built, step.peak, step.estimate.memory
    limit, needed, per_chip = limit_bytes(plan.target), step.needed_bytes, used_devices_per_chip(plan.target)
    planned = plan.memory
    known = planned.by_role | {"master": planned.master, "optimizer": planned.optimizer,
                               "scalars": planned.scalars, "batch": planned.batch}  # fmt: skip
    code = None
    if built.memory is not None:
        code = built.memory.code_bytes
        known["outputs"] = built.memory.outputs_bytes - built.memory.aliased_bytes
    rest = None if needed is None else max(0, needed - sum(known.values()))
    why = _cannot_tell_apart(step, rest)
    within = {name: None if why or isinstance(peak, Unavailable) else peak.by_class.get(name, 0) for name in TOLD_APART}
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
        unknown |= dict.fromkeys(names, peak.why if built.memory and isinstance(peak, Unavailable) else refused)
    if code is None:
        unknown["memory.breakdown.code"] = "the compiler refused the program"
    if limit is None:
        unknown |= dict.fromkeys(LIMITED, NO_LIMIT)
    host, host_limit = step.host_bytes, plan.target.host_bytes_per_device
    if host is None:
        unknown |= dict.fromkeys(("memory.host_bytes_per_chip", "memory.host_fits"), "the compiler refused the program")
    if host_limit is None:
        names = ("memory.host_limit_bytes_per_chip", *(["memory.host_fits"] if host else []))
        unknown |= dict.fromkeys(names, HOST_UNKNOWN)
    if any(change.slower_fraction is None for change in changes):
        unknown["memory.changes[*].slower_fraction"] = "the time of a step cannot be estimated: see `meshloom explain`"
    return MemoryReport(
        peak_bytes_per_chip=needed * per_chip if needed is not None else None,
        limit_bytes_per_chip=limit,
        fits=step.fits,
        breakdown=breakdown,
        estimate_bytes_per_chip=estimate.peak_bytes * per_chip,
        host_bytes_per_chip=host * per_chip if host is not None else None,
        host_limit_bytes_per_chip=host_limit * per_chip if host_limit else None,
        host_fits=step.fits_host,
        host_estimate_bytes_per_chip=estimate.host_bytes * per_chip,
        changes=changes,
    )


def _cannot_tell_apart(step: CompiledStep, rest: int | None) -> str | None:
    """Returns the reason why the temporaries cannot be classified; None if they can. rest: the bytes of all of them."""
    plan, built, peak = step.plan, step.built, step.peak
    if built.memory is None or rest is None:
        return NO_PEAK
    if isinstance(peak, Unavailable):
        return peak.why
    memory, counted = built.memory, peak.num_bytes
    # For a CPU's program XLA's peak counts arguments and results alone.
    found = memory.taken_bytes if plan.target.platform == "cpu" else memory.peak_bytes
    if memory.host_bytes:  # XLA's peak may be the host's
        found = counted
    is_near = abs(counted - found) <= LARGEST_ERROR * found
    if is_near and sum(peak.by_class.get(name, 0) for name in TOLD_APART) <= rest:
        return None
    said = f"{human_bytes(counted)} per device, and the compiler counts {human_bytes(found)}"
    return f"part of the temporaries: the live bytes at the peak were counted as {said}"


def target_report(placement: Placement) -> TargetReport:
    """Returns the part of a report about the target."""
    target, peak = placement.target, placement.target.peak_flops_per_second
    return TargetReport(
        name=target.name,
        chip=target.chip.name if target.chip else target.platform,
        num_chips=target.num_chips,
        num_devices=target.num_devices,
        num_slices=target.num_slices,
        hbm_bytes_per_chip=target.hbm_bytes_per_chip,
        hbm_bytes_per_second=target.chip.hbm_bytes_per_second if target.chip else None,
        peak_flops_per_second=peak * used_devices_per_chip(target) if peak else None,
        calibration=target.calibration.describe() if target.calibration else "",
        placement=placement.describe(),
    )


def unknown_of_target(target: TargetReport) -> dict[str, str]:
    """Returns the reasons why figures of the target are unknown, by their paths."""
    figures = ("hbm_bytes_per_chip", "hbm_bytes_per_second", "peak_flops_per_second")
    return {f"target.{name}": "the chip is not known" for name in figures if getattr(target, name) is None}


def _program(plan: Plan, model: str | None) -> ProgramReport:
    return ProgramReport(
        model=model or plan.spec.model.family,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        tokens_per_step=plan.spec.tokens_per_step,
        model_flops_per_step=plan.model_flops_per_step,
    )


def _build(step: CompiledStep) -> BuildReport:
    lowered, built, fingerprint = step.lowered, step.built, step.lowered.fingerprint
    environment = fingerprint.environment
    return BuildReport(
        lower_seconds=lowered.seconds,
        compile_seconds=built.compile_seconds,
        cache=built.cache,
        jax=environment["jax"],
        jaxlib=environment["jaxlib"],
        plugin=environment.get("plugin"),
        compiler_options={**fingerprint.options_without_device, **fingerprint.compiler_options},
        compiler_options_left_out=lowered.programs.options_left_out,
        fingerprint=fingerprint.digest,
    )
