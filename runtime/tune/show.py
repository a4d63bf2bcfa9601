"""Shows the answer of a search: the best candidates, why the first wins, what would change it, what was refused.

Its candidates are also rows in the form of a sweep, so that one table and one page show both.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.format import (
    counted,
    human_bytes,
    human_range,
    human_seconds,
    human_share,
    three_digits,
)
from meshloom.compiler.core.known import Unknown
from meshloom.compiler.figures import FIGURES, StepFigures, text_of_figure
from meshloom.compiler.target.accuracy import best_published_mfu
from meshloom.compiler.tune.answer import Answer, Estimated, WhatIf, cost_per_million_tokens
from meshloom.compiler.tune.space import MeshCandidate

from ..sweep.read import versions
from ..sweep.rows import SWEEP_VERSION, Figures, Point, Row, SweepFile, lack
from .variants import CompiledCandidate, Space

NUM_LINES = 10
LEAST_GAIN = 0.03  # share of a step: closer estimates on the same chip are not told apart
NUM_REASONS = 6
MOST_ROWS = 3000  # of the best; the page draws each
COLUMNS = ("step_seconds", "tokens_per_second_per_chip", "mfu", "exposed_fraction", "bubble_fraction", "peak_bytes")
OBJECTIVES = {"step_time": "step_seconds", "cost": "cost_per_million_tokens", "memory": "peak_bytes"}


def show_answer(answer: Answer, console: Console) -> None:
    """Shows the best candidates, why the first is the best, and what was refused."""
    console.wrapped(_counts(answer))
    console.line()
    console.table(_table(answer, console.width))
    console.line()
    first = answer.best[0].figures
    if answer.target.calibration:
        console.wrapped(("calibrated", "bold"), f" {answer.target.calibration.describe()}")
    if between := first.range_of(first.step_seconds):
        console.wrapped(f"the first takes {human_range(between)}: {first.range_basis}")
    if too_fast := above_published(answer):
        console.wrapped((too_fast, "yellow"))
    if tied := [one for one in answer.best[1:] if one.seconds <= (1 + LEAST_GAIN) * answer.best[0].seconds]:
        others = f"{counted(len(tied), 'other')}, within {human_share(LEAST_GAIN)}"
        console.wrapped(f"a tie with {others}: compile them to tell, tune.num_compiled={len(tied) + 1}")
    for line in why_it_wins(answer.best):
        console.wrapped(line)
    for change in answer.changes:
        console.wrapped(_changed(change))
    _show_refused(answer, console)


def above_published(answer: Answer) -> str | None:
    """Returns a warning if the first has an estimated MFU that no published run on the chip has reached."""
    best, mfu = best_published_mfu(answer.target), answer.best[0].figures.mfu
    if best is None or isinstance(mfu, Unknown) or mfu <= best:
        return None
    chip = answer.target.chip
    assert chip is not None
    ran = f"published runs on {chip.name} reached {human_share(best)} at most"
    return f"warning: an MFU of {human_share(mfu)} is estimated, and {ran}: take the step as too short"


def why_it_wins(best: Sequence[Estimated]) -> list[str]:
    """Returns the differences between the first and the second: seconds of each part of the step, and memory."""
    if len(best) < 2:
        return ["it is the only one that fits"]
    first, second = best[:2]
    figures, others = first.figures, second.figures
    parts = {"compute": (figures.compute_seconds or 0.0, others.compute_seconds or 0.0)}
    if figures.bubble_seconds or others.bubble_seconds:
        parts["bubble"] = (figures.bubble_seconds or 0.0, others.bubble_seconds or 0.0)
    for axes in dict.fromkeys((*figures.exposed_by_axes, *others.exposed_by_axes)):
        parts[f"exposed over {axes}"] = (figures.exposed_by_axes.get(axes, 0.0), others.exposed_by_axes.get(axes, 0.0))
    gains = sorted(((a - b, name) for name, (a, b) in parts.items()), key=lambda one: one[0])
    least = 1e-3 * first.seconds
    told = [f"{name} {'-' if gain < 0 else '+'}{human_seconds(abs(gain))}" for gain, name in gains if abs(gain) > least]
    room = first.peak_bytes - second.peak_bytes
    told.append(f"memory {'-' if room < 0 else '+'}{human_bytes(abs(room))}")
    share = second.seconds / first.seconds - 1
    differ = _difference(first.candidate, second.candidate)
    return [f"it wins over the second ({differ}) by {human_share(share)}: {', '.join(told)}"]


def _difference(first: MeshCandidate, second: MeshCandidate) -> str:
    """Returns the overrides of the second that the first does not share."""
    return " ".join(f"{key}={value}" for key, value in second.values.items() if first.values.get(key) != value)


def _counts(answer: Answer) -> str:
    priced = len(answer.prices.candidates)
    rules = f"{answer.refused.total:,} refused by rules, " if answer.refused.total else ""
    room, num_fitting = human_bytes(answer.limit_bytes), priced - answer.num_too_large
    large = f"{answer.num_too_large:,} too large for {room}"
    return f"{counted(answer.num_candidates, 'candidate')}: {rules}{large}, {num_fitting:,} fit"


def _table(answer: Answer, width: int) -> Table:
    """Returns a table with a column for each key that varies; one for all of them if the terminal is too narrow."""
    keys = list(dict.fromkeys(key for one in answer.best for key in one.candidate.values))
    varying = [key for key in keys if len({one.candidate.values.get(key) for one in answer.best}) > 1]
    keys, shown = varying or keys, answer.best[:NUM_LINES]
    named = [_figures(one) for one in shown]
    names = [name for name in named[0] if any(each[name] for each in named)]
    figures = [[each[name] for name in names] for each in named]
    values = [[str(one.candidate.values.get(key, "")) for key in keys] for one in shown]
    cells = [[*names, *keys], *([*a, *b] for a, b in zip(figures, values, strict=True))]
    if sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) - 2 > width:
        values = [[" ".join(f"{key}={text}" for key, text in zip(keys, each, strict=True))] for each in values]
        keys = ["candidate"]
    columns = [*(Column(name, "right") for name in names), *(Column(key) for key in keys)]
    styles = ["bold green", *[""] * len(shown)]
    rows = zip(figures, values, styles, strict=False)
    return Table(columns, [[(text, style) for text in (*a, *b)] for a, b, style in rows])


def _figures(one: Estimated) -> dict[str, str]:
    """Returns the figures by the names of their columns; "" for what a candidate has not."""
    found = {FIGURES[name].heading: text_of_figure(one.figures, name) for name in COLUMNS}
    return found | {
        "bubble": found["bubble"] if one.figures.bubble_seconds else "",
        "cost/M tokens": three_digits(one.cost) if one.cost is not None else "",
    }


def _changed(change: WhatIf) -> str:
    if change.best is None:
        return f"with {change.what}: nothing fits"
    if not change.is_other:
        return f"with {change.what}: the same choice"
    differ = _difference(change.before, change.best)
    assert change.seconds is not None
    then_and_now = f"{human_seconds(change.seconds)} a step (now {human_seconds(change.seconds_before)})"
    return f"with {change.what}: {differ}, {then_and_now}"


def _show_refused(answer: Answer, console: Console) -> None:
    reasons = answer.refused.counts.most_common()
    if not reasons:
        return
    console.line()
    rows: list[list[Part]] = [
        [f"{count:,}", reason, shlex.join(answer.refused.examples[reason])] for reason, count in reasons[:NUM_REASONS]
    ]
    columns = [
        Column("refused", justify="right"),
        Column("because", overflow="fold"),
        Column("such as", overflow="fold"),
    ]
    console.table(Table(columns, rows))
    if len(reasons) > NUM_REASONS:
        rest = sum(count for _, count in reasons[NUM_REASONS:])
        others = counted(len(reasons) - NUM_REASONS, "other reason")
        console.wrapped(f"... {rest:,} more for {others}: tune.json has them")


def sweep_file(space: Space, rows: Sequence[Row], objective: str) -> SweepFile:
    """Returns the request of the search. objective: the figure that the table is sorted by."""
    axes: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.swept.items():
            if value not in axes.setdefault(key, []):
                axes[key].append(value)
    return SweepFile(
        schema_version=SWEEP_VERSION,
        command="tune",
        overrides=space.request.overrides,
        axes={key: sorted(values, key=lambda x: (isinstance(x, str), x)) for key, values in axes.items()},
        num_points=None,
        objective=objective,
        versions=versions(),
    )


def rows_of(answer: Answer, model: str, compiled: Sequence[CompiledCandidate]) -> Iterator[Row]:
    """Yields the rows of the best candidates, with the outcome of compiling them or their own estimates; then the rows
    of the others, by price."""
    made = {each.one.candidate.overrides: each for each in compiled}
    for index, one in enumerate(answer.best):
        each = made.get(one.candidate.overrides)
        yield row_of_compiled(index, each) if each else row_of_estimate(index, answer, one, model)
    known = {one.candidate.overrides for one in answer.best}
    prices, index = answer.prices, len(answer.best)
    objective = answer.best[0].candidate.variant.spec.tune.objective
    merit = prices.peak_bytes if objective == "memory" else prices.time.seconds
    for place in np.argsort(merit, kind="stable"):
        one = prices.candidates[place]
        if one.overrides not in known and index < MOST_ROWS:
            yield _row_of_price(index, answer, int(place), model)
            index += 1


def row_of_estimate(index: int, answer: Answer, one: Estimated, model: str, target: str | None = None) -> Row:
    """Returns the row of one of the best. target: as typed, if several targets are compared."""
    figures = _figures_of_candidate(answer, one.candidate, one.figures, model)
    typed = {} if target is None else {"target": target}
    words = (*(f"{key}={value}" for key, value in typed.items()), *one.candidate.overrides)
    return Row(index=index, overrides=words, swept=typed | dict(one.candidate.values), status="done", figures=figures)


def row_of_compiled(index: int, each: CompiledCandidate) -> Row:
    """Returns the row of a compiled candidate."""
    candidate = each.one.candidate
    point = Point(index, candidate.overrides, dict(candidate.values), each.directory)
    return each.outcome.row(point, has_directory=True)


def _row_of_price(index: int, answer: Answer, place: int, model: str) -> Row:
    one, found = answer.prices.candidates[place], answer.prices.figures(place, answer.limit_bytes)
    # It is of the same model and chips.
    found = found.rated(replace(answer.best[0].work, tokens_per_step=one.variant.spec.tokens_per_step))
    return Row(
        index=index,
        overrides=one.overrides,
        swept=dict(one.values),
        status="done" if found.fits else "does_not_fit",
        why=None if found.fits else lack(found),
        figures=_figures_of_candidate(answer, one, found, model),
    )


def _figures_of_candidate(answer: Answer, one: MeshCandidate, found: StepFigures, model: str) -> Figures:
    """Returns the figures of a candidate, whose time is known."""
    target, spec, seconds = answer.target, one.variant.spec, found.step_seconds or 0.0
    cost, tokens = cost_per_million_tokens(spec, target, seconds), spec.tune.tokens
    return Figures(
        **dict(found),
        basis="estimate",
        model=model,
        target=target.name,
        chip=target.chip.name if target.chip else "",
        num_chips=target.num_chips,
        mesh=str(one.mesh),
        global_batch_size=spec.global_batch_size,
        num_microbatches=one.num_microbatches,
        tokens_per_step=spec.tokens_per_step,
        cost_per_million_tokens=cost,
        training_seconds=None if tokens is None else tokens / spec.tokens_per_step * seconds,
        training_cost=None if tokens is None or cost is None else tokens / 1e6 * cost,
    )
