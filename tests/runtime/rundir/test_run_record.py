"""How a run ended is recorded, however it ended; `latest` leads to the newest one."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.runtime.core.failures import NONFINITE, RunFailed
from meshloom.runtime.core.files import locked
from meshloom.runtime.rundir.folders import RunFolder, RunRecord, find_directories, link_latest, read_run, recorded_run
from support.commands import run_python

PROBLEM = Problem("optimizer.learning_rate", "the loss of step 7 is NaN", "lower it")
BUSY = Problem("here", "is busy", "wait")


def _ended_by(run_dir: Path, error: BaseException) -> tuple[str, str | None, int | None]:
    with pytest.raises(type(error)), recorded_run(run_dir, "train"):
        raise error
    record = _record(run_dir)
    return record.state, record.why, record.exit_code


def _record(run_dir: Path) -> RunRecord:
    record = RunFolder(run_dir).record
    assert record is not None
    return record


def test_a_run_is_running_until_its_end(tmp_path):
    with recorded_run(tmp_path, "compile"):
        running = _record(tmp_path)
    assert (running.state, running.command, running.pid, running.ended) == ("running", "compile", os.getpid(), None)
    done = _record(tmp_path)
    assert (done.state, done.why, done.exit_code, done.began) == ("done", None, 0, running.began)
    assert done.ended is not None
    assert done.ended >= running.began


@pytest.mark.parametrize(("error", "ended"), [
    (RunFailed(PROBLEM, NONFINITE), ("failed", "optimizer.learning_rate: the loss of step 7 is NaN", NONFINITE)),
    (ConfigError([PROBLEM]), ("failed", "optimizer.learning_rate: the loss of step 7 is NaN", 2)),
    (KeyboardInterrupt(), ("stopped", "by SIGINT", 130)),
    (KeyboardInterrupt(signal.SIGTERM), ("stopped", "by SIGTERM", 143)),
    (TypeError("no\nsecond line"), ("failed", "TypeError: no", 1)),
    (AssertionError(), ("failed", "AssertionError", 1)),
], ids=["failed", "mistake", "interrupt", "signal", "crash", "crash without words"])  # fmt: skip
def test_what_ends_a_run_is_its_reason(tmp_path, error, ended):
    assert _ended_by(tmp_path, error) == ended


def test_exit_codes_say_how_it_ended(tmp_path):
    with recorded_run(tmp_path, "train") as record:
        assert record.end(128 + signal.SIGTERM) == 143
    assert (_record(tmp_path).state, _record(tmp_path).why) == ("stopped", "by SIGTERM")
    with recorded_run(tmp_path, "compile") as record:
        record.end(DOES_NOT_FIT, "it needs 20 GiB")
    assert (_record(tmp_path).state, _record(tmp_path).why) == ("failed", "it needs 20 GiB")


def test_a_command_that_leaves_at_once_is_recorded_too(tmp_path):
    code = f"""
from pathlib import Path
from meshloom.runtime.core.failures import hear_interrupts, leave_now
from meshloom.runtime.rundir.folders import recorded_run
hear_interrupts()
with recorded_run(Path({str(tmp_path)!r}), "train"):
    leave_now(130)
