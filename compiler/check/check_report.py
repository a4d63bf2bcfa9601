"""Defines what a check finds: a line for each property, with what was measured and what is tolerated."""

from collections.abc import Sequence
from typing import Literal

from meshloom.models.record import Record

from .compare import Deviation
from .shrink import KeyCut

CHECK_VERSION = 1
LineStatus = Literal["passed", "failed", "differs", "not run"]


class CheckLine(Record):
    """One property of the program.

    measured, tolerance: of what differs by most beside its tolerance, as shares of a norm; None where nothing was
    measured. parameter: which differs by most. split: the mesh axes that split it. by: where the tolerance is from.
    why: what is wrong, or why it was not run; else what was compared. status: "differs" is of the small program, which
    has something that the declared one has not; no result is wrong."""

    name: str
    what: str
    status: LineStatus
    measured: float | None
    tolerance: float | None
    parameter: str | None
    split: str | None
    by: str
    why: str


class CheckReport(Record):
    """A check of a declaration. program: the declared one. small: the program that ran. replaced: what runs otherwise
    on a processor. seconds: of the whole check."""

    schema_version: Literal[1] = CHECK_VERSION
    program: str
    small: str
    passed: bool
    lines: tuple[CheckLine, ...]
    cuts: tuple[KeyCut, ...]
    replaced: tuple[str, ...]
    seconds: float


BY_ROUNDING = "rounding"  # measured on one device (compare.py)
BY_BITS = "equal bits"
BY_COUNT = "equal counts"


def not_run(name: str, what: str, why: str) -> CheckLine:
    """Returns the line of a property that the declaration does not have."""
    return CheckLine(
        name=name,
        what=what,
        status="not run",
        measured=None,
        tolerance=None,
        parameter=None,
        split=None,
        by="",
        why=why,
    )


def deviation_line(
    name: str, what: str, found: Deviation, *, split: str | None = None, by: str = BY_ROUNDING, why: str = ""
) -> CheckLine:
    """Returns the line of a difference."""
    measured = found.measured if found.measured < float("inf") else None
    said = (
        why if measured is not None else f"{found.path or 'a value'} is not there, has another shape, or is not finite"
    )
    return CheckLine(
        name=name,
        what=what,
        status="passed" if found.is_within else "failed",
        measured=measured,
        tolerance=found.tolerance,
        parameter=found.path or None,
        split=split,
        by=by,
        why=said,
    )


def judged_line(
    name: str, what: str, wrong: Sequence[str], *, by: str = BY_COUNT, why: str = "", otherwise: LineStatus = "failed"
) -> CheckLine:
    """Returns the line of a property that is there or not. wrong: all that is wrong. otherwise: the status then."""
    return CheckLine(
        name=name,
        what=what,
        status=otherwise if wrong else "passed",
        measured=None,
        tolerance=None,
        parameter=None,
        split=None,
        by=by,
        why="; ".join(wrong) or why,
    )
