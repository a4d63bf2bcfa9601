"""One command at a time writes into a run directory, whichever it is; the one that comes second changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from conftest import LINEAR_STACK, SMALL, plan_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.compose import Request
from meshloom.runtime.cli.main import run
from meshloom.runtime.compile.compile_command import CompileJob, compile_step
from meshloom.runtime.core.files import LOCK, locked
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.rundir.run_dir import check_is_free
from meshloom.runtime.train.train import Job, run_training

NO_DATA: Any = None
BUSY = Problem("here", "is busy", "wait")


@pytest.mark.parametrize("named_by", ["the line", "a file"])
@pytest.mark.parametrize("command", ["train", "compile"])
def test_a_run_directory_in_use_is_refused_and_left_as_it_is(tmp_path, monkeypatch, capsys, command, named_by):
    monkeypatch.setattr("meshloom.runtime.train.train.start_devices", lambda *_: ())  # this process has its devices
    monkeypatch.setattr("meshloom.runtime.compile.compile_command.start_devices", lambda *_: ())
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "config.yaml").write_text("of the run that is going on")
    with locked(run_dir, BUSY):
        before = _content(run_dir)
        line = [*SMALL, *LINEAR_STACK, "target=cpu-2", "model.num_layers=1"]
        if named_by == "a file":
            (tmp_path / "configs" / "place").mkdir(parents=True)
            file = tmp_path / "configs" / "place" / "here.yaml"
            file.write_text(f"# @package _global_\nhydra: {{run: {{dir: {run_dir}}}}}\n")
            line += [f"--config-dir={tmp_path}/configs", "place=here"]
        else:
            line.append(f"hydra.run.dir={run_dir}")
        assert run([command, *line]) == 2
        assert _content(run_dir) == before
    assert f"error: hydra.run.dir: another run is in progress in {run_dir}" in capsys.readouterr().err


def test_a_compile_holds_its_run_directory_as_a_run_does(tmp_path):
    plan, nothing = plan_of("target=cpu-2"), Console(is_quiet=True)
    with locked(tmp_path, BUSY), pytest.raises(ConfigError, match="another run is in progress"):
        compile_step(CompileJob(plan, []), tmp_path, request=Request(()), model=None, console=nothing)
    with locked(tmp_path, BUSY), pytest.raises(ConfigError, match="another run is in progress"):
        run_training(Job(plan, NO_DATA), tmp_path, overrides=(), console=nothing, processes=Processes())


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_held_within_the_with_and_no_longer(tmp_path):
    with locked(tmp_path, BUSY):
        with pytest.raises(ConfigError, match="is busy"), locked(tmp_path, BUSY):
            pass
        with pytest.raises(ConfigError, match="another run is in progress"):
            check_is_free(tmp_path)
    check_is_free(tmp_path)
    with locked(tmp_path, BUSY):
        pass


def test_a_look_at_a_folder_makes_no_lock(tmp_path):
    check_is_free(tmp_path)
    check_is_free(tmp_path / "nowhere")
    assert not (tmp_path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
