"""A training loop over one batch, and what it asks for."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshloom.compiler.declare.run_spec import RunSpec
from meshloom.compiler.plan import Plan
from meshloom.compiler.xla.programs import Programs
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train.loop import TrainingLoop
from meshloom.runtime.train.metrics import Metrics, Stopwatch
from meshloom.runtime.train.observer import Observer, Observers


class NoData:
    """Takes the place of an iterator over batches, for checkpoints of states that came from none."""

    def __init__(self) -> None:
        self.identity: dict[str, Any] = {}

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: Mapping[str, int]) -> None:
        assert state == {}


class Batches(NoData):
    """Gives the same batch again and again, as `TrainingLoop` reads them."""

    def __init__(self, batch: dict[str, np.ndarray]):
        super().__init__()
        self.batch = batch

    def __next__(self) -> dict[str, np.ndarray]:
        return self.batch


class Reported(Observer):
    """Collects the metrics of each step."""

    def __init__(self) -> None:
        self.metrics: list[Metrics] = []

    def step_reported(self, metrics: Metrics) -> None:
        self.metrics.append(metrics)


def observers_of(*each: Observer) -> Observers:
    """Returns the observers of a loop, with a stopwatch of their own."""
    observers = Observers(Stopwatch(time.time()))
    for one in each:
        observers.add(one)
    return observers


def loop_over(
    batch: dict[str, np.ndarray],
    plan: Plan[RunSpec],
    programs: Programs,
    checkpoints: Checkpoints,
    stop: StopRequest,
    observers: Observers,
) -> TrainingLoop:
    """Returns a loop that trains on one batch again and again, and evaluates on it."""
    batches: Any = Batches(batch)
    return TrainingLoop(
        plan, programs, batches=batches, held_out=[batch], checkpoints=checkpoints, stop=stop, observers=observers
    )
