"""The rows of a search, as a sweep has them: one table and one page show both."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import numpy as np

from meshloom.compiler.core.format import human_bytes
from meshloom.compiler.tune.answer import Answer, Estimated, cost_per_million_tokens
from meshloom.compiler.tune.space import Candidate

from ..sweep.rows import SCHEMA_VERSION, Figures, Row, SweepFile
from .variants import Space

MOST_ROWS = 3000  # the best; the page draws each


def sweep_file(space: Space, answer: Answer) -> SweepFile:
    """Returns what was asked for."""
    axes: dict[str, list[str | int]] = {}
    for one in answer.prices.candidates:
        for key, value in one.values().items():
            if value not in axes.setdefault(key, []):
                axes[key].append(value)
    objective = {"step_time": "step_seconds", "cost": "cost_per_million_tokens", "memory": "peak_bytes"}
    return SweepFile(
        schema_version=SCHEMA_VERSION,
        command="tune",
        overrides=space.request.overrides,
        axes={key: sorted(values, key=lambda x: (isinstance(x, str), x)) for key, values in axes.items()},
        num_points=None,
        objective=objective[space.spec.tune.objective],
        versions={"jax": version("jax"), "meshloom": version("meshloom")},
    )


def rows(answer: Answer, model: str) -> Iterator[Row]:
    """Yields the best candidates, with their own estimates, then the others by their price."""
    by_overrides = {one.candidate.overrides(): one for one in answer.best}
    for index, one in enumerate(answer.best):
        yield _row(index, one.candidate, _figures(answer, one, model), None)
    prices, index = answer.prices, len(answer.best)
    merit = prices.peak_bytes if answer.best[0].candidate.variant.spec.tune.objective == "memory" else prices.seconds
    for place in np.argsort(merit, kind="stable"):
        one = prices.candidates[place]
        if index >= MOST_ROWS:
            return
        if one.overrides() in by_overrides:
            continue
        figures = _priced(answer, int(place), model)
        why = (
            None
            if figures.fits
            else f"needs {human_bytes(figures.peak_bytes or 0)} of {human_bytes(answer.limit_bytes)}"
        )
        yield _row(index, one, figures, why)
        index += 1


def _row(index: int, one: Candidate, figures: Figures, why: str | None) -> Row:
    return Row(
        index=index,
        overrides=one.overrides(),
        swept=one.values(),
        status="does_not_fit" if why else "done",
        why=why,
        figures=figures,
    )


def _figures(answer: Answer, one: Estimated, model: str) -> Figures:
    return Figures(
        **_common(answer, one.candidate, model),
        step_seconds=one.seconds,
        compute_seconds=one.compute_seconds,
        exposed_seconds=one.exposed_seconds,
        tokens_per_second_per_chip=one.tokens_per_second / answer.target.num_chips,
        mfu=one.mfu,
        peak_bytes=one.peak_bytes * answer.target.devices_per_chip,
        fits=one.fits,
        cost_per_million_tokens=one.cost,
    )


def _priced(answer: Answer, place: int, model: str) -> Figures:
    prices, target = answer.prices, answer.target
    one, seconds = prices.candidates[place], float(prices.seconds[place])
    spec, first = one.variant.spec, answer.best[0]
    peak = int(prices.peak_bytes[place])
    return Figures(
        **_common(answer, one, model),
        step_seconds=seconds,
        compute_seconds=float(prices.compute_seconds[place]),
        exposed_seconds=float(prices.exposed_seconds[place]),
        tokens_per_second_per_chip=spec.tokens_per_step / seconds / target.num_chips,
        mfu=first.mfu * first.seconds / seconds if first.mfu else None,  # of the same FLOPs
        peak_bytes=peak * target.devices_per_chip,
        fits=peak <= answer.limit_bytes,
        cost_per_million_tokens=cost_per_million_tokens(spec, target, seconds),
    )


def _common(answer: Answer, one: Candidate, model: str) -> dict[str, Any]:
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
