"""Derives the facts of a report that all views show: the verdict, why a collective is exposed, why a value is
unknown."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ...core.format import LEAST_SECONDS, counted, human_bytes, human_names, human_range, human_seconds, human_share
from ...core.known import Unknown, all_known, first_unknown, known, text_of
from ...core.traffic import ComputeKind, TimedTraffic
from ...figures import NOT_RATED, StepFigures, registered_figures, text_of_figure
from ...schema import MAX_IMBALANCE, Alternative, CollectiveReport, Report, SearchReport, TriedReport, or_infinity

PER_CHIP = "tokens/s per chip"
STEP, EXPECTED_STEP, STEP_OF_ANY = "predicted step", "expected step", "step as compiled"
Tone = Literal["good", "bad", "plain", "unknown"]


@dataclass(frozen=True)
class Fact:
    """One fact of the verdict. why: why it, or the limit that judges it, is unknown; empty if it is known."""

    name: str
    value: str
    detail: str
    tone: Tone
    why: str = ""


def verdict(report: Report) -> tuple[Fact, ...]:
    """Returns the verdict: whether the step fits in a device's memory and the host's, its time, MFU and exposed
    share."""
    step = report.compiled
    roofline = text_of(step.roofline_seconds, lambda seconds: f"roofline {human_seconds(seconds)}", "")
    between = text_of(step.range_of(step.step_seconds), lambda ends: f"{human_range(ends)} ({step.range_basis})", "")
    detail = "; ".join(filter(None, (between, roofline)))
    own = _whole_step(report) or _fact(STEP, step.step_seconds, human_seconds, detail)
    fit = _fit("memory", step.peak_bytes, step.limit_bytes, fits=step.fits, left=left_bytes(report))
    host, left = step.host_bytes, all_known((step.host_limit_bytes, step.host_bytes), lambda both: both[0] - both[1])
    of_host = _fit("host memory", host, step.host_limit_bytes, fits=step.host_fits, left=known(left))
    return (fit, *([of_host] if host else []), *_of_imbalance(report, own), *_rates(step))


def _rates(step: StepFigures) -> Iterator[Fact]:
    """Yields what follows from the time of a step: the rates, the shares of the parts, and the registered figures."""
    if rate := step.tokens_per_second_per_chip:
        yield Fact(PER_CHIP, f"{rate:,.0f}", "predicted", "plain")
    yield _fact("predicted MFU", step.mfu, human_share, "remat excluded")
    of_host = step.exposed_host_seconds
    exposed = text_of(step.exposed_seconds, lambda all_: f"{human_seconds(all_ - of_host)} of communication", "")
    if exposed and of_host:
        exposed += f", {human_seconds(of_host)} of copies to the host and back"
    yield _fact("exposed", step.exposed_fraction, human_share, exposed)
    if step.bubble_seconds:
        detail = f"{human_seconds(step.bubble_seconds)} of waits for other stages"
        yield _fact("bubble", step.bubble_fraction, human_share, detail)
    for one in registered_figures():
        yield _fact(one.heading, getattr(step, one.name, NOT_RATED), one.human, "")


def at_usual_imbalance(report: Report) -> Alternative | None:
    """Returns the step with room for the usual imbalance of experts, by the estimate; None if the compiled step has no
    room for more."""
    first = f"{MAX_IMBALANCE}="
    return next((one for one in report.alternatives if one.overrides and one.overrides[0].startswith(first)), None)


def _of_imbalance(report: Report, own: Fact) -> tuple[Fact, ...]:
    """Returns the step. If experts have room for any imbalance, the expected step comes first and the compiled one is
    named as such."""
    usual = at_usual_imbalance(report)
    if usual is None:
        return (own,)
    room = f"estimated, {shlex.join(usual.overrides)}"
    detail = f"with room for any imbalance of experts{'; ' if own.detail else ''}{own.detail}"
    expected = Fact(EXPECTED_STEP, text_of(usual.figures.step_seconds, human_seconds), room, "plain")
    return expected, replace(own, name=STEP_OF_ANY, detail=detail)


def _whole_step(report: Report) -> Fact | None:
    """Returns the least time of the step if the time of a part is unknown; None if all or nothing is timed."""
    step = report.compiled
    if not isinstance(step.step_seconds, Unknown) or isinstance(step.least_seconds, Unknown):
        return None
    value = f"at least {human_seconds(step.least_seconds)}"
    if step.counted_once:
        value += f" per iteration of {human_names(step.counted_once, most=2)}"
    return Fact(STEP, value, "the time of a part is", "unknown", step.step_seconds.why)


def _fit(name: str, needed: int | Unknown, limit: int | Unknown, *, fits: bool | Unknown, left: int | None) -> Fact:
    if isinstance(needed, Unknown):
        return Fact(name, "unknown", "", "unknown", needed.why)
    if isinstance(limit, Unknown):
        return Fact(name, human_bytes(needed), "its limit is", "unknown", limit.why)
    detail = f"{human_bytes(needed)} of {human_bytes(limit)}"
    if fits:
        return Fact(name, "fits", f"{detail}, {human_bytes(max(0, left or 0))} left", "good")
    return Fact(name, "does not fit", f"{detail}, {human_bytes(needed - limit)} too much", "bad")


def left_bytes(report: Report) -> int | None:
    """Returns the bytes beside the peak, the program's code and the reserved part; None if they are unknown."""
    peak, limit = report.compiled.peak_bytes, report.compiled.limit_bytes
    if isinstance(peak, Unknown) or isinstance(limit, Unknown):
        return None
    return limit - peak - (report.memory.breakdown.get("code") or 0)  # the limit excludes the reserved part


