"""Shows a profile: the words that terminal and page share, `profile.html`, and the summary on a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.console import Column, Console, Part, Table
from ...core.format import counted, human_seconds
from ...core.known import Unknown, text_of
from ...profile.compare import Compared, KindRow, OperationRow, ProfileReport, compared, difference
from ...profile.prediction import Prediction
from ...profile.trace import Execution, execution_events, roles_of
from ...schema import Event, total
from .page import compact_timeline, policy_hash, template_environment, template_source
from .summary import show_files
from .timeline import by_stage

NUM_ON_PAGE = 400  # the operations that differ most; profile.json has all
NUM_OPERATIONS = 10
UNKNOWN: Part = ("unknown", "yellow")


@dataclass(frozen=True)
class Operations:
    """Operations of one source and kind, their times added. exposed: the exposed time; None for compute."""

    source: str
    kind: str
    names: tuple[str, ...]
    alone: Compared
    exposed: Compared | None


def traced(report: ProfileReport) -> str:
    """Returns the extent of a trace: 'steps 10 to 13 on 8 devices'."""
    steps = report.steps
    if not steps:
        what = counted(report.num_executions, "execution")
    else:
        what = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if report.num_devices is None:
        return f"an average of {what}"
    processes = f" of {counted(report.num_processes, 'process', 'processes')}" if report.num_processes > 1 else ""
    return f"{what} on {counted(report.num_devices, 'device')}{processes}"


def spread(report: ProfileReport) -> str:
    """Returns the range of the measured steps."""
    fastest, slowest = human_seconds(report.fastest_seconds), human_seconds(report.slowest_seconds)
    return fastest if fastest == slowest else f"{fastest} to {slowest}"


def name_of(row: KindRow) -> str:
    """Returns the name of a kind: 'matmul', 'all-gather over fsdp on ICI'; simulated devices have no link."""
    if row.link is None:
        return row.kind
    over = f"{row.kind} over {'+'.join(row.mesh_axes) or '?'}"
    return over if row.link == "memory" else f"{over} on {row.link}"


def by_source(rows: Sequence[OperationRow]) -> list[Operations]:
    """Returns the operations of each source together, those whose time differs most from the prediction first."""
    groups: dict[tuple[str, str], list[OperationRow]] = {}
    for row in rows:
        groups.setdefault((row.source, row.kind), []).append(row)
    found = [_together(each) for each in groups.values()]
    return sorted(found, key=lambda one: -difference(one.exposed or one.alone))


def alone(row: OperationRow) -> Operations:
    """Returns one operation by itself."""
    return _together([row])


def _together(rows: Sequence[OperationRow]) -> Operations:
    exposed = [row.exposed for row in rows if row.exposed is not None]
    return Operations(
        source=rows[0].source,
        kind=rows[0].kind,
        names=tuple(row.name for row in rows),
        alone=_added(rows),
        exposed=_added(exposed) if exposed else None,
    )


def _added(values: Sequence[Compared]) -> Compared:
    predicted = total(each.predicted_seconds for each in values)
    return compared(sum(each.measured_seconds for each in values), predicted)


def measured_part(report: ProfileReport, prediction: Prediction, execution: Execution | None) -> dict[str, Any]:
    """Returns what a page shows of a profile. execution: the one whose timeline is shown; None: the profile is a table,
    without times of day."""
    where = "a step" if execution is None or execution.step is None else f"step {execution.step}"
    place = f" on device {execution.device} of process {execution.process}" if execution else ""
    return {
        "report": report,
        "traced": traced(report),
        "spread": spread(report),
        "shown": f"{where}{place}",
        "kinds": [(name_of(row), row) for row in report.kinds],
        "operations": [alone(row) for row in report.operations[:NUM_ON_PAGE]],
        "reasons": list(dict.fromkeys(report.unknown.values())),
        "timeline": _timeline(prediction, execution),
    }


def render_profile(report: ProfileReport, prediction: Prediction, execution: Execution | None) -> str:
    """Returns the whole page as text. execution: as in `measured_part`."""
    environment = template_environment()
    script, style = (template_source(environment, name) for name in ("page.js", "page.css"))
    return environment.get_template("profile.html.jinja").render(
        **measured_part(report, prediction, execution),
        title=f"{report.model} on {report.target}",
        report_json=report.model_dump(mode="json"),
        script=script,
        style=style,
        script_hash=policy_hash(script),
        style_hash=policy_hash(style),
    )


def _timeline(prediction: Prediction, execution: Execution | None) -> dict[str, Any]:
    """Returns the measured lanes above the predicted ones, compute before links. Of a pipeline they are those of the
    first stage."""
    if execution is None:
        return compact_timeline(())
    sources = {each.name: each.source for each in prediction.compute}
    sources |= {each.report.name: each.report.source for each in prediction.collectives}
    measured = execution_events(execution, roles_of(prediction))
    predicted = by_stage(prediction.events)[0]
    return compact_timeline(_marked(measured, "measured", sources), _marked(predicted, "predicted", sources))


def _marked(events: Iterable[Event], mark: str, sources: dict[str, str]) -> tuple[Event, ...]:
    return tuple(
        event.model_copy(
            update={
                "track": f"{mark} {event.track}",
                "arguments": event.arguments | ({"source": sources[event.name]} if event.name in sources else {}),
            }
        )
        for event in events
    )


def show_profile(report: ProfileReport, console: Console, *, files: Sequence[Path], is_by_name: bool = False) -> None:
    """Prints the profile. is_by_name: whether each operation is listed alone, with the name of its instruction."""
    is_predicted = any(not isinstance(row.predicted_seconds, Unknown) for row in (report.step, *report.operations))
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
    """Returns the table of the step and its kinds. is_predicted: whether it has predicted times."""
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
    shown = [
        [
            *_cells(row.exposed or row.alone, is_predicted),
            row.kind if row.exposed is None else f"{row.kind}, exposed",
            _name(row, is_by_name),
        ]
        for row in rows
    ]
    return Table(columns, shown, title=title)


def _headings(is_predicted: bool) -> tuple[Column, ...]:
    names = ("measured", "predicted", "ratio") if is_predicted else ("measured",)
    return tuple(Column(name, justify="right", min_width=9) for name in names)


def _name(row: Operations, is_by_name: bool) -> str:
    if is_by_name:
        return f"{row.source}  {row.names[0]}"
    return row.source if len(row.names) == 1 else f"{row.source} ({counted(len(row.names), 'place')})"


def _cells(value: Compared, is_predicted: bool) -> list[Part]:
    measured = human_seconds(value.measured_seconds)
    if not is_predicted:
        return [measured]
    predicted = UNKNOWN if isinstance(value.predicted_seconds, Unknown) else human_seconds(value.predicted_seconds)
    return [measured, predicted, text_of(value.ratio, "{:.2f}".format, "")]


def _notes(report: ProfileReport) -> list[list[Part]]:
    """Returns notes on unknown values, with reasons, and on gaps in the trace."""
    notes: list[list[Part]] = []
    if isinstance(report.step.predicted_seconds, Unknown):
        notes.append([("unknown", "yellow"), f" predicted step: {report.step.predicted_seconds.why}"])
    notes += [[("note", "yellow"), f" {note}"] for note in report.notes]
    if report.num_not_run:
        notes.append([("note", "yellow"), f" not in the trace: {counted(report.num_not_run, 'collective')}"])
    return notes
