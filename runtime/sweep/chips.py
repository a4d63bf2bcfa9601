"""Figures over the number of chips: the best point on each target, with the range of its prediction, and ties.

v5p-64: 24.1 s (20.1 to 28.9), v5p-128: 12.2 s (10.2 to 14.6), v6e-256: 11.5 s (9.6 to 13.8)
    -> v6e-256 and v5p-128 are a tie: on different chips predictions are off by different factors
"""

from collections.abc import Callable, Sequence
from typing import Any

from .figures import FIGURES, Figure, FigureKind, best_first, value_of
from .rows import Figures, Row

SAME_CHIP = 0.03  # of a value: estimates on one chip are off together, and order no closer ones
NO_RANGE = ("peak_bytes",)  # in no proportion to the step


def best_on_targets(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point that is done on each target, the best first."""
    done = [row for row in best_first(rows, figure) if row.status == "done" and value_of(row, figure) is not None]
    first = {row.figures.target: row for row in reversed(done) if row.figures}
    return [row for row in done if row.figures and first[row.figures.target] is row]


def range_of(row: Row, value: float | None) -> tuple[float, float] | None:
    """Returns between what a value lies that is in proportion to the step; None where the row has no range."""
    factor = row.figures.range_factor if row.figures else None
    return None if value is None or factor is None else (value / factor, value * factor)


def tied_with_best(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point, and those of other targets that may be as good: on another chip where the ranges overlap,
    on the same chip where they are within a few percent."""
    found = best_on_targets(rows, figure)
    return found[:1] + [row for row in found[1:] if _is_tied(found[0], row, figure)]


def _is_tied(best: Row, row: Row, figure: Figure) -> bool:
    a, b = value_of(best, figure), value_of(row, figure)
    assert a is not None
    assert b is not None
    assert best.figures is not None
    assert row.figures is not None
    if figure.name in NO_RANGE:
        return a == b
    if best.figures.chip == row.figures.chip:
        return max(a, b) <= (1 + SAME_CHIP) * min(a, b)
    (low, high), (other_low, other_high) = range_of(best, a) or (a, a), range_of(row, b) or (b, b)
    return low <= other_high and other_low <= high


def chip_panels(rows: Sequence[Row], figure: Figure) -> list[dict[str, Any]]:
    """Returns what the page draws over the number of chips: step, tokens per second and cost of the best on each
    target; nothing where all targets have one number of chips."""
    found = best_on_targets(rows, figure)
    if len({row.figures.num_chips for row in found if row.figures}) < 2:
        return []
    tied = {row.index for row in tied_with_best(rows, figure)}
    panels = []
    for heading, kind, of in _panels(found):
        marks = [
            {"target": row.figures.target, "chip": row.figures.chip, "chips": row.figures.num_chips, "index": row.index,
             "value": value, "range": range_of(row, value), "isTied": len(tied) > 1 and row.index in tied}
            for row in found if row.figures and (value := of(row.figures)) is not None
        ]  # fmt: skip
        if marks:
            panels.append({"heading": heading, "kind": kind, "marks": sorted(marks, key=lambda mark: mark["chips"])})
    return panels


def _panels(rows: Sequence[Row]) -> list[tuple[str, FigureKind, Callable[[Figures], float | None]]]:
    """Returns heading, kind and value of each figure. Cost is that of the training where its tokens are known."""
    costs = (FIGURES[name] for name in ("training_cost", "cost_per_million_tokens"))
    cost = next((one for one in costs if any(value_of(row, one) is not None for row in rows)), None)
    return [
        ("step", "seconds", lambda figures: figures.step_seconds),
        ("tokens/s", "count", lambda figures: figures.step_seconds and figures.tokens_per_step / figures.step_seconds),
        *([(cost.heading, cost.kind, cost.of)] if cost else []),
    ]
