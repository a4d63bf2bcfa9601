"""The loop: next batch, call the step, metrics, save. It decides nothing about placement, precision or schedule.

Steps are dispatched ahead: while step n runs, the host reads the metrics of step n-1.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax
import numpy as np

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import NUM_PADDING
from meshloom.compiler.xla.programs import Programs

from ..checkpoint.checkpoints import Checkpoints
from ..data import BatchIterator, HostBatch
from ..processes.stop import StopRequest
from .due import Due
from .feed import Feed
from .metrics import Metrics, metrics_of
from .missing_targets import MissingTargets
from .nonfinite import NonFinite, SkipCounter
from .profiler import Profiler
from .stragglers import StepTimes, Stragglers
from .time_spent import Stopwatch
from .watchdog import Watchdog

TakeStep = Callable[[Any, dict[str, jax.Array], int, dict[str, Any]], tuple[Any, dict[str, jax.Array]]]


@dataclass(frozen=True)
class Running:
    """A step that was dispatched: its metrics to come, where in the data its batch lies, how long this process
    took for it, and its devices may have waited."""

    step: int
    metrics: dict[str, jax.Array]
    position: dict[str, Any]
    input_seconds: float
    input_wait_seconds: float


class Loop:
    """One run of compiled programs over batches, of which this process reads its rows. held_out: the same batches each
    time it is iterated. take_step: takes a state, a batch, the step's number and the batch's place in the data; by
    default it calls the program."""

    def __init__(
        self,
        plan: Plan,
        programs: Programs,
        *,
        batches: BatchIterator,
        held_out: Iterable[HostBatch],
        checkpoints: Checkpoints,
        report: Callable[[Metrics], None],
        warn: Callable[[Problem], None],
        stop: StopRequest,
        watch: Stopwatch,
        watchdog: Watchdog,
        profiler: Profiler,
        stragglers: Stragglers,
        take_step: TakeStep | None = None,
    ):
        self.plan, self.spec, self.programs = plan, plan.spec, programs
        self.batches, self.held_out, self.checkpoints = batches, held_out, checkpoints
        self.report, self.stop, self.watch = report, stop, watch
        self.watchdog, self.profiler, self.stragglers, self.due = watchdog, profiler, stragglers, Due(plan.spec)
        self._take_step = take_step or (lambda state, batch, *_: programs.train(state, batch))
        self._targets = MissingTargets(warn)
        self._skips, self._feed = SkipCounter(plan.spec), Feed(plan, programs, batches, watch)
        self._last_finish, self._num_tokens = 0.0, 0

    def run(self, state: Any, first_step: int, num_tokens: int = 0) -> int:
        """Trains from `first_step` steps and `num_tokens` tokens on, until a stop is asked for; returns the steps done.
        Raises NonFinite, and saves nothing more, where training cannot go on."""
        running, done, eval_loss, self._num_tokens = None, first_step, None, num_tokens
        self._last_finish = time.perf_counter()
        while done < self.spec.num_steps and not self.stop.is_due(done):
            position = self.batches.get_state()
            batch, *input_times = self._feed.next(behind=running and running.metrics)
            if self.profiler.is_first(done + 1):
                self._finish(running)
                running = self.profiler.start(state)
                self._last_finish = time.perf_counter()
            with self.profiler.step(done + 1):
                state, metrics = self._take_step(state, batch, done + 1, position)
            done, eval_loss = done + 1, None
            self._finish(running)
            running = Running(done, metrics, position, *input_times)
            if self._is_read_at_once(done):
                eval_loss = self._finish(running, state)
                running = None
                if self.due.is_save(done):
                    self._save(done, state, eval_loss)
                self._last_finish = time.perf_counter()
        self._finish(running)
        if done > first_step:
            self._save(done, state, eval_loss)
        return done

    def _is_read_at_once(self, step: int) -> bool:
        """Returns True for a step whose metrics are read before the next one is dispatched."""
        is_due = self.due.is_evaluation(step) or self.due.is_save(step)
        return is_due or self.profiler.is_last(step) or self.spec.keeps_state

    def _finish(self, running: Running | None, state: Any = None) -> float | None:
        """Waits for a step, evaluates its state if that is due, and reports; returns the held-out loss."""
        if running is None:
            return None
        step, read = running.step, jax.device_get(running.metrics)
        finish = time.perf_counter()
        seconds, self._last_finish = finish - self._last_finish, finish
        self.watchdog.step_ended(step, seconds)
        self.profiler.stop_after(step, state)
        eval_loss = self._evaluate(state) if state is not None and self.due.is_evaluation(step) else None
        times = StepTimes(seconds, running.input_seconds, running.input_wait_seconds)
        self._num_tokens += self.spec.tokens_per_step - int(read.get(NUM_PADDING, 0))
        told = metrics_of(
            self.plan, step, read, eval_loss, self.watch.by_all(), seconds=seconds, num_tokens=self._num_tokens,
            input_wait_seconds=times.input_wait, of_processes=self.stragglers.count(step, times),
        )  # fmt: skip
        self.report(told)
        self._targets.check_step(told)
        self._skips.count(told, running.position, is_finite=isfinite(told.loss) and isfinite(told.grad_norm))
        return told.eval_loss

    def _evaluate(self, state: Any) -> float | None:
        """Returns the mean loss over the held-out batches, in nats per token; None where they have no targets."""
        sums = np.zeros(2)
        with self.watch.spending("evaluation"), self.watchdog.paused():
            # One at a time: with many in flight on CPU, several processes were seen to hang.
            for batch in self.held_out:
                sums += jax.device_get(self.programs.evaluate(state["params"], self._feed.place(batch)))
        return self._targets.mean(*sums)

    def _save(self, step: int, state: Any, eval_loss: float | None) -> None:
        """Saves a state that is finite; loss and gradients of its step say nothing of what the update made of it."""
        with self.watch.spending("save"), self.watchdog.paused():
            if self.spec.checkpoint.is_saving and not self.programs.is_finite(state):
                raise NonFinite(step, "the state after it has NaN or infinity, although its loss does not", None)
            self.checkpoints.save(step, state, self.batches, num_tokens=self._num_tokens, eval_loss=eval_loss)
        self.due.saved()
