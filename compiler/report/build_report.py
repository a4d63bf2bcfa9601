"""Builds the Report of a compiled step, or of an inspected program, for people and tools.

Facts that cannot be read in a program's text are unknown, and so are those that only a declaration has.
"""

from collections.abc import Iterator

from .. import schema
from ..analysis.compiled_step import REFUSED, CompiledStep, InspectedProgram
from ..analysis.schedule_analysis import NOT_DECLARED
from ..core.format import human_bytes
from ..core.known import Unknown, each_known, or_unknown
from ..estimate.estimate import NO_LIMIT
from ..estimate.liveness import MemoryClass
from ..estimate.stage_buffers import WHAT, bytes_in_use
from ..plan import Plan
from ..target.placement import Placement
from ..target.target import TargetPlan

# Classes that XLA counts among its temporaries.
TOLD_APART: tuple[MemoryClass, ...] = ("working_parameters", "gathered_weights", "gradients", "activations")
NO_PEAK = Unknown("the compiler refused the program: what it would keep at its peak is not known")
NO_CHIP = "the chip is not known"
LARGEST_ERROR = 0.1  # the largest difference from XLA's peak, relative to it


def build_report(
    step: CompiledStep,
    findings: tuple[schema.Finding, ...],
    *,
    overrides: tuple[str, ...],
    model: str | None,
    changes: tuple[schema.MemoryChange, ...],
    search: schema.SearchReport | None,
    alternatives: tuple[schema.Alternative, ...],
) -> schema.Report:
    """Returns the report. overrides: the overrides of the declaration. model: the declaration's name for its model, if
    it has one. changes: changes that would make the step fit. search: the search that chose this program. alternatives:
    other declarations, by the estimate."""
    plan, estimate = step.plan, step.estimate
    return schema.Report(
        schema_version=schema.SCHEMA_VERSION,
        target=target_report(plan.mesh.placement),
        program=program_report(plan, model),
        estimated=estimate.figures,
        compiled=step.figures,
        memory=schema.MemoryReport(breakdown=_breakdown(step), changes=changes),
        collectives=step.analysis.collectives,
        pipeline=_pipeline(step),
        roofline=estimate.roofline,
        findings=findings,
        search=search,
        alternatives=alternatives,
        build=_build(step),
        overrides=overrides,
    )


