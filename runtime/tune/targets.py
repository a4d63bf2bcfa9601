"""Several targets compared: the best configuration on each, and what a whole training takes and costs there."""

from dataclasses import replace
from pathlib import Path

from meshloom.compiler.config.compose import Request
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError

from ..processes.say import say
from ..sweep.read import read_sweep
from ..sweep.rows import Row
from ..sweep.table import show_table
from .rows import OBJECTIVES, row_of_estimate
from .search import PAGE, search, write_table
from .variants import Space, find_space


def compare_targets(space: Space, request: Request, run_dir: Path, model: str, console: Console) -> None:
    """Searches each target, then shows and writes one table. A target on which nothing can run is a row with its
    reason."""
    rows = []
    for index, target in enumerate(space.spec.tune.targets):
        say(console, f"{target} ({index + 1} of {len(space.spec.tune.targets)})")
        rows.append(_row(index, request, target, model, run_dir, console))
    tune = space.spec.tune
    objective = "training_seconds" if tune.tokens and tune.objective == "step_time" else OBJECTIVES[tune.objective]
    objective = "training_cost" if tune.tokens and tune.objective == "cost" else objective
    write_table(space, rows, run_dir, objective)
    sweep = read_sweep(run_dir)
    show_table(console, sweep.file, sweep.rows, directory=run_dir)
    say(console, f"written: {run_dir}: {PAGE}, sweep.jsonl")


def _row(index: int, request: Request, target: str, model: str, run_dir: Path, console: Console) -> Row:
    words = (*request.overrides, f"target={target}")
    try:
        answer = search(find_space(replace(request, overrides=words)), run_dir, console)
    except ConfigError as error:
        why = "; ".join(f"{each.where}: {each.what}" for each in error.problems)
        return Row(index=index, overrides=(f"target={target}",), swept={"target": target}, status="refused", why=why)
    return row_of_estimate(index, answer, answer.best[0], model, target)
