"""Summarises the report on one screen of a terminal: 100 columns, 40 lines."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from ...core.console import Column, Console, Line, Part, Table
from ...core.format import (
    counted,
    human_bytes,
    human_parameters,
    human_range,
    human_seconds,
    human_share,
    human_slowdown,
)
from ...core.known import Unknown, known, text_of
from ...figures import text_of_figure
from ...schema import MemoryChange, Report, by_exposed
from . import facts

FILE_WIDTH = 1000  # columns; nothing is wrapped
BAR_WIDTH = 48
LEAST_SAVED = (
    0.03  # the share of a step that makes another declaration worth a line; the estimate does not order closer ones
)
NUM_COLLECTIVES, NUM_FINDINGS, NUM_CHANGES, NUM_REASONS = 6, 2, 3, 3
TONES = {"good": "green", "bad": "bold red", "plain": "bold", "unknown": "yellow"}
MEMORY_STYLES = ("blue", "cyan", "magenta", "green", "white")
COMPUTE_STYLES = {"matmul": "blue", "attention": "cyan", "other": "white", "exposed": "red", "bubble": "magenta"}
FILLS = "█▓▒░"  # neighbours differ without colours too


def show_summary(report: Report, console: Console, *, files: Sequence[Path]) -> None:
    """Prints the verdict, memory, the step's time, the worst exposed collectives, findings, and the names of the files.

    Nothing is cut: a terminal wraps lines between words, and a file has them in full.
    """
    if not console.is_terminal:
        console.width = FILE_WIDTH
    target, program = report.target, report.program
    slices = f" in {target.num_slices} slices" if target.num_slices > 1 else ""
    between = known(report.compiled.range_of(report.compiled.step_seconds))
    shown = [_fact(fact, between) for fact in facts.verdict(report)]
    console.wrapped(*(part for index, fact in enumerate(shown) for part in ((" · ", *fact) if index else fact)))
    size = text_of(program.num_parameters, lambda count: f", {human_parameters(count)} parameters", "")
    size += text_of(program.tokens_per_step, ", {:,} tokens per step".format, "")
    console.wrapped(f"{program.model} on {target.name}: {counted(target.num_chips, 'chip')}{slices}{size}")
    if target.calibration:
        console.wrapped(("calibrated", "bold"), f" {target.calibration}")
    for part in (_memory, _step, _search, _faster, _collectives, _roofline, _findings, _unknown):
        for one in part(report):
            if isinstance(one, Table):
                console.table(one)
            else:
                console.wrapped(*one)
    show_files(console, files)


def _fact(fact: facts.Fact, between: tuple[float, float] | None) -> Line:
    value = (fact.value, TONES[fact.tone])
    if fact.name in ("memory", "host memory"):
        detail = fact.detail.split(",")[0]
        if fact.tone not in ("good", "bad"):
            return [f"{fact.name} ", value, ", limit unknown"]
        if fact.name == "memory":
            return [value, f": {detail}"]
        return ["host ", (detail, TONES["good"])] if fact.tone == "good" else ["host ", value, f": {detail}"]
    if fact.name == facts.PER_CHIP:
        return [value, f" {facts.PER_CHIP}"]
    if fact.name == facts.EXPECTED_STEP:
        return [f"{fact.name} ", value, f" ({fact.detail})"]
    name = {
        facts.STEP: "step",
        "predicted MFU": "MFU",
        facts.STEP_OF_ANY: "as compiled, for any imbalance of experts: step",
    }.get(fact.name, fact.name)
    is_step = fact.name in (facts.STEP, facts.STEP_OF_ANY) and between
    return [f"{name} ", value, *([f" ({human_range(between)})"] if is_step and between else [])]


def _memory(report: Report) -> Iterable[Line]:
    memory = report.memory
    # The limit excludes the reserved part.
    counts = [(name, count) for name, count in memory.breakdown.items() if count and name != "reserved"]
    parts = sorted(((name.replace("_", " "), count) for name, count in counts), key=lambda part: -part[1])
    if parts:
        rest = sum(count for _, count in parts[3:])
        parts = [*parts[:3], *([("other", rest)] if rest else [])]
        limit = report.compiled.limit_bytes or 0
        whole = max(sum(count for _, count in parts), limit)
        mark = limit / whole if limit < whole and limit else None
        bar = _bar([count / whole for _, count in parts], MEMORY_STYLES, mark)
        yield []
        yield [("memory", "bold"), "   ", *bar, f" of {human_bytes(limit)}" if limit else " of an unknown limit"]
        yield _legend([(n, human_bytes(c), s) for (n, c), s in zip(parts, MEMORY_STYLES, strict=False)])
    yield from change_lines(memory.changes)


def change_lines(changes: Sequence[MemoryChange]) -> Iterable[Line]:
    """Yields a line for each of the first changes that save memory."""
    for change in changes[:NUM_CHANGES]:
        enough: Part = ("fits", "green") if change.fits else "not enough"
        saved = human_bytes(change.saved_bytes)
        slower = text_of(change.slower_fraction, lambda share: f"; a token takes {human_slowdown(share)}", "")
        yield [f"  fix: {shlex.join(change.overrides)}  saves {saved}, ", enough, f"{slower}; {change.cost}"]


def _step(report: Report) -> Iterable[Line]:
    step = report.compiled
    parts = facts.compute_by_kind(report)
    if not isinstance(step.exposed_seconds, Unknown):
        parts.append(("exposed", step.exposed_seconds))
    if step.bubble_seconds:
        parts.append(("bubble", step.bubble_seconds))
    whole = sum(seconds for _, seconds in parts)
    if not whole:
        return
    styles = [COMPUTE_STYLES[name] for name, _ in parts]
    bar = _bar([seconds / whole for _, seconds in parts], styles)
    legend = _legend([(name, human_seconds(s), style) for (name, s), style in zip(parts, styles, strict=True)])
    at_least = "at least " if isinstance(step.step_seconds, Unknown) else ""
    yield [("step", "bold"), "     ", *bar, f" {at_least}{human_seconds(step.least_seconds or whole)}"]
    yield ["         ", *legend]
    if (between := step.range_of(step.step_seconds)) and step.range_basis:
        yield [("range", "bold"), f"    {human_range(between)}: {step.range_basis}"]


def _search(report: Report) -> Iterable[Line]:
    """Yields the chosen candidate and its gain over the declared one, or says that nothing could be judged."""
    search = report.search
    if search is None:
        return
    declared, chosen = search.tried[0], search.tried[search.chosen]
    name, num_tried, gain = chosen.name, len(search.tried), ""
    if search.chosen and declared.figures.step_seconds and chosen.figures.step_seconds:
        saved = 1 - chosen.figures.step_seconds / declared.figures.step_seconds
        gain = f", {human_share(saved)} shorter than {declared.name}"
    judged = f"best of {num_tried}" if chosen.figures.step_seconds else f"none of {num_tried} can be judged"
    yield [("search", "bold"), f"   {judged} compiled: {name}{gain}"]
    for line in facts.lines_of_rest(search):
        yield [("         " + line, "dim")]


def _faster(report: Report) -> Iterable[Line]:
    """Yields another declaration that fits and is shorter by the estimate, if it is shorter by more than a few
    percent."""
    own, others = report.alternatives[:1], report.alternatives[1:]
    usual = facts.at_usual_imbalance(report)  # it may drop tokens, and is in the verdict
    steps = [(one.figures.step_seconds, one) for one in others if one.figures.fits and one is not usual]
    timed = [(seconds, one) for seconds, one in steps if not isinstance(seconds, Unknown)]
    if not own or not timed:
        return
    seconds, best = min(timed, key=lambda each: each[0])
    declared = own[0].figures.step_seconds
    saved = 1 - seconds / declared if declared else 0.0
    if saved > LEAST_SAVED:
        gain = f"{human_share(saved)} shorter, {text_of_figure(best.figures, 'peak_bytes')}, both estimated"
        yield [("faster", "bold"), f"   {shlex.join(best.overrides)}: {gain}"]


def _bar(shares: Sequence[float], styles: Sequence[str], mark: float | None = None) -> Line:
    """Returns blocks in proportion. Boundaries are rounded, so that the whole is never longer than the bar."""
    cells: Line = []
    done = 0.0
    for index, share in enumerate(shares):
        done += share
        end = round(min(done, 1.0) * BAR_WIDTH)
        cells += [(FILLS[index % len(FILLS)], styles[index])] * (end - len(cells))
    cells += [("·", "dim")] * (BAR_WIDTH - len(cells))
    if mark is not None:
        cells[min(round(mark * BAR_WIDTH), BAR_WIDTH - 1)] = ("│", "bold red")
    return cells


def _legend(entries: Sequence[tuple[str, str, str]]) -> Line:
    return [
        part
        for index, (name, value, style) in enumerate(entries)
        for part in ("  ", (FILLS[index % len(FILLS)], style), f" {name} {value}")
    ]


def _collectives(report: Report) -> Iterable[Table | Line]:
    yield []
    for row in facts.sums(report.collectives)[:3]:
        times = f"{counted(row.count, 'time')}, {human_bytes(row.bytes)}"
        if not isinstance(row.hidden_seconds, Unknown) and not isinstance(row.exposed_seconds, Unknown):
            times += f", {human_seconds(row.hidden_seconds)} hidden, {human_seconds(row.exposed_seconds)} exposed"
        yield [(row.kind, "bold"), f" over {'+'.join(row.mesh_axes)} on {row.link}: {times}"]
    alike: dict[tuple[str, str], list[float]] = {}
    for c in by_exposed(report.collectives):
        if c.exposed_seconds:
            alike.setdefault((f"{c.kind}: {facts.origin(report, c)}", facts.why_exposed(c)), []).append(
                c.exposed_seconds
            )
    worst = sorted(alike.items(), key=lambda row: -sum(row[1]))
    if not worst:
        return
    columns = (
        Column("exposed", justify="right", min_width=7),
        Column("collective", overflow="fold"),
        Column("why", overflow="fold"),
    )
    rows: list[tuple[Part, ...]] = []
    for (name, why), seconds in worst[:NUM_COLLECTIVES]:
        places = f" ({len(seconds)} places)" if len(seconds) > 1 else ""
        rows.append((human_seconds(sum(seconds)), name + places, why))
    yield Table(columns, rows)
    if len(worst) > NUM_COLLECTIVES:
        rest = sum(sum(seconds) for _, seconds in worst[NUM_COLLECTIVES:])
        yield [(f"and {len(worst) - NUM_COLLECTIVES} more, {human_seconds(rest)} exposed", "dim")]


def _roofline(report: Report) -> Iterable[Line]:
    parts = [part for part in report.roofline if part.bound]
    step = report.compiled
    if not parts or isinstance(step.roofline_seconds, Unknown):
        return
    share = step.roofline_seconds / step.step_seconds if step.step_seconds else None
    of_step = f", {human_share(share)} of the step" if share else ""
    bounds: dict[str, list[str]] = {}
    for part in parts:
        bounds.setdefault(str(part.bound), []).append(part.name)
    bound = text_of(
        step.bound_seconds, lambda least: f"; no program of this declaration takes less than {human_seconds(least)}", ""
    )
    yield [("roofline", "bold"), f" {human_seconds(step.roofline_seconds)}{of_step}{bound}"]
    for bound, names in bounds.items():
        yield [f"  bound by {bound}: {', '.join(names)}"]


def _findings(report: Report) -> Iterable[Line]:
    found = sorted(report.findings, key=lambda finding: finding.severity != "warning")
    for finding in found[:NUM_FINDINGS]:
        style = "yellow" if finding.severity == "warning" else "dim"
        yield [(f"{finding.severity}: {finding.what}", style)]
        yield [(f"  where: {finding.where}", "dim")]
        yield [f"  fix: {finding.fix}"]
    if len(found) > NUM_FINDINGS:
        yield [(f"and {counted(len(found) - NUM_FINDINGS, 'more finding')}", "dim")]


def _unknown(report: Report) -> Iterable[Line]:
    reasons: dict[str, list[str]] = {}
    for path, reason in facts.unknown_values(report):
        reasons.setdefault(reason, []).append(path)
    for reason, paths in islice(reasons.items(), NUM_REASONS):
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield [("unknown", "yellow"), f" {paths[0]}{more}: {reason}"]
    if len(reasons) > NUM_REASONS:
        yield [(f"and {counted(len(reasons) - NUM_REASONS, 'more reason')}", "dim")]


def show_findings(report: Report, console: Console, *, files: Sequence[Path]) -> None:
    """Prints what a program does wrong, and the names of the files."""
    for line in _findings(report):
        console.wrapped(*line)
    show_files(console, files)


def show_files(console: Console, files: Sequence[Path]) -> None:
    """Prints the names of files, each on its own line if one line is too short: readers copy them whole."""
    names = [str(file) for file in files]
    if console.is_terminal and len("files    " + "  ".join(names)) > console.width:
        console.line(("files", "bold"))
        for name in names:
            console.line("  " + name)
    elif names:
        console.line(("files", "bold"), "    " + "  ".join(names))
