"""Compares a trace with the prediction of its program: the time of each kind of work, and of each operation.

Such comparisons calibrate a chip: they give the factors by which runs on it were slower than predicted. Compute has a
factor for each kind, the measured over the predicted time. Links have two for each kind: one for the part of a
collective's time that depends on its size, and one for the part that does not. They are fitted to all collectives whose
transfer was measured, for the least relative errors. Where these do not tell the two parts apart, both have the same
factor.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from meshloom.models.record import Record

from ..core.errors import ConfigError, Problem
from ..core.format import counted, human_names, human_seconds
from ..core.known import OrUnknown, Reasoned, Unknown, each_known, known
from ..core.traffic import ComputeKind, LinkKind, TransferKind
from ..schema import total
from ..spec.calibration_spec import CalibratedLink, Calibration, LinkCalibration
from .op_table import OpRow
from .prediction import PredictedCollective, Prediction
from .trace import Account, Execution, Platform, Roles, Trace, account, roles_of

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
    num_devices: PositiveInt | None  # in the trace; None: a table does not say
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


@dataclass(frozen=True)
class Ran:
    """What ran. accounts: of each execution. seconds: how long each took. steps: those that the trace names.
    num_executions, num_devices, num_processes: the extent of the trace. notes: what is missing in it."""

    platform: Platform
    accounts: Sequence[Account]
    seconds: Sequence[float]
    steps: tuple[int, ...]
    num_executions: int
    num_devices: int | None
    num_processes: int
    notes: tuple[str, ...]


def compare(traces: Sequence[Trace], prediction: Prediction) -> ProfileReport:
    """Returns the comparison. traces: one for each process; at least one of them has an execution."""
    roles = roles_of(prediction)
    executions = [each for trace in traces for each in trace.executions]
    ran = Ran(
        platform=traces[0].platform,
        accounts=[account(each, roles) for each in executions],
        seconds=[each.seconds for each in executions],
        steps=tuple(sorted({each.step for each in executions if each.step is not None})),
        num_executions=len(executions),
        num_devices=len({(each.process, each.device) for each in executions}),
        num_processes=len({each.process for each in executions}),
        notes=tuple(note for trace in traces for note in trace.notes),
    )
    return _report(ran, prediction, roles)


def compare_rows(rows: Sequence[OpRow], prediction: Prediction, runs: int, platform: Platform) -> ProfileReport:
    """Returns the comparison of a table of operations. runs: the executions in it, on all devices together."""
    roles = roles_of(prediction)
    found = account_of_rows(rows, roles, runs)
    seconds = sum(row.seconds for row in rows) / runs
    note = f"a table has sums of {counted(runs, 'execution')} on all devices: each time is their average"
    note += ", and of a collective with a start and an end only what was waited for"
    return _report(Ran(platform, [found], [seconds], (), runs, None, 1, (note,)), prediction, roles)


def account_of_rows(rows: Sequence[OpRow], roles: Roles, runs: int) -> Account:
    """Returns how an average execution was spent. An operation of a device's line runs alone on it, so the time of a
    collective's own operations is exposed; how long its transfer took is known where it is one operation."""
    found = Account()
    for row in rows:
        if row.name in roles.containers:
            continue
        seconds, count = row.seconds / runs, max(1, round(row.occurrences / runs))
        collective = row.name if row.name in roles.begun else roles.ended.get(row.name)
        if collective is not None:
            begun = roles.begun[collective]
            found.exposed[collective] = found.exposed.get(collective, 0.0) + seconds
            found.in_flight[collective] = found.in_flight.get(collective, 0.0) + seconds
            found.is_exact[collective] = not begun.ends
            if row.name == collective:
                found.counts[collective] = count
        elif row.name in roles.kinds:
            kind = roles.kinds[row.name]
            found.compute[kind] = found.compute.get(kind, 0.0) + seconds
            found.operations[row.name] = found.operations.get(row.name, 0.0) + seconds
            found.counts[row.name] = count
        else:
            found.unmatched[row.name] = seconds
    return found


