"""Several processes are one run: the same losses, the same checkpoint, one voice, and an odd one is named."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.lib import (
    _jax,  # pyright: ignore[reportPrivateImportUsage]  # what jax.distributed.initialize starts
)
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from conftest import plan_of, spec_of
from helpers import NoData, programs_of, with_plugin
from meshloom.compiler.driver import lower
from meshloom.compiler.problems import ConfigError, Problem
from meshloom.compiler.spec import DistributedSpec
from meshloom.runtime.agreement import (
    OF_ONE_PROCESS,
    check_same_declaration,
    check_same_program,
    differences,
    environment_of_program,
)
from meshloom.runtime.checkpoint import Checkpoints
from meshloom.runtime.cli import run
from meshloom.runtime.cluster import plan_start
from meshloom.runtime.data import open_data
from meshloom.runtime.distributed import Processes, current
from meshloom.runtime.process_log import process_log
from meshloom.runtime.rows import local_rows, rows_held, to_devices
from meshloom.runtime.shared_start import found_by_first, seen

NUM_STEPS = 40
RUN = ("model=linear_stack", "model.embed_dim=32", "model.num_layers=2", "sequence_length=16", "global_batch_size=16",
       f"num_steps={NUM_STEPS}", "data=synthetic", "precision=float32", "evaluation.num_batches=2", "logging=quiet",
       "sharding=fsdp_tensor", "hydra.run.dir=run")  # fmt: skip
TIMEOUTS = ("distributed.initialization_timeout_seconds=60", "distributed.heartbeat_timeout_seconds=10",
            "distributed.shutdown_timeout_seconds=30")  # fmt: skip
# Rows of the batch go over fsdp first: with data across processes, those of a process are no neighbours.
INTERLEAVED = ("mesh.data=2", "sharding.activations=[{logical:[batch],mesh:[fsdp,data]},"
               "{logical:[vocab,mlp],mesh:[tensor]},{logical:[length,embed],mesh:[]}]")  # fmt: skip


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _slurm(num_processes: int, port: int) -> list[dict[str, str]]:
    """The variables of `srun`, for each of its processes."""
    same = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
    return [same | {"SLURM_NTASKS": str(num_processes), "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}
            for i in range(num_processes)]  # fmt: skip


def _open_mpi(num_processes: int, port: int) -> list[dict[str, str]]:
    """The variables of Open MPI's `mpirun`, for each of its processes."""
    same = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "JAX_COORDINATOR_PORT": str(port)}
    return [same | {"OMPI_COMM_WORLD_SIZE": str(num_processes), "OMPI_COMM_WORLD_RANK": str(i),
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(i)} for i in range(num_processes)]  # fmt: skip


def _keys(num_processes: int, port: int) -> list[tuple[str, ...]]:
    """Overrides that say it, for each process."""
    same = (f"distributed.coordinator_address=127.0.0.1:{port}", f"distributed.num_processes={num_processes}")
    return [(*same, f"distributed.process_id={i}") for i in range(num_processes)]


