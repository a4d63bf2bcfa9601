"""Runs the training loop: next batch, step, metrics, save. It decides nothing about placement, precision or schedule.

Steps are dispatched ahead: while step n runs, the host reads the metrics of step n-1.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax
import numpy as np

from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import NUM_PADDING
from meshloom.compiler.xla.programs import Programs

from ..checkpoint.checkpoints import Checkpoints
from ..data import BatchIterator, HostBatch
from ..processes.stop import StopRequest
from .decisions import Due, NonFinite, SkipCounter
from .feed import Feed
from .metrics import metrics_of
from .observer import Observers, StepTimes


@dataclass(frozen=True)
class Running:
    """A step that was dispatched: its future metrics, the place of its batch in the data, the seconds that this process
    took for the batch, and the seconds that its devices may have waited."""

    step: int
    metrics: dict[str, jax.Array]
    position: dict[str, Any]
    input_seconds: float
    input_wait_seconds: float


class TrainingLoop:
    """One run of compiled programs over batches. held_out: the same batches each time it is iterated. latest_eval_loss:
    the last held-out loss, in nats per token; None before the first."""

    def __init__(
        self,
        plan: Plan[RunSpec],
        programs: Programs,
        *,
        batches: BatchIterator,
        held_out: Iterable[HostBatch],
        checkpoints: Checkpoints,
        stop: StopRequest,
        observers: Observers,
    ):
        self.plan, self.spec, self.programs = plan, plan.spec, programs
        self.batches, self.held_out, self.checkpoints = batches, held_out, checkpoints
        self.stop, self.observers, self.watch = stop, observers, observers.watch
        self.latest_eval_loss: float | None = None
        self._take_step = observers.around_step(lambda state, batch, *_: programs["train"](state, batch))
        self._due, self._skips = Due(plan.spec), SkipCounter(plan.spec)
        order = plan.batch.token_order.of_sequence(self.spec.sequence_length)
        self._feed = Feed(programs, batches, order, self.watch)
        self._step_seconds, self._num_tokens = 0.0, 0

    def run(self, state: Any, first_step: int, num_tokens: int = 0) -> int:
        """Trains after `first_step` steps and `num_tokens` tokens, to the last step or until a stop is requested.
        Returns the steps done. Raises NonFinite, and saves nothing more, if training cannot continue."""
        running, done, eval_loss = None, first_step, None
        self._num_tokens = num_tokens
        self.observers.run_started(first_step)
        with self.watch.spending("steps"):
            while done < self.spec.num_steps and not self.stop.is_due(done):
                position = self.batches.get_state()
                batch, *input_times = self._feed.next(behind=running and running.metrics)
                state, metrics = self._take_step(state, batch, done + 1, position)
                done, eval_loss = done + 1, None
                self._finish(running)
                running = Running(done, metrics, position, *input_times)
                is_due = self._due.is_evaluation(done) or self._due.is_save(done)
                if is_due or self.observers.reads_at_once(done):  # its state is not donated to the next step
                    eval_loss = self._finish(running, state)
                    running = None
                    if self._due.is_save(done):
                        self._save(done, state, eval_loss)
            self._finish(running)
            if done > first_step:
                self._save(done, state, eval_loss)
        self.observers.run_ended(done)
        return done

    def _finish(self, running: Running | None, state: Any = None) -> float | None:
        """Waits for a step, evaluates its state if that is due, and reports it. Returns the held-out loss; None without
        one."""
        if running is None:
            return None
        step, read = running.step, jax.device_get(running.metrics)
        so_far = self.watch.step_seconds  # without pauses
        seconds, self._step_seconds = so_far - self._step_seconds, so_far
        times = StepTimes(seconds, running.input_seconds, running.input_wait_seconds)
        observed = self.observers.step_ended(step, times, state)
        eval_loss = self._evaluate(step, state) if state is not None and self._due.is_evaluation(step) else None
        self._num_tokens += self.spec.tokens_per_step - int(read.get(NUM_PADDING, 0))
        metrics = metrics_of(
            self.plan, step, read, eval_loss, self.watch.by_all(), seconds=seconds, num_tokens=self._num_tokens,
            input_wait_seconds=times.input_wait, observed=observed,
        )  # fmt: skip
        self.observers.step_reported(metrics)
        is_finite = isfinite(metrics.loss) and isfinite(metrics.grad_norm)
        self._skips.count(metrics, running.position, is_finite=is_finite)
        return eval_loss

    def _evaluate(self, step: int, state: Any) -> float | None:
        """Returns the mean loss over the held-out batches, in nats per token; None if they have no targets."""
        sums = np.zeros(2)
        with self.observers.pause("evaluation"):
            # One at a time: with many in flight on CPU, several processes were seen to hang.
            for batch in self.held_out:
                sums += jax.device_get(self.programs["evaluate"](state["params"], self._feed.place(batch)))
        loss = float(sums[0] / sums[1]) if sums[1] else None
        self.observers.evaluated(step, loss)
        self.latest_eval_loss = self.latest_eval_loss if loss is None else loss
        return loss

    def _save(self, step: int, state: Any, eval_loss: float | None) -> None:
        """Saves a finite state, and raises NonFinite for any other: a finite loss does not prove that the updated state
        is finite."""
        with self.observers.pause("save"):
            if self.spec.checkpoint.is_saving and not self.programs["is_finite"](state):
                raise NonFinite(step, "the state after it has NaN or infinity, although its loss does not", None)
            self.checkpoints.save(step, state, self.batches, num_tokens=self._num_tokens, eval_loss=eval_loss)
        self._due.saved()