def _report(ran: Ran, prediction: Prediction, roles: Roles) -> ProfileReport:
    accounts = ran.accounts
    unmatched = sorted({name for each in accounts for name in each.unmatched})
    missing = [each for each in prediction.collectives if not any(each.report.name in a.in_flight for a in accounts)]
    operations = tuple(_operations(accounts, prediction, roles))
    notes = [*ran.notes, *_unpriced(operations, prediction)]
    if prediction.chip and isinstance(prediction.step.compute_seconds, Unknown):
        notes.append("matmul, attention and other are the sums of the operations that have a prediction")
    if ran.num_executions == 1:
        notes.append("the program ran once: a first step may wait for what later ones find ready, so trace several")
    if unmatched:
        named = human_names(unmatched, NUM_UNMATCHED)
        notes.append(f"{counted(len(unmatched), 'operation')} not in the program: {named}")
    return ProfileReport(
        schema_version=PROFILE_VERSION,
        model=prediction.model,
        target=prediction.target,
        chip=prediction.chip,
        calibration=prediction.calibration,
        platform=ran.platform,
        steps=ran.steps,
        num_executions=ran.num_executions,
        num_devices=ran.num_devices,
        num_processes=ran.num_processes,
        step=compared(statistics.median(ran.seconds), prediction.step.step_seconds),
        fastest_seconds=min(ran.seconds),
        slowest_seconds=max(ran.seconds),
        kinds=(*_compute_kinds(accounts, operations, prediction), *_collective_kinds(accounts, prediction)),
        idle_seconds=statistics.median(each.idle for each in accounts),
        operations=operations,
        num_not_run=len(missing),
        unmatched_seconds=_median(accounts, lambda each: sum(each.unmatched.values())),
        notes=tuple(notes),
    )


def _unpriced(operations: Sequence[OperationRow], prediction: Prediction) -> Iterator[str]:
    """Yields a note for each reason why the times of some operations on a known chip are not predicted."""
    reasons: dict[str, float] = {}
    for row in operations:
        if prediction.chip and isinstance(row.predicted_seconds, Unknown):
            why = row.predicted_seconds.why
            reasons[why] = reasons.get(why, 0.0) + row.measured_seconds
    for why, seconds in sorted(reasons.items(), key=lambda each: -each[1]):
        yield f"{human_seconds(seconds)} measured of operations without a prediction: {why}"


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


def _compute_kinds(
    accounts: Sequence[Account], operations: Sequence[OperationRow], prediction: Prediction
) -> list[KindRow]:
    """Returns a row for each kind. Where some operations of a known chip have no prediction, a row has the others
    alone."""
    kinds: tuple[ComputeKind, ...] = ("matmul", "attention", "other")
    predicted, whole = prediction.step.compute_seconds_by_kind, prediction.step.compute_seconds
    is_partial = isinstance(whole, Unknown) and prediction.chip is not None
    rows = []
    for kind in kinds:
        if is_partial:
            priced = [
                (row.measured_seconds, row.predicted_seconds)
                for row in operations
                if row.kind == kind and not isinstance(row.predicted_seconds, Unknown)
            ]
            measured, price = sum(each for each, _ in priced), sum(each for _, each in priced)
        else:
            measured = _median(accounts, lambda each, kind=kind: each.compute.get(kind, 0.0))
            price = predicted.get(kind, 0.0)
        if measured or price:
            values = _values(measured, price if is_partial else each_known(whole, lambda _, price=price: price))
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


CLOSE = 0.002  # a step that is predicted this well is not fitted again
NUM_FITS = 4
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


def fit_steps(
    calibration: Calibration,
    reports: Sequence[ProfileReport],
    predict: Callable[[Calibration], Sequence[float] | None],
) -> tuple[Calibration, str]:
    """Returns the calibration with its factors of what ran changed by one ratio, under which the predicted steps sum up
    to the measured ones: what the factors of each kind leave is time in which nothing ran, and other overlap. Returns
    with it what was not reached; empty if the steps are predicted.

    predict: returns the steps that are predicted with a calibration; None where they are not known.
    """
    kinds: list[ComputeKind] = [
        kind for kind in KINDS if any(row.kind == kind for report in reports for row in report.kinds)
    ]
    measured = [report.step.measured_seconds for report in reports]
    tried: list[tuple[float, Calibration]] = []
    for _ in range(1 + NUM_FITS):
        predicted = predict(calibration)
        if not predicted:
            return calibration, "the step is not predicted, so only the time of each kind of work is fitted"
        ratio = sum(measured) / sum(predicted)
        if abs(ratio - 1) < CLOSE:
            return calibration, ""
        tried.append((ratio, calibration))
        calibration = _scaled(calibration, ratio, kinds)
    ratio, best = min(tried, key=lambda each: abs(each[0] - 1))
    took = f"{counted(len(measured), 'step')} took {ratio:.3g} times as long as predicted"
    return best, f"after {counted(NUM_FITS, 'fit')} the {took}: much of it depends on no factor, as latencies"


def _scaled(calibration: Calibration, ratio: float, of: Sequence[ComputeKind]) -> Calibration:
    links = {
        kind: LinkCalibration(transfer=link.transfer * ratio, latency=link.latency * ratio)
        for kind, link in calibration.links.items()
    }
    kinds = {kind: getattr(calibration, kind) * ratio for kind in of}
    return calibration.model_copy(update={**kinds, "links": links})


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
