"""Builds the Report of an inspected program. Facts that only a declaration has are unknown, with that reason."""

from collections.abc import Iterator

from ..analysis.compiled_step import limit_bytes, used_devices_per_chip
from ..analysis.inspected import InspectedProgram
from ..analysis.schedule_analysis import NOT_DECLARED
from ..core.known import Unknown, each_known, or_unknown
from ..estimate.estimate import HOST_UNKNOWN, NO_LIMIT, fits_host
from ..schema import SCHEMA_VERSION, Finding, MemoryReport, ProgramReport, Report
from .build_report import LARGEST_ERROR, TOLD_APART, reserved_bytes, target_report

ELSEWHERE = "it was compiled elsewhere: neither its versions nor its options are in its text"
NO_HOST = Unknown("the program's text does not say what lies in the host's memory")


def report_inspected(program: InspectedProgram) -> Report:
    """Returns the report of a program without a declaration."""
    target = target_report(program.devices.placement)
    undeclared = Unknown(NOT_DECLARED)
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        program=ProgramReport(
            model=program.module.name,
            num_parameters=undeclared,
            num_active_parameters=undeclared,
            tokens_per_step=undeclared,
            model_flops_per_step=undeclared,
        ),
        memory=_memory(program),
        collectives=program.analysis.collectives,
        step=program.analysis.step,
        pipeline=None,
        roofline=(),
        findings=(*program.findings, *_memory_notes(program)),
        search=None,
        alternatives=(),
        build=Unknown(ELSEWHERE),
        overrides=(),
    )


def _memory_notes(program: InspectedProgram) -> Iterator[Finding]:
    """Yields the note on how much memory a text does not show. docs/inspect.md has the range, which
    bench/memory_by_text.py measures."""
    if program.memory is None and not isinstance(program.peak, Unknown):
        yield Finding(
            rule="memory-by-text",
            severity="note",
            what="the memory is counted in the program's text: mostly 5 % below to 3 % above XLA's own figure, without "
            "the scratch memory of kernels and what a TPU's compiler keeps in vector memory",
            where="memory.peak_bytes_per_chip",
            fix="in Python, meshloom.inspect(compiled, target=...) has XLA's own figure",
        )


def _memory(program: InspectedProgram) -> MemoryReport:
    """Returns the memory of the program, as XLA counts it if that is known, or else as counted in its text."""
    target, stats, undeclared = program.devices.target, program.memory, Unknown(NOT_DECLARED)
    per_chip, limit = used_devices_per_chip(target), or_unknown(limit_bytes(target), NO_LIMIT)
    why = program.peak.why if isinstance(program.peak, Unknown) else None
    needed = or_unknown(program.needed_bytes, why)
    peak = each_known(needed, lambda count: count * per_chip)
    host_limit = target.host_bytes_per_device
    breakdown: dict[str, int | Unknown] = {name: count * per_chip for name, count in _breakdown(program).items()}
    if stats is not None:
        breakdown["code"] = stats.code_bytes * per_chip
    reserved = reserved_bytes(target)
    return MemoryReport(
        peak_bytes_per_chip=peak,
        limit_bytes_per_chip=limit,
        fits=each_known(limit, lambda most: each_known(peak, lambda count: count <= most)),
        breakdown=breakdown | ({} if isinstance(reserved, Unknown) else {"reserved": reserved}),
        estimate_bytes_per_chip=undeclared,
        host_bytes_per_chip=NO_HOST if stats is None else stats.host_bytes * per_chip,
        host_limit_bytes_per_chip=host_limit * per_chip if host_limit else Unknown(HOST_UNKNOWN),
        host_fits=NO_HOST if stats is None else or_unknown(fits_host(stats.host_bytes, host_limit), HOST_UNKNOWN),
        host_estimate_bytes_per_chip=undeclared,
        changes=(),
    )


def _breakdown(program: InspectedProgram) -> dict[str, int]:
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
