"""Several real processes are one run: the same losses, the same checkpoint, one voice, and an odd one is named."""

import json
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from meshloom.compiler.core.trees import leaves_by_path
from meshloom.runtime.checkpoint.adapters import find_saved, load_parameters
from meshloom.runtime.core.failures import HUNG, LOST
from support.commands import run_in_process, with_plugin
from support.programs import plan_as_declared
from support.several import Started, free_port, keys, open_mpi, slurm

NUM_STEPS = 40
RUN = ("model=linear_stack", "model.embed_dim=32", "model.num_layers=2", "sequence_length=16", "global_batch_size=16",
       f"num_steps={NUM_STEPS}", "data=synthetic", "precision=float32", "evaluation.num_batches=2", "logging=quiet",
       "sharding=fsdp_tensor", "hydra.run.dir=run")  # fmt: skip
# Rows of the batch go over fsdp first: with data across processes, those of a process are no neighbours.
INTERLEAVED = ("mesh.data=2", "sharding.activations=[{logical:[batch],mesh:[fsdp,data]},"
               "{logical:[vocab,mlp],mesh:[tensor]},{logical:[length,embed],mesh:[]}]")  # fmt: skip
NO_PLUGIN = "def initialize():\n    raise RuntimeError('no such driver')\n"


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _assert_same_losses(one: list[dict], other: list[dict]) -> None:
    """Compares 6 digits: sums over devices have another order."""
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[key] for m in one], [m[key] for m in other], rtol=2e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run of one process with eight devices, which nothing disturbed; it saved after half of its steps, too."""
    folder = tmp_path_factory.mktemp("alone")
    done = run_in_process(
        "train", *RUN, f"checkpoint.every_num_steps={NUM_STEPS // 2}", "compilation_cache=null", cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "run"


def _saved_parameters(run_dir: Path) -> dict[str, Any]:
    """The parameters of the last checkpoint, by path."""
    here = SingleDeviceSharding(jax.devices()[0])
    shapes = plan_as_declared(*RUN[:-1]).abstract["params"]
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    return leaves_by_path(load_parameters(find_saved(str(run_dir), "checkpoint.weights_from"), placed))


def _half_done(alone: Path, folder: Path) -> Path:
    """The same run as a kill after half of its steps leaves it."""
    shutil.copytree(alone, folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / str(NUM_STEPS))
    return folder / "run"


def _assert_whole_and_as(alone: Path, run_dir: Path) -> None:
    metrics, undisturbed = _metrics(run_dir), _metrics(alone)
    assert [m["step"] for m in metrics] == list(range(1, NUM_STEPS + 1))
    _assert_same_losses(metrics, undisturbed)
    assert metrics[-1]["eval_loss"] == pytest.approx(undisturbed[-1]["eval_loss"], rel=2e-6)


@pytest.mark.ci
def test_two_processes_are_one_run_stop_after_the_same_step_and_go_on_in_one(alone, tmp_path):
    """Four devices each, under `srun`; the second process gets a SIGTERM on the way."""
    # JAX looks for a signal once a second: evaluations keep a fast machine from being done before.
    line = (*RUN, *INTERLEAVED, "evaluation.every_num_steps=1", "evaluation.num_batches=10")
    started = Started(tmp_path, line, line, env=slurm(2, free_port()), is_forked=False)
    run_dir = tmp_path / "run"
    lines, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
    while not (lines.exists() and lines.read_text().count("\n") > 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    started.processes[1].send_signal(signal.SIGTERM)
    (code_0, out_0, err_0), (code_1, out_1, err_1) = started.end()
    assert (code_0, code_1) == (128 + signal.SIGTERM,) * 2, err_0 + err_1
    metrics = _metrics(run_dir)
    num_done = len(metrics)
    assert 0 < num_done < NUM_STEPS
    _assert_same_losses(metrics, _metrics(alone)[:num_done])
    assert f"stopped: by SIGTERM after step {num_done} of {NUM_STEPS}" in out_0
    assert "distributed." not in out_0.split("continue: ")[1]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(num_done)]
    written_by = {path.name for path in (run_dir / "checkpoints" / str(num_done) / "state").glob("ocdbt.*")}
    assert written_by == {"ocdbt.process_0", "ocdbt.process_1"}
    assert out_1 == ""
    assert [line for line in err_1.splitlines() if "SIGTERM caught" not in line] == []  # said by JAX
    for index in (0, 1):
        log = (run_dir / "logs" / f"process-{index}.log").read_text()
        assert f"process {index} of 2 on {socket.gethostname()}" in log
        assert f"stopped: by SIGTERM after step {num_done} of {NUM_STEPS}" in log

    ended = run_in_process("train", *RUN, "compilation_cache=null", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert f"continuing after step {num_done}" in ended.stdout
    _assert_whole_and_as(alone, run_dir)


@pytest.mark.ci
def test_a_run_goes_on_in_two_processes_and_what_plugins_say_is_in_each_log(alone, tmp_path):
    """One device each, along tensor: each row of a batch is held by both."""
    plugin = with_plugin(tmp_path, "xla_cuda13", NO_PLUGIN)
    run_dir = _half_done(alone, tmp_path)
    local = (*RUN, "target=local", "mesh.tensor=2")
    ended = Started(tmp_path, *((*local, *each) for each in keys(2, free_port())), env=[plugin] * 2).end()
    (code_0, out, said), (code_1, *nothing) = ended
    assert (code_0, code_1, nothing) == (0, 0, ["", ""]), ended
    assert f"continuing after step {NUM_STEPS // 2}" in out
    assert said.startswith("warning: JAX's CUDA plugin ")
    assert said.count("\n") == 1
    for index in range(2):
        assert "no such driver" in (run_dir / f"logs/process-{index}.log").read_text()
    _assert_whole_and_as(alone, run_dir)


@pytest.mark.ci
def test_a_run_goes_on_over_stages_of_which_each_process_has_one(alone, tmp_path):
    """Results of layers go from one process to the other, and their gradients back; so do the parts of layers that each
    stage stores, as the first one runs both layers."""
    run_dir = _half_done(alone, tmp_path)
    line = (*RUN, "mesh.stage=2", "mesh.tensor=2", "num_microbatches=4", "pipeline.layers=[2,0]")
    ended = Started(tmp_path, *((*line, *each) for each in keys(2, free_port()))).end()
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert f"continuing after step {NUM_STEPS // 2}" in ended[0][1]
    _assert_whole_and_as(alone, run_dir)
    saved = {path.name for path in (run_dir / "checkpoints" / str(NUM_STEPS) / "state").glob("ocdbt.*")}
    assert saved == {"ocdbt.process_0", "ocdbt.process_1"}
    ours, expected = _saved_parameters(run_dir), _saved_parameters(alone)
    for path, parameter in expected.items():
        np.testing.assert_allclose(ours[path], parameter, atol=2e-6 * np.abs(parameter).max(), err_msg=path)


@pytest.mark.release
def test_a_run_goes_on_in_four_processes(alone, tmp_path):
    """Two devices each, four along tensor: each row of a batch is held by two processes."""
    run_dir = _half_done(alone, tmp_path)
    ended = Started(tmp_path, *((*RUN, *each, "mesh.tensor=4") for each in keys(4, free_port()))).end()
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert f"continuing after step {NUM_STEPS // 2}" in ended[0][1]
    assert [out for _, out, _ in ended[1:]] == [""] * 3
    _assert_whole_and_as(alone, run_dir)


@pytest.mark.ci
def test_an_odd_process_is_named_by_all(tmp_path):
    odd = ("seed=1", "optimizer.learning_rate=1e-2", "hydra.run.dir=elsewhere")
    ended = Started(tmp_path, RUN, (*RUN, *odd), env=open_mpi(2, free_port())).end()
    assert [code for code, _, _ in ended] == [2, 2], ended
    told = ended[0][2]
    assert "error: seed: 0 in process 0, 1 in process 1" in told
    assert "error: optimizer.learning_rate: 0.003 in process 0, 0.01 in process 1" in told
    assert told.count("error: ") == 2
    assert ended[1][1:] == ("", "")
    for index in (0, 1):
        assert told.strip() in (tmp_path / "run" / "logs" / f"process-{index}.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.release
def test_a_process_with_other_data_is_named_by_all(tmp_path):
    """The same declaration on two hosts, whose files differ."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for host, text in zip(hosts, ("to be or not to be ", "to be or not to bee "), strict=True):
        (host / "corpus").mkdir(parents=True)
        for number in range(40):
            (host / "corpus" / f"{number}.txt").write_text(text * 100)
    line = (*RUN, "data=text_files", "data.source.paths=[corpus/*.txt]", f"hydra.run.dir={tmp_path}/run")
    ended = Started(hosts, *((*line, *each) for each in keys(2, free_port()))).end()
    assert [code for code, _, _ in ended] == [2, 2], ended
    told = ended[0][2]
    assert "error: data.source.content: " in told
    assert " in process 0, " in told
    assert ended[1][1:] == ("", "")
    for index in (0, 1):
        assert told.strip() in (tmp_path / "run" / "logs" / f"process-{index}.log").read_text()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.release
