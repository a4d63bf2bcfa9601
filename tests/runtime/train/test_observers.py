"""Observers see all of a run, and one that fails loses nothing that was saved."""

import ast
import inspect
import io
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import Problem
from meshloom.runtime import train as train_folder
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.find import Checkpoint
from meshloom.runtime.core.failures import FAULTY, RunFailed
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.process_log import process_log
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train import loop
from meshloom.runtime.train.loop import DroppedTokens, TrainingLoop
from meshloom.runtime.train.metrics import NOTHING, Metrics
from meshloom.runtime.train.observer import Observer
from meshloom.runtime.train.train import plan_and_check, run_training
from support.loops import Batches, loop_over, observers_of
from support.programs import programs_of
from support.tiers import tiered

RUN = (*LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "schedule.num_warmup_steps=0", "num_steps=4",
       "evaluation.every_num_steps=3", "evaluation.num_batches=1", "checkpoint.every_num_steps=2")  # fmt: skip


class Seen(Observer):
    """Writes down each event. fails_at: the one at which it raises."""

    def __init__(self, fails_at: tuple[Any, ...] | None = None):
        self.events: list[tuple[Any, ...]] = []
        self._fails_at = fails_at

    def _see(self, *event: Any) -> None:
        self.events.append(event)
        if event == self._fails_at:
            raise RunFailed(Problem("observer", f"failed at {event}", "mend it"), FAULTY)

    def __exit__(self, kind, error, trace):
        self._see("left", kind)

    def run_started(self, first_step):
        self._see("run started", first_step)

    def around_step(self, take):
        def seen(state, batch, step, position):
            self._see("step", step)
            return take(state, batch, step, position)

        return seen

    def reads_at_once(self, step):
        return step == 1

    def step_ended(self, step, times, state):
        assert 0 <= times.input_wait <= times.input
        assert times.step > 0
        self._see("step ended", step, state is not None)
        return {"seen": step}

    def evaluated(self, step, loss):
        assert loss is not None
        self._see("evaluated", step)

    def step_reported(self, metrics):
        assert metrics.observed == {"seen": metrics.step}
        self._see("step reported", metrics.step)

    def run_ended(self, num_steps_done):
        self._see("run ended", num_steps_done)

    @contextmanager
    def pause(self, kind):
        self._see("pause", kind)
        yield
        self._see("pause over", kind)


STEP_3_AND_4 = [
    ("step", 3), ("step ended", 3, True),
    ("pause", "evaluation"), ("pause over", "evaluation"), ("evaluated", 3), ("step reported", 3),
    ("step", 4), ("step ended", 4, True),
    ("pause", "evaluation"), ("pause over", "evaluation"), ("evaluated", 4), ("step reported", 4),
    ("pause", "save"), ("pause over", "save"),
]  # fmt: skip
EVENTS = [
    ("run started", 0), ("step", 1), ("step ended", 1, True), ("step reported", 1),
    ("step", 2), ("step ended", 2, True), ("step reported", 2), ("pause", "save"), ("pause over", "save"),
    *STEP_3_AND_4, ("pause", "save"), ("pause over", "save"), ("run ended", 4), ("left", None),
]  # fmt: skip
SAVES = {"2": 7, "4": 21}  # a checkpoint is saved after the event of this number
assert [EVENTS[number] for number in SAVES.values()] == [("pause", "save")] * 2
QUICK = [("step reported", 2), ("pause", "save"), ("pause over", "save"), ("step ended", 4, True)]


def _run(folder: Path, tokens: np.ndarray, seen: Observer) -> None:
    plan = plan_of(*RUN)
    programs, first = programs_of(plan), {"inputs": tokens[0][:, :-1], "targets": tokens[0][:, 1:]}
    batch = {name: np.ascontiguousarray(rows) for name, rows in first.items()}
    checkpoints, observed = Checkpoints(folder, plan.spec), observers_of(seen)
    with StopRequest(Processes()) as stop, checkpoints, observed:
        loop = loop_over(batch, plan, programs, checkpoints, stop, observed)
        loop.run(programs["init"](), 0)


def _saved(folder: Path, step: int) -> Any:
    """The state of a checkpoint."""
    programs = programs_of(plan_of(*RUN))
    start = Checkpoint(folder / "checkpoints" / str(step), step, is_own=True, damaged={})
    return restore(start, programs.state, Batches({})).state


def _steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tokens):
    folder, seen = tmp_path_factory.mktemp("undisturbed"), Seen()
    _run(folder, tokens, seen)
    return folder, seen.events


def test_an_observer_sees_every_event_in_its_order(undisturbed):
    assert undisturbed[1] == EVENTS


@pytest.mark.parametrize(
    "event",
    tiered(dict.fromkeys(EVENTS), plain=QUICK[1:2], ci=[*QUICK, *list(dict.fromkeys(EVENTS))[::4]]),
    ids=str,
)
def test_an_observer_that_fails_ends_the_run_and_no_checkpoint_is_harmed(undisturbed, tmp_path, tokens, event):
    """What is saved is what an undisturbed run saves, bit by bit, and nothing is left half written."""
    seen = Seen(fails_at=event)
    with pytest.raises(RunFailed, match="failed at"):
        _run(tmp_path, tokens, seen)
    assert seen.events[-1] == ("left", None if event == ("left", None) else RunFailed)
    expected = [step for step, begun in SAVES.items() if EVENTS.index(event) > begun]
    assert _steps_saved(tmp_path) == expected
    for step in map(int, expected):
        jax.tree.map(np.testing.assert_array_equal, _saved(tmp_path, step), _saved(undisturbed[0], step))


@pytest.mark.ci
def test_a_line_of_the_table_is_all_that_a_new_observer_needs(tmp_path, monkeypatch):
    seen = Seen()
    monkeypatch.setattr(loop, "OBSERVERS", (*loop.OBSERVERS, lambda _: seen))
    job, console = plan_and_check(spec_of(*RUN)), Console(io.StringIO())
    with process_log(tmp_path, Processes()):
        assert run_training(job, tmp_path, overrides=(), console=console, processes=Processes()) == 0
    assert seen.events == EVENTS


def test_the_loop_and_its_functions_stay_small():
    assert len(inspect.signature(TrainingLoop).parameters) <= 7
    for path in Path(train_folder.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 40, f"{path.name}: {node.name}"


def _step(number: int, **auxiliary: float) -> Metrics:
    named = {f"layers/{name}": value for name, value in auxiliary.items()}
    return Metrics(number, 2.0, None, 1.0, 0.1, False, 1.0, 1.0, 0.0, 256, None, 256, 0.0, NOTHING, named)


def test_a_layer_that_drops_is_enough():
    told: list[Problem] = []
    DroppedTokens(told.append).step_reported(_step(1, **{"dropped/0": 0.0, "dropped/1": 0.25, "expert_load/1": 3.0}))
    assert [problem.what.partition(" of")[0] for problem in told] == ["25.0 %"]


def test_the_first_step_that_drops_is_told_with_its_share():
    told: list[Problem] = []
    check = DroppedTokens(told.append)
    for step in (_step(1), _step(2, dropped=0.0, expert_load=3.0), _step(3, dropped=0.013), _step(4, dropped=0.5)):
        check.step_reported(step)
    (problem,) = told
    assert problem.where == "step 3"
    assert problem.what.startswith("1.3 % of the choices")
    assert "moe.max_imbalance" in problem.fix
