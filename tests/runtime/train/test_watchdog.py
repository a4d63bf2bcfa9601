"""A run that stands still is told of, with who is behind and where each process is."""

import time
from dataclasses import replace

import pytest

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import WatchdogSpec
from meshloom.runtime.core.failures import FINAL, HUNG
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.train.observer import StepTimes
from meshloom.runtime.train.watchdog import Watchdog, describe_hang
from support.several import in_both, joined

SLOWER = WatchdogSpec(factor=4.0, min_seconds=1.0, abort=False)
QUICK = WatchdogSpec(factor=4.0, min_seconds=0.2, abort=False)
QUICK_STEP = StepTimes(0.01, 0.0, 0.0)


def _wait_for(what, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_step_that_does_not_end_is_told_once_with_the_stacks(tmp_path):
    log, told = tmp_path / "process-0.log", list[Problem]()
    with Watchdog(QUICK, Processes(), log, told.append) as watchdog:
        watchdog.step_ended(7, QUICK_STEP, None)
        _wait_in_a_collective(lambda: bool(told))
        time.sleep(0.1)  # in which it looks again, five times
        watchdog.step_ended(8, QUICK_STEP, None)
        _wait_for(lambda: told[-1].where == "step 9")
    assert [problem.where for problem in told] == ["step 8", "step 9"]
    assert "the median is 10.0 ms" in told[0].what
    assert told[0].fix.endswith("watchdog.abort=true ends such a run")
    assert "_wait_in_a_collective" in log.read_text().partition("step 9 ")[0]


def _wait_in_a_collective(is_over) -> None:
    _wait_for(is_over)


def test_what_is_no_step_may_take_its_time_and_slow_steps_have_more(tmp_path):
    told: list[Problem] = []
    with Watchdog(QUICK, Processes(), tmp_path / "log", told.append) as watchdog:
        with watchdog.pause("evaluation"):
            time.sleep(0.6)
        watchdog.step_ended(1, StepTimes(0.5, 0.0, 0.0), None)
        assert watchdog.limit_seconds == 2.0
        time.sleep(0.6)
    assert told == []


def test_it_ends_a_process_where_that_is_asked_for(tmp_path):
    codes: list[int] = []
    spec = QUICK.model_copy(update={"abort": True})
    with Watchdog(spec, Processes(), tmp_path / "log", lambda problem: None, end=codes.append):
        _wait_for(lambda: bool(codes))
    assert codes == [HUNG]
    assert HUNG not in FINAL, "a run that hung is started again"


@pytest.mark.parametrize(
    ("done", "words"),
    [
        ({0: 9, 1: 9, 2: 9}, "all 3 processes wait in the same step"),
        ({0: 9, 2: 9}, "process 1 on b does not answer"),
        ({0: 9, 1: 9, 2: 8}, "process 2 on c has done 8 steps, others 9"),
        ({0: 9, 2: 1}, "process 1 on b does not answer; process 2 on c has done 1 step, others 9"),
    ],
)
def test_who_is_behind_is_named(done, words):
    assert describe_hang(done, ("a", "b", "c")).startswith(words)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_process_0_learns_from_the_others_who_is_behind(tmp_path, is_frozen):
    """Over the real coordination service: process 1 has done a step less, or tells nothing at all."""
    told: list[Problem] = []

    with joined() as processes:
        both = [replace(each, hosts=("here", "there")) for each in processes]

        def run(index: int) -> None:
            if index == 1 and is_frozen:
                return
            with Watchdog(SLOWER, both[index], tmp_path / f"{index}", told.append) as watchdog:
                watchdog.step_ended(5 - index, QUICK_STEP, None)
                _wait_for(lambda: bool(told))

        in_both(run)
    (problem,) = told
    expected = "process 1 on there does not answer" if is_frozen else "process 1 on there has done 4 steps, others 5"
    assert problem.what.endswith(expected)
