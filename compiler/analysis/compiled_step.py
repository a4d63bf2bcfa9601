"""Holds a compiled program with everything that was read from it: a step with its plan, and the verdicts that follow;
or an inspected program, without a declaration to compare it with."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.errors import ConfigError, Problem, raise_if_any, use_one_of
from ..core.format import counted, human_bytes, human_names
from ..core.known import Unknown, known, or_unknown
from ..core.partition_spec import STAGE
from ..core.scopes import OperationName
from ..estimate.communication import PlannedCollective
from ..estimate.estimate import NO_LIMIT, StepEstimate, memory_figures
from ..estimate.roofline import least_step_seconds, roofline_seconds
from ..parallel.pipeline_plan import PipelinePlan
from ..plan import Plan
from ..schema import Event, Finding, StepReport
from ..target.target import TargetPlan
from ..xla.aot import Built, LoweredStep, ProgramMemory
from ..xla.hlo import HloError, Module, module_name, parse_module
from ..xla.schedule.alike import Divergent, find_divergent
from ..xla.schedule.buffers import read_host_bytes
from ..xla.schedule.stage_clocks import StagedDevices
from ..xla.schedule.steps import Choices
from .lint import find_too_exposed, find_too_much_bubble, lint
from .program_devices import ProgramDevices, stages_of
from .program_lint import find_costly_traffic, lint_program
from .program_memory import PeakMemory, needed_bytes, read_peak
from .program_text import read_part
from .schedule_analysis import UNDECLARED, ScheduleAnalysis, analyse_program, analyse_schedule, nothing_timed
from .timeline_events import with_memory

NO_PROGRAM = Unknown("the step was not compiled: it does not fit")
REFUSED = Unknown("the compiler refused the program")


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. estimate: the estimate without XLA. lowered, built: the programs before and after compiling.
    schedule, peak: the results of reading the program's text, or why they are unknown."""

    plan: Plan
    estimate: StepEstimate
    lowered: LoweredStep
    built: Built
    schedule: ScheduleAnalysis | Unknown
    peak: PeakMemory | Unknown

    @property
    def analysis(self) -> ScheduleAnalysis:
        """Returns the schedule; if it is unknown, an analysis without figures that says why."""
        if isinstance(self.schedule, Unknown):
            return ScheduleAnalysis((), {}, nothing_timed(self.schedule.why), ())
        return self.schedule

    @property
    def events(self) -> tuple[Event, ...]:
        """Returns the timeline of the step."""
        return with_memory(self.analysis.events, self.peak)

    @cached_property
    def figures(self) -> StepReport:
        """Returns the figures of the step, with its memory and the bounds of its plan.

        The TPU compiler itself decides whether a step fits. For other targets the program's size is compared, since
        compilers for GPUs refuse nothing.
        """
        plan, memory, limit = self.plan, self.built.memory, self.plan.target.hbm_bytes_per_device
        refused = f"{REFUSED.why} and did not say what it needs"
        why = self.peak.why if memory and isinstance(self.peak, Unknown) else refused
        fits: bool | Unknown = memory is not None
        if memory and plan.target.platform != "tpu":
            fits = Unknown(NO_LIMIT) if limit is None else memory.taken_bytes <= limit
        found = memory_figures(
            plan.target, or_unknown(self.needed_bytes, why), REFUSED if memory is None else memory.host_bytes, fits=fits
        )
        bounds = {
            "roofline_seconds": roofline_seconds(self.estimate.roofline),
            "bound_seconds": least_step_seconds(plan),
        }
        return self.analysis.step.model_copy(update=found | bounds).rated(plan.work)

    @property
    def fits(self) -> bool | None:
        """Returns whether the step fits in a device's memory; None if that is unknown."""
        return known(self.figures.fits)

    @property
    def needed_bytes(self) -> int | None:
        """Returns the bytes that the step needs on a device; None if the compiler refused it without a number. If the
        compiler's number is not per device, the bytes are counted in the scheduled program; None if that cannot be
        read."""
        memory, refused = self.built.memory, self.built.out_of_memory
        if memory is None:
            return refused.needed_bytes if refused else None
        return needed_bytes(memory, self.peak, self.plan.target)


def read_text(
    text: str | None, plan: Plan, planned: Sequence[PlannedCollective]
) -> tuple[ScheduleAnalysis | Unknown, PeakMemory | Unknown]:
    """Returns the schedule and the peak. text: None if the step does not fit. planned: the plan's collectives.

    A text in an unknown form does not make the program invalid, so each part is read separately. Raises ConfigError for
    a program that would hang.
    """
    if text is None:
        return NO_PROGRAM, NO_PROGRAM
    module = read_part(lambda: parse_module(text))
    if isinstance(module, Unknown):
        return module, module
    hangs = read_part(lambda: tuple(find_hangs(module, plan.mesh.sizes)))
    raise_if_any(() if isinstance(hangs, Unknown) else hangs)
    return (
        read_part(
            lambda: analyse_schedule(
                module, plan, planned, stages=_stages(plan.pipeline, plan.mesh.sizes, module.num_devices)
            )
        ),
        read_part(lambda: read_peak(module)),
    )


