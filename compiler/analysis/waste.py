"""Finds what a program does for nothing: transfers that another layout or another order of operations would save, and
arithmetic that several devices repeat, since a batch or another array is split over fewer devices than run.

stack-gathered-whole        a stack of layers is split along the dimension that a loop runs along: all of it is gathered
gathered-then-sliced        each device uses only a part of what an all-gather gives it
upcast-transfer             the transferred type is wider than that of the input, or of the result
float32-reduction           a sum in float32 of what is bfloat16, or where the program's other sums are in bfloat16
repeated-work               devices compute the same as others

compiler/xla/hlo/flow.py finds where values come from and go to.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..core.float_types import numpy_name
from ..core.format import counted, human_bytes, human_count, human_names, human_seconds, human_share
from ..core.known import each_known, text_of
from ..core.traffic import CollectiveKind
from ..schema import CollectiveReport, Finding, StepReport, total
from ..xla.hlo import Computation, Instruction, Module
from ..xla.hlo.flow import Flow, ModuleValue, ValueUse
from ..xla.hlo.opcodes import BLOCKS, VIEWS
from ..xla.hlo.types import ArrayType, bits_of
from ..xla.schedule.alike import Repeated, find_repeated
from .program_devices import ProgramDevices
from .program_text import LEAST_BYTES, NUM_PLACES, SourceLine, shown, source_finder

MOST_USED = 0.5  # the share of a gathered array; an operation that uses more needs it whole
_MOVED: frozenset[CollectiveKind] = frozenset({"all-gather", "all-to-all", "collective-permute"})  # nothing is summed
_SUMMED: frozenset[CollectiveKind] = frozenset({"all-reduce", "reduce-scatter"})


@dataclass(frozen=True)
class MovedArray:
    """One array that a collective moves. sent: the array that a device gives, an operand of the collective itself.
    result: the array that it has afterwards. dimension: the dimension that an all-gather joins. share: the array's
    share of the collective's bytes."""

    report: CollectiveReport
    sent: ModuleValue
    result: ModuleValue
    dimension: int
    share: float

    @property
    def array(self) -> ArrayType:
        """Returns the array that each device has afterwards."""
        found = self.result.array
        return found if found is not None else ArrayType("token", ())


@dataclass(frozen=True)
class Waste:
    """A transfer of which `share` could be saved, with the reason and the fix. where: the cause, after the place of the
    transfer."""

    rule: str
    moved: MovedArray
    share: float
    why: str
    where: str
    fix: str
    severity: Literal["warning", "note"] = "warning"


def find_wasted_transfers(
    module: Module, collectives: Sequence[CollectiveReport], dones: Mapping[str, str], *, is_cpu: bool
) -> tuple[Finding, ...]:
    """Returns the findings on transfers, the most costly first. dones: the instructions that wait for a collective,
    with its name. is_cpu: whether the compiler computes in float32 where the program has bfloat16."""
    seen = _Transfers(module, collectives, dones)
    found: list[Waste] = []
    for moved in seen.moved:
        candidates = (seen.stack(moved), seen.part(moved), None if is_cpu else seen.cast(moved))
        found += [each for each in candidates if each is not None][:1]
    for moved in () if is_cpu else seen.summed:
        found += [] if (waste := seen.wide_sum(moved)) is None else [waste]
    alike: dict[tuple[str, str, str], list[Waste]] = defaultdict(list)
    for each in found:
        alike[each.rule, each.moved.report.kind, each.fix].append(each)
    findings = ((_cost(several)[0], _finding(several)) for several in alike.values())
    return tuple(finding for _, finding in sorted(findings, key=lambda each: -each[0]))


