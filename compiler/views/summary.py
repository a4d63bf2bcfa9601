"""The report on one screen of a terminal: 100 columns, 40 lines."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..report import MemoryReport, Report
from ..units import human_bytes, human_parameters, human_seconds, human_share
from .facts import Fact, by_exposed, compute_by_kind, sums, unknown_values, unpriced, verdict, why_exposed

WIDTH = 100
BAR_WIDTH = 60
NUM_COLLECTIVES, NUM_FINDINGS, NUM_CHANGES, NUM_REASONS = 6, 2, 3, 3
TONES = {"good": "green", "bad": "bold red", "plain": "bold", "unknown": "yellow"}
MEMORY_STYLES = ("blue", "cyan", "magenta", "green", "white")
COMPUTE_STYLES = {"matmul": "blue", "attention": "cyan", "other": "white", "exposed": "red"}
FILLS = "█▓▒░"  # neighbours differ without colours too


def show_summary(report: Report, console: Console, *, files: Sequence[Path]) -> None:
    """Print the verdict, memory, the step's time, the worst exposed collectives, findings, and where the files are.

    In a file lines have their full width; a narrower terminal cuts them.
    """
    if not console.is_terminal:
        console.width = max(WIDTH, console.width)
    target, program = report.target, report.program
    slices = f" in {target.num_slices} slices" if target.num_slices > 1 else ""
    _line(console, " · ".join(_fact(fact) for fact in verdict(report)))
    size = f"{human_parameters(program.num_parameters)} parameters, {program.tokens_per_step:,} tokens per step"
    _line(console, f"{escape(program.model)} on {escape(target.name)}: {target.num_chips:,} chips{slices}, {size}")
    for part in (_memory, _step, _search, _collectives, _roofline, _findings, _unknown):
        for renderable in part(report):
            if isinstance(renderable, str):
                _line(console, renderable)
            else:
                console.print(renderable, width=WIDTH)
    if files:
        told = "  ".join(escape(str(path)) for path in files)
        console.print(
            f"[bold]files[/]    {told}", soft_wrap=True, highlight=False, emoji=False
        )  # never broken: they are copied


def _line(console: Console, text: str) -> None:
    """One line and no more: what does not fit ends in an ellipsis, but on a screen that is wider."""
    width = max(WIDTH, console.width)
    console.print(
        Text.from_markup(text, emoji=False), overflow="ellipsis", no_wrap=True, width=width, crop=False, highlight=False
    )


def _fact(fact: Fact) -> str:
    value = f"[{TONES[fact.tone]}]{escape(fact.value)}[/]"
    if fact.name == "memory":
        detail = fact.detail.split(",")[0]
        return value + f": {detail}" if fact.tone in ("good", "bad") else f"memory {value}, limit unknown"
    name = {"predicted step": "step", "predicted MFU": "MFU"}.get(fact.name, fact.name)
    return f"{name} {value}"


def _memory(report: Report) -> Iterable[Table | str]:
    memory = report.memory
    parts = [(name.replace("_", " "), count) for name, count in memory.breakdown.items() if count]
    if parts:
        parts = _largest(parts)
        limit = memory.limit_bytes_per_chip or 0
        whole = max(sum(count for _, count in parts), limit)
        mark = limit / whole if limit < whole and limit else None
        yield ""
        yield f"[bold]memory[/]   {_bar([count / whole for _, count in parts], MEMORY_STYLES, mark)}{_limit(memory)}"
        yield _legend([(n, human_bytes(c), s) for (n, c), s in zip(parts, MEMORY_STYLES, strict=False)])
    for change in memory.changes[:NUM_CHANGES]:
        enough = "[green]fits[/]" if change.fits else "not enough"
        yield (f"  fix: {escape(shlex.join(change.overrides))}  saves {human_bytes(change.saved_bytes)}, {enough}; "
               f"{escape(change.cost)}")  # fmt: skip


def _largest(parts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The three largest parts, and the others as one."""
    parts = sorted(parts, key=lambda part: -part[1])
    rest = sum(count for _, count in parts[3:])
    return parts[:3] + ([("other", rest)] if rest else [])


def _limit(memory: MemoryReport) -> str:
    limit = memory.limit_bytes_per_chip
    return f" of {human_bytes(limit)}" if limit else " of an unknown limit"


def _step(report: Report) -> Iterable[str]:
    step = report.step
    parts = compute_by_kind(report)
    if step.exposed_seconds is not None:
        parts.append(("exposed", step.exposed_seconds))
    whole = sum(seconds for _, seconds in parts)
    if not whole:
        return
    styles = [COMPUTE_STYLES[name] for name, _ in parts]
    yield f"[bold]step[/]     {_bar([seconds / whole for _, seconds in parts], styles)} {human_seconds(whole)}"
    yield "         " + _legend(
        [(name, human_seconds(s), style) for (name, s), style in zip(parts, styles, strict=True)]
    )


