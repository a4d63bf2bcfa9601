"""What a run directory says of its run: while it runs, once it ended, and where it was killed."""

import json
import socket
from pathlib import Path

import pytest

from meshloom.compiler.core.errors import Problem
from meshloom.runtime.core.files import locked
from meshloom.runtime.rundir.folders import find_directories, read_run
from meshloom.runtime.rundir.run_record import RunRecord, recorded_run

BUSY = Problem("here", "is busy", "wait")


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


def _record(**changed) -> str:
    values = {"command": "train", "state": "running", "began": "2026-11-23T00:00:00+00:00", "pid": 1,
              "host": socket.gethostname()} | changed  # fmt: skip
    return RunRecord(**values).model_dump_json()


def test_a_run_without_an_end_that_nobody_holds_was_killed(tmp_path):
    (_written(tmp_path, num_rows=5) / "run.json").write_text(_record())
    run = read_run(tmp_path)
    assert (run.state, run.why) == ("killed", "it recorded no end: its process was killed, or the machine went down")
    (tmp_path / "run.json").write_text(_record(host="elsewhere"))
    assert read_run(tmp_path).why == "it recorded no end, on elsewhere: killed, or its lock is not seen from here"
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "process-0.log"
    log.write_text("2026 INFO meshloom\nFatal Python error: Aborted\n\nThread 0x1:\n")
    assert read_run(tmp_path).why == f"Aborted ({log} has its stacks)"


def test_the_reason_of_a_failed_run_is_that_of_its_record(tmp_path):
    (_written(tmp_path, num_rows=5) / "run.json").write_text(_record(state="failed", why="NaN", exit_code=5))
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
