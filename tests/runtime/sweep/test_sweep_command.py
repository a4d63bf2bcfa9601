"""`meshloom ... -m` as it is typed, in processes: whatever goes wrong, every point has one row."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.commands import meshloom, run_in_process
from support.forked import Process, start

# A model of a user's own, whose points go wrong in each way there is.
TROUBLE = """
import os, time

from meshloom.models import Model, ModelConfig
from meshloom.models.family_configs import LinearStackConfig


class Trouble(ModelConfig):
    embed_dim: int
    num_layers: int
    kind: str

    def build(self) -> Model:
        taken = []
        if self.kind == "abort":
            os.abort()
        if self.kind == "hang":
            time.sleep(1000)
        while self.kind == "memory":
            taken.append(b"x" * 2**27)
        return LinearStackConfig(family="linear_stack", vocab_size=self.vocab_size, embed_dim=64, num_layers=2).build()
"""
WRONG = ("explain", "-m", "--allow-code-from=trouble", "model=linear_stack", "model.family=trouble:Trouble",
         "target=v5e-8", "+model.kind=fine,abort,memory,hang",
         "hydra.launcher={timeout_seconds: 20, worker_bytes: 1000000000}", "hydra.sweep.dir=sweep")  # fmt: skip
SMALL = ("model=linear_stack", "model.num_layers=2", "model.embed_dim=32", "sequence_length=16", "data=synthetic",
         "target=cpu-2", "num_steps=4")  # fmt: skip


def rows_of(sweep: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (sweep / "sweep.jsonl").read_text().splitlines()]


def start_sweep(words: Sequence[str], folder: Path) -> Process:
    return start(["-m", "meshloom", *words], cwd=folder, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for_rows(sweep: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while not (sweep / "sweep.jsonl").exists() or len((sweep / "sweep.jsonl").read_bytes().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.ci
def test_a_sweep_that_is_killed_in_the_middle_has_each_row_exactly_once_when_it_is_typed_again(tmp_path):
    """Of its points some abort in C++, some hang and some take all memory that they may."""
    (tmp_path / "trouble.py").write_text(TROUBLE)
    first = start_sweep(WRONG, tmp_path)
    wait_for_rows(tmp_path / "sweep", 2)
    first.kill()
    first.communicate(timeout=60)
    before = (tmp_path / "sweep" / "sweep.jsonl").read_bytes()
    with (tmp_path / "sweep" / "sweep.jsonl").open("ab") as file:
        file.write(b'{"index":3,"overr')  # as a kill may leave it

    done = meshloom(*WRONG, cwd=tmp_path)
    content = (tmp_path / "sweep" / "sweep.jsonl").read_bytes()
    assert content.startswith(before)
    rows = rows_of(tmp_path / "sweep")
    assert sorted(row["index"] for row in rows) == list(range(4)), done.stdout + done.stderr
    statuses = {row["swept"]["model.kind"]: row["status"] for row in rows}
    assert statuses == {"fine": "done", "abort": "aborted", "memory": "out_of_memory", "hang": "timed_out"}
    assert all(row["why"] for row in rows if row["status"] != "done")
    assert "is cut off" in done.stdout
    assert f"continuing sweep: {len(before.splitlines())} of 4 points have a row" in done.stdout
    assert done.returncode == 137
    assert not (tmp_path / "sweep" / ".workers").exists()

    again = meshloom(*WRONG, cwd=tmp_path)
    assert "all 4 points of this sweep are there" in again.stdout
    assert (tmp_path / "sweep" / "sweep.jsonl").read_bytes() == content

    words = [*WRONG, "sweep.retry=[aborted]"]
    assert meshloom(*words, cwd=tmp_path).returncode == 137
    assert sorted(row["index"] for row in rows_of(tmp_path / "sweep")) == list(range(4))
    assert (tmp_path / "sweep" / "sweep.jsonl").read_bytes() != content, "the aborted one ran again, and comes last"


@pytest.mark.ci
def test_ctrl_c_keeps_what_is_done_and_the_same_command_finds_it(tmp_path):
    line = ("explain", "-m", *SMALL, "seed=range(0,12)", "hydra.launcher.num_workers=1")
    first = start_sweep(line, tmp_path)
    while not (found := list(tmp_path.glob("multirun/*/*"))):
        time.sleep(0.1)
    (sweep,) = found
    wait_for_rows(sweep, 2)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal sends it: to all processes
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 130
    kept = rows_of(sweep)
    assert 2 <= len(kept) < 12
    assert f"interrupted: {len(kept)} of 12 points have a row" in said

    done = meshloom(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("multirun/*/*")) == [sweep], "it went on in the same directory"
    rows = rows_of(sweep)
    assert rows[: len(kept)] == kept
    assert [row["index"] for row in rows] == list(range(12))


@pytest.mark.ci
def test_another_sweep_does_not_go_on_in_a_directory(tmp_path):
    line = ("explain", "-m", *SMALL, "hydra.sweep.dir=sweep", "hydra.launcher.num_workers=1")
    assert meshloom(*line, "seed=1,2", cwd=tmp_path).returncode == 0
    done = meshloom(*line, "seed=1,3", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: hydra.sweep.dir: sweep holds another sweep")
    assert len(rows_of(tmp_path / "sweep")) == 2


@pytest.mark.ci
def test_a_sweep_runs_in_any_directory_with_configs_of_ones_own(tmp_path):
    here = tmp_path / "it's [mine], a=b"
    (here / "configs/model").mkdir(parents=True)
    (here / "configs/model/mine.yaml").write_text("defaults: [tiny, _self_]\nnum_layers: 3\n")
    words = ("--config-dir", "configs", "model=mine", "remat=full,none", "hydra.launcher.num_workers=1")
    done = meshloom("explain", "-m", *words, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = here.glob("multirun/*/*")
    assert [row["status"] for row in rows_of(sweep)] == ["done"] * 2
    assert {row["figures"]["model"] for row in rows_of(sweep)} == {"mine"}
    assert (sweep / "sweep.html").exists()
    page = (sweep / "sweep.html").read_text()
    assert f"in {sweep.relative_to(here)}: sweep.html shows all of it" in done.stdout
    assert all(f'"{value}"' in page for value in ("remat", "full", "none"))
    assert "the sweep is running" not in page


@pytest.mark.ci
def test_equal_programs_are_compiled_once(tmp_path):
    line = ("compile", "-m", *SMALL, "logging.every_num_steps=1,2", "hydra.launcher.num_workers=2")
    done = meshloom(*line, "hydra.sweep.dir=sweep", cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "sweep")
    assert len({row["fingerprint"] for row in rows}) == 1
    assert [row["same_as"] for row in rows] == [None, rows[0]["index"]]
    caches = [json.loads((tmp_path / "sweep" / row["directory"] / "report.json").read_text()) for row in rows]
    assert sorted(report["build"]["cache"] for report in caches) == ["hit", "miss"]


@pytest.mark.release
def test_a_run_that_ctrl_c_stops_goes_on_from_its_checkpoint(tmp_path):
    line = ("train", "-m", *SMALL, "num_steps=3000", "seed=1,2", "checkpoint.every_num_steps=1000", "logging=quiet",
            "hydra.sweep.dir=sweep")  # fmt: skip
    first = start_sweep(line, tmp_path)
    metrics = tmp_path / "sweep" / "seed=1" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 5:
        time.sleep(0.1)
    page, until = tmp_path / "sweep" / "sweep.html", time.monotonic() + 60
    while '"heldOut"' not in page.read_text():  # a curve of the point that is running
        assert time.monotonic() < until
        time.sleep(0.1)
    assert "the sweep is running, 0 points ended" in page.read_text()
    os.killpg(first.pid, signal.SIGINT)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 130, said
    assert not (tmp_path / "sweep" / "sweep.jsonl").exists(), "a run that goes on later has no row"
    assert "the sweep is running" not in page.read_text()
    assert list((tmp_path / "sweep" / "seed=1" / "checkpoints").iterdir()), "it saved what it had"


@pytest.mark.ci
def test_points_do_not_save_in_one_folder(tmp_path):
    done = run_in_process("train", "-m", "target=cpu-2", "seed=1,2", "checkpoint.directory=saved", cwd=tmp_path)
    assert done.returncode == 2
    assert "checkpoint.directory: all points would save in one folder" in done.stderr
    assert not any(tmp_path.iterdir())
