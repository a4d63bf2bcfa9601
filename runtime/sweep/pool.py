"""Runs the points of a sweep in worker processes: an abort, a hang or a lack of memory ends one of them alone.

Points of `explain` and `compile` run in Pebble's worker processes, which stay warm. Points of `train`, and those that
need devices that JAX cannot have in a warm process, run in a process of their own: devices, signals and environment
variables belong to one run of training alone. Points start one by one, as many at once as memory allows.
"""

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from pebble import ProcessExpired, ProcessPool
from pydantic import ValidationError

from meshloom.compiler.declare.compositions import keep_compositions

from ..core.host_memory import available_bytes
from .evaluate import evaluate_point
from .outcomes import outcome_of_death, outcome_of_error, outcome_of_memory, outcome_of_timeout
from .rows import PRINTED, Outcome, Point, Task
from .settings import PoolSettings

_POLL_SECONDS = 0.2
MOST_POINTS_OF_A_WORKER = 500  # traced programs stay in memory; a fresh worker starts in 3 s
LEAST_LEFT = 512 * 2**20  # below this the system is about to end processes: the youngest point is ended first
EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # their `oom_kill` counts what the system ended
Work = Callable[[Task], Outcome | None]
MODULE = "meshloom.runtime.cli.sweep_point"  # it reads a task from its input, and ends when that is closed
_PARENT_POLL_SECONDS = 0.5


@dataclass
class OwnProcess:
    """Runs one point. process: set once it has started."""

    task: Task
    timeout_seconds: float | None
    process: subprocess.Popen[bytes] | None = field(default=None)
    is_interrupted: bool = False

    def run(self) -> Outcome:
        """Returns the outcome of the point. Its process has a session of its own, which a terminal's Ctrl-C does not
        reach."""
        self.task.directory.mkdir(parents=True, exist_ok=True)
        printed = self.task.directory / PRINTED
        with tempfile.TemporaryDirectory(prefix="meshloom-point-") as folder, printed.open("ab") as log:
            start, told = log.tell(), Path(folder) / "outcome.json"
            # -P: the working directory is not on the import path of this process, and must not be on the point's.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                self._tell(pickle.dumps((self.task, told)))
                exit_code = self.process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                self.end(signal.SIGKILL)
                return outcome_of_timeout(self.timeout_seconds or 0)
            finally:
                self.end(signal.SIGKILL)
            with suppress(OSError, ValidationError):
                return Outcome.model_validate_json(told.read_bytes())
            with printed.open("rb") as file:
                file.seek(start)
                said = file.read().decode(errors="replace")
            return outcome_of_death(exit_code, self.task.directory, said)

    def interrupt(self) -> None:
        """Asks the process to stop, as Ctrl-C does: a training run saves a checkpoint first."""
        self.is_interrupted = True
        self._signal(signal.SIGINT)

    def end(self, number: int) -> None:
        """Ends the process and all of its children."""
        self._signal(number)
        if self.process:
            self.process.wait()
            if self.process.stdin:
                with suppress(OSError):
                    self.process.stdin.close()

    def _tell(self, message: bytes) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already; its exit code says how
            self.process.stdin.write(len(message).to_bytes(8, "big") + message)
            self.process.stdin.flush()

    def _signal(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def read_task(read: Callable[[int], bytes]) -> tuple[Task, Path]:
    """Returns the task that the parent has sent, and the file for its outcome."""
    return pickle.loads(read(int.from_bytes(read(8), "big")))


def end_with(parent: int) -> None:
    """Ends this process when its parent has died, in whatever way: nobody would take its result."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class Memory:
    """The memory of points. expected: bytes that a point needs. taken: bytes that each running point uses now, by
    index."""

    expected: int
    taken: dict[int, int] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int]) -> None:
        """Measures the running points. pids: the process of each, by index."""
        self.taken = {index: bytes_of(pid) for index, pid in pids.items()}
        self.expected = max([self.expected, *self.taken.values()])

    def has_room(self, running: Iterable[int]) -> bool:
        """Returns True if one more point fits beside all that the running ones may still take."""
        reserved = sum(max(0, self.expected - self.taken.get(index, 0)) for index in running)
        return available_bytes() - reserved - self.expected > LEAST_LEFT


def bytes_of(pid: int) -> int:
    """Returns the memory of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(one.memory_info().rss for one in family)
    except psutil.Error:
        return 0


def num_ended_for_memory() -> int | None:
    """Returns how many processes the system has ended for memory so far; None if it does not say."""
    for path in EVENTS:
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def prepare_worker(parent: int, scratch: Path) -> None:
    """Prepares a worker process, which ends when its parent does. scratch: takes what the process prints.

    Ctrl-C reaches all processes of a terminal; the parent alone answers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    log = os.open(scratch / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())


def say_at(index: int, scratch: Path) -> None:
    """Records which point this process runs, for the parent, which measures its memory."""
    (scratch / f"{os.getpid()}.point").write_text(str(index))


def start_worker(parent: int, scratch: Path) -> None:
    """Prepares a worker process that keeps what all points share."""
    prepare_worker(parent, scratch)
    keep_compositions()
    gc.freeze()  # all imported objects, some 500,000
    gc.set_threshold(50_000, 20, 100)  # a traced program has as many: do not collect at every 700 new ones


def work(task: Task) -> Outcome | None:
    """Returns the outcome of a point; None if it needs a process of its own."""
    return evaluate_point(task)


@dataclass
class _Running:
    """A point that runs. own: its process, if it is not a warm one. ended_as: the outcome, if the pool has ended it."""

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

    task_of: returns what a worker needs to run a point. scratch: a folder that the pool makes, and removes at its end.
    ended: takes each point that has ended, once. told: is called often, with the number of running points. is_own: each
    point runs in a process of its own. start, work: what a warm worker does at its start, and for each point.
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
    _waiting: deque[tuple[Point, bool]] = field(default_factory=deque, init=False)  # True: in a process of its own

    def __post_init__(self) -> None:
        self._memory = Memory(self.settings.worker_bytes)

    def __enter__(self) -> Self:
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by a start that was killed
        self.scratch.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm:
            self._warm.stop()
            self._warm.join()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, points: Iterable[Point]) -> None:
        """Runs all points. Ctrl-C ends the running ones, which then have no outcome, and is raised again."""
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
        """Reports the outcome of a point, or queues it again: for a process of its own, or until there is memory."""
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
        except Exception as error:  # from Pebble, or from a pickle
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
        """Ends points that take more memory than allowed, and the youngest one before the system ends any process."""
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
        """Ends all running points. A training run saves a checkpoint first; a second Ctrl-C ends it at once."""
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
