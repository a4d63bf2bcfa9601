"""Runs the points of a sweep in worker processes: an abort, a hang or a lack of memory ends one of them alone.

Points of `explain` and `compile` run in Pebble's worker processes, which stay warm. Points of `train`, and those that
need devices that JAX cannot have in a warm process, run in a process of their own: devices, signals and environment
variables belong to one run of training alone. Points start one by one, as many at once as memory allows.
"""

import gc
import math
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
from typing import Any, Self

import psutil
from pebble import ProcessExpired, ProcessPool
from pydantic import ValidationError

from meshloom.compiler.core.errors import Problem, raise_if_any
from meshloom.compiler.declare.compositions import keep_compositions

from ..core.failures import in_thread, raise_if_interrupted
from ..core.garbage import collect_seldom
from ..core.host_memory import available_bytes
from .outcomes import evaluate_point, outcome_of_death, outcome_of_error, outcome_of_memory, outcome_of_timeout
from .rows import PRINTED, Outcome, Point, SweepCommand, Task

_POLL_SECONDS = 0.2
MOST_POINTS_OF_A_WORKER = 500  # traced programs stay in memory; a fresh worker starts in 3 s
GIB = 2**30
LEAST_LEFT = GIB // 2  # below this the system is about to end processes: the youngest point is ended first
EVENTS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))  # their `oom_kill` counts what the system ended
MODULE = "meshloom.runtime.cli.sweep_point"  # it reads a task from its input, and ends when that is closed
TARGET = "hydra_plugins.meshloom_sweeps.launcher.PoolLauncher"
MOST_WORKERS = 1024
# The memory that a point is expected to need before one was measured: imports, and tracing or compiling a large model.
EXPECTED_BYTES: dict[SweepCommand, int] = {"explain": GIB, "compile": 3 * GIB, "train": 3 * GIB}
Work = Callable[[Task], Outcome | None]


@dataclass(frozen=True)
class PoolSettings:
    """The settings of the pool. num_workers: the most points at once. timeout_seconds: the most time of a point; None:
    no limit. worker_bytes: the memory that a point is expected to need, until one was measured. is_limit: a point that
    takes more is ended."""

    num_workers: int
    timeout_seconds: float | None
    worker_bytes: int
    is_limit: bool


