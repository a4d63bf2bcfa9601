"""The steps that are asked for are traced, and no others; what is not traced is said."""

import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.profiler import ProfileData

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.profile.trace import account, roles_of
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.rundir.profile_files import read_profile
from meshloom.runtime.train.profiler import Profiler, check_profile, predicted_files
from support.loops import Reported, loop_over, observers_of
from support.programs import programs_of

STEPS = ("num_steps=5", "evaluation.every_num_steps=4", "checkpoint=disabled", "schedule.num_warmup_steps=0",
         "profile.steps=[2,3]")  # fmt: skip


SLOW_SECONDS = 0.1  # that a trace takes to begin, and to be written


class SlowProfiler(Profiler):
    @contextmanager
    def _set_aside(self):
        with super()._set_aside():
            time.sleep(SLOW_SECONDS)
            yield


@dataclass
class Traced:
    run_dir: Path
    said: list[str] = field(default_factory=list)
    warned: list[Any] = field(default_factory=list)
    reported: Reported = field(default_factory=Reported)


def _train(folder: Path, tokens: np.ndarray, *, first_step: int = 0) -> Traced:
    """Runs the loop from after `first_step`."""
    plan = plan_of("target=cpu-2", *LINEAR_STACK, "model.num_layers=1", *STEPS)
    programs, traced, observers = programs_of(plan), Traced(folder), observers_of()
    batch = {"inputs": tokens[0][:, :-1].copy(), "targets": tokens[0][:, 1:].copy()}
    with (
        StopRequest(Processes()) as stop,
        Checkpoints(folder, plan.spec) as checkpoints,
        observers,
    ):
        profiler = SlowProfiler(
            plan.spec.profile.steps, Processes(), folder, pause=observers.pause,
            files=lambda: predicted_files(plan, programs),
            say=traced.said.append, warn=traced.warned.append,
        )  # fmt: skip
        observers.add(profiler)
        observers.add(traced.reported)
        loop = loop_over(batch, plan, programs, checkpoints, stop, observers)
        assert loop.run(programs["init"](), first_step) == 5
    return traced


def _annotated(folder: Path) -> list[int]:
    """The numbers of the steps in a trace."""
    data = ProfileData.from_file(str(next((folder / "profile/process-0").rglob("*.xplane.pb"))))
    events = (event for plane in data.planes for line in plane.lines for event in line.events)
    return sorted(dict(event.stats)["step_num"] for event in events if event.name == "train")


@pytest.fixture(scope="module")
def traced(tmp_path_factory, tokens):
    return _train(tmp_path_factory.mktemp("traced"), tokens)


def test_the_steps_asked_for_are_traced_and_no_others(traced):
    assert _annotated(traced.run_dir) == [2, 3]
    data = ProfileData.from_file(str(next(traced.run_dir.rglob("*.xplane.pb"))))
    events = (dict(event.stats) for plane in data.planes for line in plane.lines for event in line.events)
    executions = {(s["run_id"], s["device_ordinal"]) for s in events if s.get("hlo_module") == "jit_train_step"}
    assert len(executions) == 4, "two steps on two devices"
    assert traced.said == [f"traced steps 2 to 3: read it with `meshloom profile {traced.run_dir}`"]
    assert traced.warned == []
    assert "HloModule jit_train_step" in (traced.run_dir / "profile/train.hlo.txt").read_text()


def test_what_each_device_ran_is_found_in_the_program(traced):
    """Every event of the trace is an instruction of the program, and most of a step is accounted for."""
    profile = read_profile(traced.run_dir)
    report = profile.report
    assert (report.steps, report.num_devices, report.num_executions, report.notes) == ((2, 3), 2, 4, ())
    assert (report.unmatched_seconds, report.num_not_run) == (0.0, 0)
    for execution in profile.traces[0].executions:
        found = account(execution, roles_of(profile.prediction))
        parts = [*found.compute.values(), *found.exposed.values(), found.idle]
        assert sum(parts) == pytest.approx(execution.seconds)
    assert {row.kind for row in report.kinds} >= {"matmul", "all-gather", "reduce-scatter"}
    gathers = [row.source for row in report.operations if row.kind == "all-gather"]
    assert any(source.startswith("layers/") and source.endswith(", forward") for source in gathers), gathers
    assert not report.step.predicted_seconds


def test_writing_a_trace_counts_as_no_step(traced):
    reported = traced.reported.metrics
    assert [metrics.step for metrics in reported] == [1, 2, 3, 4, 5]
    spent = reported[-1].spent.seconds
    assert spent["profile"] >= 2 * SLOW_SECONDS
    assert sum(metrics.step_seconds for metrics in reported) <= spent["steps"] + spent["input"] + 1e-6


def test_a_run_that_goes_on_within_the_steps_traces_the_rest(tmp_path, tokens):
    traced = _train(tmp_path, tokens, first_step=2)
    assert _annotated(tmp_path) == [3]
    assert traced.said[0] == "profile.steps=[2,3]: only step 3 can be traced, as the run goes on after step 2"


def _profiler(folder: Path, steps: str, said: list[str], warned: list[Any] | None = None) -> Profiler:
    take = warned if warned is not None else []
    return Profiler(
        spec_of(steps).profile.steps,
        Processes(),
        folder,
        pause=lambda _: nullcontext(),
        files=dict,
        say=said.append,
        warn=take.append,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("began", "ended", "told"),
    [(13, 20, "profile.steps=[10,13]: nothing is traced, as the run goes on after step 13"),
     (0, 7, "profile.steps: steps 10 to 13 not traced, as the run ended after step 7"),
     (0, 12, "profile.steps: step 13 not traced, as the run ended after step 12")],
)  # fmt: skip
def test_what_is_not_traced_is_said(tmp_path, began, ended, told):
    said: list[str] = []
    profiler = _profiler(tmp_path, "profile.steps=[10,13]", said)
    profiler.run_started(began)
    profiler.run_ended(ended)
    assert said == [told]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("a file where the folder belongs")
    warned: list[Any] = []
    with _profiler(tmp_path, "profile.steps=[1,1]", [], warned) as profiler:
        profiler.start(None)
    assert [problem.where for problem in warned] == ["profile.steps"]


def test_steps_that_the_run_does_not_have_are_a_mistake():
    check_profile((10, 13), 13)
    with pytest.raises(ConfigError, match="step 13 is traced last, and num_steps is 12"):
        check_profile((10, 13), 12)
