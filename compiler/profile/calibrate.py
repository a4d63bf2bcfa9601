"""Calibrates a chip: finds the factors by which runs on it were slower than predicted.

Compute has a factor for each kind, the measured over the predicted time. Links have two for each kind: one for the part
of a collective's time that depends on its size, and one for the part that does not. They are fitted to all collectives
whose transfer was measured, for the least relative errors. Where these do not tell the two parts apart, both have the
same factor.
"""

from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from ..core.collectives import ComputeKind
from ..core.errors import ConfigError, Problem
from ..spec.calibration_spec import CalibratedLink, Calibration, LinkCalibration
from .compare import OperationRow, ProfileReport

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
