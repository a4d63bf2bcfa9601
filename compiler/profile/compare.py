"""Compares a trace with the prediction of its program: the time of each kind of work, and of each operation.

Such comparisons calibrate a chip: they give the factors by which runs on it were slower than predicted. Compute has a
factor for each kind, the measured over the predicted time. Links have two for each kind: one for the part of a
collective's time that depends on its size, and one for the part that does not. They are fitted to all collectives whose
transfer was measured, for the least relative errors. Where these do not tell the two parts apart, both have the same
factor.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from meshloom.models.record import Record

from ..core.errors import ConfigError, Problem
from ..core.format import counted, human_names
from ..core.known import OrUnknown, Reasoned, Unknown, each_known, known
from ..core.traffic import ComputeKind, LinkKind, TransferKind
from ..schema import total
from ..spec.calibration_spec import CalibratedLink, Calibration, LinkCalibration
from .prediction import PredictedCollective, Prediction
from .trace import Account, Execution, Roles, Trace, account, roles_of

PROFILE_VERSION = 1  # of profile.json
NUM_UNMATCHED = 3


class Compared(Record):
    """The seconds of a step, and the ratio of measured to predicted. measured: the median over the traced steps and
    devices."""

    measured_seconds: NonNegativeFloat
    predicted_seconds: OrUnknown[NonNegativeFloat]
    ratio: OrUnknown[NonNegativeFloat]


class KindRow(Compared):
    """The time of one kind of work. For collectives it is their time alone; `exposed` is the part that compute waits
    for."""

    kind: ComputeKind | TransferKind
    mesh_axes: tuple[str, ...]
    link: LinkKind | None  # None: compute
    exposed: Compared | None  # None: compute


class OperationRow(Compared):
    """An instruction, with all its executions in a step. is_transfer: for a collective, True if the measured time is
    that of its transfer, and does not end when compute asks for it. latency_seconds: the part of the predicted time
    that does not depend on the size."""

    name: str
    kind: ComputeKind | TransferKind
    source: str
    link: LinkKind | None
    count: PositiveInt  # measured
    exposed: Compared | None
    is_transfer: bool
    latency_seconds: NonNegativeFloat | None


class ProfileReport(Reasoned):
    """A traced run, compared with its prediction. steps: the traced steps, where the trace names them. fastest,
    slowest: of the steps on any device. idle: neither compute nor a collective ran. unmatched: seconds of instructions
    that the program does not have. notes: what is missing in the trace."""

    schema_version: Literal[1]
    model: str
    target: str
    chip: str | None
    calibration: Calibration | None  # used by the predicted times
    platform: Literal["cpu", "gpu", "tpu"]
    steps: tuple[int, ...]
    num_executions: PositiveInt
    num_devices: PositiveInt  # in the trace
    num_processes: PositiveInt
    step: Compared
    fastest_seconds: NonNegativeFloat
    slowest_seconds: NonNegativeFloat
    kinds: tuple[KindRow, ...]
    idle_seconds: NonNegativeFloat
    operations: tuple[OperationRow, ...]
    num_not_run: NonNegativeInt  # collectives of the program that the trace does not have
    unmatched_seconds: NonNegativeFloat
    notes: tuple[str, ...]


def compare(traces: Sequence[Trace], prediction: Prediction) -> ProfileReport:
    """Returns the comparison. traces: one for each process; at least one of them has an execution."""
    roles = roles_of(prediction)
    executions = [each for trace in traces for each in trace.executions]
    accounts = [account(each, roles) for each in executions]
    seconds = [each.seconds for each in executions]
    steps = sorted({each.step for each in executions if each.step is not None})
    unmatched = sorted({name for each in accounts for name in each.unmatched})
    missing = [each for each in prediction.collectives if not any(each.report.name in a.in_flight for a in accounts)]
    notes = [note for trace in traces for note in trace.notes]
    if unmatched:
        named = human_names(unmatched, NUM_UNMATCHED)
        notes.append(f"{counted(len(unmatched), 'operation')} not in the program: {named}")
    return ProfileReport(
        schema_version=PROFILE_VERSION,
        model=prediction.model,
        target=prediction.target,
        chip=prediction.chip,
        calibration=prediction.calibration,
        platform=traces[0].platform,
        steps=tuple(steps),
        num_executions=len(executions),
        num_devices=len({(each.process, each.device) for each in executions}),
        num_processes=len({each.process for each in executions}),
        step=compared(statistics.median(seconds), prediction.step.step_seconds),
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        kinds=(*_compute_kinds(accounts, prediction), *_collective_kinds(accounts, prediction)),
        idle_seconds=statistics.median(each.idle for each in accounts),
        operations=tuple(_operations(accounts, prediction, roles)),
        num_not_run=len(missing),
        unmatched_seconds=_median(accounts, lambda each: sum(each.unmatched.values())),
        notes=tuple(notes),
    )


def typical_execution(traces: Sequence[Trace]) -> Execution:
    """Returns the execution whose time is closest to the median of all."""
    executions = [each for trace in traces for each in trace.executions]
    median = statistics.median(each.seconds for each in executions)
    return min(executions, key=lambda each: abs(each.seconds - median))


def compared(measured: float, predicted: float | Unknown) -> Compared:
    """Returns two times and their ratio, which is unknown where nothing, or a time of zero, was predicted."""
    return Compared(**_values(measured, predicted))


def _values(measured: float, predicted: float | Unknown) -> dict[str, Any]:
    ratio = each_known(
        predicted, lambda seconds: measured / seconds if seconds else Unknown("a time of 0 is predicted")
    )
    return {"measured_seconds": measured, "predicted_seconds": predicted, "ratio": ratio}


def _median(accounts: Iterable[Account], value: Callable[[Account], float]) -> float:
    return statistics.median(value(each) for each in accounts)


def _compute_kinds(accounts: Sequence[Account], prediction: Prediction) -> list[KindRow]:
    kinds: tuple[ComputeKind, ...] = ("matmul", "attention", "other")
    predicted, whole = prediction.step.compute_seconds_by_kind, prediction.step.compute_seconds
    rows = []
    for kind in kinds:
        measured = _median(accounts, lambda each, kind=kind: each.compute.get(kind, 0.0))
        if measured or predicted.get(kind):
            values = _values(measured, each_known(whole, lambda _, kind=kind: predicted.get(kind, 0.0)))
            rows.append(KindRow(kind=kind, mesh_axes=(), link=None, exposed=None, **values))
    return rows


def _collective_kinds(accounts: Sequence[Account], prediction: Prediction) -> list[KindRow]:
    """Returns a row for each kind, mesh axes and link, the longest measured first."""
    groups: dict[tuple[TransferKind, tuple[str, ...], LinkKind], list[PredictedCollective]] = {}
    for each in prediction.collectives:
        groups.setdefault((each.report.kind, each.report.mesh_axes, each.report.link), []).append(each)
    rows = []
    for (kind, axes, link), each in groups.items():
        names = [one.report.name for one in each]
        alone = _median(accounts, lambda a, names=names: sum(a.in_flight.get(name, 0.0) for name in names))
        exposed = _median(accounts, lambda a, names=names: sum(a.exposed.get(name, 0.0) for name in names))
        if not any(name in a.in_flight for name in names for a in accounts):
            continue
        rows.append(
            KindRow(
                kind=kind,
                mesh_axes=axes,
                link=link,
                exposed=compared(exposed, total(one.report.exposed_seconds for one in each)),
                **_values(alone, total(one.report.alone_seconds for one in each)),
            )
        )
    return sorted(rows, key=lambda row: -row.measured_seconds)


def _operations(accounts: Sequence[Account], prediction: Prediction, roles: Roles) -> list[OperationRow]:
    """Returns a row for each instruction that ran: first those whose time differs most from the predicted one, or the
    longest where none is predicted."""
    rows = []
    names = dict.fromkeys(name for each in accounts for name in each.counts)
    computes = {each.name: each for each in prediction.compute}
    for name in names:
        count = max(each.counts.get(name, 0) for each in accounts)
        begun = roles.begun.get(name)
        if begun is None:
            compute = computes[name]
            measured = _median(accounts, lambda a, name=name: a.operations.get(name, 0.0))
            rows.append(
                OperationRow(
                    name=name, kind=compute.kind, source=compute.source, link=None, count=count, exposed=None,
                    is_transfer=False, latency_seconds=None, **_values(measured, compute.seconds),
                )
            )  # fmt: skip
            continue
        report = begun.report
        measured = _median(accounts, lambda a, name=name: a.in_flight.get(name, 0.0))
        exposed = _median(accounts, lambda a, name=name: a.exposed.get(name, 0.0))
        rows.append(
            OperationRow(
                name=name,
                kind=report.kind,
                source=report.source,
                link=report.link,
                count=count,
                exposed=compared(exposed, report.exposed_seconds),
                is_transfer=all(a.is_exact.get(name, True) for a in accounts),
                latency_seconds=known(begun.latency_seconds),
                **_values(measured, report.alone_seconds),
            )
        )
    return sorted(rows, key=lambda row: (-difference(row.exposed or row), row.name))


def difference(of_step: Compared) -> float:
    """Returns the difference of measured and predicted seconds; the measured time where nothing is predicted. of_step:
    of a collective, the time that compute waits for it."""
    return abs(of_step.measured_seconds - (of_step.predicted_seconds or 0.0))


KINDS: tuple[ComputeKind, ...] = ("matmul", "attention", "other")
LARGEST_CONDITION = 1e4  # of the matrix, for a fit of two factors


def calibrate(reports: Sequence[ProfileReport], source: str) -> Calibration:
    """Returns the calibration under which predictions of these runs equal the measured times. source: the names of the
    runs.

    Raises ConfigError for runs on different chips, on an unknown one, or predicted with different calibrations.
    """
    chip, before = _same_chip(reports), _same_calibration(reports)
    factors = {kind: _compute_factor(kind, reports) * (getattr(before, kind) if before else 1.0) for kind in KINDS}
    links = dict(before.links) if before else {}
    for kind in get_args(CalibratedLink):
        found = _link_factors([row for report in reports for row in report.operations if row.link == kind])
        if found is not None:
            old = links.get(kind)
            links[kind] = LinkCalibration(
                transfer=found.transfer * (old.transfer if old else 1.0),
                latency=found.latency * (old.latency if old else 1.0),
            )
    return Calibration(chip=chip, links=links, source=source, **factors)


def _same_chip(reports: Sequence[ProfileReport]) -> str:
    chips = dict.fromkeys(report.chip for report in reports)
    if None in chips:
        what = "a run was on no chip that is known, so nothing was predicted of it"
        raise ConfigError([Problem("RUN", what, "name runs on TPUs or GPUs that have a file in conf/target")])
    if len(chips) > 1:
        what = f"the runs were on different chips: {', '.join(map(str, chips))}"
        raise ConfigError([Problem("RUN", what, "calibrate each chip by its own runs")])
    return str(next(iter(chips)))


def _same_calibration(reports: Sequence[ProfileReport]) -> Calibration | None:
    first, *others = (report.calibration for report in reports)
    if any(other != first for other in others):
        what = "the runs were predicted with different calibrations"
        raise ConfigError([Problem("RUN", what, "name runs of the same calibration=")])
    return first


def _compute_factor(kind: ComputeKind, reports: Iterable[ProfileReport]) -> float:
    """Returns the ratio of measured to predicted seconds; 1 if the runs have no work of this kind."""
    rows = [row for report in reports for row in report.kinds if row.kind == kind]
    measured, predicted = sum(row.measured_seconds for row in rows), sum(row.predicted_seconds or 0.0 for row in rows)
    return measured / predicted if measured and predicted else 1.0


def _link_factors(rows: Sequence[OperationRow]) -> LinkCalibration | None:
    """Returns the factors of one kind of link; None where no transfer over it was measured."""
    known = [
        (row.measured_seconds, row.predicted_seconds - row.latency_seconds, row.latency_seconds)
        for row in rows
        if row.is_transfer and row.predicted_seconds and row.latency_seconds is not None and row.measured_seconds
    ]
    if not known:
        return None
    values = np.array(known)
    measured, parts = values[:, 0], values[:, 1:]
    relative = parts / measured[:, None]
    if len(known) > 1 and np.linalg.cond(relative) < LARGEST_CONDITION:
        transfer, latency = np.linalg.lstsq(relative, np.ones(len(known)), rcond=None)[0]
        if transfer > 0 and latency > 0:
            return LinkCalibration(transfer=float(transfer), latency=float(latency))
    both = float(measured.sum() / parts.sum())
    return LinkCalibration(transfer=both, latency=both)
