"""Finds arithmetic that several devices repeat: a batch, or another array, is split over fewer devices than run.

repeated-work       devices compute the same as others
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..core.format import counted, human_count, human_names, human_seconds, human_share
from ..schema import Finding, StepReport
from ..xla.hlo import Module
from ..xla.schedule.alike import Repeated, find_repeated
from .program_devices import ProgramDevices
from .program_text import NUM_PLACES
from .source_lines import shown, source_finder

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