"""
    assert run_python("-c", code).returncode == 130
    assert (_record(tmp_path).state, _record(tmp_path).why) == ("stopped", "by SIGINT")


def test_a_disk_that_refuses_the_record_ends_no_run(tmp_path, caplog):
    gone = tmp_path / "gone"
    with recorded_run(gone, "train"):
        pass
    assert "gone/run.json could not be written" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"schema_version": 1, "state": "asleep"})])
def test_a_record_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert RunFolder(tmp_path).record is None
    assert RunFolder(tmp_path / "none").record is None


def test_latest_leads_to_the_newest_run(tmp_path):
    for name in ("2026-11-22/23-59-59", "2026-11-23/00-00-01"):
        run_dir = tmp_path / "outputs" / name
        run_dir.mkdir(parents=True)
        link_latest(run_dir)
        assert (tmp_path / "outputs" / "latest").readlink() == Path(name)
        assert (tmp_path / "outputs" / "latest").samefile(run_dir)
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["2026-11-22", "2026-11-23", "latest"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_latest_leaves_alone_what_is_its_users(tmp_path, make):
    run_dir = tmp_path / "2026-11-23" / "00-00-01"
    run_dir.mkdir(parents=True)
    make(tmp_path / "latest")
    link_latest(run_dir)
    assert not (tmp_path / "latest").is_symlink()
    named = tmp_path / "mine" / "a" / "run"
    named.mkdir(parents=True)
    link_latest(named)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["a"]


def test_a_disk_without_links_stops_no_run(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    run_dir = tmp_path / "2026-11-23" / "00-00-01"
    run_dir.mkdir(parents=True)
    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_latest(run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["2026-11-23"]


def _written(directory: Path, *, num_rows: int, num_steps: int = 10) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "spec.yaml").write_text(f"seed: 0\nnum_steps: {num_steps}\nschedule:\n  num_steps: 3\n")
    rows = [{"step": n, "loss": 9.0 - n, "eval_loss": 5.5 if n == 4 else None} for n in range(1, num_rows + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_run_that_goes_on_is_running_whatever_its_record_says(tmp_path):
    _written(tmp_path, num_rows=5)
    with recorded_run(tmp_path, "train"):
        pass
    with locked(tmp_path, BUSY):
        run = read_run(tmp_path)
    assert (run.state, run.why, run.command) == ("running", None, "train")
    assert (run.step, run.num_steps, run.loss, run.eval_loss) == (5, 10, 4.0, 5.5)
    assert read_run(tmp_path).state == "done"


def test_a_line_that_is_being_written_is_none(tmp_path):
    path = _written(tmp_path, num_rows=5) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')
    assert read_run(tmp_path).step == 5


def _json_of(**changed) -> str:
    values = {"command": "train", "state": "running", "began": "2026-11-23T00:00:00+00:00", "pid": 1,
              "host": socket.gethostname()} | changed  # fmt: skip
    return RunRecord(**values).model_dump_json()


def test_a_run_without_an_end_that_nobody_holds_was_killed(tmp_path):
    (_written(tmp_path, num_rows=5) / "run.json").write_text(_json_of())
    run = read_run(tmp_path)
    assert (run.state, run.why) == ("killed", "it recorded no end: its process was killed, or the machine went down")
    (tmp_path / "run.json").write_text(_json_of(host="elsewhere"))
    assert read_run(tmp_path).why == "it recorded no end, on elsewhere: killed, or its lock is not seen from here"
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "process-0.log"
    log.write_text("2026 INFO meshloom\nFatal Python error: Aborted\n\nThread 0x1:\n")
    assert read_run(tmp_path).why == f"Aborted ({log} has its stacks)"


def test_the_reason_of_a_failed_run_is_that_of_its_record(tmp_path):
    (_written(tmp_path, num_rows=5) / "run.json").write_text(_json_of(state="failed", why="NaN", exit_code=5))
    assert (read_run(tmp_path).state, read_run(tmp_path).why) == ("failed", "NaN")


@pytest.mark.parametrize(("num_rows", "state"), [(10, "done"), (9, "killed"), (0, "killed")])
def test_runs_of_before_there_was_a_record_are_done_at_their_last_step(tmp_path, num_rows, state):
    run = read_run(_written(tmp_path, num_rows=num_rows))
    assert (run.state, run.step) == (state, num_rows or None)


def test_directories_are_found_below_and_nothing_inside_of_one(tmp_path):
    for name in ("2026/a", "2026/a/checkpoints/5", ".hidden/b", "c"):
        _written(tmp_path / name, num_rows=1)
    (tmp_path / "latest").symlink_to("2026/a")
    assert list(find_directories(tmp_path, "spec.yaml")) == [tmp_path / "2026/a", tmp_path / "c"]
    assert list(find_directories(tmp_path / "c", "spec.yaml")) == [tmp_path / "c"]
    assert list(find_directories(tmp_path / "none", "spec.yaml")) == []
