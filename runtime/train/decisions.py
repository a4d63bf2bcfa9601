"""Decides when a run evaluates, when it saves, and when it cannot go on."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import RunSpec

from ..core.failures import NONFINITE, RunFailed
from .metrics import Metrics


class Due:
    """Says which work is due after a step, by the declaration and, for saves, by the clock."""

    def __init__(self, spec: RunSpec):
        self._spec, self._last_save = spec, time.perf_counter()

    def saved(self) -> None:
        """Notes that the state was saved now."""
        self._last_save = time.perf_counter()

    def is_evaluation(self, step: int) -> bool:
        """Returns True if the held-out loss is due. It always is at the end, unless nothing is held out."""
        if not self._spec.data.held_out_fraction:
            return False
        return step % self._spec.evaluation.every_num_steps == 0 or step == self._spec.num_steps

    def is_save(self, step: int) -> bool:
        """Returns True if a checkpoint is due."""
        checkpoint = self._spec.checkpoint
        if checkpoint.every_num_steps is not None and step % checkpoint.every_num_steps == 0:
            return True
        minutes = (time.perf_counter() - self._last_save) / 60
        return checkpoint.every_num_minutes is not None and minutes >= checkpoint.every_num_minutes


@dataclass  # not frozen: contextlib sets the traceback of what passes through it
class NonFinite(Exception):
    """Training cannot continue. step: the step that showed it. position: the place of its batch in the data; None if
    the batch is not to blame."""

    step: int
    what: str
    position: dict[str, Any] | None

    def failure(self, saved: int | None, documents: Callable[[Mapping[str, Any]], str]) -> RunFailed:
        """Returns the error that ends the run. saved: the step of the last good checkpoint. documents: describes the
        documents of a batch."""
        where = self.position
        batch = f"; its batch, {json.dumps(where)} in the data, has {documents(where)}" if where is not None else ""
        good = "no checkpoint was saved" if saved is None else f"the last good checkpoint is {saved}"
        fix = "lower optimizer.learning_rate, raise schedule.num_warmup_steps, or try on_nonfinite=skip or precision=float32"  # noqa: E501
        return RunFailed(Problem(f"step {self.step}", f"{self.what}{batch}; {good}", fix), NONFINITE)


class SkipCounter:
    """Counts consecutive skipped steps."""

    def __init__(self, spec: RunSpec):
        self._num_allowed, self._num_in_a_row = spec.num_skips_allowed if spec.may_skip else 0, 0

    def count(self, metrics: Metrics, position: dict[str, Any], *, is_finite: bool) -> None:
        """Counts a step. Raises NonFinite if it is not finite and no more steps may be skipped."""
        self._num_in_a_row = 0 if is_finite else self._num_in_a_row + 1
        if self._num_in_a_row > self._num_allowed:
            what = f"the loss is {metrics.loss}, the norm of the gradients {metrics.grad_norm}"
            if self._num_allowed:
                before = "step before it was" if self._num_allowed == 1 else f"{self._num_allowed} steps before it were"
                what += f", and the {before} skipped for the like"
            raise NonFinite(metrics.step, what, position)
