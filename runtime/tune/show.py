"""Shows the answer of a search: the best candidates, why the first wins, what would change it, what was refused."""

import shlex
from collections.abc import Sequence

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.format import (
    counted,
    human_bytes,
    human_count,
    human_range,
    human_seconds,
    human_share,
    three_digits,
)
from meshloom.compiler.target.accuracy import accuracy_of, best_published_mfu
from meshloom.compiler.tune.answer import Answer, Estimated, WhatIf

NUM_LINES = 10
LEAST_GAIN = 0.03  # share of a step: closer estimates on the same chip are not told apart
NUM_REASONS = 6


def show_answer(answer: Answer, console: Console) -> None:
    """Shows the best candidates, why the first is the best, and what was refused."""
    console.wrapped(_counts(answer))
    console.line()
    console.table(_table(answer, console.width))
    console.line()
    if (accuracy := accuracy_of(answer.target, "estimated")) and answer.best:
        between = human_range(accuracy.range_of(answer.best[0].seconds))
        console.wrapped(f"the first takes {between}: {accuracy}")
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
    best, mfu = best_published_mfu(answer.target), answer.best[0].mfu
    if best is None or mfu is None or mfu <= best:
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
    parts = {"compute": (first.compute_seconds, second.compute_seconds)}
    for axes in dict.fromkeys((*first.exposed, *second.exposed)):
        parts[f"exposed over {'+'.join(axes)}"] = (first.exposed.get(axes, 0.0), second.exposed.get(axes, 0.0))
    gains = sorted(((a - b, name) for name, (a, b) in parts.items()), key=lambda one: one[0])
    least = 1e-3 * first.seconds
    told = [f"{name} {'-' if gain < 0 else '+'}{human_seconds(abs(gain))}" for gain, name in gains if abs(gain) > least]
    room = first.peak_bytes - second.peak_bytes
    told.append(f"memory {'-' if room < 0 else '+'}{human_bytes(abs(room))}")
    share = second.seconds / first.seconds - 1
    differ = _difference(first, second)
    return [f"it wins over the second ({differ}) by {human_share(share)}: {', '.join(told)}"]


def _difference(first: Estimated, second: Estimated) -> str:
    """Returns the overrides of the second that the first does not share."""
    own, others = first.candidate.values, second.candidate.values
    return " ".join(f"{key}={value}" for key, value in others.items() if own.get(key) != value)


def _counts(answer: Answer) -> str:
    priced = len(answer.prices.candidates)
    rules = f"{answer.refused.total:,} refused by rules, " if answer.refused.total else ""
    room, num_fitting = human_bytes(answer.limit_bytes), priced - answer.num_too_large
    large = f"{answer.num_too_large:,} too large for {room}"
    return f"{counted(answer.num_candidates, 'candidate')}: {rules}{large}, {num_fitting:,} fit"


def _table(answer: Answer, width: int) -> Table:
    """Returns a table with a column for each key that varies; one for all of them if the terminal is too narrow."""
    keys = _varying(answer.best)
    has_cost = any(one.cost is not None for one in answer.best)
    names = ["step", "tokens/s/chip", "MFU", "exposed", "memory", *(["cost/M tokens"] if has_cost else [])]
    shown = answer.best[:NUM_LINES]
    figures = [_figures(answer, one, has_cost) for one in shown]
    values = [[str(one.candidate.values.get(key, "")) for key in keys] for one in shown]
    cells = [[*names, *keys], *([*a, *b] for a, b in zip(figures, values, strict=True))]
    if sum(max(map(len, column)) + 2 for column in zip(*cells, strict=True)) - 2 > width:
        values = [[" ".join(f"{key}={text}" for key, text in zip(keys, each, strict=True))] for each in values]
        keys = ["candidate"]
    columns = [*(Column(name, "right") for name in names), *(Column(key) for key in keys)]
    styles = ["bold green", *[""] * len(shown)]
    rows = zip(figures, values, styles, strict=False)
    return Table(columns, [[(text, style) for text in (*a, *b)] for a, b, style in rows])


def _figures(answer: Answer, one: Estimated, has_cost: bool) -> list[str]:
    return [
        human_seconds(one.seconds),
        human_count(one.tokens_per_second / answer.target.num_chips),
        human_share(one.mfu) if one.mfu is not None else "unknown",
        human_share(one.exposed_seconds / one.seconds),
        human_bytes(one.peak_bytes * answer.target.devices_per_chip),
        *([three_digits(one.cost) if one.cost is not None else ""] if has_cost else []),
    ]


def _varying(best: Sequence[Estimated]) -> list[str]:
    keys = dict.fromkeys(key for one in best for key in one.candidate.values)
    return [key for key in keys if len({one.candidate.values.get(key) for one in best}) > 1] or list(keys)


def _changed(change: WhatIf) -> str:
    if change.best is None:
        return f"with {change.what}: nothing fits"
    if not change.is_other:
        return f"with {change.what}: the same choice"
    before, then = change.before.values, change.best.values
    differ = " ".join(f"{key}={value}" for key, value in then.items() if before.get(key) != value)
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
