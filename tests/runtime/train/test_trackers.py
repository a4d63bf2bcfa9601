"""Where metrics go besides `metrics.jsonl`: several trackers at once, a user's own, and one that fails."""

import json
import sys
from pathlib import Path

import pytest

from conftest import LINEAR_STACK, SMALL, plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.runtime.core.failures import RunFailed
from meshloom.runtime.train.tensorboard import TensorBoard
from meshloom.runtime.train.trackers import Trackers, find_trackers, tracked_run
from support.commands import meshloom
from support.recording_tracker import Failing, Recording

MINE = "support.recording_tracker:Recording"


def _run(folder: Path, first_step: int = 0):
    return tracked_run(plan_of(*LINEAR_STACK), folder, first_step)


def test_a_users_class_is_found_by_its_path():
    with code_allowed_from(["support.recording_tracker"]):
        found = find_trackers(spec_of(f"logging.trackers=[tensorboard,'{MINE}']").logging)
    assert found == (TensorBoard, Recording)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("support.recording_tracker:TrackedRun", "is not a class that derives from Tracker"),
        ("support.recording_tracker:Nobody", "Nobody"),
        ("nowhere.at_all:Tracker", "nowhere"),
    ],
)
def test_what_is_no_tracker_is_one_error(name, words):
    with code_allowed_from(["support.recording_tracker"]), pytest.raises(ConfigError, match=words):
        find_trackers(spec_of(f"logging.trackers=['{name}']").logging)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_its_package_a_tracker_is_one_error(monkeypatch, name):
    for module in ("weights_and_biases", "mlflow_tracker"):
        monkeypatch.delitem(sys.modules, f"meshloom.runtime.train.{module}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'meshloom\[{name}\]'"):
        find_trackers(spec_of(f"logging.trackers=[{name}]").logging)


def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path):
    told: list[Problem] = []
    with Trackers((Failing, Recording), _run(tmp_path, first_step=7), told.append) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"step": step, "loss": 1 / step, "mfu": None})
    (problem,) = told
    assert problem.what == "Failing failed at step 2, and gets no more: ConnectionError: no such host for 1 values"
    recorded = Recording.made[-1]
    assert recorded.logged == [(1, {"loss": 1.0}), (2, {"loss": 0.5}), (3, {"loss": 1 / 3})]
    assert (recorded.has_failed, recorded.run.first_step) == (False, 7)
    assert recorded.run.declaration["model"]["family"] == "linear_stack"


def test_a_run_that_fails_says_so(tmp_path):
    def fail() -> None:
        with Trackers((Recording,), _run(tmp_path), print):
            raise RunFailed(Problem("step 3", "is not finite", "look"), 4)

    with pytest.raises(RunFailed):
        fail()
    assert Recording.made[-1].has_failed is True


def test_an_id_is_that_of_the_first_start(tmp_path):
    first, again = _run(tmp_path), _run(tmp_path, first_step=5)
    assert first.remembered_id("a", lambda: "one") == "one"
    assert first.remembered_id("b", lambda: "other") == "other"
    assert again.remembered_id("a", lambda: "two") == "one"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of MLflow's libraries, about each other
def test_wandb_and_mlflow_have_both_starts_of_a_run_as_one(tmp_path):
    """Both without a network: a folder to sync, and a database."""
    pytest.importorskip("wandb")
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    words = (
        *SMALL, *LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "checkpoint.every_num_steps=2",
        "logging.trackers=[wandb,mlflow,tensorboard]", "logging.wandb.mode=offline", "hydra.run.dir=run",
        "run.name=first", "run.tags=[tiny,v2]", "run.notes='a try'",
    )  # fmt: skip
    for num_steps in (2, 4):
        done = meshloom("train", *words, f"num_steps={num_steps}", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("MLflow keeps the parameters of the first start" in done.stdout) is (num_steps == 4)
    assert "and num_steps: 2 -> 4 changed" in " ".join(done.stdout.split())
    run_dir = tmp_path / "run"
    ids = json.loads((run_dir / "trackers.json").read_text())
    folders = [each.name for each in (run_dir / "wandb").iterdir() if each.name.startswith("offline-run-")]
    assert len(folders) == 2
    assert all(each.endswith(ids["wandb"]) for each in folders)
    database = client(f"sqlite:///{run_dir / 'mlflow.db'}")
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [point.value for point in database.get_metric_history(ids["mlflow"], "loss")] == losses
    tracked = database.get_run(ids["mlflow"])
    assert (tracked.info.status, tracked.data.params["model.family"]) == ("FINISHED", "linear_stack")
    assert tracked.info.run_name == "first"
    assert tracked.data.tags["changed_after_step_2"] == "num_steps: 2 -> 4"
    assert {"tiny": "", "v2": "", "mlflow.note.content": "a try"}.items() <= tracked.data.tags.items()