@dataclass(frozen=True)
class _Transfers:
    """The large transfers of a program."""

    module: Module
    collectives: Sequence[CollectiveReport]
    dones: Mapping[str, str]

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.module)

    @cached_property
    def moved(self) -> tuple[MovedArray, ...]:
        """Returns the arrays that large collectives move as they are."""
        return self._moved(_MOVED)

    @cached_property
    def summed(self) -> tuple[MovedArray, ...]:
        """Returns the arrays that large collectives sum."""
        return self._moved(_SUMMED)

    def _moved(self, kinds: frozenset[CollectiveKind]) -> tuple[MovedArray, ...]:
        large = {each.name: each for each in self._large if each.kind in kinds}
        ends = {name: done for done, name in self.dones.items()}
        return tuple(
            moved
            for computation in self.module.computations.values()
            for name in (each.name for each in computation.instructions if each.opcode != "parameter")
            if name in large and ends.get(name, name) in computation.by_name
            for moved in self._arrays(large[name], computation, ends.get(name, name))
        )

    @cached_property
    def _large(self) -> tuple[CollectiveReport, ...]:
        return tuple(each for each in self.collectives if each.bytes // each.count >= LEAST_BYTES)

    def _are_others_narrow(self, report: CollectiveReport) -> bool:
        """Returns True if the program sums more in bfloat16 than in float32 over the same devices, as it does where
        gradients are declared in bfloat16. Sums of activations over other devices have a type of their own."""
        alike = [each for each in self._large if each.kind in _SUMMED and each.mesh_axes == report.mesh_axes]
        wide = sum(each.bytes for each in alike if each.dtype == "f32")
        narrow = sum(each.bytes for each in alike if each.dtype == "bf16")
        return narrow > wide

    def wide_sum(self, moved: MovedArray) -> Waste | None:
        """Returns the waste of a sum in float32 that is an exception among the program's sums; as a note, of one whose
        input or result is bfloat16, since many want gradients to be summed so."""
        if moved.array.dtype != "f32":
            return None
        fix = "sum in bfloat16: cast before it, or let the matmul give bfloat16 (preferred_element_type)"
        of = self.flow.origin(moved.sent, through=VIEWS).instruction
        if self._are_others_narrow(moved.report):
            why = "in float32, where the program's others over these devices are in bfloat16"
            return Waste("float32-reduction", moved, 0.5, why, f"made by {of.name}", f"{fix}, as the others")
        if (found := self.cast(moved)) is None:
            return None
        return replace(
            found,
            rule="float32-reduction",
            severity="note",
            fix=f"if its sum is accurate enough, {fix}: half the bytes",
        )

    def stack(self, moved: MovedArray) -> Waste | None:
        """Returns the waste of a parameter that is gathered along the dimension that a loop slices one by one."""
        array, gathered = moved.array, self.flow.uses(moved.result)
        if moved.report.kind != "all-gather" or not array.shape or array.shape[moved.dimension] < 2:
            return None
        origin = self.flow.origin(moved.sent)
        num_layers, is_within = array.shape[moved.dimension], moved.result.computation.name in self._bodies
        is_sliced = bool(gathered) and all(
            _is_slice(use) and use.reader.opcode == "dynamic-slice" and (use.loops or is_within)
            and use.reader.arrays[0].num_elements * num_layers == array.num_elements
            for use in gathered
        )  # fmt: skip
        if not is_sliced or not (
            origin.instruction.opcode == "parameter" and origin.computation.name == self.module.entry
        ):
            return None
        named = origin.instruction.op_name.replace("\\'", "'") or origin.instruction.name
        held = "" if is_within else ", and then lies whole on each device throughout the loop"
        return Waste(
            "stack-gathered-whole", moved, 1 - 1 / num_layers if is_within else 1.0,
            f"of a whole stack of layers, which is split along the dimension that the loop runs along{held}",
            f"{named}, a stack of {num_layers}",
            "split another dimension of the stack, as PartitionSpec(None, 'fsdp'): an iteration then gathers one layer",
        )  # fmt: skip

    def part(self, moved: MovedArray) -> Waste | None:
        """Returns the waste of an array that is gathered and then used only in part."""
        gathered = self.flow.uses(moved.result)
        if moved.report.kind != "all-gather" or not gathered:
            return None
        if not all(_is_slice(use) and not use.loops for use in gathered):
            return None
        whole, used = moved.array.num_elements, sum(use.reader.arrays[0].num_elements for use in gathered)
        if used > MOST_USED * whole:
            return None
        use, lines = gathered[0], self._lines_of(gathered[0].reader)
        at = f" at {shown(lines, use.reader.op_name)}" if lines else ""
        return Waste(
            "gathered-then-sliced", moved, 1 - used / whole,
            f"of which each device uses {human_share(used / whole)}",
            f"sliced by {use.reader.name}{at}", _fix_of_slice(use, moved),
        )  # fmt: skip

    def cast(self, moved: MovedArray) -> Waste | None:
        """Returns the waste of an array that is cast to a wider type before it is moved, or to a narrower one after."""
        dtype = moved.array.dtype
        before = self.flow.origin(moved.sent, through=VIEWS)
        if before.instruction.opcode == "convert":
            narrow = before.computation.by_name[before.instruction.operands[0]].arrays[0].dtype
            if bits_of(narrow) < bits_of(dtype):
                return self._cast(moved, narrow, "what goes in", f"cast by {before.instruction.name}", "after")
        uses = self.flow.uses(moved.result, through=VIEWS)
        types = {use.reader.arrays[0].dtype for use in uses if use.reader.opcode == "convert" and not use.is_result}
        if uses and len(types) == 1 and all(use.reader.opcode == "convert" for use in uses):
            (narrow,) = types
            if bits_of(narrow) < bits_of(dtype):
                return self._cast(moved, narrow, "all that uses it", f"cast by {uses[0].reader.name}", "before")
        return None

    def _cast(self, moved: MovedArray, narrow: str, which: str, where: str, when: str) -> Waste:
        wide, short = (numpy_name(name) for name in (moved.array.dtype, narrow))
        return Waste(
            "upcast-transfer", moved, 1 - bits_of(narrow) / bits_of(moved.array.dtype),
            f"in {wide}, where {which} is {short}", where,
            f"cast {when} the {moved.report.kind}: {short} crosses instead",
        )  # fmt: skip

    def _arrays(self, report: CollectiveReport, around: Computation, end: str) -> Iterator[MovedArray]:
        found = self._collective(around.by_name[report.name], around, report.kind)
        if found is None:
            return
        inner, within = found
        sizes = [within.by_name[name].num_bytes for name in inner.operands]
        dimension = int((inner.attribute("dimensions") or "{0}").strip("{}").split(",")[0] or 0)
        for number, name in enumerate(inner.operands):
            path = (number,) if len(sizes) > 1 else ()
            sent, result = ModuleValue(within, within.by_name[name]), ModuleValue(around, around.by_name[end], path)
            yield MovedArray(report, sent, result, dimension, sizes[number] / max(1, sum(sizes)))

    def _collective(self, outer: Instruction, around: Computation, kind: str) -> tuple[Instruction, Computation] | None:
        """Returns the collective that an instruction is or contains, and the computation that it is in."""
        kinds = (kind, "all-reduce") if kind == "reduce-scatter" else (kind,)  # TPUs scatter the sum in one fusion
        if outer.opcode.removesuffix("-start") in kinds:
            return outer, around
        for name in outer.called:
            computation = self.module.computations[name]
            for each in computation.instructions:
                if found := self._collective(each, computation, kind):
                    return found
        return None

    @cached_property
    def _bodies(self) -> frozenset[str]:
        """Returns the bodies of loops."""
        instructions = (each for c in self.module.computations.values() for each in c.instructions)
        return frozenset(each.body for each in instructions if each.opcode == "while")

    @cached_property
    def _lines_of(self) -> Callable[[Instruction], tuple[SourceLine, ...]]:
        return source_finder(self.module)


def _is_slice(use: ValueUse) -> bool:
    return use.reader.opcode in BLOCKS and use.place == 0 and not use.is_result


def _fix_of_slice(use: ValueUse, moved: MovedArray) -> str:
    """Returns the fix for a gathered array that is sliced."""
    if use.reader.opcode == "slice":
        return "slice first, then gather: or give the slice alone the layout that is whole, by with_sharding_constraint"
    shape, part = (use.array.shape if use.array else ()), use.reader.arrays[0].shape
    sliced = [d for d, (whole, size) in enumerate(zip(shape, part, strict=False)) if size < whole]
    if shape == moved.array.shape and moved.dimension in sliced:
        return (
            "leave it split: the PartitionSpec of with_sharding_constraint or out_specs before the slice makes it "
            "whole, so give it that of its use"
        )
    return (
        "do not make it whole between two layouts: constrain it from the first PartitionSpec straight to the second, "
        "and an all-to-all moves a part of the bytes"
    )


def _cost(several: Sequence[Waste]) -> tuple[float, str]:
    """Returns the seconds that waste exposes, and its text: '12.0 MiB and 1.20 ms of waiting a step'."""
    num_bytes = sum(round(each.moved.report.bytes * each.moved.share * each.share) for each in several)
    shares = [(each.moved.report.exposed_seconds, each.moved.share * each.share) for each in several]
    seconds = total(each_known(exposed, lambda known, share=share: known * share) for exposed, share in shares)
    more = " more than needed" if several[0].share < 1 else ""
    waiting = text_of(seconds, lambda known: f" and {human_seconds(known)} of waiting", "")
    return seconds or 0.0, f"{human_bytes(num_bytes)}{waiting} a step{more}"


def _finding(several: Sequence[Waste]) -> Finding:
    """Returns one finding for wastes that differ only in their places."""
    first = max(several, key=lambda each: each.moved.report.bytes * each.moved.share * each.share)
    kind = first.moved.report.kind
    reports = {each.moved.report.name: each.moved.report for each in several}
    number = counted(sum(each.count for each in reports.values()), kind)
    causes = [(each.moved.report, each.where) for each in (first, *several)]
    places = [f"{at.line or at.source} ({at.name}, {at.where}): {cause}" for at, cause in causes]
    return Finding(
        rule=first.rule,
        severity=first.severity,
        what=f"{number} {first.why}: {_cost(several)[1]}",
        where=human_names(list(dict.fromkeys(places)), NUM_PLACES, between="; "),
        fix=first.fix,
    )


LEAST_SHARE = 0.1  # the share of the arithmetic that would be saved if each result were computed once


def find_repeated_work(
    module: Module, devices: ProgramDevices, compute_seconds: Mapping[str, float], step: StepReport
) -> Iterator[Finding]:
    """Yields the finding, if there is one. compute_seconds: by instruction of the schedule, over all executions."""
    found = find_repeated(module)
    whole = sum(each.flops for each in found)
    once = sum(each.flops / each.num_times for each in found)
    repeated = sorted((each for each in found if each.num_times > 1), key=lambda each: -_wasted(each))
    if not whole or 1 - once / whole < LEAST_SHARE:
        return
    over = list(dict.fromkeys(name for each in repeated for name in devices.name((each.alike,))))
    number, most = module.num_devices, round(repeated[0].num_times)
    seconds = _seconds(found, compute_seconds)
    of_step = f" and {human_seconds(seconds)}" if seconds else ""
    if seconds and step.least_seconds:
        of_step += f", {human_share(seconds / step.least_seconds)} of the step"
    alike = "all of them" if most == number else f"{most} at a time"
    lines = source_finder(module)
    named = (
        f"{shown(at, each.instruction.op_name)} ({each.within})" if (at := lines(each.instruction)) else each.within
        for each in repeated
    )
    places = human_names(list(dict.fromkeys(named)), NUM_PLACES, between="; ")
    yield Finding(
        rule="repeated-work",
        severity="warning",
        what=f"{counted(number, 'device')} do {whole / once:.2g} times the arithmetic of the program: {alike} compute "
        f"the same, which costs each {human_count(whole - once, 'FLOPs')}{of_step}",
        where=f"over {human_names(over, NUM_PLACES)}: {places}",
        fix="split the batch over them, too: in_shardings, or with_sharding_constraint, with a PartitionSpec that "
        "names their mesh axes for its first dimension",
    )


def _wasted(each: Repeated) -> float:
    return each.flops * (1 - 1 / each.num_times)


def _seconds(found: Sequence[Repeated], compute_seconds: Mapping[str, float]) -> float:
    """Returns the time of arithmetic that several devices repeat: the repeated share of each instruction of the
    schedule."""
    whole, wasted = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in found:
        whole[each.within] += each.flops
        wasted[each.within] += _wasted(each)
    return sum(compute_seconds.get(name, 0.0) * wasted[name] / whole[name] for name in whole)