def test_a_mistake_is_said_once_and_leaves_nothing(tmp_path):
    lines = [(*RUN, *each, "model.layrs=3", "target=cpu-7") for each in keys(2, free_port())]
    (code_0, _, err_0), rest = Started(tmp_path, *lines).end()
    assert code_0 == 2
    assert err_0.startswith("error: model.layrs: there is no such key\n")
    assert "error: target: 7 simulated devices do not divide over 2 processes\n  fix: use cpu-6 or cpu-8" in err_0
    assert rest == (2, "", "")
    assert list(tmp_path.iterdir()) == []


IN_STEP_6 = """
import sys, time
from meshloom.runtime.cli import main as cli
from meshloom.runtime.train import feed
calls, to_devices = [], feed.to_devices
def in_step_6(*args):
    calls.append(args)
    if len(calls) == 6:
        %s
    return to_devices(*args)
feed.to_devices = in_step_6
cli.main()
"""
FAILS_IN_STEP_6 = IN_STEP_6 % 'raise OSError("the disk is gone")'
COMPILES_LATE = """
import time
from meshloom.runtime.compile import run_programs
build = run_programs.build
def late(lowered):
    time.sleep(35)
    return build(lowered)
run_programs.build = late
"""


@pytest.mark.release
def test_a_late_compile_is_waited_for_and_a_crash_in_one_process_ends_all(tmp_path):
    """Gloo gives up after 30 s, but the processes meet first: the second one reaches step 6, and fails there while the
    first waits for it in a collective."""
    line = (*RUN, "target=cpu-4")
    first, second = ((*line, *each) for each in keys(2, free_port()))
    ended = Started(tmp_path, first, second, code={1: COMPILES_LATE + FAILS_IN_STEP_6}).end()
    (code_0, _, err_0), (code_1, out_1, err_1) = ended
    assert (code_1, out_1) == (1, ""), ended
    assert err_1 == "process 1: OSError: the disk is gone (run/logs/process-1.log)\n"
    assert err_0.startswith("process 0: waiting for process 1 at 'compiled programs', at most 3600 s\n")
    assert "Traceback" in (tmp_path / "run" / "logs" / "process-1.log").read_text()
    told = f"error: distributed: process 1 on {socket.gethostname()} ended: OSError: the disk is gone\n  fix: see logs/"
    assert (code_0, told in err_0, "Traceback" in err_0) == (LOST, True, False), err_0
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.ci
def test_a_process_that_no_error_reaches_says_why_another_ended(tmp_path):
    """The first sleeps in step 6, until JAX misses the heartbeats of the second and would abort it."""
    line = (*RUN, "target=cpu-4", "distributed.heartbeat_timeout_seconds=5")
    first, second = ((*line, *each) for each in keys(2, free_port()))
    code = {0: IN_STEP_6 % "time.sleep(100)", 1: FAILS_IN_STEP_6}
    (code_0, _, err_0), (code_1, _, _) = Started(tmp_path, first, second, code=code).end()
    told = f"error: distributed: process 1 on {socket.gethostname()} ended: OSError: the disk is gone\n  fix: see logs/"
    assert (code_0, code_1) == (LOST, 1), err_0
    assert err_0.startswith(told)


