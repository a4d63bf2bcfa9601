"""Finds matmuls of few bits that run in 16 bits or more, without a word of the compiler.

silent-upcast       both operands of a matmul were float8 or int8, and are converted to a wider type right before it, or
                    the chip's compiler multiplies that type no faster than 16 bits

One operand of few bits beside one of 16 is a weight that is stored so: a matmul in the type of the other is meant then.
"""

from collections.abc import Callable, Iterator, Sequence

from ..core.float_types import FEW_BITS, numpy_name, peak_name
from ..core.format import counted, human_names, human_seconds, human_share
from ..schema import Finding
from ..target.target import TargetPlan
from ..xla.hlo import Computation, Instruction, Module
from ..xla.hlo.flow import Flow, ModuleValue
from ..xla.hlo.opcodes import VIEWS
from ..xla.schedule.kernels import is_matmul
from .program_text import LEAST_SHARE, NUM_PLACES, shown, source_finder
from .schedule_analysis import ScheduleAnalysis

_SCALED = ("multiply", "divide")


def find_upcasts(module: Module, schedule: ScheduleAnalysis, target: TargetPlan) -> Iterator[Finding]:
    """Yields one finding for each type that matmuls of both operands lose on their way."""
    flow = Flow(module)
    found: dict[str, list[tuple[Instruction, Computation]]] = {}
    for around in module.computations.values():
        for each in filter(is_matmul, around.instructions):
            if dtype := _lost_type(each, around, flow, target):
                found.setdefault(dtype, []).append((each, around))
    for dtype, matmuls in found.items():
        yield from _finding(dtype, matmuls, module, schedule, target)


def _lost_type(matmul: Instruction, around: Computation, flow: Flow, target: TargetPlan) -> str | None:
    """Returns the type that both operands had, if the matmul does not run in it."""
    operands = [around.by_name[name] for name in matmul.operands[:2] if name in around.by_name]
    if len(operands) < 2:
        return None
    values = [ModuleValue(around, each) for each in operands]
    types = [_few_bits(value) for value in values]
    if all(types):
        return types[0] if peak_name(types[0] or "") not in target.real_types and target.chip else None
    stored = [own or _converted_from(value, flow) for own, value in zip(types, values, strict=True)]
    return stored[0] if all(stored) else None


def _few_bits(value: ModuleValue) -> str | None:
    """Returns XLA's name of the type of a value, if it is one of few bits."""
    dtype = value.array.dtype if value.array is not None else "f32"
    return dtype if dtype != "token" and peak_name(dtype) in FEW_BITS else None


def _converted_from(value: ModuleValue, flow: Flow) -> str | None:
    """Returns the type of few bits that a value was converted from, and perhaps scaled, right before its use."""
    made = flow.origin(value, through=VIEWS)
    if made.instruction.opcode == "convert":
        return _operand_type(made, 0, flow)
    if made.instruction.opcode in _SCALED:
        factors = (_factor(made, place, flow) for place in range(len(made.instruction.operands)))
        converted = (each for each in factors if each.instruction.opcode == "convert")
        return next((dtype for each in converted if (dtype := _operand_type(each, 0, flow))), None)
    return None


def _factor(value: ModuleValue, place: int, flow: Flow) -> ModuleValue:
    operand = value.computation.by_name[value.instruction.operands[place]]
    return flow.origin(ModuleValue(value.computation, operand), through=VIEWS)


def _operand_type(value: ModuleValue, place: int, flow: Flow) -> str | None:
    return _few_bits(_factor(value, place, flow))


def _finding(
    dtype: str,
    matmuls: Sequence[tuple[Instruction, Computation]],
    module: Module,
    schedule: ScheduleAnalysis,
    target: TargetPlan,
) -> Iterator[Finding]:
    seconds = sum(map(_seconds_in(module, schedule), matmuls))
    least = schedule.step.least_seconds
    if not least or seconds < LEAST_SHARE * least:
        return
    lines = source_finder(module)
    places = dict.fromkeys(shown(at, each.op_name) if (at := lines(each)) else each.name for each, _ in matmuls)
    has = human_names(sorted(target.real_types)) or "none"
    yield Finding(
        rule="silent-upcast",
        severity="warning",
        what=f"{counted(len(matmuls), 'matmul')} of {numpy_name(dtype)} by {numpy_name(dtype)} run in a wider type: "
        f"{human_seconds(seconds)}, {human_share(seconds / least)} of the step",
        where=human_names(list(places), NUM_PLACES, between="; "),
        fix=f"types of few bits that {target.name} multiplies faster: {has}. Multiply in one of these, with the scales "
        "after the matmul, or in bfloat16 without rounding first",
    )


def _seconds_in(module: Module, schedule: ScheduleAnalysis) -> Callable[[tuple[Instruction, Computation]], float]:
    """Returns a function of a matmul to the seconds of what runs it: itself, or the fusion around it."""

    def seconds(place: tuple[Instruction, Computation]) -> float:
        each, around = place
        while each.name not in schedule.compute_seconds:
            callers = module.callers.get(around.name, ())
            if len(callers) != 1:
                return 0.0
            ((around, each),) = callers
        return schedule.compute_seconds[each.name]

    return seconds
