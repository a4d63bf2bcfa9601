"""A run that stands still is told of, with who is behind and where each process is."""

import json
import time
from dataclasses import replace

import pytest

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import StragglersSpec, WatchdogSpec
from meshloom.runtime.core.failures import FINAL, HUNG
from meshloom.runtime.launch.local import free_port
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.train.observer import StepTimes
from meshloom.runtime.train.watchdog import Stragglers, Watchdog, describe_hang, find_straggler
from support.several import Started, in_both, joined, keys

SLOWER = WatchdogSpec(factor=4.0, min_seconds=1.0, abort=False)
QUICK = WatchdogSpec(factor=4.0, min_seconds=0.2, abort=False)
QUICK_STEP = StepTimes(0.01, 0.0, 0.0)
SPEC = StragglersSpec(every_num_steps=2, cost_share=0.1)
FAST, SLOW = StepTimes(1.0, 0.25, 0.0), StepTimes(1.0, 0.75, 0.5)


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


@pytest.mark.parametrize(
    ("waits", "expected"),
    [([0.0, 0.0, 0.5, 0.0], (2, 0.5)), ([0.5, 0.5, 0.5, 0.6], (3, 0.1)), ([0.0, 0.0], (0, 0.0))],
)
def test_a_process_costs_what_its_devices_wait_more_than_the_others(waits, expected):
    slowest, cost = find_straggler({index: StepTimes(1.0, wait, wait) for index, wait in enumerate(waits)})
    assert (slowest, pytest.approx(cost)) == expected


def test_process_0_has_the_times_of_all_over_the_window_before():
    """Over the real coordination service. No process waits for another: the last window is not asked for."""
    told: list[Problem] = []
    with joined() as processes:
        both = [Stragglers(SPEC, replace(one, hosts=("here", "there")), told.append) for one in processes]
        seen = []
        for step in range(1, 9):
            both[1].step_ended(step, SLOW if step <= 4 else FAST, None)
            seen.append(both[0].step_ended(step, FAST, None))
    assert [bool(one) for one in seen] == [False, False, False, True, False, True, False, True]
    assert seen[3] == {
        "processes/0/step_seconds": 1.0, "processes/0/input_seconds": 0.25, "processes/0/input_wait_seconds": 0.0,
        "processes/1/step_seconds": 1.0, "processes/1/input_seconds": 0.75, "processes/1/input_wait_seconds": 0.5,
    }  # fmt: skip
    assert seen[7]["processes/1/input_seconds"] == 0.25
    assert [problem.where for problem in told] == ["step 4"]  # once, for both windows
    assert told[0].what == (
        "process 1 on there costs 50.0 % of each step: it takes 750 ms for a batch, the others 250 ms"
    )


def test_a_process_alone_tells_of_nothing():
    alone = Stragglers(SPEC, Processes(), print)
    assert [alone.step_ended(step, SLOW, None) for step in range(1, 5)] == [None] * 4


SLOW_ITEMS = """
import os, time
import numpy as np
from meshloom.runtime.data import DataSource

class Items(DataSource):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(float(os.environ["SECONDS_OF_ITEM"]))
        return np.random.default_rng(index).integers(0, 257, 17)
"""


@pytest.mark.ci
def test_the_process_that_reads_slowly_is_named(tmp_path):
    """Two real processes, of which one takes long for each item of its own rows."""
    (tmp_path / "slow_items.py").write_text(SLOW_ITEMS)
    line = (
        "model=linear_stack", "target=cpu-2", "global_batch_size=2", "sequence_length=16", "num_steps=30",
        "data=python", "data.source.object=slow_items:Items", "data.source.items=sequences", "data.tokenizer=null",
        "data.num_prefetch_threads=1", "data.num_prefetch_batches=1", "evaluation.num_batches=1",
        "stragglers.every_num_steps=5", "checkpoint=disabled", "schedule.num_warmup_steps=2", "hydra.run.dir=run",
        "--allow-code-from=slow_items",
    )  # fmt: skip
    env = [{"PYTHONPATH": str(tmp_path), "SECONDS_OF_ITEM": seconds} for seconds in ("0", "0.3")]
    ended = Started(tmp_path, *((*line, *own) for own in keys(2, free_port())), env=env).end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "process 1 on " in ended[0][1] + ended[0][2]
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert last["step"] == 30
    assert last["processes/1/input_wait_seconds"] > last["processes/0/input_wait_seconds"]
