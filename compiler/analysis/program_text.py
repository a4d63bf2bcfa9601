"""Reads the schedule and the memory from the text of a compiled step, or says why they are unknown."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..estimate.communication import PlannedCollective
from ..plan import Plan
from ..xla.hlo import HloError, parse_module
from .program_memory import PeakMemory, read_peak
from .schedule_analysis import ScheduleAnalysis, analyse_schedule
from .unavailable import Unavailable

T = TypeVar("T")


NO_PROGRAM = Unavailable("the step was not compiled: it does not fit")


def read_text(
    text: str | None, plan: Plan, planned: Sequence[PlannedCollective]
) -> tuple[ScheduleAnalysis | Unavailable, PeakMemory | Unavailable]:
    """Returns the schedule and the peak. text: None if the step does not fit. planned: the plan's collectives.

    A text of an unknown form does not make the program invalid, so each part is read separately.
    """
    if text is None:
        return NO_PROGRAM, NO_PROGRAM
    module = read_part(lambda: parse_module(text))
    if isinstance(module, Unavailable):
        return module, module
    return read_part(lambda: analyse_schedule(module, plan, planned)), read_part(lambda: read_peak(module))


def read_part(part: Callable[[], T]) -> T | Unavailable:
    """Returns a part of what a text says, or why it cannot be read. Unsupported forms raise HloError; missing pieces
    raise the others."""
    try:
        return part()
    except RecursionError:
        return Unavailable("the program's text cannot be read: its computations call each other without an end")
    except (LookupError, ValueError) as error:
        said = str(error) if isinstance(error, HloError) else repr(error)
        return Unavailable(f"the program's text cannot be read: {said}")
