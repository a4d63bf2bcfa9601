"""A run that goes on in its directory says what is no longer as it was: the schedule, files that were damaged."""

import io
import json
import shutil
from pathlib import Path

import pytest

from conftest import LINEAR_STACK, SMALL, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.runtime.checkpoint.restore_plan import describe_change, schedule_record
from meshloom.runtime.cli.main import run
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.process_log import process_log
from meshloom.runtime.train.train import plan_and_check, run_training

PEAK = 0.003
RUN = (*LINEAR_STACK, "target=cpu-2", "model.num_layers=1", f"optimizer.learning_rate={PEAK}", "schedule=linear",
       "schedule.num_warmup_steps=0", "schedule.final_learning_rate_fraction=0", "num_steps=5",
       "checkpoint.every_num_steps=2", "evaluation.num_batches=1", "logging.every_num_steps=1")  # fmt: skip


def _train(run_dir: Path, *overrides: str) -> str:
    """Returns what a run in this process says."""
    job, said = plan_and_check(spec_of(*RUN, *overrides)), io.StringIO()
    with process_log(run_dir, Processes()):
        code = run_training(job, run_dir, overrides=(), console=Console(said), processes=Processes())
    assert code == 0, said.getvalue()
    return said.getvalue()


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _seconds(metrics: dict) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("seconds/"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of five steps that got as far as its checkpoint of step 4."""
    run_dir = tmp_path_factory.mktemp("stopped")
    said = _train(run_dir)
    assert "warning" not in said
    assert [each["learning_rate"] for each in _metrics(run_dir)] == pytest.approx(
        [PEAK * k / 4 for k in (4, 3, 2, 1, 0)]
    )
    shutil.rmtree(run_dir / "checkpoints" / "5")
    return run_dir


@pytest.mark.ci
def test_another_schedule_is_said_before_the_first_step_with_the_old_and_the_new_rate(stopped, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    (run_dir / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes() + bytes(100))
    said = _train(run_dir, "num_steps=9")
    before, _, after = said.partition("step 5/9")
    assert after
    assert f"warning: the learning rate of the next step is {PEAK / 2:.4g}, not 0: " in before
    assert "another schedule than the checkpoint's (num_steps 5 -> 9)" in before
    assert f"warning: {run_dir}/metrics.jsonl is damaged: line 6 holds no step" in before
    metrics = _metrics(run_dir)
    assert [each["step"] for each in metrics] == list(range(1, 10))
    assert metrics[4]["learning_rate"] == pytest.approx(PEAK / 2)
    _, _, _, fourth, fifth = _metrics(stopped)
    last, redone = metrics[-1], _seconds(fifth) - _seconds(fourth)
    assert (fifth["num_starts"], last["num_starts"]) == (1, 2)
    assert last["seconds/redone"] == pytest.approx(redone, abs=0.002)
    assert last["seconds/compile"] > fifth["seconds/compile"] == fourth["seconds/compile"]
    assert _seconds(last) == pytest.approx(last["time"] - fifth["time"] + _seconds(fifth), abs=0.5)
    assert last["goodput"] == pytest.approx(last["seconds/steps"] / _seconds(last), abs=1e-3)
    assert "time of 2 starts: " in said


def test_other_batches_go_on_in_the_same_data_and_no_step_left_is_an_error(stopped, tmp_path):
    """Of 4 x 16 sequences that are drawn, batches of 24 leave out 8."""
    there = f"checkpoint.restore_from={stopped}"
    (tmp_path / "run").mkdir()
    said = _train(tmp_path / "run", there, "global_batch_size=24", "num_steps=6")
    assert "batches have 24 sequences in place of 16" in said
    assert "go on where they were, 8 sequences further, at a whole batch" in said
    position = json.loads((tmp_path / "run" / "checkpoints" / "6" / "data" / "data.json").read_text())["position"]
    assert position == {"next_batch": 3 + 2}
    with pytest.raises(ConfigError, match="4 steps leave nothing to do after the 4 of") as error:
        plan_and_check(spec_of(*RUN, there, "num_steps=4"))
    assert [problem.where for problem in error.value.problems] == ["num_steps"]


@pytest.mark.ci
def test_the_same_schedule_is_not_spoken_of(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "same")
    said = _train(tmp_path / "same")
    assert "continuing after step 4" in said
    assert "another schedule" not in said
    assert "warning" not in said


def test_a_learning_rate_that_another_schedule_leaves_as_it_is_is_no_warning():
    constant = spec_of("schedule=constant", "schedule.num_warmup_steps=2", f"optimizer.learning_rate={PEAK}")
    longer = constant.model_copy(update={"num_steps": constant.num_steps + 5})
    saved = json.loads(json.dumps(schedule_record(constant, 4)))  # as a checkpoint keeps it
    keys = f"num_steps {constant.num_steps} -> {longer.num_steps}"
    words = f"another schedule than the checkpoint's ({keys}); the learning rate of the next step stays {PEAK}"
    assert describe_change(saved, schedule_record(longer, 4)) == words
    assert describe_change(saved, schedule_record(constant, 4)) is None


def _damaged(run_dir: Path, copy: Path) -> Path:
    shutil.copytree(run_dir, copy)
    (copy / "checkpoints" / "4" / "data" / "data.json").unlink()
    return copy


@pytest.mark.parametrize(
    ("make", "more", "code", "words"),
    [
        (lambda run_dir, _: run_dir, "model.embed_dim=64", 2, "holds another model or optimizer"),
        (lambda run_dir, _: run_dir / "checkpoints" / "3", "seed=1", 2, "there is no checkpoint 3"),
        (lambda run_dir, copy: copy, "seed=1", 2, "there is no finished checkpoint"),
        (_damaged, "seed=1", 6, "checkpoint 4: data/data.json is missing"),
    ],
)
def test_a_wrong_place_to_restore_from_is_found_before_anything_is_written(
    stopped, tmp_path, monkeypatch, capsys, make, more, code, words
):
    place = make(stopped, tmp_path / "copy")
    monkeypatch.setattr("meshloom.runtime.train.train.start_devices", lambda *_: ())  # this process has its devices
    line = [*SMALL, *RUN, more, f"checkpoint.restore_from={place}", f"hydra.run.dir={tmp_path}/run"]
    assert run(["train", *line]) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
