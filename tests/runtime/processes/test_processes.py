"""What several processes of a run have to agree on, without starting any: see test_process_starts.py for those."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from conftest import LINEAR_STACK, plan_of, spec_of
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError, Problem
from meshloom.compiler.declare.run_spec import DistributedSpec, RunSpec
from meshloom.compiler.xla.programs import Programs, build, lower
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.cli.main import run
from meshloom.runtime.compile.run_programs import compile_together
from meshloom.runtime.data import open_data
from meshloom.runtime.processes.agreement import (
    OF_ONE_PROCESS,
    check_same_data,
    check_same_declaration,
    check_same_program,
    differences,
    environment_of_program,
)
from meshloom.runtime.processes.distributed import Disagreement, Processes, current, together
from meshloom.runtime.processes.initialize import plan_start
from meshloom.runtime.processes.process_log import process_log
from meshloom.runtime.start.state import find_for_run, found_by_first, seen
from meshloom.runtime.train.feed import local_rows, rows_held, to_devices
from support.loops import NoData
from support.several import free_port, in_both, joined, open_mpi, slurm


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
    assert _start(slurm(2, 1)[1], "distributed=alone") is None


def test_a_cluster_is_left_to_jax_and_keys_win():
    of_slurm, of_open_mpi = slurm(2, 1)[1], open_mpi(2, 1)[1]
    assert _start(of_slurm) == {"cluster_detection_method": "slurm"}
    assert _start(of_open_mpi) == {"cluster_detection_method": "ompi"}
    assert _start(of_slurm | of_open_mpi) == {"cluster_detection_method": "ompi"}  # mpirun inside a SLURM job
    gpus = _start(of_slurm, "distributed.local_device_ids=[0,1]", "distributed.coordinator_address=h:1")
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
        (slurm(4, 1)[0] | {"SLURM_STEP_NUM_TASKS": "1"}, "SLURM gave this job 4 tasks"),  # a shell of salloc
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


def test_a_variable_of_a_launcher_that_is_set_to_nothing_is_not_set():
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JAX_COORDINATOR_ADDRESS"):
        assert _start({name: "", "SLURM_PROCID": ""}) is None
    assert _start(slurm(2, 1)[1] | {"OMPI_COMM_WORLD_SIZE": ""}) == {"cluster_detection_method": "slurm"}


def test_a_variable_of_a_launcher_that_is_no_number_is_named():
    wrong = {"SLURM_NTASKS": "x", "OMPI_COMM_WORLD_RANK": "-1", "SLURM_STEP_NUM_TASKS": "2.0"}
    with pytest.raises(ConfigError) as raised:
        _start(slurm(2, 1)[1] | wrong)
    assert {problem.where for problem in raised.value.problems} == set(wrong)
    assert _start(wrong, "distributed=alone") is None


def test_a_port_that_there_is_not_is_an_error():
    keys = ("distributed.num_processes=2", "distributed.process_id=0")
    for port in ("99999", "0", "", "x"):
        with pytest.raises(ConfigError, match="coordinator_address"):
            _start({}, f"distributed.coordinator_address='h:{port}'", *keys)


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
    """A new key is compared, unless it is said to be of one process."""
    assert set(OF_ONE_PROCESS) == {"distributed.process_id", "distributed.local_device_ids", "compilation_cache"}
    assert {key.split(".")[0] for key in OF_ONE_PROCESS} <= set(RunSpec.model_fields)
    assert {key.split(".")[1] for key in OF_ONE_PROCESS if "." in key} < set(DistributedSpec.model_fields)


@pytest.fixture
def two_processes() -> Iterator[list[Processes]]:
    with joined() as processes:
        yield processes


def test_processes_hear_each_other(two_processes):
    assert in_both(lambda i: two_processes[i].gather("names", f"I am {i}")) == [["I am 0", "I am 1"]] * 2
    assert in_both(lambda i: two_processes[i].from_first("first", f"I am {i}")) == ["I am 0"] * 2


def test_one_that_does_not_come_is_named(two_processes):
    waiting = [replace(each, timeout_seconds=1) for each in two_processes]
    told = in_both(lambda i: waiting[i].gather("names", "") if i == 0 else None)
    assert str(told[0]).startswith("error: distributed: process 1 did not come to 'names' within 1 s")
    told = in_both(lambda i: waiting[i].from_first("first") if i == 1 else None)
    assert str(told[1]).startswith("error: distributed: process 0 did not come to 'first' within 1 s")


def test_what_is_wrong_in_any_process_is_said_by_all():
    seed, target = Problem("seed", "is not a number", "fix it"), Problem("target", "is unknown", "fix it")

    def fails(*problems: Problem, kind: type[ConfigError] = ConfigError) -> Callable[[], None]:
        def step() -> None:
            raise kind(problems)

        return step

    for steps, expected in (
        ((fails(seed, target), fails(seed)), ("seed", "target (process 0)")),
        ((lambda: None, fails(seed)), ("seed (process 1)",)),
        # Its own mistake explains why a process is not like the others.
        ((fails(target, kind=Disagreement), fails(seed)), ("seed (process 1)",)),
        ((fails(target, kind=Disagreement), fails(target, kind=Disagreement)), ("target",)),
    ):
        with joined() as processes:
            told = in_both(lambda i, p=processes, s=steps: together("step", s[i], processes=p[i]))
        assert [tuple(problem.where for problem in error.problems) for error in told] == [expected] * 2
    with joined() as processes:
        assert in_both(lambda i: together("step", lambda: i, processes=processes[i])) == [0, 1]


def test_another_declaration_or_program_is_found_before_the_first_step(two_processes):
    specs = [spec_of(), spec_of("distributed.process_id=1")]
    assert in_both(lambda i: check_same_declaration(specs[i], two_processes[i])) == [None, None]
    plans = [plan_of(*LINEAR_STACK), plan_of(*LINEAR_STACK, "precision.compute=bfloat16")]
    programs = [lower(plan, plan.mesh.of_devices(jax.devices())) for plan in plans]
    told = in_both(lambda i: check_same_program(programs[i], two_processes[i]))
    assert str(told[0]) == str(told[1])
    assert "error: the lowered train program: " in str(told[0])
    assert "the lowered init program" not in str(told[0])


def test_other_data_are_found_before_the_first_step(two_processes, tmp_path):
    """The same declaration on three hosts: on the last one a single byte of a single file is another."""

    def identity_on(host: str, first: str) -> dict[str, Any]:
        (tmp_path / host).mkdir()
        for number in range(40):
            start = first if number == 7 else "a"
            (tmp_path / host / f"{number}.txt").write_text(start + f" file with the number {number}" * 40)
        paths = f"data.source.paths=[{tmp_path / host}/*.txt]"
        return open_data(spec_of("data=text_files", paths, "evaluation.num_batches=1")).identity

    same, odd = [identity_on("host0", "a"), identity_on("host1", "a")], identity_on("host2", "b")
    assert same[0] == same[1]
    told = in_both(lambda i: check_same_data([same[0], odd][i], two_processes[i]))
    assert str(told[0]) == str(told[1])
    assert re.match(r"error: data.source.content: \w{12} in process 0, \w{12} in process 1\n", str(told[0]))
    assert str(told[0]).count("error: ") == 1


ON_TWO_DEVICES = (*LINEAR_STACK, "target=cpu-2", "model.num_layers=1")


@cache
def _lowered_and_built() -> tuple[jax.sharding.Mesh, Programs, Programs]:
    plan = plan_of(*ON_TWO_DEVICES)
    mesh = plan.mesh.of_devices(jax.devices()[:2])
    lowered = lower(plan, mesh)
    return mesh, lowered, build(lowered)


def _start_of_both(places: Sequence[Path], *, slow_seconds: float = 0, timeout_seconds: int = 60) -> tuple[Any, Any]:
    """Starts two processes, of which process 1 compiles for so many seconds and process 0 for none; returns how their
    programs came to be, and in which order. places: where each keeps its programs."""
    mesh, lowered, built = _lowered_and_built()
    order = list[str]()

    def start(index: int, processes: Processes) -> str:
        def compile_(_: Programs) -> Programs:
            time.sleep(slow_seconds * index)
            order.append(f"compiled in {index}")
            return built

        own = (f"compilation_cache={places[index]}", f"distributed.compile_timeout_seconds={timeout_seconds}")
        how = compile_together(plan_of(*ON_TWO_DEVICES, *own), lowered, mesh, compile_, processes).how
        order.append(f"ready in {index}")
        return how

    with joined() as processes:
        return in_both(lambda i: start(i, processes[i])), order


def test_all_processes_load_or_all_compile_whoever_has_the_programs(tmp_path):
    """On two hosts with disks of their own, the second of which loses what it kept."""
    disks = (tmp_path / "host0", tmp_path / "host1")
    told, order = _start_of_both(disks)
    assert sorted(order[:2]) == ["compiled in 0", "compiled in 1"], told
    told, order = _start_of_both(disks)
    assert all(how.startswith("compiled before: loaded in ") for how in told)
    assert sorted(order) == ["ready in 0", "ready in 1"]
    shutil.rmtree(disks[1])
    told, order = _start_of_both(disks, slow_seconds=0.5)
    assert all(how.startswith("compiled in ") for how in told)
    assert sorted(order[:2]) == ["compiled in 0", "compiled in 1"], "process 0 waits for process 1"
    told, _ = _start_of_both(disks)
    assert all(how.startswith("compiled before") for how in told)


def test_processes_that_share_a_disk_keep_one_copy_of_their_programs(tmp_path):
    _start_of_both((tmp_path, tmp_path))
    assert len(list((tmp_path / "artifacts").iterdir())) == 1
    told, _ = _start_of_both((tmp_path, tmp_path))
    assert all(how.startswith("compiled before") for how in told)


def test_a_process_whose_compile_takes_too_long_is_named(tmp_path):
    told, _ = _start_of_both((tmp_path, tmp_path), slow_seconds=2, timeout_seconds=1)
    problem = str(told[0])
    assert problem.startswith("error: distributed: process 1 did not come to 'compiled programs' within 1 s")
    assert "raise distributed.compile_timeout_seconds" in problem


def test_process_0_finds_the_checkpoint_for_all(two_processes, tmp_path):
    plan, console = plan_of(*ON_TWO_DEVICES), Console(is_quiet=True)
    with Checkpoints(tmp_path, plan.spec) as checkpoints:
        checkpoints.save(2, _lowered_and_built()[2]["init"](), NoData(), num_tokens=0, eval_loss=None)
    places = [tmp_path, tmp_path / "elsewhere"]
    found = in_both(
        lambda i: found_by_first(
            lambda: find_for_run(places[i], plan.spec.checkpoint, plan.abstract, console), two_processes[i]
        )
    )
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
    for name, value in slurm(2, free_port())[1].items():
        monkeypatch.setenv(name, value)
    assert run(["explain", "model=linear_stack"]) == 0
    assert "fsdp=8" in capsys.readouterr().out
    assert current() == Processes()
    assert not jax.distributed.is_initialized()


def test_a_process_alone_waits_for_nobody():
    alone = Processes()
    assert alone.gather("name", "text") == ["text"]
    assert alone.from_first("name", "text") == "text"
