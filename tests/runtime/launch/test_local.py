"""Processes on this machine: signals reach all of them, exit codes decide, and nothing is left behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import SMALL, spec_of
from meshloom.compiler.declare.launch_spec import LocalLaunch
from meshloom.runtime.launch.local import local_processes, run_local
from meshloom.runtime.launch.plan import Hosts, LaunchPlan
from meshloom.runtime.rundir.profile_files import read_profile
from support.commands import meshloom

# A process of a run: its words are overrides, of which it reads its index; then it runs the code.
PROGRAM = """
import os, re, signal, sys, time
index = int(re.search(r"distributed.process_id=(\\d+)", " ".join(sys.argv))[1])
def note(*said):
    with open("said", "a") as file:
        print(index, *said, file=file)
"""


def plan_of_code(folder: Path, code: str, count: int = 3) -> LaunchPlan:
    (folder / "program.py").write_text(PROGRAM + code)
    program = (sys.executable, str(folder / "program.py"))
    return LaunchPlan("test", Hosts(1, count), program, ("train",), {"MINE": "7"}, str(folder / "run"))


def run(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    monkeypatch.chdir(folder)
    spec = spec_of("distributed.heartbeat_timeout_seconds=1", "distributed.shutdown_timeout_seconds=1", *overrides)
    assert isinstance(spec.launch, LocalLaunch)
    return run_local(plan_of_code(folder, code), spec.launch, spec.distributed)


def said(folder: Path) -> list[str]:
    return sorted((folder / "said").read_text().splitlines())


def test_all_processes_run_with_their_index_and_environment(tmp_path, monkeypatch, capfd):
    assert run(tmp_path, 'note(os.environ["MINE"]); print("out", index)', monkeypatch) == 0
    assert said(tmp_path) == ["0 7", "1 7", "2 7"]
    assert capfd.readouterr().out == "out 0\n"
    logs = tmp_path / "run" / "logs"
    assert [(logs / f"output-{index}.log").read_text() for index in (1, 2)] == ["out 1\n", "out 2\n"]


@pytest.mark.parametrize(
    ("code", "exit_code", "starts"),
    [
        ("sys.exit(3 if index == 1 else 0)", 3, 1),  # a mistake fails for good
        ("sys.exit(1)", 1, 3),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL) if index == 2 else time.sleep(30)", 137, 3, marks=pytest.mark.ci
        ),
        ("sys.exit(0 if open('said').read().count('1 start') == 2 else 134)", 0, 2),  # restarted once, and well
    ],
)
def test_the_exit_code_decides_whether_all_start_again(tmp_path, monkeypatch, code, exit_code, starts):
    wait = "while open('said').read().count('start') % 3: time.sleep(0.01)\n"  # until all have said that they started
    assert run(tmp_path, f'note("start")\n{wait}{code}', monkeypatch, "launch.max_restarts=2") == exit_code
    assert said(tmp_path).count("1 start") == starts


def test_a_process_that_hangs_after_another_failed_is_ended(tmp_path, monkeypatch, capfd):
    begin = time.monotonic()
    assert run(tmp_path, "sys.exit(1) if index == 1 else time.sleep(60)", monkeypatch) == 1
    assert time.monotonic() - begin < 30
    told = capfd.readouterr().err
    assert "launch: process 1 of 3 ended with exit code 1: see " in told
    assert "the others still ran 2 s later, and are ended" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_all_processes_once_and_starts_none_again(tmp_path, monkeypatch, number):
    code = """
def stop(number, frame):
    note("signal", number)
    time.sleep(0.3)
    sys.exit(128 + number)
[signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
note("ready")
time.sleep(60)
"""

    def send() -> None:
        while not (tmp_path / "said").exists() or len(said(tmp_path)) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    assert run(tmp_path, code, monkeypatch, "launch.max_restarts=2") == 128 + number
    assert [line for line in said(tmp_path) if "signal" in line] == [f"{i} signal {number}" for i in range(3)]


def test_setup_runs_before_each_process(tmp_path, monkeypatch):
    assert run(tmp_path, "note(os.environ['SET'])", monkeypatch, "launch.setup=['export SET=up']") == 0
    assert said(tmp_path) == ["0 up", "1 up", "2 up"]


def test_a_dry_run_prints_commands_that_a_shell_takes(tmp_path):
    plan = plan_of_code(tmp_path, "note('it is', *sys.argv[1:3])", count=2)
    for process in local_processes(plan, 1234):
        subprocess.run(["bash", "-c", str(process)], check=True, cwd=tmp_path)
    assert said(tmp_path) == [
        "0 it is train distributed.coordinator_address='127.0.0.1:1234'",
        "1 it is train distributed.coordinator_address='127.0.0.1:1234'",
    ]
    assert shlex.split(str(local_processes(plan, 1)[0]))[0] == "MINE=7"


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


RUN = (*SMALL, "model.num_layers=1", "num_steps=3", "schedule.num_warmup_steps=1", "checkpoint=disabled",
       "distributed.initialization_timeout_seconds=120", "distributed.shutdown_timeout_seconds=60")  # fmt: skip


LAYOUT = ("sharding=hsdp", "mesh.replica=2", "mesh.fsdp=4")


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    alone = meshloom("train", *RUN, *LAYOUT, "hydra.run.dir=run", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    return losses(folder / "run")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "hosts"),
    [
        pytest.param(2, "2 hosts", marks=pytest.mark.release),  # two processes: test_process_starts.py
        (4, "2 slices of 2 hosts"),  # GKE's variables, replica over the network of the slices
    ],
)
def test_several_processes_train_as_one_does(tmp_path, losses_alone, number, hosts):
    launch = (f"launch.num_processes={number}", *(["launch.num_slices=2"] if "slices" in hosts else []))
    several = meshloom("launch", *RUN, *LAYOUT, *launch, "hydra.run.dir=run", cwd=tmp_path)
    assert several.returncode == 0, several.stderr
    assert hosts in several.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses_alone, rel=1e-6)
    for index in range(number):
        assert f"process {index} of {number}" in (tmp_path / "run" / "logs" / f"process-{index}.log").read_text()


@pytest.mark.release
def test_all_processes_load_an_artifact_with_the_flags_of_its_compile(tmp_path):
    cache, flags = tmp_path / "cache", "--xla_backend_optimization_level=1"
    first = meshloom("launch", *RUN, f"compilation_cache={cache}", f"hydra.run.dir={tmp_path}/first",
                     cwd=tmp_path, XLA_FLAGS=flags)  # fmt: skip
    assert first.returncode == 0, first.stderr
    (artifact,) = [path.parent for path in cache.glob("artifacts/*/manifest.json")]
    second = meshloom("launch", *RUN, "compilation_cache=null", f"artifact={artifact}", "profile.steps=[2,3]",
                      f"hydra.run.dir={tmp_path}/second", cwd=tmp_path, XLA_FLAGS="")  # fmt: skip
    assert second.returncode == 0, second.stderr
    assert f"loaded from {artifact}" in second.stdout
    assert losses(tmp_path / "second") == losses(tmp_path / "first")
    profile = read_profile(tmp_path / "second").report  # each process has traced its own devices
    assert (profile.num_processes, profile.num_devices, profile.steps, profile.notes) == (2, 8, (2, 3), ())
    assert (profile.unmatched_seconds, profile.num_not_run) == (0.0, 0)
    assert profile.model.startswith("tiny (")
    shown = meshloom("launch", *RUN, f"artifact={artifact}", "launch.dry_run=true", cwd=tmp_path, XLA_FLAGS="")
    assert shown.stdout.count(f"XLA_FLAGS={flags}") == 2