def _fact(name: str, value: float | Unknown, human: Any, detail: str) -> Fact:
    if isinstance(value, Unknown):
        return Fact(name, "unknown", "", "unknown", value.why)
    return Fact(name, human(value), detail, "plain")


def unknown_values(report: Report) -> Iterator[tuple[str, str]]:
    """Yields (path, reason) of the values of this step that are unknown, in the order of the report."""
    needless = ("search.", "estimated", "alternatives")
    if not report.compiled.host_bytes:
        needless += ("compiled.host_limit_bytes",)
    for path, why in report.unknown.items():
        if not path.startswith(needless):
            yield path, why


def compute_by_kind(report: Report) -> list[tuple[str, float]]:
    """Returns the kinds of compute that take time, always in the same order."""
    seconds = report.compiled.compute_seconds_by_kind
    return [(str(kind), seconds[kind]) for kind in get_args(ComputeKind) if seconds.get(kind)]


def why_exposed(collective: CollectiveReport) -> str:
    """Returns one clause on what compute waits for; empty if nothing is exposed or the cause is unknown."""
    if not collective.exposed_seconds:
        return ""
    if not collective.is_async:
        return "synchronous: compute waits" if collective.form != "synchronous" else "compute waits for all of it"
    if (collective.hidden_seconds or 0) < LEAST_SECONDS:
        return "nothing runs between its start and its end"
    return f"outlasts {human_names(collective.hidden_behind, most=2) or 'what runs meanwhile'}"


def origin(report: Report, collective: CollectiveReport) -> str:
    """Returns a short name of a collective's origin: the parameter that a declaration names, or else the line of
    code."""
    if not isinstance(report.program.num_parameters, Unknown) or not collective.line:
        return collective.source
    in_pass = collective.origin.in_pass
    return f"{collective.line.rpartition('/')[2]}{f', {in_pass}' if in_pass else ''}"


def sums(collectives: Iterable[CollectiveReport]) -> tuple[TimedTraffic, ...]:
    """Returns collectives added up by kind, mesh axes and link, the most exposed first."""
    groups: dict[tuple[str, tuple[str, ...], str], TimedTraffic] = {}
    for c in collectives:
        key = c.kind, c.mesh_axes, c.link
        groups[key] = groups[key] + c if key in groups else c
    return tuple(sorted(groups.values(), key=lambda row: (-or_infinity(row.exposed_seconds), -row.bytes)))


def line_of(one: TriedReport) -> str:
    """Returns the line of a candidate of `overlap.search`, 'prefetch 1, unroll 2, sparse_core: 1.54 s, 0.3 % exposed,
    9.5 GiB', or why it has no figures."""
    step = one.figures
    if (unknown := first_unknown((step.step_seconds, step.exposed_fraction, step.peak_bytes))) is not None:
        return f"  {one.name}: {unknown.why}"
    exposed = f"{text_of_figure(step, 'exposed_fraction')} exposed"
    host = f" and {text_of(step.host_bytes, human_bytes)} of the host" if step.host_bytes else ""
    memory = text_of_figure(step, "peak_bytes") + host + (", does not fit" if step.runs is False else "")
    return f"  {one.name}: {text_of_figure(step, 'step_seconds')}, {exposed}, {memory}"


def lines_of_rest(search: SearchReport) -> Iterator[str]:
    """Yields a line for each reason why candidates are not in the table."""
    if search.num_ruled_out:
        yield f"{counted(search.num_ruled_out, 'candidate')} could not save overlap.search.min_gain of the step"
    if search.num_equal:
        yield f"{counted(search.num_equal, 'candidate')} made a program that was compiled already"
    if search.num_untried:
        yield f"{counted(search.num_untried, 'candidate')} not tried: overlap.search.{search.bound}"
