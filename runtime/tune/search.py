"""Searches the space of a request, on one target or several, and shows and writes the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshloom.compiler.core.console import Column, Console, Part, Table
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.format import human_range, human_seconds, human_share, signed_share, three_digits
from meshloom.compiler.core.known import Unknown, as_json, known, or_unknown, text_of
from meshloom.compiler.declare.compose import Request
from meshloom.compiler.tune.answer import Answer, Estimated, WhatIf, remembering, tune

from ..core.files import replace_json, replace_text
from ..processes.process_log import announce, say_command
from ..rundir.folders import ROWS_FILE, SWEEP_FILE
from ..sweep.page import PAGE, render_sweep
from ..sweep.read import read_sweep
from ..sweep.rows import FIGURES, SAME_CHIP, Row, range_of, tied_with_best
from ..sweep.table import show_table
from .show import OBJECTIVES, above_published, row_of_estimate, rows_of, show_answer, sweep_file, why_it_wins
from .variants import (
    CompiledCandidate,
    Space,
    best_compiled,
    choose_variants,
    compile_best,
    find_space,
    workers,
    write_experiment,
)

SECONDS_OF_DAY = 86400
NO_TOKENS = "set tune.tokens=1T for the days of a whole training"
NO_PRICE = "set tune.price_per_chip_hour={CHIP: PRICE} for its cost, in your currency"


@dataclass(frozen=True)
class Found:
    """The answer of a space. compiled: those of its best candidates that were compiled."""

    space: Space
    answer: Answer
    compiled: tuple[CompiledCandidate, ...]

    @property
    def winner(self) -> Estimated:
        """Returns the best candidate: by its schedule if any was compiled and fits, else by its estimate."""
        best = best_compiled(self.compiled)
        return best.one if best else self.answer.best[0]


def search(space: Space, run_dir: Path, console: Console) -> Answer:
    """Returns the answer for all variants of the space, or for those that Optuna chooses if they are too many. Raises
    ConfigError if there is none."""
    with workers(space.spec.target, console) as runner:
        if space.is_listed:
            return tune(space.variants, runner)
        once = remembering(runner)  # the chosen variants have been traced already
        return tune(choose_variants(space, once, run_dir, console), once)


def search_into(space: Space, run_dir: Path, model: str, console: Console) -> None:
    """Searches, compiles the best candidates if requested, and shows and writes all. Raises ConfigError if none
    fits."""
    answer = search(space, run_dir, console)
    if space.pins:
        announce(console, f"not searched, as typed: {' '.join(space.pins)}")
    show_answer(answer, console)
    found = Found(space, answer, compile_best(space, answer, run_dir, console))
    _show_compiled(found, console)
    rows = list(rows_of(answer, model, found.compiled))
    write_table(space, rows, run_dir, OBJECTIVES[space.spec.tune.objective])
    replace_json(run_dir / "tune.json", answer_as_json(found))
    path = write_winner(found, run_dir, model)
    console.line()
    announce(console, f"written: {run_dir}: {path.relative_to(run_dir)}, {PAGE}, {ROWS_FILE}, tune.json")
    words = ["meshloom", "compile", "--config-dir", str(run_dir), f"experiment={path.stem}"]
    say_command(console, "compile it", words)


def write_table(space: Space, rows: Sequence[Row], run_dir: Path, objective: str) -> None:
    """Writes the files of a sweep, and its page."""
    replace_text(run_dir / SWEEP_FILE, sweep_file(space, rows, objective).model_dump_json(indent=2) + "\n")
    replace_text(run_dir / ROWS_FILE, "".join(row.model_dump_json() + "\n" for row in rows))
    # The sweep is complete, though this process holds its directory.
    sweep = replace(read_sweep(run_dir), is_running=False, notes=())
    replace_text(run_dir / PAGE, render_sweep(sweep, run_dir / PAGE))


def write_winner(found: Found, run_dir: Path, model: str) -> Path:
    """Writes the experiment of the winner, and returns its file."""
    answer = found.answer
    option = model.partition(" ")[0]  # without the keys that differ from the option
    path = run_dir / "experiment" / f"{_file_name(option)}_{_file_name(answer.target.name)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    first = found.winner
    why = f"estimated step {human_seconds(first.seconds)}"
    why += f"; {why_it_wins(answer.best)[0]}" if first is answer.best[0] else "; the best of those that were compiled"
    write_experiment(found.space, first, path, why)
    return path


def _show_compiled(found: Found, console: Console) -> None:
    for number, each in enumerate(found.compiled, start=1):
        estimated = human_seconds(each.one.seconds)
        if each.seconds is None:
            console.wrapped((f"compiled number {number}: {each.outcome.why or each.outcome.status}", "yellow"))
        else:
            off = signed_share(each.seconds / each.one.seconds - 1)
            text = f"compiled number {number}: {human_seconds(each.seconds)} a step, estimated {estimated} ({off})"
            console.wrapped(text)
    best = best_compiled(found.compiled)
    if found.compiled and best is None:
        announce(console, "warning: none of the compiled ones fits; the winner is the best by its estimate")
    elif best is not None and best.one is not found.answer.best[0]:
        first = found.compiled[0].seconds
        gain = f", {human_share(first / best.seconds - 1)} before the first" if first and best.seconds else ""
        console.wrapped(f"its schedule makes {' '.join(best.one.candidate.overrides)} the winner{gain}")


def answer_as_json(found: Found) -> dict[str, Any]:
    """Returns the answer for tune.json. range_factor: the first may take so many times more or less than
    estimated."""
    answer, first = found.answer, found.answer.best[0].figures
    basis = first.range_basis
    return {
        "target": answer.target.name,
        "num_candidates": answer.num_candidates,
        "num_too_large": answer.num_too_large,
        "limit_bytes_per_device": answer.limit_bytes,
        "winner": list(found.winner.candidate.overrides),
        "range_factor": first.range_factor or None,
        "range_basis": basis.why if isinstance(basis, Unknown) else basis,
        "best": [_estimated(one) for one in answer.best],
        "why": why_it_wins(answer.best),
        "changes": [_change(one) for one in answer.changes],
        "compiled": [
            {"overrides": list(each.one.candidate.overrides), "status": each.outcome.status, "why": each.outcome.why,
             "predicted_seconds": each.seconds}
            for each in found.compiled
        ],
        "refused": [
            {"reason": reason, "count": count, "example": list(answer.refused.examples[reason])}
            for reason, count in answer.refused.counts.most_common()
        ],
    }  # fmt: skip


def _estimated(one: Estimated) -> dict[str, Any]:
    overrides, figures = list(one.candidate.overrides), one.figures.model_dump(mode="json")
    return {"overrides": overrides, "compile_overrides": list(one.compile_overrides), "cost": one.cost,
            "figures": figures}  # fmt: skip


def _change(one: WhatIf) -> dict[str, Any]:
    best = None if one.best is None else list(one.best.overrides)
    return {"what": one.what, "is_other": one.is_other, "best": best, "seconds": one.seconds,
            "seconds_before": one.seconds_before}  # fmt: skip


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


@dataclass(frozen=True)
class OnTarget:
    """The best on one target. found: None if nothing can run there; the row says why."""

    name: str
    row: Row
    found: Found | None

    def range_of(self, value: float | Unknown | None) -> tuple[float, float] | None:
        """Returns the range of a figure that is proportional to the step."""
        return range_of(self.row, known(value))


def compare_targets(space: Space, request: Request, run_dir: Path, model: str, console: Console) -> None:
    """Searches on each target, then shows and writes one table, tune.json, and an experiment for each target. A target
    on which nothing can run is a row with the reason."""
    ones = []
    for index, target in enumerate(space.spec.tune.targets):
        announce(console, f"{target} ({index + 1} of {len(space.spec.tune.targets)})")
        ones.append(_on_target(index, request, target, model, run_dir, console))
    tune = space.spec.tune
    objective = "training_seconds" if tune.tokens and tune.objective == "step_time" else OBJECTIVES[tune.objective]
    objective = "training_cost" if tune.tokens and tune.objective == "cost" else objective
    write_table(space, [one.row for one in ones], run_dir, objective)
    sweep = read_sweep(run_dir)
    tied = {row.index for row in tied_with_best(sweep.rows, FIGURES[objective])}
    names = [one.name for one in ones if one.row.index in tied]
    show_table(console, sweep.file, sweep.rows, directory=run_dir, is_tie=len(names) > 1)
    console.line()
    console.table(_ranges(ones))
    if len(names) > 1:
        near = f"their ranges overlap, or on one chip they are within {human_share(SAME_CHIP)}"
        announce(console, f"a tie: {', '.join(names)}: {near}, so none is called the best")
    for one in ones:
        if one.found:
            if too_fast := above_published(one.found.answer):
                console.wrapped((f"{one.name}: {too_fast}", "yellow"))
            for line in why_it_wins(one.found.answer.best):
                console.wrapped(f"{one.name}: {line}")
    for missing in ([] if tune.tokens else [NO_TOKENS]) + ([] if tune.price_per_chip_hour else [NO_PRICE]):
        console.wrapped(missing)
    paths = [write_winner(one.found, run_dir, model) for one in ones if one.found]
    targets = [_target_as_json(one) for one in ones]  # each in the form of a single answer
    replace_json(run_dir / "tune.json", {"objective": objective, "tied_with_best": names, "targets": targets})
    written = ", ".join(str(path.relative_to(run_dir)) for path in paths)
    announce(console, f"written: {run_dir}: {written}, {PAGE}, sweep.jsonl, tune.json")


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
    """Returns a table of step, days and cost on each target, with their ranges."""
    columns = [Column("target"), *(Column(name, justify="right") for name in ("step", "days", "cost"))]
    rows: list[list[Part]] = []
    for one in ones:
        if (figures := one.row.figures) is None:
            continue
        step = one.range_of(figures.step_seconds)
        days, cost = figures.training_seconds, figures.training_cost
        rows.append([
            one.name,
            human_range(step) if step else text_of(figures.step_seconds, human_seconds),
            _between(one, None if days is None else days / SECONDS_OF_DAY),
            _between(one, cost),
        ])  # fmt: skip
    return Table(columns, rows)


def _between(one: OnTarget, value: float | None) -> str:
    if value is None:
        return "unknown"
    ends = one.range_of(value)
    return " to ".join(map(three_digits, ends)) if ends else three_digits(value)


def _target_as_json(one: OnTarget) -> dict[str, Any]:
    figures = one.row.figures
    if one.found is None or figures is None:
        return {"target": one.name, "status": one.row.status, "why": one.row.why}
    why = NO_TOKENS if one.found.space.spec.tune.tokens is None else NO_PRICE
    return as_json(
        {
            **answer_as_json(one.found),
            "target": one.name,
            "status": one.row.status,
            "step_seconds": figures.step_seconds,
            "step_range_seconds": one.range_of(figures.step_seconds),
            "training_seconds": or_unknown(figures.training_seconds, NO_TOKENS),
            "training_range_seconds": one.range_of(figures.training_seconds),
            "training_cost": or_unknown(figures.training_cost, why),
            "training_range_cost": one.range_of(figures.training_cost),
        }
    )
