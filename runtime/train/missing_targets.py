"""Batches without a target: their loss is 0 by definition, and the user hears of it once."""

from collections.abc import Callable
from typing import Self

from meshloom.compiler.core.errors import Problem

from .metrics import Metrics
from .observer import ObservedRun, Observer

FIX = "train on longer documents, or set data.isolate_documents=false; metrics.jsonl has num_targets"


class MissingTargets(Observer):
    """Warns of the first step, and of the first evaluation, whose batches have no targets."""

    def __init__(self, warn: Callable[[Problem], None]):
        self._warn = warn
        self._warned: set[str] = set()

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the observer of a run."""
        return cls(run.warn)

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step's global batch had no target."""
        if not metrics.num_targets:
            what = "its global batch has no target: the loss is 0, and only auxiliary losses have gradients"
            self._warn_once(f"step {metrics.step}", what)

    def evaluated(self, step: int, loss: float | None) -> None:  # noqa: ARG002
        """Warns if no held-out batch has a target."""
        if loss is None:
            self._warn_once("evaluation", "no token of the held-out batches has a target: there is no held-out loss")

    def _warn_once(self, where: str, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(Problem(where, what, FIX))
