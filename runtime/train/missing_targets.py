"""Batches without a target: their loss is 0 by definition, and the user hears of it once."""

from collections.abc import Callable

from meshloom.compiler.core.errors import Problem

from .metrics import Metrics

FIX = "train on longer documents, or set data.isolate_documents=false; metrics.jsonl has num_targets"


class MissingTargets:
    """Warns of the first step, and of the first evaluation, whose batches have no targets."""

    def __init__(self, warn: Callable[[Problem], None]):
        self._warn = warn
        self._warned: set[str] = set()

    def check_step(self, metrics: Metrics) -> None:
        """Warns if the step's global batch had no target."""
        if not metrics.num_targets:
            what = "its global batch has no target: the loss is 0, and only auxiliary losses have gradients"
            self._warn_once(f"step {metrics.step}", what)

    def mean(self, loss: float, num_targets: float) -> float | None:
        """Returns the mean held-out loss, in nats per token; None, with a warning, where there are no targets."""
        if num_targets:
            return float(loss / num_targets)
        self._warn_once("evaluation", "no token of the held-out batches has a target: there is no held-out loss")
        return None

    def _warn_once(self, where: str, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(Problem(where, what, FIX))
