"""`meshloom tune`: searched, shown, and written in a run directory."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from meshloom.compiler.core.console import Console
from meshloom.compiler.core.format import human_seconds
from meshloom.compiler.tune.answer import Answer, Change, Estimated, tune

from ..core.files import replace_json, replace_text
from ..processes.say import say
from ..sweep.rows import ROWS_FILE, SWEEP_FILE
from .experiment import write_experiment
from .rows import rows, sweep_file
from .show import show_answer, why_it_wins
from .variants import Space
from .workers import workers


def search(space: Space, console: Console) -> Answer:
    """Returns the answer of the space. Raises ConfigError where there is none."""
    with workers(space.spec.target, console) as runner:
        return tune(space.variants, runner)


def write_answer(space: Space, answer: Answer, run_dir: Path, model: str) -> Path:
    """Writes the table, the answer and the winner's experiment. Returns the experiment's file."""
    replace_text(run_dir / SWEEP_FILE, sweep_file(space, answer).model_dump_json(indent=2) + "\n")
    replace_text(run_dir / ROWS_FILE, "".join(row.model_dump_json() + "\n" for row in rows(answer, model)))
    replace_json(run_dir / "tune.json", as_json(answer))
    path = run_dir / "experiment" / f"{_file_name(model)}_{_file_name(answer.target.name)}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    first = answer.best[0]
    why = f"estimated step {human_seconds(first.seconds)}; {why_it_wins(answer.best)[0]}"
    write_experiment(space, first, path, why)
    return path


def as_json(answer: Answer) -> dict[str, Any]:
    """Returns the answer for tune.json."""
    return {
        "target": answer.target.name,
        "num_candidates": answer.num_candidates,
        "num_too_large": answer.num_too_large,
        "limit_bytes_per_device": answer.limit_bytes,
        "best": [_estimated(one) for one in answer.best],
        "why": why_it_wins(answer.best),
        "changes": [_change(one) for one in answer.changes],
        "refused": [
            {"reason": reason, "count": count, "example": list(answer.refused.examples[reason])}
            for reason, count in answer.refused.counts.most_common()
        ],
    }


def _estimated(one: Estimated) -> dict[str, Any]:
    names = (each.name for each in fields(one) if each.name not in ("candidate", "exposed"))
    kept = {name: getattr(one, name) for name in names}
    exposed = {"+".join(axes): seconds for axes, seconds in one.exposed.items()}
    return {"overrides": list(one.candidate.overrides()), **kept, "exposed_seconds": exposed}


def _change(one: Change) -> dict[str, Any]:
    best = None if one.best is None else list(one.best.overrides())
    return {"what": one.what, "is_other": one.is_other, "best": best, "seconds": one.seconds,
            "seconds_before": one.seconds_before}  # fmt: skip


def show(space: Space, answer: Answer, path: Path, console: Console) -> None:
    """Shows the answer, what is written, and the command that goes on."""
    if space.pins:
        say(console, f"not searched, as typed: {' '.join(space.pins)}")
    show_answer(answer, console)
    console.line()
    say(console, f"written: {path.parent.parent}: {path.relative_to(path.parent.parent)}, {ROWS_FILE}, tune.json")
    config = f"hydra.searchpath=[file://{path.parent.parent.resolve()}]"
    say(console, f"compile it: meshloom compile '{config}' experiment={path.stem}")


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)
