"""How a run ended is recorded, however it ended; `latest` leads to the newest one."""

import json
import os
import signal
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import DOES_NOT_FIT, ConfigError, Problem
from meshloom.runtime.core.failures import NONFINITE, RunFailed
from meshloom.runtime.rundir.folders import RunFolder
from meshloom.runtime.rundir.run_record import RunRecord, link_latest, recorded_run
from support.commands import run_python

PROBLEM = Problem("optimizer.learning_rate", "the loss of step 7 is NaN", "lower it")


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
from meshloom.runtime.core.interruptible import hear_interrupts, leave_now
from meshloom.runtime.rundir.run_record import recorded_run
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