class Started:
    """Processes of `meshloom train` with these overrides each; `end` gives exit code, stdout and stderr of each.

    code: for a process that runs this Python instead of the command.
    """

    def __init__(
        self,
        folder: Path,
        *lines: tuple[str, ...],
        env: list[dict[str, str]] | None = None,
        code: dict[int, str] | None = None,
    ):
        self.processes = []
        for index, line in enumerate(lines):
            program = ["-c", code[index]] if code and index in code else ["-m", "meshloom"]
            command = [sys.executable, *program, "train", *RUN, *TIMEOUTS, *line]
            environment = os.environ | (env[index] if env else {})
            pipe = subprocess.PIPE
            self.processes.append(
                subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment)
            )

    def end(self) -> list[tuple[int, str, str]]:
        try:
            said = [process.communicate(timeout=300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(p.returncode, _without_gloo(out), err) for p, (out, err) in zip(self.processes, said, strict=True)]


GLOO_SAYS = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"


def _without_gloo(out: str) -> str:
    """What the collectives of simulated devices print by themselves is not ours. Its threads write into each other's
    lines, so a line is theirs if all of its words are."""
    words = set(_words(GLOO_SAYS))
    return "".join(line for line in out.splitlines(keepends=True) if not words.issuperset(_words(line)))


def _words(line: str) -> list[str]:
    return re.findall(r"[^\s\d]+", line)


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _assert_same_losses(one: list[dict], other: list[dict]) -> None:
    """To 6 digits: sums over devices have another order."""
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[key] for m in one], [m[key] for m in other], rtol=2e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A run of one process with eight devices, which nothing disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    [(code, _, err)] = Started(folder, ()).end()
    assert (code, err) == (0, "")
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, list[tuple[int, str, str]]]:
    """Two processes of four devices under `srun`, of which the second got a SIGTERM on the way."""
    folder = tmp_path_factory.mktemp("stopped")
    # JAX looks for a signal once a second: evaluations keep a fast machine from being done before.
    line = (*INTERLEAVED, "evaluation.every_num_steps=1", "evaluation.num_batches=10")
    started = Started(folder, line, line, env=_slurm(2, _free_port()))
    metrics, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    started.processes[1].send_signal(signal.SIGTERM)
    return folder / "run", started.end()


@pytest.mark.slow
def test_two_processes_are_one_run_and_stop_after_the_same_step(alone, stopped):
    run_dir, ((code_0, out_0, err_0), (code_1, out_1, err_1)) = stopped
    assert (code_0, code_1) == (128 + signal.SIGTERM,) * 2, err_0 + err_1
    metrics = _metrics(run_dir)
    assert 0 < len(metrics) < NUM_STEPS
    _assert_same_losses(metrics, _metrics(alone)[: len(metrics)])
    assert f"stopped: by SIGTERM after step {len(metrics)} of {NUM_STEPS}" in out_0
    assert "distributed." not in out_0.split("continue: ")[1]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(len(metrics))]
    written_by = {path.name for path in (run_dir / "checkpoints" / str(len(metrics)) / "state").glob("ocdbt.*")}
    assert written_by == {"ocdbt.process_0", "ocdbt.process_1"}
    assert out_1 == ""
    assert [line for line in err_1.splitlines() if "SIGTERM caught" not in line] == []  # said by JAX
    for index in (0, 1):
        log = (run_dir / "logs" / f"process-{index}.log").read_text()
        assert f"process {index} of 2 on {socket.gethostname()}" in log
        assert f"stopped: by SIGTERM after step {len(metrics)} of {NUM_STEPS}" in log


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_run_goes_on_in_another_number_of_processes(alone, stopped, tmp_path, num_processes):
    shutil.copytree(stopped[0], tmp_path / "run")
    done_before = len(_metrics(tmp_path / "run"))
    # In four processes of two devices, four along tensor: each row of a batch is held by two processes.
    lines = [(*keys, "mesh.tensor=4") for keys in _keys(4, _free_port())] if num_processes == 4 else [()]
    ended = Started(tmp_path, *lines).end()
    assert [code for code, _, _ in ended] == [0] * num_processes, ended
    assert f"continuing after step {done_before}" in ended[0][1]
    assert [out for _, out, _ in ended[1:]] == [""] * (num_processes - 1)
    metrics, undisturbed = _metrics(tmp_path / "run"), _metrics(alone)
    assert [m["step"] for m in metrics] == list(range(1, NUM_STEPS + 1))
    _assert_same_losses(metrics, undisturbed)
    assert metrics[-1]["eval_loss"] == pytest.approx(undisturbed[-1]["eval_loss"], rel=2e-6)


