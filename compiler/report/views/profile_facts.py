"""Describes a profile in the words that the terminal and the page share."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.format import counted, human_seconds
from ...profile.compare import Compared, KindRow, OperationRow, ProfileReport, compared


@dataclass(frozen=True)
class Operations:
    """Operations of one source and kind, their times added. exposed: None: of compute."""

    source: str
    kind: str
    names: tuple[str, ...]
    alone: Compared
    exposed: Compared | None


def traced(report: ProfileReport) -> str:
    """Returns what was traced: 'steps 10 to 13 on 8 devices'."""
    steps = report.steps
    if not steps:
        what = counted(report.num_executions, "execution")
    else:
        what = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    processes = f" of {counted(report.num_processes, 'process', 'processes')}" if report.num_processes > 1 else ""
    return f"{what} on {counted(report.num_devices, 'device')}{processes}"


def spread(report: ProfileReport) -> str:
    """Returns the range of the measured steps."""
    return f"{human_seconds(report.fastest_seconds)} to {human_seconds(report.slowest_seconds)}"


def name_of(row: KindRow) -> str:
    """Returns the name of a kind: 'matmul', 'all-gather over fsdp on ICI'; simulated devices have no link."""
    if row.link is None:
        return row.kind
    over = f"{row.kind} over {'+'.join(row.mesh_axes) or '?'}"
    return over if row.link == "memory" else f"{over} on {row.link}"


def by_source(rows: Sequence[OperationRow]) -> list[Operations]:
    """Returns the operations of each source together, those first whose time differs most from the predicted one."""
    groups: dict[tuple[str, str], list[OperationRow]] = {}
    for row in rows:
        groups.setdefault((row.source, row.kind), []).append(row)
    found = [_together(each) for each in groups.values()]
    return sorted(found, key=lambda one: -_difference(one))


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
    predicted = [each.predicted_seconds for each in values]
    known = [each for each in predicted if each is not None]
    return compared(sum(each.measured_seconds for each in values), sum(known) if len(known) == len(predicted) else None)


def _difference(one: Operations) -> float:
    of_step = one.exposed or one.alone
    return abs(of_step.measured_seconds - (of_step.predicted_seconds or 0.0))
