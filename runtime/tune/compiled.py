"""The best of a search, compiled one after the other: their schedules judge."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshloom.compiler.config.allowed_code import allowed_modules
from meshloom.compiler.core.console import Console
from meshloom.compiler.tune.answer import Answer, Estimated

from ..sweep.own_process import OwnProcess
from ..sweep.points import Outcome, Task, directory_name
from .variants import Space


@dataclass(frozen=True)
class CompiledCandidate:
    """One of the best, and what compiling it came to. directory: relative to the search's."""

    one: Estimated
    outcome: Outcome
    directory: str

    @property
    def seconds(self) -> float | None:
        """Returns the predicted step of one that fits."""
        figures = self.outcome.figures
        return figures.step_seconds if figures and self.outcome.status == "done" else None


def compile_best(space: Space, answer: Answer, run_dir: Path, console: Console) -> tuple[CompiledCandidate, ...]:
    """Compiles the first `tune.num_compiled` of the answer, each in a process of its own: one that aborts is a row."""
    ones = answer.best[: space.spec.tune.num_compiled]
    if not ones:
        return ()
    bar = console.bar("compiling the best", "doing", "bar", "count", "elapsed", is_transient=True)
    bar.start()
    try:
        found = []
        for number, each in enumerate(_compiled(space, ones, run_dir), start=1):
            bar.update(number, total=len(ones))
            found.append(each)
        return tuple(found)
    finally:
        bar.stop()


def _compiled(space: Space, ones: tuple[Estimated, ...], run_dir: Path) -> Iterator[CompiledCandidate]:
    for one in ones:
        name = directory_name(one.candidate.overrides)
        request = replace(space.request, overrides=(*space.request.overrides, *one.compile_overrides))
        task = Task("compile", request, allowed_modules(), run_dir.resolve() / name)
        yield CompiledCandidate(one, OwnProcess(task, None).run(), name)


def best_compiled(compiled: tuple[CompiledCandidate, ...]) -> CompiledCandidate | None:
    """Returns the shortest predicted step of those that fit; None where none does."""
    done = [(seconds, n) for n, one in enumerate(compiled) if (seconds := one.seconds) is not None]
    return compiled[min(done)[1]] if done else None
