"""The loop: next batch, call the step, metrics, save. It decides nothing about placement, precision or schedule.

Steps are dispatched ahead: while step n runs, the host reads the metrics of step n-1.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from meshloom.compiler.driver import Programs
from meshloom.compiler.plan import Plan

from .checkpoint import Checkpoints
from .data import HostBatch
from .metrics import Metrics, mfu
from .rows import local_rows, to_devices
from .stop import StopRequest

Running = tuple[int, dict[str, jax.Array]]  # a step that was dispatched, and its metrics to come


class Loop:
    """One run of compiled programs over batches, of which this process reads its rows. held_out: the same batches each
    time it is iterated."""

    def __init__(
        self,
        plan: Plan,
        programs: Programs,
        *,
        batches: Iterator[HostBatch],
        held_out: Iterable[HostBatch],
        checkpoints: Checkpoints,
        report: Callable[[Metrics], None],
        stop: StopRequest,
    ):
        self.plan, self.spec, self.programs = plan, plan.spec, programs
        self.batches, self.held_out = batches, held_out
        self.checkpoints, self.report, self.stop = checkpoints, report, stop
        self._rows = local_rows(programs.batch)
        self._last_finish = 0.0

    def run(self, state: Any, first_step: int) -> int:
        """Train from `first_step` steps done until all are, or a stop is asked for. Returns the steps done."""
        running, done = None, first_step
        self._last_finish = time.perf_counter()
        while done < self.spec.num_steps and not self.stop.is_due(done):
            state, metrics = self.programs.train(state, self._to_devices(next(self.batches)))
            done += 1
            self._finish(running)
            running = (done, metrics)
            if self._is_evaluation_due(done) or self._is_save_due(done):
                self._finish(running, state)
                running = None
                if self._is_save_due(done):
                    self.checkpoints.save(done, state, self.batches)
                self._last_finish = time.perf_counter()
        self._finish(running)
        if done > first_step:
            self.checkpoints.save(done, state, self.batches)
        return done

    def _finish(self, running: Running | None, state: Any = None) -> None:
        """Wait for a step, evaluate its state where that is due, and report. No evaluation counts as step time."""
        if running is None:
            return
        step, metrics = running[0], {name: float(value) for name, value in jax.device_get(running[1]).items()}
        finish = time.perf_counter()
        seconds, self._last_finish = finish - self._last_finish, finish
        self.report(
            Metrics(
                step=step,
                loss=metrics["loss"],
                eval_loss=self._evaluate(state) if state is not None and self._is_evaluation_due(step) else None,
                grad_norm=metrics["grad_norm"],
                learning_rate=metrics["learning_rate"],
                tokens_per_second=self.spec.tokens_per_step / seconds,
                step_seconds=seconds,
                mfu=mfu(self.plan, seconds),
            )
        )

    def _evaluate(self, state: Any) -> float:
        """Mean loss over the held-out batches, in nats per token."""
        # One at a time: XLA:CPU holds 32 programs in flight, and processes that fill them in other orders never end.
        losses = [float(self.programs.evaluate(state["params"], self._to_devices(batch))) for batch in self.held_out]
        return sum(losses) / len(losses)

    def _to_devices(self, batch: HostBatch) -> dict[str, jax.Array]:
        return to_devices(self.programs.batch, self._rows, batch)

    def _is_evaluation_due(self, step: int) -> bool:
        return step % self.spec.evaluation.every_num_steps == 0 or step == self.spec.num_steps

    def _is_save_due(self, step: int) -> bool:
        interval = self.spec.checkpoint.every_num_steps
        return interval is not None and step % interval == 0
