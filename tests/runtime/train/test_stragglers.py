"""The times of all processes in the metrics, and the one that the others wait for by name."""

import json
from dataclasses import replace

import pytest

from meshloom.compiler.core.errors import Problem
from meshloom.compiler.declare.run_spec import StragglersSpec
from meshloom.runtime.launch.local import free_port
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.train.observer import StepTimes
from meshloom.runtime.train.watchdog import Stragglers, find_straggler
from support.several import Started, joined, keys

SPEC = StragglersSpec(every_num_steps=2, cost_share=0.1)
QUICK, SLOW = StepTimes(1.0, 0.25, 0.0), StepTimes(1.0, 0.75, 0.5)


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
            both[1].step_ended(step, SLOW if step <= 4 else QUICK, None)
            seen.append(both[0].step_ended(step, QUICK, None))
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