def _search(report: Report) -> Iterable[str]:
    """What was chosen and what it gains against what was declared; or that nothing could be judged."""
    search = report.search
    if search is None:
        return
    declared, chosen = search.tried[0], search.tried[search.chosen]
    name, num_tried, gain = chosen.name, len(search.tried), ""
    if search.chosen and declared.predicted_seconds and chosen.predicted_seconds:
        saved = 1 - chosen.predicted_seconds / declared.predicted_seconds
        gain = f", {human_share(saved)} shorter than {declared.name}"
    judged = f"best of {num_tried}" if chosen.predicted_seconds is not None else f"none of {num_tried} can be judged"
    yield f"[bold]search[/]   {judged}: {escape(name + gain)}"


def _bar(shares: Sequence[float], styles: Sequence[str], mark: float | None = None) -> str:
    """Blocks in proportion; the boundaries are rounded, so that the whole is never longer than the bar."""
    cells, done = [], 0.0
    for index, share in enumerate(shares):
        done += share
        end = round(min(done, 1.0) * BAR_WIDTH)
        cells += [f"[{styles[index]}]{FILLS[index % len(FILLS)]}[/]"] * (end - len(cells))
    cells += ["[dim]·[/]"] * (BAR_WIDTH - len(cells))
    if mark is not None:
        cells[min(round(mark * BAR_WIDTH), BAR_WIDTH - 1)] = "[bold red]│[/]"
    return "".join(cells)


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    return "  " + "  ".join(
        f"[{style}]{FILLS[index % len(FILLS)]}[/] {name} {value}" for index, (name, value, style) in enumerate(entries)
    )


def _collectives(report: Report) -> Iterable[Table | str]:
    yield ""
    for row in sums(report.collectives)[:3]:
        yield (f"[bold]{row.kind}[/] over {'+'.join(row.mesh_axes)} on {row.link}: {row.count:,} times, "
               f"{human_bytes(row.bytes)}" + _split(row.hidden_seconds, row.exposed_seconds))  # fmt: skip
    alike: dict[tuple[str, str], list[float]] = {}
    for c in by_exposed(report.collectives):
        if c.exposed_seconds:
            alike.setdefault((f"{c.kind}: {c.source}", why_exposed(c)), []).append(c.exposed_seconds)
    worst = sorted(alike.items(), key=lambda row: -sum(row[1]))
    if not worst:
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("exposed", justify="right", no_wrap=True, min_width=7)
    table.add_column("collective", no_wrap=True, max_width=48)
    table.add_column("why", no_wrap=True, ratio=1)
    for (name, why), seconds in worst[:NUM_COLLECTIVES]:
        places = f" ({len(seconds)} places)" if len(seconds) > 1 else ""
        table.add_row(human_seconds(sum(seconds)), Text(name + places), Text(why))
    yield table
    if len(worst) > NUM_COLLECTIVES:
        rest = sum(sum(seconds) for _, seconds in worst[NUM_COLLECTIVES:])
        yield f"[dim]and {len(worst) - NUM_COLLECTIVES} more, {human_seconds(rest)} exposed[/]"


def _split(hidden: float | None, exposed: float | None) -> str:
    if hidden is None or exposed is None:
        return ""
    return f", {human_seconds(hidden)} hidden, {human_seconds(exposed)} exposed"


def _roofline(report: Report) -> Iterable[str]:
    parts = [part for part in report.roofline if part.bound]
    if not parts or report.step.roofline_seconds is None:
        return
    share = report.step.roofline_seconds / report.step.predicted_seconds if report.step.predicted_seconds else None
    of_step = f", {human_share(share)} of the step" if share else ""
    bounds: dict[str, list[str]] = {}
    for part in parts:
        bounds.setdefault(str(part.bound), []).append(part.name)
    yield f"[bold]roofline[/] {human_seconds(report.step.roofline_seconds)}{of_step}"
    for bound, names in bounds.items():
        yield f"  bound by {bound}: {escape(', '.join(names))}"


def _findings(report: Report) -> Iterable[str]:
    found = sorted(report.findings, key=lambda finding: finding.severity != "warning")
    for finding in found[:NUM_FINDINGS]:
        style = "yellow" if finding.severity == "warning" else "dim"
        yield f"[{style}]{finding.severity}: {escape(finding.what)}[/]"
        yield f"  [dim]where: {escape(finding.where)}[/]"
        yield f"  fix: {escape(finding.fix)}"
    if len(found) > NUM_FINDINGS:
        yield f"[dim]and {len(found) - NUM_FINDINGS} more findings[/]"


def _unknown(report: Report) -> Iterable[str]:
    reasons: dict[str, list[str]] = {}
    for path, reason in unknown_values(report):
        reasons.setdefault(reason, []).append(path)
    for reason, paths in islice(reasons.items(), NUM_REASONS):
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield f"[yellow]unknown[/] {escape(paths[0])}{more}: {escape(reason)}"
    if len(reasons) > NUM_REASONS:
        yield f"[dim]and {len(reasons) - NUM_REASONS} more reasons[/]"
    if left_out := unpriced(report):
        yield f"[yellow]too short[/] by {escape(left_out)}"