@pytest.mark.ci
def test_ctrl_c_is_heard_while_no_other_process_comes(tmp_path):
    """JAX waits in C++, for five minutes, and would end the process by an abort."""
    code = """
from meshloom.runtime.cli import main as cli
from meshloom.runtime.processes import distributed
distributed.SECONDS_UNTIL_NOTE = 1
cli.main()
"""
    waiting = Started(tmp_path, (*RUN, *keys(2, free_port())[1]), code={0: code})
    (process,) = waiting.processes
    assert process.stderr
    assert process.stderr.readline().startswith("process 1: waiting for the others at")
    process.send_signal(signal.SIGINT)
    ((exit_code, _, said),) = waiting.end()
    assert (exit_code, said) == (130, "\ninterrupted while waiting for the other processes\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_process_that_stands_still_is_named_and_the_run_ends_to_be_started_again(tmp_path):
    """SIGSTOP: it lives, and heartbeats are missed long after the watchdog has noticed."""
    watchdog = ("watchdog.min_seconds=3", "watchdog.abort=true", "distributed.heartbeat_timeout_seconds=100")
    line = (*RUN, *watchdog, "num_steps=100000")
    started = Started(tmp_path, *((*line, *each) for each in keys(2, free_port())))
    lines, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while not (lines.exists() and lines.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started.processes[1].send_signal(signal.SIGSTOP)
    code = started.processes[0].wait(timeout=100)
    started.processes[1].kill()
    (_, out, _), _ = started.end()
    assert code == HUNG
    assert f"process 1 on {socket.gethostname()} does not answer" in out
    assert "the processes end, to be started again" in out
    assert "_finish" in (tmp_path / "run" / "logs" / "process-0.log").read_text()
