"""Real worker processes that die, hang and take memory: each point has one outcome, and no other point notices."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshloom.compiler.declare.compose import Request
from meshloom.runtime.core import failures
from meshloom.runtime.sweep.pool import Pool, PoolSettings, prepare_worker
from meshloom.runtime.sweep.rows import Outcome, Point, Task
from support.sweep_work import work

MB = 10**6


def points_of(names: list[str]) -> list[Point]:
    return [Point(index, (f"run.name={name}",), {"run.name": name}, name) for index, name in enumerate(names)]


def run(
    names: list[str],
    folder: Path,
    *,
    told: Callable[[int], None] = lambda running: None,
    **settings: int | float | None,
) -> dict[str, Outcome]:
    """Returns the outcome of each point; a second one for a point fails."""
    found: list[tuple[str, Outcome]] = []
    chosen = {"num_workers": 2, "timeout_seconds": None, "worker_bytes": 500 * MB, "is_limit": False} | settings

    def task_of(point: Point) -> Task:
        return Task("explain", Request(()), (), folder / point.directory)

    def ended(point: Point, outcome: Outcome) -> None:
        found.append((point.directory, outcome))

    pool = Pool(PoolSettings(**chosen), task_of, folder / "workers", ended, told, start=prepare_worker, work=work)  # type: ignore[arg-type]
    with pool:
        pool.run(points_of(names))
    assert not (folder / "workers").exists()
    assert max(Counter(name for name, _ in found).values(), default=1) == 1
    return dict(found)


@pytest.mark.ci
def test_a_point_that_dies_ends_no_other(tmp_path):
    outcomes = run(["fine0", "abort", "fine1", "exit", "raise", "fine2"], tmp_path)
    assert [outcomes[f"fine{n}"].status for n in range(3)] == ["done"] * 3
    assert (outcomes["abort"].status, outcomes["abort"].exit_code) == ("aborted", 134)
    assert "SIGABRT" in (outcomes["abort"].why or "")
    assert "exit code 7" in (outcomes["exit"].why or "")
    assert (outcomes["raise"].status, outcomes["raise"].why) == ("failed", "RuntimeError: it had to")


@pytest.mark.ci
def test_a_point_that_hangs_is_ended_in_time_and_others_go_on(tmp_path):
    outcomes = run(["hang", "fine0", "fine1"], tmp_path, timeout_seconds=1.0)
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "hang": "timed_out", "fine0": "done", "fine1": "done",
    }  # fmt: skip
    assert outcomes["hang"].exit_code == 124


@pytest.mark.ci
def test_a_point_that_takes_more_memory_than_it_may_is_ended(tmp_path):
    outcomes = run(["memory", "fine"], tmp_path, worker_bytes=700 * MB, is_limit=True, timeout_seconds=60.0)
    assert outcomes["fine"].status == "done"
    assert outcomes["memory"].status == "out_of_memory"
    assert "hydra.launcher.worker_bytes" in (outcomes["memory"].why or "")


@pytest.mark.ci
def test_points_wait_for_memory(tmp_path):
    """Each is expected to need more than half of the machine's memory, so that one runs at a time."""
    at_once: list[int] = []
    needed = int(0.6 * psutil.virtual_memory().total)  # what is available changes with the other programs that run
    outcomes = run(["fine0", "fine1", "fine2"], tmp_path, told=at_once.append, worker_bytes=needed)
    assert [outcome.status for outcome in outcomes.values()] == ["done"] * 3
    assert max(at_once) == 1


def _is_worker(child: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(child.cmdline())
    except psutil.Error:  # it has ended
        return False


# The interrupt may come between the opening of a file and its `with`, as psutil reads what processes take.
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Exception ignored in.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_ends_what_is_running_and_keeps_what_is_done(tmp_path):
    ended: list[str] = []

    def task_of(point: Point) -> Task:
        return Task("explain", Request(()), (), tmp_path / point.directory)

    settings = PoolSettings(num_workers=2, timeout_seconds=None, worker_bytes=500 * MB, is_limit=False)
    pool = Pool(
        settings, task_of, tmp_path / "workers", lambda point, _: ended.append(point.directory), lambda _: None,
        start=prepare_worker, work=work,
    )  # fmt: skip

    def interrupt() -> None:
        while not ended:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt), pool:
            pool.run(points_of(["fine", "hang0", "hang1", "never"]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["fine"]
    assert [child for child in psutil.Process().children() if _is_worker(child)] == []


@pytest.mark.filterwarnings("ignore:Exception ignored in.*__del__:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_is_lost_in_a_callback_ends_the_points_too(tmp_path, monkeypatch):
    """As in XLA's, which each garbage collection calls: the KeyboardInterrupt is printed, and goes no further."""
    monkeypatch.setattr(failures, "_heard", threading.Event())

    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, failures._hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(["hang"], tmp_path, told=lambda _: Callback() and None, timeout_seconds=20.0)
    finally:
        signal.signal(signal.SIGINT, before)