@pytest.mark.slow
def test_an_odd_process_is_named_by_all(tmp_path):
    odd = ("seed=1", "optimizer.learning_rate=1e-2", "hydra.run.dir=elsewhere")
    ended = Started(tmp_path, (), odd, env=_open_mpi(2, _free_port())).end()
    assert [code for code, _, _ in ended] == [2, 2], ended
    told = ended[0][2]
    assert "error: seed: 0 in process 0, 1 in process 1" in told
    assert "error: optimizer.learning_rate: 0.003 in process 0, 0.01 in process 1" in told
    assert told.count("error: ") == 2
    assert ended[1][1:] == ("", "")
    for index in (0, 1):
        assert told.strip() in (tmp_path / "run" / "logs" / f"process-{index}.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_mistake_is_said_once_and_leaves_nothing(tmp_path):
    lines = [(*keys, "model.layrs=3", "target=cpu-7") for keys in _keys(2, _free_port())]
    (code_0, _, err_0), rest = Started(tmp_path, *lines).end()
    assert code_0 == 2
    assert err_0.startswith("error: model.layrs: there is no such key\n")
    assert "error: target: 7 simulated devices do not divide over 2 processes\n  fix: use cpu-6 or cpu-8" in err_0
    assert rest == (2, "", "")
    assert list(tmp_path.iterdir()) == []


FAILS_IN_STEP_6 = """
import sys
from meshloom.runtime import cli, loop
calls, to_devices = [], loop.to_devices
def fails(*args):
    calls.append(args)
    if len(calls) == 6:
        raise OSError("the disk is gone")
    return to_devices(*args)
loop.to_devices = fails
cli.main()
"""


@pytest.mark.slow
def test_a_crash_in_one_process_ends_all_and_is_in_its_log(tmp_path):
    """The second process fails while the first waits for it in a collective."""
    first, second = _keys(2, _free_port())
    ended = Started(tmp_path, first, second, code={1: FAILS_IN_STEP_6}).end()
    (code_0, _, err_0), (code_1, out_1, err_1) = ended
    assert (code_1, out_1) == (1, "")
    assert err_1 == "process 1: OSError: the disk is gone (run/logs/process-1.log)\n"
    assert "Traceback" in (tmp_path / "run" / "logs" / "process-1.log").read_text()
    # The first one's collective fails at once, or JAX ends it by SIGABRT when the second is not heard of any more.
    where_it_was = {1: "Traceback", -signal.SIGABRT: "Fatal Python error: Aborted"}[code_0]
    assert where_it_was in (tmp_path / "run" / "logs" / "process-0.log").read_text(), err_0
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_what_plugins_say_is_in_each_log_and_one_line_on_the_terminal(tmp_path):
    plugin = with_plugin(tmp_path, "xla_cuda13", "def initialize():\n    raise RuntimeError('no such driver')\n")
    local = ("target=local", "sharding=ddp", "num_steps=2", "checkpoint=disabled")
    processes = Started(tmp_path, *((*local, *keys) for keys in _keys(2, _free_port())), env=[plugin] * 2)
    (code, _, said), (_, _, nothing) = processes.end()
    assert (code, nothing) == (0, "")
    assert said.startswith("warning: JAX's CUDA plugin ")
    assert said.count("\n") == 1
    for index in range(2):
        assert "no such driver" in (tmp_path / f"run/logs/process-{index}.log").read_text()


def test_rows_of_all_processes_are_the_batch_and_are_read_alone():
    """Devices 0-3 and 4-7 as two processes, in a layout that interleaves their rows."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    for axes, expected in {
        ("data", "fsdp"): (range(8), range(8, 16)),
        ("fsdp", "data"): ([*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]),
        ("tensor",): (range(16), range(16)),
        (): (range(16), range(16)),
    }.items():
        sharding = NamedSharding(mesh, PartitionSpec(axes or None))
        held = tuple(rows_held(sharding, 16, part) for part in (devices[:4], devices[4:]))
        assert held == tuple(map(tuple, expected))


def test_rows_of_a_batch_are_those_of_the_whole_one():
    batches = open_data(spec_of())["train"]
    rows = (0, 1, 5, 14)
    whole, part = iter(batches), iter(batches.of_rows(rows))
    for _ in range(3):
        np.testing.assert_array_equal(next(part)["targets"], next(whole)["targets"][list(rows)])
    assert part.get_state() == whole.get_state()


def test_a_batch_is_on_the_devices_what_it_was_on_the_host(tokens):
    plan = plan_of("sharding=fsdp_tensor")
    mesh = plan.mesh.of_devices(jax.devices())
    sharding = NamedSharding(mesh, PartitionSpec(("tensor", "fsdp")))
    batch = {"inputs": jax.ShapeDtypeStruct((16, 16), np.int32, sharding=sharding)}
    placed = to_devices(batch, local_rows(batch), {"inputs": tokens[0, :, :-1]})
    np.testing.assert_array_equal(placed["inputs"], tokens[0, :, :-1])
    assert placed["inputs"].sharding == sharding


def _start(environment: dict[str, str], *overrides: str):
    spec = spec_of(*overrides)
    return plan_start(spec.distributed, spec.target, environment)


def test_a_plain_process_is_alone():
    for environment in ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}):
        assert _start(environment) is None
    assert _start(_slurm(2, 1)[1], "distributed=alone") is None


def test_a_cluster_is_left_to_jax_and_keys_win():
    slurm, open_mpi = _slurm(2, 1)[1], _open_mpi(2, 1)[1]
    assert _start(slurm) == {"cluster_detection_method": "slurm"}
    assert _start(open_mpi) == {"cluster_detection_method": "ompi"}
    assert _start(slurm | open_mpi) == {"cluster_detection_method": "ompi"}  # mpirun inside a SLURM job
    gpus = _start(slurm, "distributed.local_device_ids=[0,1]", "distributed.coordinator_address=h:1")
    assert gpus == {
        "cluster_detection_method": "slurm",
        "local_device_ids": [0, 1],
        "coordinator_address": "h:1",
    }
    keys = ("distributed.coordinator_address=h:1", "distributed.num_processes=3", "distributed.process_id=2")
    assert _start({}, *keys) == {
        "cluster_detection_method": "deactivate",
        "coordinator_address": "h:1",
        "num_processes": 3,
        "process_id": 2,
    }
    mpich = {"PMI_SIZE": "2", "PMI_RANK": "1"}  # JAX does not know it: the address is all that is missing
    assert _start(mpich, "distributed.coordinator_address=h:1") == {
        "cluster_detection_method": "deactivate",
        "coordinator_address": "h:1",
        "num_processes": 2,
        "process_id": 1,
    }


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM gave this job 4 tasks"),  # sbatch, without srun
        (_slurm(4, 1)[0] | {"SLURM_STEP_NUM_TASKS": "1"}, "SLURM gave this job 4 tasks"),  # a shell of salloc
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "2 processes were started"),  # Open MPI 5
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "2 processes were started"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "given without num_processes and process_id"),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}, "pod 1 of a Kubernetes Job"),
    ],
)
def test_several_processes_that_could_not_meet_are_an_error(environment, told):
    with pytest.raises(ConfigError, match=told) as raised:
        _start(environment)
    assert all("distributed" in problem.fix for problem in raised.value.problems)


def test_differences_name_the_rarest_first():
    same = environment_of_program()
    assert {"python", "jax", "jaxlib", "meshloom", "flax", "optax", "orbax-checkpoint", "grain"} <= set(same)
    other = same | {"jax": "0.9.0", "XLA_FLAGS": "--xla_dump_to=x"}
    flags = same["XLA_FLAGS"]
    assert differences([same, same, other, same, same, same], fix="fix") == [
        Problem("jax", f"0.9.0 in process 2, {same['jax']} in the other 5", "fix"),
        Problem("XLA_FLAGS", f"--xla_dump_to=x in process 2, {flags} in the other 5", "fix"),
    ]
    assert differences([{"a": "1"}, {"a": "1", "b": "2"}], fix="") == [
        Problem("b", "not set in process 0, 2 in process 1", "")
    ]
    assert differences([same, same], fix="") == []


def test_only_what_is_of_one_process_may_differ():
    """A new key of the group is compared, unless it is said to be of one process."""
    assert {"distributed": {"process_id", "local_device_ids"}} == OF_ONE_PROCESS
    assert OF_ONE_PROCESS["distributed"] < set(DistributedSpec.model_fields)


@pytest.fixture
def two_processes() -> Iterator[list[Processes]]:
    """What two processes share before they have devices: a real coordination service, here with both clients."""
    port = _free_port()
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 2, heartbeat_timeout=300, shutdown_timeout=60)
    clients = [_jax.get_distributed_runtime_client(f"127.0.0.1:{port}", i, init_timeout=30) for i in (0, 1)]
    _in_both(lambda i: clients[i].connect())
    yield [Processes(i, 2, 10, client) for i, client in enumerate(clients)]
    _in_both(lambda i: clients[i].shutdown())
    service.shutdown()


def _in_both(call: Callable[[int], Any]) -> list[Any]:
    """`call(0)` and `call(1)` at the same time: result or error of each."""

    def caught(index: int) -> Any:
        try:
            return call(index)
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(caught, (0, 1)))


def test_processes_hear_each_other(two_processes):
    assert _in_both(lambda i: two_processes[i].gather("names", f"I am {i}")) == [["I am 0", "I am 1"]] * 2
    assert _in_both(lambda i: two_processes[i].from_first("first", f"I am {i}")) == ["I am 0"] * 2


def test_one_that_does_not_come_is_named(two_processes):
    waiting = [replace(each, timeout_seconds=1) for each in two_processes]
    told = _in_both(lambda i: waiting[i].gather("names", "") if i == 0 else None)
    assert str(told[0]).startswith("error: distributed: process 1 did not come to 'names' within 1 s")
    told = _in_both(lambda i: waiting[i].from_first("first") if i == 1 else None)
    assert str(told[1]).startswith("error: distributed: process 0 did not come to 'first' within 1 s")


def test_another_declaration_or_program_is_found_before_the_first_step(two_processes):
    specs = [spec_of(), spec_of("distributed.process_id=1")]
    assert _in_both(lambda i: check_same_declaration(specs[i], two_processes[i])) == [None, None]
    plans = [plan_of(), plan_of("precision.compute=bfloat16")]
    programs = [lower(plan, plan.mesh.of_devices(jax.devices())) for plan in plans]
    told = _in_both(lambda i: check_same_program(programs[i], two_processes[i]))
    assert str(told[0]) == str(told[1])
    assert "error: the lowered train program: " in str(told[0])
    assert "the lowered init program" not in str(told[0])


def test_process_0_finds_the_checkpoint_for_all(two_processes, tmp_path):
    plan, console = plan_of("data=synthetic"), Console(quiet=True)
    with Checkpoints(tmp_path, plan.spec) as checkpoints:
        checkpoints.save(2, programs_of(plan).init(), NoData(), eval_loss=None)
    places = [tmp_path, tmp_path / "elsewhere"]
    found = _in_both(lambda i: found_by_first(places[i], plan, console, two_processes[i]))
    assert [(start.path, start.step, start.is_own) for start in found] == [
        (tmp_path / "checkpoints" / "2", 2, True)
    ] * 2
    assert seen(found[1], two_processes[1]) is found[1]
    with pytest.raises(ConfigError, match="process 1 does not see"):
        seen(replace(found[1], path=tmp_path / "gone"), two_processes[1])


def test_each_process_has_a_log_and_the_first_one_warns_on_the_terminal_too(tmp_path, capsys):
    for processes in (Processes(0, 2), Processes(1, 2)):
        with process_log(tmp_path, processes):
            logging.getLogger("meshloom").info("step 1")
            logging.getLogger("meshloom").error("said on the terminal by itself")
            logging.getLogger("a.library").warning("deprecated")
        log = (tmp_path / "logs" / f"process-{processes.index}.log").read_text()
        lines = [line.split(" ", 2)[2] for line in log.splitlines()]
        assert lines[0].startswith("INFO meshloom")
        assert lines[1:] == ["INFO step 1", "ERROR said on the terminal by itself", "WARNING deprecated"]
    assert capsys.readouterr().err == "deprecated\n"


def test_explaining_joins_nobody(monkeypatch, capsys):
    for name, value in _slurm(2, _free_port())[1].items():
        monkeypatch.setenv(name, value)
    assert run(["explain", "model=linear_stack"]) == 0
    assert "fsdp=8" in capsys.readouterr().out
    assert current() == Processes()
    assert not jax.distributed.is_initialized()


def test_a_process_alone_waits_for_nobody():
    alone = Processes()
    assert alone.gather("name", "text") == ["text"]
    assert alone.from_first("name", "text") == "text"
