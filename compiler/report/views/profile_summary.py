"""A profile on a terminal: the step, the kinds of work, and the operations that differ most from the prediction."""

from collections.abc import Sequence
from pathlib import Path

from ...core.console import Column, Console, Part, Table
from ...core.format import counted, human_seconds
from ...profile.compare import Compared, ProfileReport
from .files import show_files
from .profile_facts import Operations, alone, by_source, name_of, spread, traced

NUM_OPERATIONS = 10
UNKNOWN: Part = ("unknown", "yellow")


def show_profile(report: ProfileReport, console: Console, *, files: Sequence[Path], is_by_name: bool = False) -> None:
    """Prints the profile. is_by_name: each operation by itself, with the name of its instruction."""
    is_predicted = report.step.predicted_seconds is not None
    console.wrapped((report.model, "bold"), f" on {report.target}: {traced(report)}, a step took {spread(report)}")
    if report.calibration:
        console.wrapped(("calibrated", "bold"), f" {report.calibration.describe()}")
    console.line()
    console.table(_kinds(report, is_predicted=is_predicted))
    console.line()
    rows = [alone(row) for row in report.operations] if is_by_name else by_source(report.operations)
    title = "operations that differ most" if is_predicted else "operations that take most"
    console.table(_operations(rows[:NUM_OPERATIONS], title, is_predicted=is_predicted, is_by_name=is_by_name))
    if len(rows) > NUM_OPERATIONS:
        console.wrapped((f"and {counted(len(rows) - NUM_OPERATIONS, 'more row')}; profile.json has all", "dim"))
    console.line()
    for note in _notes(report):
        console.wrapped(*note)
    show_files(console, files)


def _kinds(report: ProfileReport, *, is_predicted: bool) -> Table:
    """Returns the step and its kinds. is_predicted: with what was predicted of them."""
    columns = (Column("", min_width=28, overflow="fold"), *_headings(is_predicted))
    rows: list[list[Part]] = [[("step", "bold"), *_cells(report.step, is_predicted)]]
    for row in report.kinds:
        rows.append([name_of(row), *_cells(row, is_predicted)])
        if row.exposed is not None:
            rows.append(["  of it exposed", *_cells(row.exposed, is_predicted)])
    rows.append(["nothing ran", human_seconds(report.idle_seconds), *[""] * (len(columns) - 2)])
    return Table(columns, rows)


def _operations(rows: Sequence[Operations], title: str, *, is_predicted: bool, is_by_name: bool) -> Table:
    columns = (
        *_headings(is_predicted),
        Column("kind"),
        Column("operation" + (", HLO instruction" if is_by_name else ""), overflow="fold"),
    )
    shown = [[*_cells(row.exposed or row.alone, is_predicted), _kind(row), _name(row, is_by_name)] for row in rows]
    return Table(columns, shown, title=title)


def _headings(is_predicted: bool) -> tuple[Column, ...]:
    names = ("measured", "predicted", "ratio") if is_predicted else ("measured",)
    return tuple(Column(name, justify="right", min_width=9) for name in names)


def _kind(row: Operations) -> str:
    return row.kind if row.exposed is None else f"{row.kind}, exposed"


def _name(row: Operations, is_by_name: bool) -> str:
    if is_by_name:
        return f"{row.source}  {row.names[0]}"
    return row.source if len(row.names) == 1 else f"{row.source} ({counted(len(row.names), 'place')})"


def _cells(value: Compared, is_predicted: bool) -> list[Part]:
    measured = human_seconds(value.measured_seconds)
    if not is_predicted:
        return [measured]
    predicted = UNKNOWN if value.predicted_seconds is None else human_seconds(value.predicted_seconds)
    return [measured, predicted, "" if value.ratio is None else f"{value.ratio:.2f}"]


def _notes(report: ProfileReport) -> list[list[Part]]:
    """Returns what is unknown and why, and what is missing in the trace."""
    reasons = dict.fromkeys(report.unknown.values())
    notes: list[list[Part]] = [[("unknown", "yellow"), f" predicted times: {reason}"] for reason in reasons]
    notes += [[("note", "yellow"), f" {note}"] for note in report.notes]
    if report.num_not_run:
        notes.append([("note", "yellow"), f" not in the trace: {counted(report.num_not_run, 'collective')}"])
    return notes