def _pipeline(step: CompiledStep) -> schema.PipelineReport | None:
    """Returns the stages of a pipeline, with their buffers by the traced step."""
    plan, buffers = step.plan.pipeline, step.estimate.stage_buffers
    if plan is None:
        return None
    per_chip = step.plan.target.used_devices_per_chip
    return schema.PipelineReport(
        schedule=plan.table.name,
        num_stages=plan.num_stages,
        num_microbatches=plan.table.num_microbatches,
        in_flight_by_stage=plan.in_flight,
        buffers=tuple(
            schema.StageBufferReport(
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


def _breakdown(step: CompiledStep) -> dict[str, int | Unknown]:
    """Returns the memory of the compiled program by class; if the compiler refused it, the memory that it says the
    program needs."""
    built, planned, target = step.built, step.plan.memory, step.plan.target
    per_chip = target.used_devices_per_chip
    needed = each_known(step.figures.peak_bytes, lambda of_chip: of_chip // per_chip)
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
    of_chip = {name: each_known(count, lambda count: count * per_chip) for name, count in found.items()}
    return of_chip | {"reserved": reserved_bytes(target)}


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
    limit, whole = target.hbm_bytes_per_device, target.hbm_bytes_per_chip
    if limit is None or whole is None:
        return Unknown(NO_LIMIT)
    return whole - limit * target.used_devices_per_chip


def target_report(placement: Placement) -> schema.TargetReport:
    """Returns the part of a report about the target."""
    target, peak = placement.target, placement.target.peak_flops_per_second
    return schema.TargetReport(
        name=target.name,
        chip=target.chip.name if target.chip else target.platform,
        num_chips=target.num_chips,
        num_devices=target.num_devices,
        num_slices=target.num_slices,
        hbm_bytes_per_chip=or_unknown(target.hbm_bytes_per_chip, NO_CHIP),
        hbm_bytes_per_second=target.chip.hbm_bytes_per_second if target.chip else Unknown(NO_CHIP),
        peak_flops_per_second=peak * target.used_devices_per_chip if peak else Unknown(NO_CHIP),
        calibration=target.calibration.describe() if target.calibration else "",
        placement=placement.describe(),
    )


def program_report(plan: Plan, model: str | None) -> schema.ProgramReport:
    return schema.ProgramReport(
        model=model or plan.spec.model.family,
        num_parameters=plan.num_parameters,
        num_active_parameters=plan.num_active_parameters,
        tokens_per_step=plan.spec.tokens_per_step,
        model_flops_per_step=or_unknown(plan.model_flops.per_step, plan.model_flops.why_unknown),
    )


def _build(step: CompiledStep) -> schema.BuildReport:
    lowered, built, fingerprint = step.lowered, step.built, step.lowered.fingerprint
    environment = fingerprint.environment
    return schema.BuildReport(
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


ELSEWHERE = "it was compiled elsewhere: neither its versions nor its options are in its text"


def report_inspected(program: InspectedProgram) -> schema.Report:
    """Returns the report of a program without a declaration."""
    undeclared = Unknown(NOT_DECLARED)
    return schema.Report(
        schema_version=schema.SCHEMA_VERSION,
        target=target_report(program.devices.placement),
        program=schema.ProgramReport(
            model=program.module.name,
            num_parameters=undeclared,
            num_active_parameters=undeclared,
            tokens_per_step=undeclared,
            model_flops_per_step=undeclared,
        ),
        estimated=undeclared,
        compiled=program.figures,
        memory=schema.MemoryReport(breakdown=_inspected_breakdown(program), changes=()),
        collectives=program.analysis.collectives,
        pipeline=None,
        roofline=(),
        findings=(*program.findings, *_memory_notes(program)),
        search=None,
        alternatives=(),
        build=Unknown(ELSEWHERE),
        overrides=(),
    )


def _memory_notes(program: InspectedProgram) -> Iterator[schema.Finding]:
    """Yields the note on how much memory a text does not show. docs/inspect.md has the range, which
    bench/memory_by_text.py measures."""
    if program.memory is None and not isinstance(program.peak, Unknown):
        yield schema.Finding(
            rule="memory-by-text",
            severity="note",
            what="the memory is counted in the program's text: mostly 5 % below to 3 % above XLA's own figure, without "
            "the scratch memory of kernels and what a TPU's compiler keeps in vector memory",
            where="compiled.peak_bytes",
            fix="in Python, meshloom.inspect(compiled, target=...) has XLA's own figure",
        )


def _inspected_breakdown(program: InspectedProgram) -> dict[str, int | Unknown]:
    """Returns the parts of the peak on a chip."""
    target, stats = program.devices.target, program.memory
    found = _inspected_parts(program) | ({"code": stats.code_bytes} if stats else {})
    reserved = reserved_bytes(target)
    of_chip: dict[str, int | Unknown] = {name: count * target.used_devices_per_chip for name, count in found.items()}
    return of_chip | ({} if isinstance(reserved, Unknown) else {"reserved": reserved})


def _inspected_parts(program: InspectedProgram) -> dict[str, int]:
    """Returns the parts of the peak on a device: arguments, and the classes that the names of operations tell apart.
    They are not told apart if XLA's peak differs from that of the text."""
    needed, peak = program.needed_bytes, program.peak
    if needed is None:
        return {}
    if isinstance(peak, Unknown):
        return {"temporaries": needed}
    made = sum(peak.by_class.values())
    arguments = peak.num_bytes - made
    if program.memory is not None:
        arguments = program.memory.arguments_bytes
    if arguments > needed or abs(peak.num_bytes - needed) > LARGEST_ERROR * needed:
        return {"temporaries": needed}
    told = {str(name): count for name in TOLD_APART if (count := peak.by_class.get(name, 0))}
    rest = needed - arguments - sum(told.values())
    if rest < 0:
        return {"arguments": arguments, "temporaries": needed - arguments}
    return {"arguments": arguments, **told, "temporaries": rest}
