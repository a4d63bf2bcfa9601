"""Several targets compared: the best configuration on each, and what a whole training takes and costs there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshloom.compiler.config.compose import Request
from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import human_range, human_seconds, human_share, three_digits

from ..core.files import replace_json
from ..processes.process_log import say
from ..sweep.chips import SAME_CHIP, range_of, tied_with_best
from ..sweep.figures import FIGURES
from ..sweep.read import read_sweep
from ..sweep.rows import Row
from ..sweep.table import show_table
from .rows import OBJECTIVES, row_of_estimate
from .search import PAGE, Found, answer_as_json, search, write_table, write_winner
from .show import above_published, why_it_wins
from .variants import Space, find_space

SECONDS_OF_DAY = 86400
NO_TOKENS = "set tune.tokens=1T for the days of a whole training"
NO_PRICE = "set tune.price_per_chip_hour={CHIP: PRICE} for its cost, in your currency"


@dataclass(frozen=True)
class OnTarget:
    """The best on one target. found: None where nothing can run, and the row says why."""

    name: str
    row: Row
    found: Found | None

    def range_of(self, value: float | None) -> tuple[float, float] | None:
        """Returns between what a figure lies that is in proportion to the step."""
        return range_of(self.row, value)


def compare_targets(space: Space, request: Request, run_dir: Path, model: str, console: Console) -> None:
    """Searches each target, then shows and writes one table, tune.json, and an experiment for each. A target on which
    nothing can run is a row with its reason."""
    ones = []
    for index, target in enumerate(space.spec.tune.targets):
        say(console, f"{target} ({index + 1} of {len(space.spec.tune.targets)})")
        ones.append(_on_target(index, request, target, model, run_dir, console))
    tune = space.spec.tune
    objective = "training_seconds" if tune.tokens and tune.objective == "step_time" else OBJECTIVES[tune.objective]
    objective = "training_cost" if tune.tokens and tune.objective == "cost" else objective
    write_table(space, [one.row for one in ones], run_dir, objective)
    sweep = read_sweep(run_dir)
    tied = [one for one in ones if one.row in tied_with_best(sweep.rows, FIGURES[objective])]
    show_table(console, sweep.file, sweep.rows, directory=run_dir, is_tie=len(tied) > 1)
    console.line()
    console.table(_ranges(ones))
    if len(tied) > 1:
        near = f"their ranges overlap, or on one chip they are within {human_share(SAME_CHIP)}"
        say(console, f"a tie: {', '.join(one.name for one in tied)}: {near}, so none is said to be best")
    for one in ones:
        if one.found:
            if too_fast := above_published(one.found.answer):
                console.wrapped((f"{one.name}: {too_fast}", "yellow"))
            for line in why_it_wins(one.found.answer.best):
                console.wrapped(f"{one.name}: {line}")
    for missing in ([] if tune.tokens else [NO_TOKENS]) + ([] if tune.price_per_chip_hour else [NO_PRICE]):
        console.wrapped(missing)
    paths = [write_winner(one.found, run_dir, model) for one in ones if one.found]
    replace_json(run_dir / "tune.json", _as_json(ones, objective, tied))
    written = ", ".join(str(path.relative_to(run_dir)) for path in paths)
    say(console, f"written: {run_dir}: {written}, {PAGE}, sweep.jsonl, tune.json")


def _on_target(index: int, request: Request, target: str, model: str, run_dir: Path, console: Console) -> OnTarget:
    own = replace(request, overrides=(*request.overrides, f"target={target}"))
    try:
        space = find_space(own)
        answer = search(space, run_dir, console)
    except ConfigError as error:
        why = "; ".join(f"{each.where}: {each.what}" for each in error.problems)
        row = Row(index=index, overrides=(f"target={target}",), swept={"target": target}, status="refused", why=why)
        return OnTarget(target, row, None)
    return OnTarget(target, row_of_estimate(index, answer, answer.best[0], model, target), Found(space, answer, ()))


def _ranges(ones: Sequence[OnTarget]) -> Table:
    """Returns the step, the days and the cost on each target, each with its range."""
    columns = [Column("target"), *(Column(name, justify="right") for name in ("step", "days", "cost"))]
    rows: list[list[Part]] = []
    for one in ones:
        if (figures := one.row.figures) is None:
            continue
        step = one.range_of(figures.step_seconds)
        days, cost = figures.training_seconds, figures.training_cost
        rows.append([
            one.name,
            human_range(step) if step else human_seconds(figures.step_seconds or 0.0),
            _between(one, None if days is None else days / SECONDS_OF_DAY),
            _between(one, cost),
        ])  # fmt: skip
    return Table(columns, rows)


def _between(one: OnTarget, value: float | None) -> str:
    if value is None:
        return "unknown"
    ends = one.range_of(value)
    return " to ".join(map(three_digits, ends)) if ends else three_digits(value)


def _as_json(ones: Sequence[OnTarget], objective: str, tied: Sequence[OnTarget]) -> dict[str, Any]:
    """Returns the comparison for tune.json: an answer for each target, as of one alone."""
    return {
        "objective": objective,
        "tied_with_best": [one.name for one in tied],
        "targets": [_target_as_json(one) for one in ones],
    }


def _target_as_json(one: OnTarget) -> dict[str, Any]:
    figures = one.row.figures
    if one.found is None or figures is None:
        return {"target": one.name, "status": one.row.status, "why": one.row.why}
    spec = one.found.space.spec.tune
    unknown = ({} if spec.tokens else {"training_seconds": NO_TOKENS, "training_cost": NO_TOKENS}) | (
        {} if figures.cost_per_million_tokens is not None else {"training_cost": NO_PRICE}
    )
    return {
        **answer_as_json(one.found),
        "target": one.name,
        "status": one.row.status,
        "step_seconds": figures.step_seconds,
        "step_range_seconds": one.range_of(figures.step_seconds),
        "training_seconds": figures.training_seconds,
        "training_range_seconds": one.range_of(figures.training_seconds),
        "training_cost": figures.training_cost,
        "training_range_cost": one.range_of(figures.training_cost),
        "unknown": unknown,
    }
