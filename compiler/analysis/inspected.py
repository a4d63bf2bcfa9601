"""A compiled program by itself: what its text says, without a declaration to hold it against."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.format import counted, human_bytes, human_names
from ..schema import Event, Finding
from ..xla.aot import ProgramMemory
from ..xla.hlo import HloError, Module, module_name, parse_module
from ..xla.schedule.choices import Choices
from .program_devices import ProgramDevices
from .program_lint import lint_program
from .program_memory import PeakMemory, needed_bytes, read_peak
from .program_target import target_mismatches
from .program_text import read_part
from .schedule_analysis import ScheduleAnalysis, analyse_program
from .timeline_events import with_memory
from .unavailable import Unavailable

COMPILED = "give the text of the compiled program: compiled.as_text() in Python, or *after_optimizations.txt of a dump"

_STABLEHLO = re.compile(r"\s*(?:#\w+ = .*\n\s*)*(?:module\b|\"builtin\.module\")")


@dataclass(frozen=True)
class InspectedProgram:
    """memory: as XLA counts it, where it is known besides the text. findings: of what the program does."""

    module: Module
    devices: ProgramDevices
    analysis: ScheduleAnalysis
    peak: PeakMemory | Unavailable
    memory: ProgramMemory | None
    findings: tuple[Finding, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """Returns the timeline of the program."""
        return with_memory(self.analysis.events, self.peak)

    @property
    def needed_bytes(self) -> int | None:
        """Returns the bytes that it needs on a device: as XLA counts them, else as counted in the text."""
        return needed_bytes(self.memory, self.peak, self.devices.target)


def inspect_text(
    text: str,
    devices: ProgramDevices,
    *,
    memory: ProgramMemory | None = None,
    name: str = "program",
    choices: Choices | None = None,
) -> InspectedProgram:
    """Reads a program that XLA compiled and scheduled. name: of the text, in messages.
    choices: of how often its loops and branches run. Raises ConfigError for a text
    that is not such a program, or not one for the target."""
    module = _parse(text, name)
    if not module.is_scheduled:
        what = "the program is not scheduled: its compiler has not ordered it"
        raise ConfigError([Problem(name, what, COMPILED)])
    raise_if_any(target_mismatches(module, text, devices.target))
    schedule = read_part(lambda: analyse_program(module, devices, choices=choices))
    if isinstance(schedule, Unavailable):
        raise ConfigError([Problem(name, schedule.why, COMPILED)])
    peak = read_part(lambda: read_peak(module))
    findings = lint_program(module, devices, schedule)
    return InspectedProgram(module, devices, schedule, peak, memory, findings)


def choose_program(texts: Sequence[str], named: str | None, where: str) -> tuple[int, str]:
    """Returns the place of the program to read among several, and a note on the choice: of those of that name, or of
    all, the largest that is scheduled. Raises ConfigError if none has that name."""
    names = [module_name(text) for text in texts]
    if named is not None and named not in names:
        fix = use_one_of(named, dict.fromkeys(names))
        raise ConfigError([Problem("module", f"{where} has no program {named}", fix)])
    places = [place for place, name in enumerate(names) if named in (None, name)]
    chosen = max(places, key=lambda place: ("is_scheduled=true" in texts[place], len(texts[place])))
    if len(places) == 1:
        return chosen, ""
    others = human_names(list(dict.fromkeys(names)))
    what = f"{names[chosen]}, {human_bytes(len(texts[chosen]))}, is the largest of {counted(len(places), 'program')}"
    return chosen, f"{what} ({others}); --module NAME chooses" if named is None else what


def _parse(text: str, name: str) -> Module:
    if _STABLEHLO.match(text):
        raise ConfigError([Problem(name, "this is a lowered program, which has no schedule yet", COMPILED)])
    try:
        return parse_module(text)
    except HloError as error:
        raise ConfigError([Problem(name, f"this is not a whole HLO module: {error}", COMPILED)]) from None
