"""Compares the points of a sweep by their figures, also across targets.

On several targets: v5p-64: 24.1 s (20.1 to 28.9), v5p-128: 12.2 s (10.2 to 14.6), v6e-256: 11.5 s (9.6 to 13.8)
    -> v6e-256 and v5p-128 are a tie: on different chips predictions are off by different factors
"""

import math
import shlex
from collections.abc import Iterable, Sequence
from statistics import fmean, pvariance
from typing import Any

from meshloom.compiler.core.errors import ConfigError, Problem, use_one_of
from meshloom.compiler.core.known import known
from meshloom.compiler.figures import FIGURES, Figure

from .rows import Row, SweepFile

_BASES = ("measured", "schedule", "estimate")  # the best informed one first
SAME_CHIP = 0.03  # share of a value: closer estimates on one chip are not told apart; they err in the same direction
NO_RANGE = ("peak_bytes",)  # figures that are not proportional to the step

# The columns of the table on a terminal, if a point has them; the page and the files have all.
SHOWN = ("step_seconds", "mfu", "tokens_per_second_per_chip", "exposed_fraction", "peak_bytes", "memory_fraction",
         "cost_per_million_tokens", "training_seconds", "training_cost", "final_loss", "evaluation_loss")  # fmt: skip


def find_figure(name: str, *, where: str) -> Figure:
    """Returns a figure by its name. Raises ConfigError for an unknown one. where: where it was named."""
    if name not in FIGURES:
        raise ConfigError([Problem(where, f"there is no figure '{name}'", use_one_of(name, FIGURES))])
    return FIGURES[name]


def value_of(row: Row, figure: Figure) -> float | None:
    return known(getattr(row.figures, figure.name, None))


def figure_text(row: Row, figure: Figure) -> str:
    """Returns the figure of a point as text; "" if it is unknown."""
    value = value_of(row, figure)
    return "" if value is None else figure.human(value)


def best_first(rows: Iterable[Row], figure: Figure) -> list[Row]:
    """Returns the points that are done, the best first; then the others.

    Measured points come before compiled ones, and these before estimated ones: `meshloom tune` compiles the best of its
    estimates, and its answer is one of them.
    """

    def key(row: Row) -> tuple[bool, int, bool, float, int]:
        value = value_of(row, figure)
        basis = _BASES.index(row.figures.basis) if row.figures else len(_BASES)
        sign = 1 if figure.better == "less" else -1
        return row.status != "done", basis, value is None, sign * (value or 0), row.index

    return sorted(rows, key=key)


def best_of(rows: Iterable[Row], figure: Figure) -> Row | None:
    """Returns the best point; None if no point that is done has this figure."""
    first = next(iter(best_first(rows, figure)), None)
    return first if first and first.status == "done" and value_of(first, figure) is not None else None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other one beats in both coordinates, smaller being better:
    [(1, 5), (2, 6), (3, 1)] -> [0, 2]. They are in the order of the first coordinate. Of equal points the first one is
    taken."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def swept_keys(file: SweepFile, rows: Sequence[Row]) -> list[str]:
    """Returns the keys in which points differ, in the typed order; keys that a sweeper has added come last."""
    keys = list(dict.fromkeys([*file.axes, *(key for row in rows for key in row.swept)]))
    return [key for key in keys if len({typed_value(row, key) for row in rows}) > 1] or keys


def typed_value(row: Row, key: str) -> str:
    """Returns the value of a swept key as it was typed; "" if the point has none. For "+model@draft=tiny" and the key
    "model@draft" it is "tiny"."""
    for text in row.overrides:  # they have passed Hydra's parser, which takes milliseconds for each
        typed, _, value = text.lstrip("+~").partition("=")
        if typed == key or typed.partition("@")[0] == key:
            return value
    return str(row.swept[key]) if key in row.swept else ""


def influence(rows: Sequence[Row], key: str, figure: Figure) -> float:
    """Returns the share of the variance of a figure's logarithm that a swept key explains alone, from 0 to 1; 0 if too
    little is known.

    For x=1: 1 s, 1 s and x=2: 2 s, 2 s, x explains all; for x=1: 1 s, 2 s and x=2: 1 s, 2 s, it explains nothing.
    """
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.status == "done" and (value := value_of(row, figure)) is not None:
            if value <= 0:
                return 0.0
            groups.setdefault(typed_value(row, key), []).append(math.log(value))
    logs = [value for group in groups.values() for value in group]
    if len(logs) < 2 or len(groups) < 2 or not (whole := pvariance(logs)):
        return 0.0
    middle = fmean(logs)
    between = sum(len(group) * (fmean(group) - middle) ** 2 for group in groups.values()) / len(logs)
    return min(1.0, between / whole)


def name_of(row: Row) -> str:
    """Returns the overrides of a point as a user types them."""
    return shlex.join(row.overrides) if row.overrides else "no override"


def best_on_targets(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point that is done on each target, the best first."""
    done = [row for row in best_first(rows, figure) if row.status == "done" and value_of(row, figure) is not None]
    first = {row.figures.target: row for row in reversed(done) if row.figures}
    return [row for row in done if row.figures and first[row.figures.target] is row]


def range_of(row: Row, value: float | None) -> tuple[float, float] | None:
    """Returns the range of a value that is proportional to the step; None if the row has no range."""
    return None if value is None or row.figures is None else known(row.figures.range_of(value))


def tied_with_best(rows: Sequence[Row], figure: Figure) -> list[Row]:
    """Returns the best point, and those of other targets that may be as good: on another chip if the ranges overlap, on
    the same chip if the values are within a few percent."""
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
    """Returns the panels of the page over the number of chips: step, tokens per second and cost of the best point on
    each target; none if all targets have the same number of chips."""
    found = best_on_targets(rows, figure)
    if len({row.figures.num_chips for row in found if row.figures}) < 2:
        return []
    tied = {row.index for row in tied_with_best(rows, figure)}
    panels = []
    costs = (FIGURES[name] for name in ("training_cost", "cost_per_million_tokens"))
    cost = [one for one in costs if any(value_of(row, one) is not None for row in found)][:1]  # of the whole, if known
    for heading, kind, of in (
        ("step", "seconds", lambda row: value_of(row, FIGURES["step_seconds"])),
        ("tokens/s", "count", _tokens_per_second),
        *((one.heading, one.kind, lambda row, one=one: value_of(row, one)) for one in cost),
    ):
        marks = [
            {"target": row.figures.target, "chip": row.figures.chip, "chips": row.figures.num_chips, "index": row.index,
             "value": value, "range": range_of(row, value), "isTied": len(tied) > 1 and row.index in tied}
            for row in found if row.figures and (value := of(row)) is not None
        ]  # fmt: skip
        if marks:
            panels.append({"heading": heading, "kind": kind, "marks": sorted(marks, key=lambda mark: mark["chips"])})
    return panels


def _tokens_per_second(row: Row) -> float | None:
    rate = value_of(row, FIGURES["tokens_per_second_per_chip"])
    return None if rate is None or row.figures is None else rate * row.figures.num_chips
