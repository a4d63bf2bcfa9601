"""Detects a process that hangs, and one that the others wait for.

A collective waits for all devices, so if one host stands still, all do; JAX itself notices only a process that has
died. The watchdog is a thread. A step has to end within `watchdog.factor` times the median of the steps before it, or
within `watchdog.min_seconds` if that is longer. Work between steps is not watched: compile, evaluation, save. Every
process writes its stacks, process 0 names the hosts behind, and the run may end.

The time of a step does not show which host is slow, as all processes end it together. The time for which a host's
devices stand still before their next step does: on a host that keeps up, they still run the previous step, or wait in
it for the others.
"""

import faulthandler
import json
import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, Self

import jax

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.core.format import counted, human_names, human_seconds, human_share
from meshloom.compiler.declare.run_spec import StragglersSpec, WatchdogSpec

from ..core.failures import HUNG
from ..processes.distributed import Processes
from ..processes.lost import Lookout
from ..processes.process_log import FOLDER
from .metrics import Metrics, TimeKind
from .observer import ObservedRun, Observer, StepTimes

LOG = logging.getLogger("meshloom")
HANGS = "meshloom/watchdog"  # in the store of the coordination service, a key for each process that hangs
NUM_STEPS = 32  # for the median
MOST_POLL_SECONDS = 5.0
ANSWER_SECONDS = 20.0  # at most, for the other processes to notice the hang too
WINDOWS = "meshloom/stragglers"  # in the store of the coordination service; a folder for each window of steps


class Watchdog(Observer):
    """Watches steps within the `with`. log: the file that takes this process's stacks. say: takes the finding, once for
    each hang. end: ends this process, if `watchdog.abort` is set."""

    def __init__(
        self,
        spec: WatchdogSpec | None,
        processes: Processes,
        log: Path,
        say: Callable[[Problem], None],
        *,
        end: Callable[[int], Any] = os._exit,
    ):
        self._spec, self._processes, self._log, self._say, self._end = spec, processes, log, say, end
        self._seconds: deque[float] = deque(maxlen=NUM_STEPS)
        self._lock, self._over = threading.RLock(), threading.Event()
        self._since: float | None = None  # the last sign of life; None while nothing is watched
        self._done, self._is_told = 0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self:
        """Returns the watchdog of this process; it writes stacks to the log of the process."""
        log = run.run_dir / FOLDER / f"process-{run.processes.index}.log"
        return cls(run.spec.watchdog, run.processes, log, run.warn)

    def __enter__(self) -> Self:
        if self._spec is not None:
            self._since = time.monotonic()
            self._thread.start()
        return self

    def left(self, error: BaseException | None) -> None:  # noqa: ARG002
        self._over.set()

    def step_ended(self, step: int, times: StepTimes, state: Any) -> None:  # noqa: ARG002
        """Notes the end of a step and its time."""
        with self._lock:
            self._done, self._since = step, time.monotonic()
            self._seconds.append(times.step)
            was_told, self._is_told = self._is_told, False
        if was_told:
            LOG.info(f"step {step} has ended: the run goes on")
            if self._processes.client is not None:
                self._processes.client.key_value_delete(self._key)

    @contextmanager
    def pause(self, kind: TimeKind) -> Iterator[None]:  # noqa: ARG002
        """Within the `with`, nothing is watched: an evaluation or a save has no time limit."""
        self._since = None
        try:
            yield
        finally:
            self._since = time.monotonic()

    @property
    def limit_seconds(self) -> float:
        """Returns the time limit of a step."""
        assert self._spec is not None
        return max(self._spec.min_seconds, self._spec.factor * (self._median() or 0.0))

    def _median(self) -> float | None:
        with self._lock:
            return statistics.median(self._seconds) if self._seconds else None

    @property
    def _key(self) -> str:
        return f"{HANGS}/{self._processes.index:06}"

    def _watch(self) -> None:
        while not self._over.wait(min(MOST_POLL_SECONDS, self.limit_seconds / 10)):
            with self._lock:
                waited = time.monotonic() - self._since if self._since is not None else 0.0
                is_hung = waited > self.limit_seconds and not self._is_told
                self._is_told |= is_hung
            if is_hung:
                self._tell(waited)

    def _tell(self, waited: float) -> None:
        assert self._spec is not None
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"step {self._done + 1} has not ended for {human_seconds(waited)}; where this process is:\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)
        who = self._who_is_behind()
        if self._processes.is_first:
            median = self._median()
            usual = f", the median is {human_seconds(median)}" if median is not None else ""
            what = f"has not ended for {human_seconds(waited)}{usual}: {who}"
            then = "the processes end, to be started again"
            then = then if self._spec.abort else "watchdog.abort=true ends such a run"
            fix = f"see logs/process-N.log for where each process is; {then}"
            self._say(Problem(f"step {self._done + 1}", what, fix))
        if self._spec.abort and not self._over.is_set():
            logging.shutdown()
            self._end(HUNG)

    def _who_is_behind(self) -> str:
        """Returns the processes that are behind, as text. Each process that notices the hang publishes its last
        step."""
        processes = self._processes
        if processes.count == 1:
            return "the log says where"
        try:
            processes.client.key_value_set(self._key, json.dumps({"done": self._done}), allow_overwrite=True)
            time.sleep(min(ANSWER_SECONDS, self.limit_seconds))
            told = processes.client.key_value_dir_get(f"{HANGS}/")
        except jax.errors.JaxRuntimeError as error:
            return f"the other processes cannot be asked: {str(error).splitlines()[0]}"
        done = {int(key.rsplit("/", 1)[1]): json.loads(text)["done"] for key, text in told}
        return describe_hang(done, processes.hosts)


class LastStep(Observer):
    """Notes each step for the lookout, which names the last one if another process is gone."""

    def __init__(self, lookout: Lookout):
        self._lookout = lookout

    @classmethod
    def of_run(cls, run: ObservedRun) -> Self | None:
        """Returns the observer of a run of several processes; None for a single one."""
        return cls(run.processes.lookout) if run.processes.lookout else None

    def step_reported(self, metrics: Metrics) -> None:
        self._lookout.last_step = metrics.step


def describe_hang(done: Mapping[int, int], hosts: tuple[str, ...]) -> str:
    """Returns the processes that are behind, as text. done: the steps done by each process that noticed the hang.
    hosts: the hosts of all processes."""
    silent = [index for index in range(len(hosts)) if index not in done]
    furthest = max(done.values())
    behind = [index for index in sorted(done) if done[index] < furthest]
    found = [f"{_named(silent, hosts)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    found += [f"{_named([i], hosts)} has done {counted(done[i], 'step')}, others {furthest}" for i in behind]
    return "; ".join(found) or f"all {len(hosts)} processes wait in the same step, in a collective or for a device"


def _named(indices: list[int], hosts: tuple[str, ...]) -> str:
    return human_names([f"process {index} on {hosts[index]}" for index in indices], most=4)


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
            key = f"{WINDOWS}/{window}/{self._processes.index:06}"
            self._processes.client.key_value_set(key, json.dumps(means), allow_overwrite=True)
            found = self._take(window - 1) if self._processes.is_first else {}
        except jax.errors.JaxRuntimeError:  # the service is gone, which the run notices by itself
            return None
        if found:
            self._name_slowest(step, found)
        return as_metrics(found)

    def _take(self, window: int) -> dict[int, StepTimes]:
        """Returns the means of every process, and removes them from the store."""
        client, folder = self._processes.client, f"{WINDOWS}/{window}/"
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
