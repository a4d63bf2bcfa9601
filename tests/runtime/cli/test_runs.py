"""`meshloom runs` as its users type it, over runs and sweeps as they lie on disk, and over real runs."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.core.errors import Problem
from meshloom.runtime.cli.main import run
from meshloom.runtime.core.files import locked
from meshloom.runtime.rundir.folders import recorded_run
from support.commands import run_python
from support.forked import start
from support.sweeps import figures, point, sweep_file, write_sweep

BUSY = Problem("here", "is busy", "wait")
TINY = (*SMALL, *LINEAR_STACK, "target=cpu-2", "model.num_layers=1", "logging.trackers=[]")


def _run_dir(directory: Path, *, step: int = 3, num_steps: int = 10) -> Path:
    directory.mkdir(parents=True)
    (directory / "spec.yaml").write_text(f"num_steps: {num_steps}\n")
    (directory / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 2.5, "eval_loss": None}) + "\n")
    return directory


def _told(capsys, *words: object) -> tuple[int, str, str]:
    exit_code = run(["runs", *map(str, words)])
    out, err = capsys.readouterr()
    return exit_code, out, err


@pytest.fixture
def place(tmp_path, monkeypatch) -> None:
    """A working directory with a run that is done, one that failed, one that runs and a sweep with a failed point."""
    monkeypatch.chdir(tmp_path)
    with recorded_run(_run_dir(Path("outputs/2026-11-23/10-00-00"), step=10), "train"):
        pass
    with recorded_run(_run_dir(Path("outputs/2026-11-23/10-00-01")), "train") as record:
        record.end(5, "the loss is NaN")
    _run_dir(Path("outputs/2026-11-23/10-00-02"))
    rows = [point(n, {"a": n}, figures=figures(step_seconds=2.0 - n)) for n in range(2)]
    rows.append(point(2, {"a": 2}, status="does_not_fit"))
    sweep = write_sweep(Path("multirun/2026-11-23/11-00-00"), rows, sweep_file(rows, num_points=3))
    _run_dir(sweep / "a=0")


def _by_directory(capsys, *words: object) -> dict[str, dict]:
    return {Path(line["directory"]).name: line for line in json.loads(_told(capsys, *words, "--json")[1])}


@pytest.mark.usefixtures("place")
def test_runs_with_a_directory_of_their_own_name_are_found(capsys):
    for name in ("my-run", "runs/first", "runs/a/too-deep"):
        with recorded_run(_run_dir(Path(name), step=10), "train"):
            pass
    _run_dir(Path("spec-of-something-else"))
    own = {"my-run", "first"}
    assert {*_by_directory(capsys)} == {"10-00-00", "10-00-01", "10-00-02", "11-00-00"} | own
    assert {*_by_directory(capsys, "outputs")} == {"10-00-00", "10-00-01", "10-00-02"}


@pytest.mark.usefixtures("place")
def test_runs_and_sweeps_are_found_with_their_states(capsys):
    with locked(Path("outputs/2026-11-23/10-00-02"), BUSY):
        found = _by_directory(capsys)
        assert json.loads(_told(capsys, "--json")[1])[0]["directory"] == "outputs/2026-11-23/10-00-02"
    states = {name: (line["state"], line["why"]) for name, line in found.items()}
    assert states == {
        "10-00-00": ("done", None), "10-00-01": ("failed", "the loss is NaN"), "10-00-02": ("running", None),
        "11-00-00": ("done", "1 does not fit"),
    }  # fmt: skip
    assert (found["10-00-00"]["step"], found["10-00-00"]["num_steps"], found["10-00-00"]["loss"]) == (10, 10, 2.5)
    assert found["11-00-00"]["statuses"] == {"done": 2, "does_not_fit": 1}
    assert found["11-00-00"]["best"] == 1.0


@pytest.mark.usefixtures("place")
def test_the_table_says_the_same_to_people(capsys):
    exit_code, out, err = _told(capsys)
    assert (exit_code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["state", "command", "when", "last", "result", "directory"]
    sweep = next(line for line in lines if "compile" in line)
    assert sweep[:3] == ["done", "compile", "-m"]
    assert " ".join(sweep[5:]) == "2 of 3 points best step 1.00 s multirun/2026-11-23/11-00-00"
    failed = next(line for line in lines if line[0] == "failed")
    assert " ".join(failed[4:]) == "step 3 of 10 loss 2.5000 outputs/2026-11-23/10-00-01"
    assert "failed outputs/2026-11-23/10-00-01: the loss is NaN" in out.splitlines()
    assert "done multirun/2026-11-23/11-00-00: 1 does not fit" in out.splitlines()


@pytest.mark.usefixtures("place")
def test_the_points_of_a_sweep_are_listed_where_it_is_named(capsys):
    assert list(_by_directory(capsys, "multirun/2026-11-23/11-00-00")) == ["a=0"]
    assert list(_by_directory(capsys, "multirun")) == ["11-00-00"]


@pytest.mark.usefixtures("place")
def test_a_sweep_that_was_stopped_and_one_that_is_damaged_say_so(capsys):
    sweep = write_sweep(Path("multirun/stopped"), [point(0, {"a": 0})], sweep_file([point(0, {"a": 0})], num_points=3))
    damaged = write_sweep(Path("multirun/damaged"), [])
    (damaged / "sweep.json").write_text("{")
    wrong = write_sweep(Path("multirun/wrong"), [])
    (wrong / "sweep.jsonl").write_text('{"index": 0, "status": null}\n')
    newer = write_sweep(Path("multirun/newer"), [])
    declared = json.loads((newer / "sweep.json").read_text()) | {"schema_version": 3}
    (newer / "sweep.json").write_text(json.dumps(declared))
    found = _by_directory(capsys, "multirun")
    assert found["wrong"]["why"].startswith("multirun/wrong/sweep.jsonl: is damaged: ")
    assert found["newer"]["why"].startswith("multirun/newer/sweep.json: schema_version is 3")
    assert (found[sweep.name]["state"], found[sweep.name]["why"]) == (
        "stopped",
        "2 points left: the same command goes on",
    )
    assert (found["damaged"]["state"], found["damaged"]["why"]) == (
        "failed", "multirun/damaged/sweep.json: is damaged: it is not valid JSON",
    )  # fmt: skip


def test_where_there_is_nothing_it_says_where_it_looked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert _told(capsys) == (
        0,
        "no run and no sweep in outputs/ and multirun/; `meshloom runs DIR` looks elsewhere\n",
        "",
    )
    assert _told(capsys, "--json")[1] == "[]\n"
    exit_code, _, err = _told(capsys, "none", "--jsn")
    assert (exit_code, err.count("error: ")) == (2, 1)
    assert "there is no flag '--jsn'" in err
    assert "there is no such directory" in _told(capsys, "none")[2]


def test_a_long_list_shows_its_newest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for n in range(35):
        os.utime(_run_dir(Path(f"outputs/{n:02}")) / "metrics.jsonl", (1e9 + n, 1e9 + n))
        os.utime(Path(f"outputs/{n:02}/spec.yaml"), (1e9, 1e9))
    lines = _told(capsys)[1].splitlines()
    assert "outputs/34" in lines[1]
    assert lines[-1] == "... 5 older ones: `meshloom runs --all` shows them"
    lines = _told(capsys, "--all")[1].splitlines()
    assert [line.split()[-1] for line in lines[1:36]] == [f"outputs/{n:02}" for n in reversed(range(35))]


@pytest.mark.ci
def test_real_runs_say_how_they_ended(tmp_path, monkeypatch, capsys):
    """Done in the default directory, stopped by a signal, killed, and failed: NaN by a learning rate without end."""
    monkeypatch.chdir(tmp_path)
    done = run_python(*_line("num_steps=3"))
    assert done.returncode == 0, done.stderr
    failed = run_python(*_line("hydra.run.dir=outputs/nan", "optimizer.learning_rate=1e30", "schedule=constant"))
    assert failed.returncode == 5, failed.stderr
    for name, number in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
        process = start(_line("num_steps=100000", f"hydra.run.dir=outputs/{name}", "checkpoint=disabled"),
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        metrics = Path("outputs") / name / "metrics.jsonl"
        until = time.monotonic() + 100
        while not (metrics.exists() and metrics.stat().st_size > 1000):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert _by_directory(capsys)[name]["state"] == "running"
        process.send_signal(number)
        process.wait(timeout=100)
    found = _by_directory(capsys)
    latest = Path("outputs/latest").resolve().name
    assert (found[latest]["state"], found[latest]["step"], found[latest]["num_steps"]) == ("done", 3, 3)
    assert (found["stopped"]["state"], found["stopped"]["why"]) == ("stopped", "by SIGTERM")
    assert (found["killed"]["state"], found["nan"]["state"]) == ("killed", "failed")
    assert "the loss is nan" in found["nan"]["why"]
    assert set(found) == {latest, "stopped", "killed", "nan"}


def _line(*overrides: str) -> list[str]:
    return ["-m", "meshloom", "train", *TINY, *overrides]
