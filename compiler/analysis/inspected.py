"""Inspects a compiled program by itself, without a declaration to compare it with."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.format import counted, human_bytes, human_names
from ..core.known import Unknown, or_unknown
from ..estimate.estimate import memory_figures
from ..schema import Event, Finding, StepReport
from ..target.target import TargetPlan
from ..xla.aot import ProgramMemory
from ..xla.hlo import HloError, Module, module_name, parse_module
from ..xla.schedule.steps import Choices
from .program_devices import ProgramDevices
from .program_lint import lint_program
from .program_memory import PeakMemory, needed_bytes, read_peak
from .program_text import read_part
from .schedule_analysis import UNDECLARED, ScheduleAnalysis, analyse_program
from .timeline_events import with_memory

NO_HOST = Unknown("the program's text does not say what lies in the host's memory")
NAME_IT = "name the target that it was compiled for"
COMPILED = "give the text of the compiled program: compiled.as_text() in Python, or *after_optimizations.txt of a dump"

_STABLEHLO = re.compile(r"\s*(?:#\w+ = .*\n\s*)*(?:module\b|\"builtin\.module\")")
# Marks that only one platform's compiler writes; the first that is found decides. A text may have none of them.
_MARKS = {
    "tpu": re.compile(r":T\(|\"estimated_cycles\""),  # tiled layouts, and the compiler's estimates
    "gpu": re.compile(r'fingerprint_before_lhs|"operation_queue_id"|"force_earliest_schedule"|"fusion_backend_config"'
                      r'|"__(?:cublas|cudnn|triton|gpu)\b'),
    "cpu": re.compile(r'"outer_dimension_partitions"|"__(?:onednn|ynn_fusion)|"xla_ffi_(?:partitioned_)?python_cpu'),
}  # fmt: skip
_SHOWN = {"tpu": "TPUs", "gpu": "GPUs", "cpu": "CPUs"}
_OF_TWO_CORES = re.compile(r'"megacore_config"')  # libtpu 0.0.42.1 writes it for these alone
_CHIPS_OF_TWO_CORES = ("v4", "v5p")


@dataclass(frozen=True)
class InspectedProgram:
    """A compiled program with everything that was read from its text. memory: XLA's own figures, if they are known.
    findings: findings on what the program does."""

    module: Module
    devices: ProgramDevices
    analysis: ScheduleAnalysis
    peak: PeakMemory | Unknown
    memory: ProgramMemory | None
    findings: tuple[Finding, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """Returns the timeline of the program."""
        return with_memory(self.analysis.events, self.peak)

    @property
    def needed_bytes(self) -> int | None:
        """Returns the bytes that the program needs on a device, as XLA counts them, or else as counted in the text."""
        return needed_bytes(self.memory, self.peak, self.devices.target)

    @property
    def figures(self) -> StepReport:
        """Returns the figures of the program; what only a declaration says is unknown."""
        why = self.peak.why if isinstance(self.peak, Unknown) else None
        host = NO_HOST if self.memory is None else self.memory.host_bytes
        found = memory_figures(self.devices.target, or_unknown(self.needed_bytes, why), host)
        return self.analysis.step.model_copy(update=found).rated(UNDECLARED)


def inspect_text(
    text: str,
    devices: ProgramDevices,
    *,
    memory: ProgramMemory | None = None,
    name: str = "program",
    choices: Choices | None = None,
) -> InspectedProgram:
    """Reads a program that XLA compiled and scheduled. name: the text's name, for messages. choices: how often its
    loops and branches run. Raises ConfigError for a text that is not such a program, or not one for the target."""
    module = _parse(text, name)
    if not module.is_scheduled:
        what = "the program is not scheduled: its compiler has not ordered it"
        raise ConfigError([Problem(name, what, COMPILED)])
    raise_if_any(target_mismatches(module, text, devices.target))
    schedule = read_part(lambda: analyse_program(module, devices, choices=choices))
    if isinstance(schedule, Unknown):
        raise ConfigError([Problem(name, schedule.why, COMPILED)])
    peak = read_part(lambda: read_peak(module))
    findings = lint_program(module, devices, schedule)
    return InspectedProgram(module, devices, schedule, peak, memory, findings)


def choose_program(texts: Sequence[str], named: str | None, where: str) -> tuple[int, str]:
    """Returns the index of the program to read among several, and a note on the choice. It is the largest scheduled one
    of that name, or of all. Raises ConfigError if none has that name."""
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


def target_mismatches(module: Module, text: str, target: TargetPlan) -> Iterator[Problem]:
    """Yields the reasons why a program's text is not one for this target."""
    # A program for several slices of TPUs counts the devices of one.
    if (num := module.num_devices) not in (target.num_devices, target.num_devices // target.num_slices):
        what = f"the program is for {counted(num, 'device')}, and {target.name} has {target.num_devices}"
        yield Problem("target", what, NAME_IT)
    platform = next((name for name, mark in _MARKS.items() if mark.search(text)), None)
    if platform not in (None, target.platform) or (platform is None and target.platform == "tpu"):
        was = f"was compiled for {_SHOWN[platform]}" if platform else "was not compiled for TPUs"
        yield Problem("target", f"the program {was}, and {target.name} is of platform {target.platform}", NAME_IT)
    elif (
        target.chip and platform == "tpu" and _OF_TWO_CORES.search(text) and target.chip.name not in _CHIPS_OF_TWO_CORES
    ):
        what = f"the program was compiled for chips of two cores that work as one, {' or '.join(_CHIPS_OF_TWO_CORES)}"
        yield Problem("target", f"{what}, and {target.name} has none", NAME_IT)


def problems_of_devices(platform: str, kind: str, target: TargetPlan) -> Iterator[Problem]:
    """Yields the reasons why a program's own devices are not the target's. platform, kind: JAX's names."""
    if platform != target.platform or (target.chip and kind != target.chip.device_kind):
        has = target.chip.device_kind if target.chip else f"devices of platform {target.platform}"
        yield Problem(
            "target", f"the program was compiled for {kind} ({platform}), and {target.name} has {has}", NAME_IT
        )
