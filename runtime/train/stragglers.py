"""Measures the time of each process for its steps and its input, and names the one that the others wait for.

All processes end a step together, since a collective waits for all devices, so the time of a step does not show which
host is slow. The time for which a host's devices stand still before their next step does: on a host that keeps up, they
still run the previous step, or wait in it for the others.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Self

import jax

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import human_seconds, human_share
from meshloom.compiler.declare.run_spec import StragglersSpec

from ..processes.distributed import Processes
from .observer import ObservedRun, Observer, StepTimes

FOLDER = "meshloom/stragglers"  # in the store of the coordination service; a folder for each window of steps


class Stragglers(Observer):
    """Collects the times of all processes. warn: takes the name of a straggler, in process 0, once until it is over."""

    def __init__(self, spec: StragglersSpec | None, processes: Processes, warn: Callable[[Problem], None]):
        self._spec, self._processes, self._warn = spec, processes, warn
        self._times: list[StepTimes] = []
        self._told: int | None = None

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the observer of a run."""
        return cls(run.spec.stragglers, run.processes, run.warn)

    def step_ended(self, step: int, times: StepTimes, state: Any) -> Mapping[str, float] | None:  # noqa: ARG002
        """Notes the times of a step. At the end of a window of steps, process 0 returns the means of every process over
        the previous window, by names of metrics, so that no process waits for another."""
        if self._spec is None or self._processes.count == 1:
            return None
        self._times.append(times)
        if step % self._spec.every_num_steps:
            return None
        window = step // self._spec.every_num_steps
        means = [statistics.fmean(each) for each in zip(*map(astuple, self._times), strict=True)]
        self._times.clear()
        try:
            key = f"{FOLDER}/{window}/{self._processes.index:06}"
            self._processes.client.key_value_set(key, json.dumps(means), allow_overwrite=True)
            found = self._take(window - 1) if self._processes.is_first else {}
        except jax.errors.JaxRuntimeError:  # the service is gone, which the run notices by itself
            return None
        if found:
            self._name_slowest(step, found)
        return as_metrics(found)

    def _take(self, window: int) -> dict[int, StepTimes]:
        """Returns the means of every process, and removes them from the store."""
        client, folder = self._processes.client, f"{FOLDER}/{window}/"
        told = client.key_value_dir_get(folder)
        client.key_value_delete(folder)
        return {int(key.rsplit("/", 1)[1]): StepTimes(*json.loads(text)) for key, text in told}

    def _name_slowest(self, step: int, found: Mapping[int, StepTimes]) -> None:
        assert self._spec is not None
        slowest, cost = find_straggler(found)
        if cost <= self._spec.cost_share:
            self._told = None
        elif slowest != self._told:
            self._told = slowest
            what = describe_straggler(slowest, cost, found, self._processes.hosts)
            fix = "see what else runs on that host and how it reads its data, or raise data.num_prefetch_threads"
            self._warn(Problem(f"step {step}", what, fix))


def find_straggler(found: Mapping[int, StepTimes]) -> tuple[int, float]:
    """Returns the process whose devices stand still longest for input, and the excess over the median of the others as
    a share of a step."""
    slowest = max(found, key=lambda index: found[index].input_wait)
    others = [one.input_wait for index, one in found.items() if index != slowest] or [0.0]
    return slowest, (found[slowest].input_wait - statistics.median(others)) / max(found[slowest].step, 1e-9)


def describe_straggler(slowest: int, cost: float, found: Mapping[int, StepTimes], hosts: Sequence[str]) -> str:
    """Returns a sentence with the process that the others wait for, and the times of its input."""
    own = found[slowest]
    others = statistics.median(one.input for index, one in found.items() if index != slowest)
    return (
        f"process {slowest} on {hosts[slowest]} costs {human_share(cost)} of each step: it takes "
        f"{human_seconds(own.input)} for a batch, the others {human_seconds(others)}"
    )


def as_metrics(found: Mapping[int, StepTimes]) -> dict[str, float]:
    """Returns the times by names of metrics: processes/3/input_seconds."""
    return {
        f"processes/{index}/{name}_seconds": seconds
        for index, one in sorted(found.items())
        for name, seconds in vars(one).items()
    }
