"""Builds the Report of an inspected program. Facts that only a declaration has are unknown, with that reason."""

from collections.abc import Iterator

from ..analysis.compiled_step import limit_bytes, used_devices_per_chip
from ..analysis.inspected import InspectedProgram
from ..analysis.program_text import Unavailable
from ..analysis.schedule_analysis import NOT_DECLARED
from ..estimate.estimate import HOST_UNKNOWN, fits_host
from ..schema import SCHEMA_VERSION, Finding, MemoryReport, ProgramReport, Report
from .build_report import LARGEST_ERROR, LIMITED, NO_LIMIT, TOLD_APART, target_report, unknown_of_target

ELSEWHERE = "it was compiled elsewhere: neither its versions nor its options are in its text"
OF_A_PLAN = (
    "program.num_parameters", "program.num_active_parameters", "program.tokens_per_step",
    "program.model_flops_per_step", "memory.estimate_bytes_per_chip", "memory.host_estimate_bytes_per_chip",
    "step.roofline_seconds", "step.bound_seconds", "roofline",
)  # fmt: skip


def report_inspected(program: InspectedProgram) -> Report:
    """Returns the report of a program without a declaration."""
    target = target_report(program.devices.placement)
    unknown = unknown_of_target(target) | dict.fromkeys(OF_A_PLAN, NOT_DECLARED) | {"build": ELSEWHERE}
    memory = _memory(program, unknown)
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target,
        program=ProgramReport(
            model=program.module.name,
            num_parameters=None,
            num_active_parameters=None,
            tokens_per_step=None,
            model_flops_per_step=None,
        ),
        memory=memory,
        collectives=program.analysis.collectives,
        step=program.analysis.step,
        pipeline=None,
        roofline=(),
        findings=(*program.findings, *_memory_notes(program)),
        search=None,
        alternatives=(),
        build=None,
        overrides=(),
        unknown=unknown | program.analysis.unknown,
    )


def _memory_notes(program: InspectedProgram) -> Iterator[Finding]:
    """Yields the note on how much memory a text does not show. docs/inspect.md has the range, which
    bench/memory_by_text.py measures."""
    if program.memory is None and not isinstance(program.peak, Unavailable):
        yield Finding(
            rule="memory-by-text",
            severity="note",
            what="the memory is counted in the program's text: mostly 5 % below to 3 % above XLA's own figure, without "
            "the scratch memory of kernels and what a TPU's compiler keeps in vector memory",
            where="memory.peak_bytes_per_chip",
            fix="in Python, meshloom.inspect(compiled, target=...) has XLA's own figure",
        )


def _memory(program: InspectedProgram, unknown: dict[str, str]) -> MemoryReport:
    """Returns the memory of the program, as XLA counts it if that is known, or else as counted in its text."""
    target, stats, needed = program.devices.target, program.memory, program.needed_bytes
    per_chip, limit = used_devices_per_chip(target), limit_bytes(target)
    if needed is None and isinstance(program.peak, Unavailable):
        unknown |= dict.fromkeys(("memory.peak_bytes_per_chip", "memory.fits"), program.peak.why)
    if limit is None:
        unknown |= dict.fromkeys(LIMITED, NO_LIMIT)
    if stats is None:
        why = "the program's text does not say what lies in the host's memory"
        unknown |= dict.fromkeys(("memory.host_bytes_per_chip", "memory.host_fits"), why)
    if target.host_bytes_per_device is None:
        unknown["memory.host_limit_bytes_per_chip"] = HOST_UNKNOWN
        unknown.setdefault("memory.host_fits", HOST_UNKNOWN)
    peak = None if needed is None else needed * per_chip
    host, host_limit = None if stats is None else stats.host_bytes, target.host_bytes_per_device
    breakdown: dict[str, int | None] = {name: count * per_chip for name, count in _breakdown(program).items()}
    if stats is not None:
        breakdown["code"] = stats.code_bytes * per_chip
    if limit is not None and target.hbm_bytes_per_chip is not None:
        breakdown["reserved"] = target.hbm_bytes_per_chip - limit
    return MemoryReport(
        peak_bytes_per_chip=peak,
        limit_bytes_per_chip=limit,
        fits=None if peak is None or limit is None else peak <= limit,
        breakdown=breakdown,
        estimate_bytes_per_chip=None,
        host_bytes_per_chip=None if host is None else host * per_chip,
        host_limit_bytes_per_chip=host_limit * per_chip if host_limit else None,
        host_fits=None if host is None else fits_host(host, host_limit),
        host_estimate_bytes_per_chip=None,
        changes=(),
    )


def _breakdown(program: InspectedProgram) -> dict[str, int]:
    """Returns the parts of the peak on a device: arguments, and the classes that the names of operations tell apart.
    They are not told apart if XLA's peak differs from that of the text."""
    needed, peak = program.needed_bytes, program.peak
    if needed is None:
        return {}
    if isinstance(peak, Unavailable):
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
