"""Makes rows of a search in the form of a sweep, so that one table and one page show both."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.search.evaluation import Evaluation
from meshloom.compiler.target.accuracy import accuracy_of
from meshloom.compiler.tune.answer import Answer, Estimated, cost_per_million_tokens
from meshloom.compiler.tune.space import MeshCandidate

from ..sweep.identity import versions
from ..sweep.rows import SCHEMA_VERSION, Figures, Point, Row, SweepFile, row_of
from .variants import Space
from .workers import CompiledCandidate

MOST_ROWS = 3000  # of the best; the page draws each
OBJECTIVES = {"step_time": "step_seconds", "cost": "cost_per_million_tokens", "memory": "peak_bytes"}


def sweep_file(space: Space, rows: Sequence[Row], objective: str) -> SweepFile:
    """Returns the request of the search. objective: the figure that the table is sorted by."""
    axes: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.swept.items():
            if value not in axes.setdefault(key, []):
                axes[key].append(value)
    return SweepFile(
        schema_version=SCHEMA_VERSION,
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
    figures = _figures(answer, one.candidate, one, one.mfu, model)
    typed = {} if target is None else {"target": target}
    words = (*(f"{key}={value}" for key, value in typed.items()), *one.candidate.overrides)
    return Row(index=index, overrides=words, swept=typed | dict(one.candidate.values), status="done", figures=figures)


def row_of_compiled(index: int, each: CompiledCandidate) -> Row:
    """Returns the row of a compiled candidate."""
    candidate = each.one.candidate
    point = Point(index, candidate.overrides, dict(candidate.values), each.directory)
    return row_of(point, each.outcome, has_directory=True)


def _row_of_price(index: int, answer: Answer, place: int, model: str) -> Row:
    one, found = answer.prices.candidates[place], answer.prices.evaluation(place, answer.limit_bytes)
    first, needed = answer.best[0], human_bytes(found.peak_bytes or 0)
    mfu = first.mfu * first.seconds / found.seconds if first.mfu and found.seconds else None  # for the same FLOPs
    return Row(
        index=index,
        overrides=one.overrides,
        swept=dict(one.values),
        status="done" if found.fits else "does_not_fit",
        why=None if found.fits else f"needs {needed} of {human_bytes(answer.limit_bytes)}",
        figures=_figures(answer, one, found, mfu, model),
    )


def _figures(answer: Answer, one: MeshCandidate, found: Evaluation, mfu: float | None, model: str) -> Figures:
    """Returns the figures of a candidate whose time and memory are known."""
    target, accuracy = answer.target, accuracy_of(answer.target, "estimated")
    assert found.seconds is not None, "a space has only candidates whose time is known"
    assert found.peak_bytes is not None, "an estimate has a peak"
    return Figures(
        **_common(answer, one, model),
        **_for_training(answer, one, found.seconds),
        step_seconds=found.seconds,
        range_factor=accuracy.factor if accuracy else None,
        compute_seconds=found.compute_seconds,
        exposed_seconds=found.exposed_seconds,
        tokens_per_second_per_chip=one.variant.spec.tokens_per_step / found.seconds / target.num_chips,
        mfu=mfu,
        peak_bytes=found.peak_bytes * target.devices_per_chip,
        fits=found.runs,
    )


def _common(answer: Answer, one: MeshCandidate, model: str) -> dict[str, Any]:
    target, spec = answer.target, one.variant.spec
    return {
        "basis": "estimate",
        "model": model,
        "target": target.name,
        "chip": target.chip.name if target.chip else "",
        "num_chips": target.num_chips,
        "mesh": str(one.mesh),
        "global_batch_size": spec.global_batch_size,
        "num_microbatches": one.num_microbatches,
        "tokens_per_step": spec.tokens_per_step,
        "bubble_seconds": 0.0,
        "limit_bytes": answer.limit_bytes * target.devices_per_chip,
    }


def _for_training(answer: Answer, one: MeshCandidate, seconds: float) -> dict[str, Any]:
    """Returns the cost of a million tokens, and the time and cost of the whole training."""
    spec = one.variant.spec
    cost, tokens = cost_per_million_tokens(spec, answer.target, seconds), spec.tune.tokens
    return {
        "cost_per_million_tokens": cost,
        "training_seconds": None if tokens is None else tokens / spec.tokens_per_step * seconds,
        "training_cost": None if tokens is None or cost is None else tokens / 1e6 * cost,
    }
