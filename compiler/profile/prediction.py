"""Predicts a compiled step instruction by instruction, by the names that they have in a trace."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from meshloom.models.record import Record

from ..analysis.compiled_step import InspectedProgram
from ..analysis.schedule_analysis import NO_CHIP, ScheduleAnalysis, analyse_schedule
from ..core.known import OrUnknown, Reasoned, Unknown
from ..core.scopes import OperationName
from ..core.traffic import ComputeKind
from ..estimate.communication import PlannedCollective
from ..parallel.operation import ParallelOp
from ..parallel.registry import OPERATIONS
from ..plan import Plan
from ..schema import CollectiveReport, Event, StepReport
from ..spec.calibration_spec import Calibration
from ..target.target import TargetPlan
from ..xla.hlo import Instruction, Module, parse_module
from ..xla.schedule.prices import instruction_kind

PREDICTION_VERSION = 3  # of predicted.json
_CONTAINERS = frozenset({"call", "conditional", "while"})  # their events contain those of what they run
_NOTHING = frozenset({"constant", "get-tuple-element", "parameter", "tuple"})


class PredictedCompute(Record):
    """An instruction of the compute unit. seconds: the sum of its executions in a step."""

    name: str
    kind: ComputeKind
    source: str  # "layers/dot_general, backward"
    seconds: OrUnknown[NonNegativeFloat]


class PredictedCollective(Record):
    """A collective, named by the instruction that starts it. ends: the instructions that wait for it. latency_seconds:
    the part of `report.alone_seconds` that does not depend on its size."""

    report: CollectiveReport
    ends: tuple[str, ...]
    latency_seconds: OrUnknown[NonNegativeFloat]


class Prediction(Reasoned):
    """A program and its prediction. module: its name in a trace. containers: instructions that only run others."""

    schema_version: Literal[3]
    module: str
    model: str
    target: str
    chip: str | None
    calibration: Calibration | None
    num_devices: PositiveInt
    step: StepReport
    compute: tuple[PredictedCompute, ...]
    collectives: tuple[PredictedCollective, ...]
    containers: tuple[str, ...]
    events: tuple[Event, ...]


def predict(text: str, plan: Plan, planned: Sequence[PlannedCollective], *, model: str | None = None) -> Prediction:
    """Returns the prediction of a compiled step. text: the program as XLA scheduled it. planned: the plan's
    collectives. model: its name in the declaration, if it has one. Raises HloError for a text of an unknown form."""
    module = parse_module(text)
    analysis = analyse_schedule(module, plan, planned)
    return _predicted(module, analysis, plan.target, plan.ops, model or plan.spec.model.family)


def predict_inspected(program: InspectedProgram) -> Prediction:
    """Returns the prediction of a program without a declaration."""
    return _predicted(program.module, program.analysis, program.devices.target, OPERATIONS, program.module.name)


def _predicted(
    module: Module, analysis: ScheduleAnalysis, target: TargetPlan, ops: Sequence[ParallelOp], model: str
) -> Prediction:
    ends: dict[str, list[str]] = {}
    for instruction, collective in analysis.dones.items():
        ends.setdefault(collective, []).append(instruction)
    parts = {*(each.name for each in analysis.collectives), *analysis.dones}
    ran = list(_ran(module))
    return Prediction(
        schema_version=PREDICTION_VERSION,
        module=module.name,
        model=model,
        target=target.name,
        chip=target.chip.name if target.chip else None,
        calibration=target.calibration,
        num_devices=target.num_devices,
        step=analysis.step,
        compute=tuple(
            PredictedCompute(
                name=each.name,
                kind=instruction_kind(each, module, ops),
                source=source_of_compute(each),
                seconds=analysis.compute_seconds.get(each.name, 0.0) if target.chip else Unknown(NO_CHIP),
            )
            for each in ran
            if each.name not in parts and each.opcode not in _CONTAINERS
        ),
        collectives=tuple(
            PredictedCollective(
                report=each,
                ends=tuple(ends.get(each.name, ())),
                latency_seconds=analysis.latency_seconds.get(each.name, Unknown(NO_CHIP)),
            )
            for each in analysis.collectives
        ),
        containers=tuple(each.name for each in ran if each.opcode in _CONTAINERS),
        events=analysis.events,
    )


def once_in_a_step(module: Module) -> frozenset[str]:
    """Returns the instructions of a program that each of its executions runs once."""
    return frozenset(each.name for each in module.entry_computation.instructions if each.opcode not in _NOTHING)


def _ran(module: Module) -> Iterator[Instruction]:
    """Returns the instructions that a device runs one by one, without those inside of fusions."""
    waiting, seen = [module.entry_computation], set[str]()
    while waiting:
        computation = waiting.pop()
        if computation.name in seen:
            continue
        seen.add(computation.name)
        for each in computation.instructions:
            if each.opcode not in _NOTHING:
                yield each
            if each.opcode in _CONTAINERS:
                waiting += [module.computations[name] for name in each.called if name in module.computations]


def source_of_compute(instruction: Instruction) -> str:
    """Returns the source of compute: 'layers/attend/dot_general, backward'. Where XLA merged several, it is the
    first."""
    if not instruction.op_name:
        return f"{instruction.name.split('.')[0]}, made by the compiler"
    name = OperationName(instruction.op_name).separated[0]
    return f"{name.own or name.last}, {name.in_pass}"
