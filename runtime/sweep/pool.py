"""The points of a sweep in worker processes: an abort, a hang or a lack of memory ends one of them alone.

Points of `explain` and `compile` go to Pebble's processes, which stay warm. Points of `train`, and those that need
devices that JAX cannot have in a warm process, run in a process of their own. Points are handed out one by one, as many
at once as memory allows.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pebble import ProcessExpired, ProcessPool

from ..core.host_memory import available_bytes
from .memory import LEAST_LEFT, Memory, num_ended_for_memory
from .outcomes import outcome_of_death, outcome_of_error, outcome_of_memory, outcome_of_timeout
from .own_process import OwnProcess
from .points import Outcome, Point, Task
from .settings import PoolSettings
from .worker_process import say_at, start_worker, work

_POLL_SECONDS = 0.2
MOST_POINTS_OF_A_WORKER = 500  # traced programs stay in memory; a fresh worker starts in 3 s
Work = Callable[[Task], Outcome | None]


@dataclass
class _Running:
    """A point at work. own: its process, where it is not a warm one. ended_as: decided by us, who end it."""

    point: Point
    task: Task
    future: "Future[Outcome | None]"
    own: OwnProcess | None
    killed_before: int | None
    ended_as: Outcome | None = None
    is_postponed: bool = False


@dataclass
class Pool:
    """Runs points, batch by batch, within its `with`.

    task_of: what a worker needs of a point. scratch: a folder that it makes, and removes at its end. ended: takes each
    point that has ended, once. told: is called often, with the number of points that are running. is_own: each in a
    process of its own. start, work: of a warm worker.
    """

    settings: PoolSettings
    task_of: Callable[[Point], Task]
    scratch: Path
    ended: Callable[[Point, Outcome], object]
    told: Callable[[int], None]
    is_own: bool = False
    start: Callable[[int, Path], None] = start_worker
    work: Work = work
    _memory: Memory = field(init=False)
    _warm: ProcessPool | None = field(default=None, init=False)
    _running: dict[int, _Running] = field(default_factory=dict, init=False)
    _waiting: deque[tuple[Point, bool]] = field(default_factory=deque, init=False)  # with: in a process of its own

    def __post_init__(self) -> None:
        self._memory = Memory(self.settings.worker_bytes)

    def __enter__(self) -> Self:
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a start that was killed
        self.scratch.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm:
            self._warm.stop()
            self._warm.join()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, points: Iterable[Point]) -> None:
        """Runs all points. Ctrl-C ends those that are running, which then have no outcome, and is raised again."""
        self._waiting.extend((point, self.is_own) for point in points)
        try:
            while self._waiting or self._running:
                self._go_on()
        except BaseException:
            self._interrupt()
            raise

    def _go_on(self) -> None:
        while self._waiting and self._may_start():
            self._start(*self._waiting.popleft())
        self.told(len(self._running))
        done, _ = wait([one.future for one in self._running.values()], _POLL_SECONDS, FIRST_COMPLETED)
        for one in [one for one in self._running.values() if one.future in done]:
            del self._running[one.point.index]
            self._finish(one)
        self._memory.look(self._pids())
        self._save_memory()

    def _may_start(self) -> bool:
        if not self._running:
            return True
        return len(self._running) < self.settings.num_workers and self._memory.has_room(self._running)

    def _start(self, point: Point, is_own: bool) -> None:
        task, own = self.task_of(point), None
        if is_own:
            own = OwnProcess(task, self.settings.timeout_seconds)
            future: Future[Outcome | None] = _in_thread(own.run)
        else:
            future = self._warm_pool().schedule(
                _work, args=(self.work, task, point.index, self.scratch), timeout=self.settings.timeout_seconds
            )
        self._running[point.index] = _Running(point, task, future, own, num_ended_for_memory())

    def _warm_pool(self) -> ProcessPool:
        if self._warm is None:
            self._warm = ProcessPool(
                max_workers=self.settings.num_workers,
                max_tasks=MOST_POINTS_OF_A_WORKER,
                initializer=self.start,
                initargs=(os.getpid(), self.scratch),
                context=multiprocessing.get_context("spawn"),
            )
        return self._warm

    def _finish(self, one: _Running) -> None:
        """Hands on the outcome of a point, or lets it run again: in a process of its own, or when there is memory."""
        for path in self.scratch.glob("*.point"):
            if path.read_text() == str(one.point.index):
                path.unlink()
        if one.is_postponed:
            self._waiting.append((one.point, one.own is not None))
            return
        outcome = one.ended_as or self._outcome(one)
        if outcome is None:
            self._waiting.appendleft((one.point, True))
        else:
            self.ended(one.point, outcome)

    def _outcome(self, one: _Running) -> Outcome | None:
        try:
            return one.future.result()
        except ProcessExpired as error:
            now = num_ended_for_memory()
            is_memory = one.killed_before is not None and now is not None and now > one.killed_before
            said = self._printed(error.pid)
            return outcome_of_death(error.exitcode or 0, one.task.directory, said, is_memory=is_memory)
        except TimeoutError:
            return outcome_of_timeout(self.settings.timeout_seconds or 0)
        except Exception as error:  # of Pebble, or of a pickle
            return outcome_of_error(error)

    def _printed(self, pid: int | None) -> str:
        log = self.scratch / f"{pid}.log"
        return log.read_text(errors="replace")[-20_000:] if log.exists() else ""

    def _pids(self) -> dict[int, int]:
        """Returns the process of each running point that has begun."""
        found = {one.point.index: one.own.process.pid for one in self._running.values() if one.own and one.own.process}
        for path in self.scratch.glob("*.point"):
            index = int(path.read_text() or -1)
            if index in self._running and self._running[index].own is None:
                found[index] = int(path.stem)
        return found

    def _save_memory(self) -> None:
        """Ends a point that takes more than it may; and, before the system ends anything, the youngest one."""
        memory = self._memory
        for index, taken in memory.taken.items():
            if self.settings.is_limit and taken > self.settings.worker_bytes:
                self._end(self._running[index], outcome_of_memory(taken, self.settings.worker_bytes, is_limit=True))
        if available_bytes() < LEAST_LEFT and (begun := [index for index in self._running if index in memory.taken]):
            youngest = self._running[begun[-1]]
            if len(begun) > 1:
                youngest.is_postponed = True
            self._end(youngest, outcome_of_memory(memory.taken[begun[-1]], available_bytes(), is_limit=False))

    def _end(self, one: _Running, outcome: Outcome) -> None:
        if one.ended_as is None:
            one.ended_as = outcome
            if one.own:
                one.own.end(signal.SIGKILL)
            else:
                one.future.cancel()

    def _interrupt(self) -> None:
        """Ends what is running. A run of training saves a checkpoint first; a second Ctrl-C ends it at once."""
        own = [one.own for one in self._running.values() if one.own]
        try:
            for process in own:
                process.interrupt()
            wait([one.future for one in self._running.values() if one.own])
        finally:
            for process in own:
                process.end(signal.SIGKILL)


def _work(work: Work, task: Task, index: int, scratch: Path) -> Outcome | None:
    say_at(index, scratch)
    return work(task)


def _in_thread(run: Callable[[], Outcome]) -> "Future[Outcome | None]":
    """Returns the future of a call in a thread that does not keep this process from ending."""
    future: Future[Outcome | None] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
