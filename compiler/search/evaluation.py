"""The evaluation of a compiled candidate: its row in the table of a search."""

from ..analysis.compiled_step import CompiledStep, used_devices_per_chip
from ..analysis.unavailable import Unavailable
from ..schema import TriedReport
from .candidates import Candidate


def evaluate(one: Candidate, step: CompiledStep) -> TriedReport:
    """Returns the row of a compiled candidate, from its schedule."""
    schedule, per_chip = step.schedule, used_devices_per_chip(step.plan.target)
    figures = None if isinstance(schedule, Unavailable) else schedule.step
    needed, host = step.needed_bytes, step.host_bytes
    return TriedReport(
        **dict(one.way),
        predicted_seconds=figures and figures.predicted_seconds,
        exposed_fraction=figures and figures.exposed_fraction,
        peak_bytes_per_chip=None if needed is None else needed * per_chip,
        host_bytes_per_chip=None if host is None else host * per_chip,
        fits=False if step.fits_host is False else step.fits,
        compile_seconds=step.built.compile_seconds,
        why_not=schedule.why if isinstance(schedule, Unavailable) else None,
    )


def evaluate_failed(one: Candidate, why: str, seconds: float) -> TriedReport:
    """Returns the row of a candidate that the compiler failed on or refused. seconds: the time that it took."""
    figures = ("predicted_seconds", "exposed_fraction", "peak_bytes_per_chip", "host_bytes_per_chip", "fits")
    return TriedReport(**dict(one.way), **dict.fromkeys(figures), compile_seconds=seconds, why_not=why)
