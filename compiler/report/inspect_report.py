"""Builds the Report of an inspected program. Facts that only a declaration has are unknown, with that reason."""

from collections.abc import Iterator

from ..analysis.inspected import InspectedProgram
from ..analysis.schedule_analysis import NOT_DECLARED
from ..core.known import Unknown
from ..schema import SCHEMA_VERSION, Finding, MemoryReport, ProgramReport, Report
from .build_report import LARGEST_ERROR, TOLD_APART, reserved_bytes, target_report

ELSEWHERE = "it was compiled elsewhere: neither its versions nor its options are in its text"


def report_inspected(program: InspectedProgram) -> Report:
    """Returns the report of a program without a declaration."""
    undeclared = Unknown(NOT_DECLARED)
    return Report(
        schema_version=SCHEMA_VERSION,
        target=target_report(program.devices.placement),
        program=ProgramReport(
            model=program.module.name,
            num_parameters=undeclared,
            num_active_parameters=undeclared,
            tokens_per_step=undeclared,
            model_flops_per_step=undeclared,
        ),
        estimated=undeclared,
        compiled=program.figures,
        memory=MemoryReport(breakdown=_breakdown(program), changes=()),
        collectives=program.analysis.collectives,
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
            where="compiled.peak_bytes",
            fix="in Python, meshloom.inspect(compiled, target=...) has XLA's own figure",
        )


def _breakdown(program: InspectedProgram) -> dict[str, int | Unknown]:
    """Returns the parts of the peak on a chip."""
    target, stats = program.devices.target, program.memory
    found = _parts(program) | ({"code": stats.code_bytes} if stats else {})
    reserved = reserved_bytes(target)
    of_chip: dict[str, int | Unknown] = {name: count * target.used_devices_per_chip for name, count in found.items()}
    return of_chip | ({} if isinstance(reserved, Unknown) else {"reserved": reserved})


def _parts(program: InspectedProgram) -> dict[str, int]:
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
