"""A job of SLURM: its script, and on two real nodes what starts it again and what does not."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import SMALL
from meshloom.compiler.core.errors import ConfigError
from support.commands import meshloom, run_in_process
from support.forked import start
from support.launch import rendered
from support.several import TIMEOUTS, free_port
from support.slurm import MISSING, Slurm, can_start, slurm

# A node runs a program instead of meshloom; `said` gets a line from each process at each start.
PROGRAM = """
import os, signal, sys, time
start, process = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
with open("said", "a") as file:
    print(start, process, os.environ["MINE"], file=file)
"""


def options_of(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (.*)$", script, re.M))


def test_a_script_asks_for_the_targets_hosts_and_chips():
    script = rendered(
        "launch=slurm", "target=h100-16", "launch.partition=big", "launch.time_limit='4:00:00'",
        "launch.options={exclusive: null, reservation: mine}", "launch.image=/images/mine.sqsh",
        "launch.mounts=['/data:/data']",
    ).text  # fmt: skip
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=big", "--requeue", "--exclusive",
            "--reservation=mine", "--time=4:00:00", "--signal=TERM@120"} <= options_of(script)  # fmt: skip
    (srun,) = [line for line in script.splitlines() if line.startswith("srun ")]
    words = shlex.split(srun)
    assert {"--container-image=/images/mine.sqsh", "--container-mounts=/data:/data"} <= set(words)
    assert words[-1] == "distributed.local_device_ids=[0,1,2,3,4,5,6,7]"


def test_a_process_for_each_gpu_takes_the_one_that_slurm_gives_it():
    script = rendered("launch=slurm", "target=h100-16", "launch.processes_per_host=8").text
    assert "--ntasks-per-node=8" in options_of(script)
    assert "local_device_ids" not in script
    with pytest.raises(ConfigError, match="2 processes do not share a host with 8 chips of h100"):
        rendered("launch=slurm", "target=h100-16", "launch.processes_per_host=2")


@pytest.mark.parametrize("name", ["a b; touch hacked", "$(touch hacked)", "'\"`touch hacked`"])
def test_values_are_text_for_the_shell(tmp_path, name):
    value = "'" + name.replace("'", r"\'") + "'"
    script = rendered("launch=slurm", f"launch.environment={{MINE: {value}}}", f"run.extra.mine={value}").text
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    fake = f'srun() {{ printf "%s\\n" "$MINE" "$@"; }}\n{script[: script.index("srun ")]}{line}\n'
    done = subprocess.run(["bash", "-c", fake], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[0] == name
    assert f"run.extra.mine={value}" in done.stdout.splitlines()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Slurm]:
    if not can_start():
        pytest.skip(MISSING)
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch) -> Callable[..., str]:
    """Launches a run, or code instead of it, on two nodes. Returns the number of the job."""
    monkeypatch.chdir(tmp_path)

    def launch(*overrides: str, code: str | None = None) -> str:
        (tmp_path / "program.py").write_text(PROGRAM + (code or ""))
        program = f"{sys.executable} -m meshloom" if code is None else f"{sys.executable} program.py"
        environment = f"{{MINE: 7, JAX_COORDINATOR_ADDRESS: '127.0.0.1:{free_port()}', JAX_PLATFORMS: cpu}}"
        told = meshloom(
            "launch", *SMALL, *TIMEOUTS, "launch=slurm", "launch.num_hosts=2", f"launch.program='{program}'",
            f"launch.environment={environment}", f"hydra.run.dir={tmp_path}/run", *overrides,
            cwd=tmp_path, **cluster.environment,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        return told.stdout.split()[-1]

    return launch


def said(folder: Path) -> list[str]:
    return sorted((folder / "said").read_text().splitlines())


@pytest.mark.ci
def test_an_exit_code_decides_whether_a_job_is_queued_again(cluster, submit, tmp_path):
    job = submit(code="sys.exit(3)")
    cluster.wait(job, "FAILED")
    assert said(tmp_path) == ["0 0 7", "0 1 7"]
    (tmp_path / "said").unlink()
    job = submit("launch.max_restarts=1", "launch.grace_seconds=5", code="sys.exit(1) if process else time.sleep(60)")
    cluster.wait(job, "FAILED")
    assert said(tmp_path) == ["0 0 7", "0 1 7", "1 0 7", "1 1 7"]
    assert len((tmp_path / "run/logs/failures").read_text().splitlines()) == 2


@pytest.mark.ci
def test_a_cancelled_job_is_not_queued_again(cluster, submit, tmp_path):
    job = submit(code="signal.signal(15, lambda *_: sys.exit(143)); time.sleep(100)")
    _until(lambda: (tmp_path / "said").exists() and len(said(tmp_path)) == 2)
    time.sleep(1)  # until both take signals
    cluster.run("scancel", job)
    cluster.wait(job, "CANCELLED")
    time.sleep(3)
    assert cluster.state(job) == "CANCELLED"
    assert said(tmp_path) == ["0 0 7", "0 1 7"]


@pytest.mark.ci
def test_a_run_that_is_preempted_saves_once_and_goes_on(cluster, submit, tmp_path):
    job = submit("num_steps=400", "model.num_layers=1", "checkpoint.every_num_steps=1000")
    metrics = tmp_path / "run/metrics.jsonl"
    _until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20)
    cluster.run("scontrol", "requeue", job)  # as a preemption: SIGTERM, then SIGKILL after KillWait
    cluster.wait(job, "PENDING", "CONFIGURING")
    cluster.wait(job, "COMPLETED")
    log = (tmp_path / f"run/logs/slurm-{job}.log").read_text()
    assert len(re.findall("continuing after step", log)) == 1, log
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 401))
    assert (tmp_path / "run/logs/process-1.log").read_text().count("process 1 of 2") == 2


def _until(is_true: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


SWEEP = ("train", "-m", *SMALL, *TIMEOUTS, "model.num_layers=1", "num_steps=4", "checkpoint=disabled",
         "hydra/launcher=meshloom_slurm", "launch=slurm", "launch.num_hosts=2",
         f"launch.program='{sys.executable} -m meshloom'", "hydra.sweep.dir=sweep")  # fmt: skip


@pytest.mark.ci
def test_a_sweep_is_an_array_whose_points_have_rows(cluster, tmp_path):
    environment = f"launch.environment={{JAX_COORDINATOR_ADDRESS: '127.0.0.1:{free_port()}', JAX_PLATFORMS: cpu}}"
    line = (*SWEEP, environment, "hydra.launcher.num_at_once=1", "optimizer.learning_rate=1e-3,2e-3",
            "mesh.data=1,3")  # fmt: skip
    told = meshloom(*line, cwd=tmp_path, **cluster.environment)
    rows = [json.loads(text) for text in (tmp_path / "sweep/sweep.jsonl").read_text().splitlines()]
    assert [row["status"] for row in sorted(rows, key=lambda row: row["index"])] == ["done", "refused"] * 2, told
    done = [row for row in rows if row["status"] == "done"]
    assert all(row["figures"]["last_step"] == 4 for row in done)
    assert all((tmp_path / "sweep" / row["directory"] / "logs/process-1.log").exists() for row in done)
    assert len({row["figures"]["final_loss"] for row in done}) == 2
    again = meshloom(*line, cwd=tmp_path, **cluster.environment)
    assert "all 4 points of this sweep are there" in again.stdout


@pytest.mark.ci
def test_a_sweep_finds_the_jobs_that_it_left_when_it_died(cluster, tmp_path):
    (tmp_path / "program.py").write_text(f"{PROGRAM}\nwhile not os.path.exists('go'): time.sleep(0.3)\nsys.exit(3)")
    line = (*SWEEP, f"launch.program='{sys.executable} {tmp_path}/program.py'", "launch.environment={MINE: 7}",
            "seed=1,2")  # fmt: skip
    environment = os.environ | cluster.environment
    first = start(["-m", "meshloom", *line], cwd=tmp_path, env=environment, stderr=subprocess.STDOUT)
    _until(lambda: (tmp_path / "said").exists() and len(said(tmp_path)) == 4)
    first.kill()
    first.communicate()
    threading.Timer(30, (tmp_path / "go").touch).start()  # the second has looked for jobs by then, or submitted its own
    meshloom(*line, cwd=tmp_path, **cluster.environment)
    rows = [json.loads(text) for text in (tmp_path / "sweep/sweep.jsonl").read_text().splitlines()]
    assert [(row["status"], row["exit_code"]) for row in rows] == [("does_not_fit", 3)] * 2
    assert len(said(tmp_path)) == 4  # no point was submitted twice


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "seed=1,2"), "error: launch: hydra/launcher=meshloom_slurm submits what launch=slurm says"),
        pytest.param(
            ("compile", "launch=slurm", "seed=1,2"), "error: hydra/launcher: meshloom_slurm runs sweeps of train",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            ("train", "launch=slurm", "seed=1,2", "hydra.launcher.num_at_once=0"),
            "error: hydra.launcher.num_at_once: 0 is not a number of jobs", marks=pytest.mark.ci,
        ),
    ],
)  # fmt: skip
def test_a_sweep_that_slurm_cannot_run_is_refused_at_once(words, message, tmp_path):
    told = run_in_process(*words, "-m", "hydra/launcher=meshloom_slurm", cwd=tmp_path)
    assert told.returncode == 2
    assert told.stderr.count("error: ") == 1
    assert message in told.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_a_time_limit_asks_a_run_to_save_and_queues_it_again(cluster, submit, tmp_path):
    code = """
def stop(*_):
    with open("said", "a") as file:
        print(start, process, "saved", file=file)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
time.sleep(0 if start else 100)
"""
    job = submit("launch.time_limit='1'", "launch.grace_seconds=30", "launch.max_restarts=0", code=code)
    cluster.wait(job, "COMPLETED", "FAILED", "TIMEOUT")
    assert cluster.state(job) == "COMPLETED"
    assert said(tmp_path) == ["0 0 7", "0 0 saved", "0 1 7", "0 1 saved", "1 0 7", "1 1 7"]
    assert not (tmp_path / "run/logs/failures").exists()
