"""Builds the Report of a compiled step for people and tools. Facts that cannot be read in its text are unknown."""

from ..analysis.compiled_step import CompiledStep, limit_bytes, used_devices_per_chip
from ..core.format import human_bytes
from ..core.known import Unknown, each_known, or_unknown
from ..estimate.estimate import HOST_UNKNOWN, NO_LIMIT
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
from ..target.target import TargetPlan

# Classes that XLA counts among its temporaries.
TOLD_APART: tuple[MemoryClass, ...] = ("working_parameters", "gathered_weights", "gradients", "activations")
NO_PEAK = Unknown("the compiler refused the program: what it would keep at its peak is not known")
NO_CHIP = "the chip is not known"
REFUSED = Unknown("the compiler refused the program")
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
    bounds = {"roofline_seconds": roofline_seconds(estimate.roofline), "bound_seconds": least_step_seconds(plan)}
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        program=_program(plan, model),
        memory=_memory(step, changes),
        collectives=analysis.collectives,
        step=analysis.step.model_copy(update=bounds),
        pipeline=_pipeline(step),
        roofline=estimate.roofline,
        findings=findings,
        search=search,
        alternatives=alternatives,
        build=_build(step),
        overrides=overrides,
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


def _memory(step: CompiledStep, changes: tuple[MemoryChange, ...]) -> MemoryReport:
    """Returns the memory of the compiled program; if the compiler refused it, the memory that it says the program
    needs."""
    plan, built, peak, estimate = step.plan, step.built, step.peak, step.estimate.memory
    per_chip = used_devices_per_chip(plan.target)
    refused = f"{REFUSED.why} and did not say what it needs"
    needed = or_unknown(step.needed_bytes, peak.why if built.memory and isinstance(peak, Unknown) else refused)
    planned = plan.memory
    found: dict[str, int | Unknown] = {
        **planned.by_role,
        "master": planned.master,
        "optimizer": planned.optimizer,
        "scalars": planned.scalars,
        "batch": planned.batch,
    }
    if built.memory is not None:
        found["outputs"] = built.memory.outputs_bytes - built.memory.aliased_bytes
    rest = each_known(needed, lambda count: max(0, count - sum(n for n in found.values() if n)))
    within = _classes(step, rest)
    found |= within | {
        "temporaries": each_known(rest, lambda count: count - sum(n for n in within.values() if n)),
        "code": built.memory.code_bytes if built.memory is not None else REFUSED,
    }
    host, host_limit = or_unknown(step.host_bytes, REFUSED.why), plan.target.host_bytes_per_device
    return MemoryReport(
        peak_bytes_per_chip=each_known(needed, lambda count: count * per_chip),
        limit_bytes_per_chip=or_unknown(limit_bytes(plan.target), NO_LIMIT),
        fits=or_unknown(step.fits, NO_LIMIT),
        breakdown={name: each_known(count, lambda count: count * per_chip) for name, count in found.items()}
        | {"reserved": reserved_bytes(plan.target)},
        estimate_bytes_per_chip=estimate.peak_bytes * per_chip,
        host_bytes_per_chip=each_known(host, lambda count: count * per_chip),
        host_limit_bytes_per_chip=host_limit * per_chip if host_limit else Unknown(HOST_UNKNOWN),
        host_fits=host if isinstance(host, Unknown) else or_unknown(step.fits_host, HOST_UNKNOWN),
        host_estimate_bytes_per_chip=estimate.host_bytes * per_chip,
        changes=changes,
    )


def _classes(step: CompiledStep, rest: int | Unknown) -> dict[str, int | Unknown]:
    """Returns the classes among the temporaries, if the program's text tells them apart. rest: the bytes of all
    temporaries."""
    plan, built, peak = step.plan, step.built, step.peak
    if built.memory is None or isinstance(rest, Unknown):
        return dict.fromkeys(TOLD_APART, NO_PEAK)
    if isinstance(peak, Unknown):
        return dict.fromkeys(TOLD_APART, peak)
    memory, counted = built.memory, peak.num_bytes
    # For a CPU's program XLA's peak counts arguments and results alone.
    found = memory.taken_bytes if plan.target.platform == "cpu" else memory.peak_bytes
    if memory.host_bytes:  # XLA's peak may be the host's
        found = counted
    classes = {name: peak.by_class.get(name, 0) for name in TOLD_APART}
    if abs(counted - found) <= LARGEST_ERROR * found and sum(classes.values()) <= rest:
        return {**classes}
    said = f"{human_bytes(counted)} per device, and the compiler counts {human_bytes(found)}"
    why = f"part of the temporaries: the live bytes at the peak were counted as {said}"
    return dict.fromkeys(TOLD_APART, Unknown(why))


def reserved_bytes(target: TargetPlan) -> int | Unknown:
    """Returns the bytes of a chip that no program may use."""
    limit, whole = limit_bytes(target), target.hbm_bytes_per_chip
    return Unknown(NO_LIMIT) if limit is None or whole is None else whole - limit


def target_report(placement: Placement) -> TargetReport:
    """Returns the part of a report about the target."""
    target, peak = placement.target, placement.target.peak_flops_per_second
    return TargetReport(
        name=target.name,
        chip=target.chip.name if target.chip else target.platform,
        num_chips=target.num_chips,
        num_devices=target.num_devices,
        num_slices=target.num_slices,
        hbm_bytes_per_chip=or_unknown(target.hbm_bytes_per_chip, NO_CHIP),
        hbm_bytes_per_second=target.chip.hbm_bytes_per_second if target.chip else Unknown(NO_CHIP),
        peak_flops_per_second=peak * used_devices_per_chip(target) if peak else Unknown(NO_CHIP),
        calibration=target.calibration.describe() if target.calibration else "",
        placement=placement.describe(),
    )


def _program(plan: Plan, model: str | None) -> ProgramReport:
    return ProgramReport(
        model=model or plan.spec.model.family,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        tokens_per_step=plan.spec.tokens_per_step,
        model_flops_per_step=or_unknown(plan.model_flops.per_step, plan.model_flops.why_unknown),
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
