"""Batches on the devices: of each global batch the rows that this process reads, and how long they were waited for."""

import time
from typing import Any

import jax

from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs

from ..data import BatchIterator, HostBatch
from .rows import in_token_order, local_rows, to_devices
from .time_spent import Stopwatch


class Feed:
    """Puts batches on the devices of a run's programs. watch: learns of the time for which devices stood still."""

    def __init__(self, plan: Plan, programs: Programs, batches: BatchIterator, watch: Stopwatch):
        self._batch, self._batches, self._watch = programs.batch, batches, watch
        self._rows = local_rows(programs.batch)
        self._order = plan.token_order.of_sequence(plan.spec.sequence_length)

    def next(self, behind: dict[str, jax.Array] | None) -> tuple[dict[str, jax.Array], float, float]:
        """Returns the next batch on the devices, how long this took, and how long they stood still for it: not at all
        where the step before it still runs, else at most as long as this took. behind: the metrics of that step."""
        start = time.perf_counter()
        batch = self.place(next(self._batches))
        seconds = time.perf_counter() - start
        loss: Any = behind["loss"] if behind is not None else None
        if loss is not None and not loss.is_ready():
            return batch, seconds, 0.0
        self._watch.move(seconds, to="input")
        return batch, seconds, seconds

    def place(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Returns this process's rows of a batch as part of the global one, on the devices."""
        return to_devices(self._batch, self._rows, in_token_order(batch, self._order))
