"""Runs the training loop: next batch, step, metrics, save. It decides nothing about placement, precision or schedule.

Steps are dispatched ahead: while step n runs, the host reads the metrics of step n-1.

Every run has the observers that are listed here, in the order in which they see a step.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Self

import jax
import numpy as np

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_share
from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.step.train_step import NUM_PADDING
from meshloom.compiler.xla.programs import Programs

from ..checkpoint.checkpoints import Checkpoints
from ..core.failures import NONFINITE, RunFailed
from ..data import BatchIterator, HostBatch
from ..processes.stop import StopRequest
from .display import Display
from .feed import Feed
from .metrics import Metrics, metrics_of
from .observer import ObservedRun, Observer, Observers, StepTimes
from .profiler import Profiler
from .replay import Replay
from .trackers import MetricsLog, Trackers
from .watchdog import LastStep, Stragglers, Watchdog

LONGER_DOCUMENTS = "train on longer documents, or set data.isolate_documents=false; metrics.jsonl has num_targets"
DROPPED = "dropped"  # the statistic of a layer (models/moe.py): layers/dropped, or layers/dropped/0 of one layer
MORE_ROOM = (
    "raise moe.max_imbalance (null: room for any imbalance), or moe.capacity_factor with parallel.experts=capacity; "
    "metrics.jsonl has the share of each step"
)
FIX = "lower optimizer.learning_rate, raise schedule.num_warmup_steps, or try on_nonfinite=skip or precision=float32"
COUNTS = "on_nonfinite=replay names the matmuls whose scales overflow"


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
    the batch is not to blame. fix: what may help."""

    step: int
    what: str
    position: dict[str, Any] | None
    fix: str = FIX

    def failure(self, saved: int | None, documents: Callable[[Mapping[str, Any]], str]) -> RunFailed:
        """Returns the error that ends the run. saved: the step of the last good checkpoint. documents: describes the
        documents of a batch."""
        where = self.position
        batch = f"; its batch, {json.dumps(where)} in the data, has {documents(where)}" if where is not None else ""
        good = "no checkpoint was saved" if saved is None else f"the last good checkpoint is {saved}"
        return RunFailed(Problem(f"step {self.step}", f"{self.what}{batch}; {good}", self.fix), NONFINITE)


class SkipCounter:
    """Counts consecutive skipped steps."""

    def __init__(self, spec: RunSpec):
        self._num_allowed, self._num_in_a_row = spec.num_skips_allowed if spec.may_skip else 0, 0
        has_scales = any(each.forward for each in spec.precision.matmuls)
        replay_counts = has_scales and spec.precision.loss_scale is None and spec.on_nonfinite != "replay"
        self._fix = f"{FIX}; {COUNTS}" if replay_counts else FIX

    def count(self, metrics: Metrics, position: dict[str, Any], *, is_finite: bool) -> None:
        """Counts a step. Raises NonFinite if it is not finite and no more steps may be skipped."""
        self._num_in_a_row = 0 if is_finite else self._num_in_a_row + 1
        if self._num_in_a_row > self._num_allowed:
            what = f"the loss is {metrics.loss}, the norm of the gradients {metrics.grad_norm}"
            if self._num_allowed:
                before = "step before it was" if self._num_allowed == 1 else f"{self._num_allowed} steps before it were"
                what += f", and the {before} skipped for the like"
            raise NonFinite(metrics.step, what, position, self._fix)


class TokenWarning(Observer):
    """Warns about tokens that teach the model nothing, each time once in a run."""

    def __init__(self, warn: Callable[[Problem], None]):
        self._warn = warn
        self._warned = set[str]()

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the observer of a run."""
        return cls(run.warn)

    def _warn_once(self, name: str, problem: Problem) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warn(problem)


class MissingTargets(TokenWarning):
    """Warns about the first step, and the first evaluation, whose batches have no targets."""

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step's global batch had no target."""
        if not metrics.num_targets:
            what = "its global batch has no target: the loss is 0, and only auxiliary losses have gradients"
            self._warn_once("step", Problem(f"step {metrics.step}", what, LONGER_DOCUMENTS))

    def evaluated(self, step: int, loss: float | None) -> None:  # noqa: ARG002
        """Warns if no held-out batch has a target."""
        if loss is None:
            what = "no token of the held-out batches has a target: there is no held-out loss"
            self._warn_once("evaluation", Problem("evaluation", what, LONGER_DOCUMENTS))


class DroppedTokens(TokenWarning):
    """Warns about the first step in which experts had no room for all choices."""

    def step_reported(self, metrics: Metrics) -> None:
        """Warns if the step dropped a choice."""
        shares = [value for name, value in metrics.auxiliary.items() if name.split("/")[1] == DROPPED]
        if any(share > 0 for share in shares):
            what = f"{human_share(max(shares))} of the choices of experts found no room and were dropped"
            self._warn_once(DROPPED, Problem(f"step {metrics.step}", what, MORE_ROOM))


# Each returns the observer of a run, or None if the declaration or this process has none. The watchdog comes before the
# profiler, so that writing a trace is not watched; the profiler comes after the replay, whose steps it traces.
OBSERVERS: tuple[Callable[[ObservedRun], Observer | None], ...] = (
    MetricsLog.of_run,
    Trackers.of_run,
    Display.of_run,
    LastStep.of_run,
    DroppedTokens.of_run,
    MissingTargets.of_run,
    Watchdog.of_run,
    Replay.of_run,
    Profiler.of_run,
    Stragglers.of_run,
)


def add_observers(run: ObservedRun) -> None:
    """Makes the observers of a run, and adds them to `run.observers`."""
    for make in OBSERVERS:
        observer = make(run)
        if observer is not None:
            run.observers.add(observer)
