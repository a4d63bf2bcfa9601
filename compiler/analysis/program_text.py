"""The text of a compiled step -> what it says of its schedule and of its memory, or why that is not known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..estimate.communication import PlannedCollective
from ..plan import Plan
from ..xla.hlo import HloError, parse_module
from .program_memory import PeakMemory, read_peak
from .schedule_analysis import ScheduleAnalysis, analyse_schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Unread:
    """In the place of what is not known."""

    why: str


NO_PROGRAM = Unread("the step was not compiled: it does not fit")


def read_text(
    text: str | None, plan: Plan, planned: Sequence[PlannedCollective]
) -> tuple[ScheduleAnalysis | Unread, PeakMemory | Unread]:
    """text: None where the step does not fit. planned: the collectives that the plan has.

    The program is no worse where its text is of a form that the reader does not know: each part is read by itself.
    """
    if text is None:
        return NO_PROGRAM, NO_PROGRAM
    module = _read(lambda: parse_module(text))
    if isinstance(module, Unread):
        return module, module
    return _read(lambda: analyse_schedule(module, plan, planned)), _read(lambda: read_peak(module))


def _read(part: Callable[[], T]) -> T | Unread:
    """A form that is known to be unknown is an HloError; what else has to be there, and is not, ends in the others."""
    try:
        return part()
    except (LookupError, ValueError) as error:
        said = str(error) if isinstance(error, HloError) else repr(error)
        return Unread(f"the program's text cannot be read: {said}")