def _stages(pipeline: PipelinePlan | None, mesh_sizes: Mapping[str, int], num_devices: int) -> StagedDevices | None:
    """Returns the ticks of a pipeline, and the stage of each device; None without a pipeline. num_devices: the devices
    that the program names."""
    if pipeline is None:
        return None
    table = pipeline.table
    rows = [
        [
            [(slot.op.value, table.placement.virtual(stage, slot.chunk)) for slot in slots]
            for stage, slots in enumerate(row)
        ]
        for row in table.rows
    ]
    return StagedDevices(rows, pipeline.layers.kind_of, stages_of(mesh_sizes), num_devices)


def find_findings(step: CompiledStep, *, is_searched: bool) -> tuple[Finding, ...]:
    """Returns all findings: unmet demands first, then what the program does that the plan did not ask for. is_searched:
    whether the step is the best of `overlap.search`."""
    analysis = step.analysis
    unmet: list[Finding | None] = []
    if step.built.text:
        unmet.append(find_too_exposed(step.plan, analysis.step, analysis.collectives, is_searched=is_searched))
        unmet.append(find_too_much_bubble(step.plan.spec.pipeline.max_bubble, step.plan.pipeline, analysis.step))
    found = lint(
        step.plan,
        analysis.collectives,
        analysis.matches,
        step.estimate.communication,
        step.built.notes,
        held=() if isinstance(step.peak, Unknown) else step.peak.held,
    )
    return (
        *filter(None, unmet),
        *found,
        *find_costly_traffic(analysis.collectives, analysis.step, is_differentiated=True),
    )


COMPILED = "compiled program"  # the place of these problems
NUM_NAMED = 3


def find_hangs(module: Module, mesh_sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem for each conditional of a program with collectives that hang: collectives among stages, in a
    branch that not all of them take. Raises HloError for an unknown form of replica groups. mesh_sizes: the sizes of
    the mesh axes, over the program's devices in order."""
    if mesh_sizes.get(STAGE, 1) == 1:
        return
    of: dict[str, list[Divergent]] = {}
    for each in find_divergent(module, stages_of(mesh_sizes)):
        of.setdefault(each.conditional.name, []).append(each)
    for name, found in of.items():
        named = [
            f"{each.collective.name} ({(OperationName(each.collective.op_name).own or each.collective.opcode)})"
            for each in found
        ]
        stages = sorted({stage for each in found for stage in each.stages})
        are = "is a collective" if len(found) == 1 else "are collectives"
        yield Problem(
            COMPILED,
            f"{human_names(named, NUM_NAMED)} {are} among {counted(len(stages), 'stage')} in a branch of {name}, which "
            "some of them may not take: those that do would wait forever",
            "run it outside of the branch, or choose the branch by a value that is the same on all stages",
        )


NAME_IT = "name the target that it was compiled for"
GIVE_COMPILED = (
    "give the text of the compiled program: compiled.as_text() in Python, or *after_optimizations.txt of a dump"
)

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


@dataclass(frozen=True)
class InspectedProgram:
    """A compiled program with everything that was read from its text. host_bytes: the bytes on the host at the peak, of
    a device. memory: XLA's own figures, if they are known. findings: findings on what the program does."""

    module: Module
    devices: ProgramDevices
    analysis: ScheduleAnalysis
    peak: PeakMemory | Unknown
    host_bytes: int | Unknown
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
        host = self.host_bytes if self.memory is None else self.memory.host_bytes
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
        raise ConfigError([Problem(name, what, GIVE_COMPILED)])
    raise_if_any(target_mismatches(module, text, devices.target))
    schedule = read_part(lambda: analyse_program(module, devices, choices=choices))
    if isinstance(schedule, Unknown):
        raise ConfigError([Problem(name, schedule.why, GIVE_COMPILED)])
    peak = read_part(lambda: read_peak(module))
    findings = lint_program(module, devices, schedule)
    host_bytes = read_part(lambda: read_host_bytes(module))
    return InspectedProgram(module, devices, schedule, peak, host_bytes, memory, findings)


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
        raise ConfigError([Problem(name, "this is a lowered program, which has no schedule yet", GIVE_COMPILED)])
    try:
        return parse_module(text)
    except HloError as error:
        raise ConfigError([Problem(name, f"this is not a whole HLO module: {error}", GIVE_COMPILED)]) from None


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
    elif target.chip and platform == "tpu" and _OF_TWO_CORES.search(text) and target.chip.cores_per_device == 1:
        what = "the program was compiled for chips of two cores that work as one, v4 or v5p"
        yield Problem("target", f"{what}, and {target.name} has none", NAME_IT)


def problems_of_devices(platform: str, kind: str, target: TargetPlan) -> Iterator[Problem]:
    """Yields the reasons why a program's own devices are not the target's. platform, kind: JAX's names."""
    if platform != target.platform or (target.chip and kind != target.chip.device_kind):
        has = target.chip.device_kind if target.chip else f"devices of platform {target.platform}"
        yield Problem(
            "target", f"the program was compiled for {kind} ({platform}), and {target.name} has {has}", NAME_IT
        )