def pool_settings(launcher: Mapping[str, Any], command: SweepCommand, *, is_joined: bool) -> PoolSettings | None:
    """Returns the settings of the pool; None if another launcher was chosen. Raises ConfigError with all problems.

    is_joined: each point runs in several processes together, which go through the points in the same order.
    """
    if launcher.get("_target_") != TARGET:
        return None
    num, seconds, size = (launcher[name] for name in ("num_workers", "timeout_seconds", "worker_bytes"))
    problems = list[Problem]()
    if num is not None and not 1 <= num <= MOST_WORKERS:
        fix = f"give 1 to {MOST_WORKERS:,}, or null: as many as cores and memory allow"
        problems.append(Problem("hydra.launcher.num_workers", f"{num} is not a number of workers", fix))
    elif is_joined and num is not None and num > 1:
        what = f"{num} points cannot run at once where each runs in several processes together"
        problems.append(Problem("hydra.launcher.num_workers", what, "leave it out, or set it to 1"))
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        fix = "give a number of seconds above 0, or null: no limit"
        problems.append(Problem("hydra.launcher.timeout_seconds", f"{seconds:g} is not a time", fix))
    if size is not None and size <= 0:
        fix = "give the bytes that a point may take, or null: as measured"
        problems.append(Problem("hydra.launcher.worker_bytes", f"{size} is not a size", fix))
    raise_if_any(problems)
    if num is None:  # a worker for each core of this process; half as many for compilers, which use several threads
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num = {"train": 1, "explain": cores, "compile": (cores + 1) // 2}[command]
    return PoolSettings(num, seconds, size or EXPECTED_BYTES[command], size is not None)


@dataclass
class OwnProcess:
    """Runs one point. process: set once it has started."""

    task: Task
    timeout_seconds: float | None
    process: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Returns the outcome of the point. Its process has a session of its own, which a terminal's Ctrl-C does not
        reach."""
        self.task.directory.mkdir(parents=True, exist_ok=True)
        printed = self.task.directory / PRINTED
        with tempfile.TemporaryDirectory(prefix="meshloom-point-") as folder, printed.open("ab") as log:
            start, answer = log.tell(), Path(folder) / "outcome.json"
            message = pickle.dumps((self.task, answer))
            # -P: the working directory is not on the import path of this process, and must not be on the point's.
            command = [sys.executable, "-P", "-m", MODULE]
            self.process = process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            try:
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # it has died already; its exit code says how
                    process.stdin.write(len(message).to_bytes(8, "big") + message)
                    process.stdin.flush()
                exit_code = process.wait(self.timeout_seconds)
            except subprocess.TimeoutExpired:
                self.end()
                return outcome_of_timeout(self.timeout_seconds or 0)
            finally:
                self.end()
            with suppress(OSError, ValidationError):
                return Outcome.model_validate_json(answer.read_bytes())
            said = printed.read_bytes()[start:].decode(errors="replace")
            return outcome_of_death(exit_code, self.task.directory, said)

    def interrupt(self) -> None:
        """Asks the process to stop, as Ctrl-C does: a training run saves a checkpoint first."""
        self._signal(signal.SIGINT)

    def end(self) -> None:
        """Ends the process and all of its children."""
        self._signal(signal.SIGKILL)
        if self.process:
            self.process.wait()
            if self.process.stdin:
                with suppress(OSError):
                    self.process.stdin.close()

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
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def bytes_of(pid: int) -> int:
    """Returns the memory of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def num_ended_for_memory() -> int | None:
    """Returns how many processes the system has ended for memory so far; None if it does not say."""
    for path in EVENTS:
        with suppress(OSError, ValueError, KeyError):
            return int(dict(line.split() for line in path.read_text().splitlines())["oom_kill"])
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


def start_worker(parent: int, scratch: Path) -> None:
    """Prepares a worker process that keeps what all points share."""
    prepare_worker(parent, scratch)
    keep_compositions()
    gc.freeze()  # all imported objects, some 500,000
    collect_seldom()


def _work(work: Work, task: Task, index: int, scratch: Path) -> Outcome | None:
    """Does the work in a worker, and says which point it runs, for the parent, which measures its memory."""
    (scratch / f"{os.getpid()}.point").write_text(str(index))
    return work(task)


@dataclass
class _Running:
    """A point that runs. own: its process, if it is not a warm one. num_killed: processes that the system had ended for
    memory before. ended_as: the outcome, if the pool has ended it."""

    point: Point
    task: Task
    future: "Future[Outcome | None]"
    own: OwnProcess | None
    num_killed: int | None
    ended_as: Outcome | None = None
    is_postponed: bool = False


@dataclass
class Pool:
    """Runs points, batch by batch, within its `with`.

    task_of: returns what a worker needs to run a point. scratch: a folder that the pool makes, and removes at its end.
    ended: takes each point that has ended, once. told: is called often, with the number of running points. is_own: each
    point runs in a process of its own. start, work: what a warm worker does at its start, and for each point; `work`
    returns None for a point that needs a process of its own.
    """

    settings: PoolSettings
    task_of: Callable[[Point], Task]
    scratch: Path
    ended: Callable[[Point, Outcome], object]
    told: Callable[[int], None]
    is_own: bool = False
    start: Callable[[int, Path], None] = start_worker
    work: Work = evaluate_point
    _warm: ProcessPool | None = field(default=None, init=False)
    _running: dict[int, _Running] = field(default_factory=dict, init=False)
    _waiting: deque[tuple[Point, bool]] = field(default_factory=deque, init=False)  # True: in a process of its own
    _expected: int = field(default=0, init=False)  # bytes that a point needs
    _taken: dict[int, int] = field(default_factory=dict, init=False)  # bytes that each running point uses now

    def __enter__(self) -> Self:
        self._expected = self.settings.worker_bytes
        shutil.rmtree(self.scratch, ignore_errors=True)  # left by a start that was killed
        self.scratch.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._warm:
            self._warm.stop()
            self._warm.join()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def run(self, points: Iterable[Point]) -> None:
        """Runs all points. Ctrl-C ends the running ones, which then have no outcome, and is raised again: a training
        run saves a checkpoint first; a second Ctrl-C ends it at once."""
        self._waiting.extend((point, self.is_own) for point in points)
        try:
            while self._waiting or self._running:
                while self._waiting and (not self._running or self._has_room()):
                    self._start(*self._waiting.popleft())
                self.told(len(self._running))
                raise_if_interrupted()
                done, _ = wait([one.future for one in self._running.values()], _POLL_SECONDS, FIRST_COMPLETED)
                for one in [one for one in self._running.values() if one.future in done]:
                    del self._running[one.point.index]
                    self._finish(one)
                self._save_memory()
        except BaseException:
            own = [one.own for one in self._running.values() if one.own]
            try:
                for process in own:
                    process.interrupt()
                wait([one.future for one in self._running.values() if one.own])
            finally:
                for process in own:
                    process.end()
            raise

    def _has_room(self) -> bool:
        """Returns True if one more point fits beside all that the running ones may still take."""
        reserved = sum(max(0, self._expected - self._taken.get(index, 0)) for index in self._running)
        has_memory = available_bytes() - reserved - self._expected > LEAST_LEFT
        return len(self._running) < self.settings.num_workers and has_memory

    def _start(self, point: Point, is_own: bool) -> None:
        task, own, seconds = self.task_of(point), None, self.settings.timeout_seconds
        if is_own:
            own = OwnProcess(task, seconds)
            future: Future[Outcome | None] = in_thread(own.run)
        else:
            self._warm = self._warm or ProcessPool(
                max_workers=self.settings.num_workers,
                max_tasks=MOST_POINTS_OF_A_WORKER,
                initializer=self.start,
                initargs=(os.getpid(), self.scratch),
                context=multiprocessing.get_context("spawn"),
            )
            future = self._warm.schedule(_work, args=(self.work, task, point.index, self.scratch), timeout=seconds)
        self._running[point.index] = _Running(point, task, future, own, num_ended_for_memory())

    def _finish(self, one: _Running) -> None:
        """Reports the outcome of a point, or queues it again: for a process of its own, or until there is memory."""
        for path in self.scratch.glob("*.point"):
            if path.read_text() == str(one.point.index):
                path.unlink()
        if one.is_postponed:
            self._waiting.append((one.point, one.own is not None))
            return
        try:
            outcome = one.ended_as or one.future.result()
        except ProcessExpired as error:
            now, log = num_ended_for_memory(), self.scratch / f"{error.pid}.log"
            is_memory = one.num_killed is not None and now is not None and now > one.num_killed
            said = log.read_text(errors="replace")[-20_000:] if log.exists() else ""
            outcome = outcome_of_death(error.exitcode or 0, one.task.directory, said, is_memory=is_memory)
        except TimeoutError:
            outcome = outcome_of_timeout(self.settings.timeout_seconds or 0)
        except Exception as error:  # from Pebble, or from a pickle
            outcome = outcome_of_error(error)
        if outcome is None:
            self._waiting.appendleft((one.point, True))
        else:
            self.ended(one.point, outcome)

    def _save_memory(self) -> None:
        """Measures the running points. Ends those that take more memory than allowed, and the youngest one before the
        system ends any process."""
        pids = {index: one.own.process.pid for index, one in self._running.items() if one.own and one.own.process}
        for path in self.scratch.glob("*.point"):
            index = int(path.read_text() or -1)
            if index in self._running and self._running[index].own is None:
                pids[index] = int(path.stem)
        self._taken = {index: bytes_of(pid) for index, pid in pids.items()}
        self._expected = max([self._expected, *self._taken.values()])
        for index, taken in self._taken.items():
            if self.settings.is_limit and taken > self.settings.worker_bytes:
                self._end(self._running[index], outcome_of_memory(taken, self.settings.worker_bytes, is_limit=True))
        if available_bytes() < LEAST_LEFT and (begun := [index for index in self._running if index in self._taken]):
            youngest = self._running[begun[-1]]
            youngest.is_postponed = youngest.is_postponed or len(begun) > 1
            self._end(youngest, outcome_of_memory(self._taken[begun[-1]], available_bytes(), is_limit=False))

    def _end(self, one: _Running, outcome: Outcome) -> None:
        if one.ended_as is None:
            one.ended_as = outcome
            if one.own:
                one.own.end()
            else:
                one.future.cancel()
