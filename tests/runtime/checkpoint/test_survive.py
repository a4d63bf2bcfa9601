"""Runs survive kill -9, a full disk, NaN, a damaged cache of programs. Processes that are killed are real ones."""

import fcntl
import json
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from conftest import spec_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.runtime.checkpoint.find import EXPECTED
from meshloom.runtime.core.failures import NONFINITE, STORAGE
from meshloom.runtime.core.files import FILE, damage_in
from meshloom.runtime.rundir.folders import CHECKPOINTS
from meshloom.runtime.train.loop import NonFinite, SkipCounter
from meshloom.runtime.train.metrics import NOTHING, Metrics
from support.commands import meshloom, run_in_process
from support.forked import Process, start

QUICK = (
    "model=linear_stack", "model.embed_dim=32", "model.num_layers=2", "target=cpu-8", "sharding=fsdp", "data=synthetic",
    "global_batch_size=8", "sequence_length=16", "evaluation.num_batches=1", "schedule.num_warmup_steps=2",
    "logging=quiet",
)  # fmt: skip
SAVING = ("checkpoint.every_num_steps=2",)
NUM_KILLS = 20
HERE = (*QUICK, "compilation_cache=null")  # JAX opens one cache for the life of a process
NAN_STEP = Metrics(1, float("nan"), None, 1.0, 0.1, True, 1.0, 1.0, 0.0, 1, None, 1, 0.0, NOTHING)
KILLED = (*QUICK, "num_steps=300", "checkpoint.every_num_steps=5", "evaluation.every_num_steps=50")


def metrics_of(run_dir: Path) -> list[dict]:
    """Returns the whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def results_of(run_dir: Path) -> list[tuple]:
    """Returns what the same run must give again, bit for bit."""
    return [tuple(m[key] for key in ("step", "loss", "eval_loss", "grad_norm")) for m in metrics_of(run_dir)]


def finished_steps(run_dir: Path) -> list[int]:
    return sorted(
        int(path.parent.name) for path in run_dir.glob(f"{CHECKPOINTS}/*/{FILE}") if path.parent.name.isdecimal()
    )


def _start(folder: Path, *overrides: str) -> Process:
    """Starts a run with the compiler's flags of this process, which give the same bits."""
    line = ["-m", "meshloom", "train", *overrides, "hydra.run.dir=run"]
    with (folder / "said").open("w") as said:
        return start(line, cwd=folder, stdout=said, stderr=subprocess.STDOUT)


def test_a_killed_run_goes_on_from_its_last_finished_save(tmp_path):
    """The kill hits a save, or the moment after it."""
    overrides, run_dir = (*QUICK, "num_steps=60", "checkpoint.every_num_steps=5"), tmp_path / "run"
    process = _start(tmp_path, *overrides)
    while len(finished_steps(run_dir)) < 2 or not list(run_dir.glob(f"{CHECKPOINTS}/*.orbax-checkpoint-tmp")):
        assert process.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    saved = finished_steps(run_dir)[-1]
    overrides = (*overrides, "compilation_cache=null")
    done = run_in_process("train", *overrides, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {saved}," in done.stdout
    assert run_in_process("train", *overrides, "hydra.run.dir=undisturbed", cwd=tmp_path).returncode == 0
    assert results_of(run_dir) == results_of(tmp_path / "undisturbed")
    assert [path for path in run_dir.glob(f"{CHECKPOINTS}/*") if not path.name.isdecimal()] == []


def _kill_at_random(process: Process, run_dir: Path, chance: random.Random, start_seconds: float) -> None:
    """Kills a run at any moment of its start, or some steps on: most of the time a save is under way then."""
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0, start_seconds))
    else:
        done, more = len(metrics_of(run_dir)), chance.randint(1, 15)
        while process.poll() is None and not done < len(metrics_of(run_dir)) - more:
            done = min(done, len(metrics_of(run_dir)))  # the lines of steps that were lost are dropped at the start
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.04))
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was still running"


@pytest.mark.release
def test_kill_at_any_moment_loses_no_more_than_the_steps_since_the_last_finished_save(tmp_path):
    began = time.monotonic()
    undisturbed = meshloom("train", *KILLED, "hydra.run.dir=undisturbed", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    start_seconds = min(4.0, time.monotonic() - began)
    chance, run_dir, num_in_a_save, continued = random.Random(0), tmp_path / "run", 0, set()
    for _ in range(NUM_KILLS):
        saved = finished_steps(run_dir)
        process = _start(tmp_path, *KILLED)
        _kill_at_random(process, run_dir, chance, start_seconds)
        said = (tmp_path / "said").read_text()
        assert "error" not in said
        assert "warning" not in said, "no finished save is damaged"
        if saved and "continuing" in said:
            assert f"continuing after step {saved[-1]}," in said
            continued.add(saved[-1])
        assert not saved or finished_steps(run_dir)[-1] >= saved[-1]
        num_in_a_save += bool(list(run_dir.glob(f"{CHECKPOINTS}/*.orbax-checkpoint-tmp")))
    assert num_in_a_save > 0
    assert len(continued) > 4, "kills at many places of the run"
    done = meshloom("train", *KILLED, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results_of(run_dir) == results_of(tmp_path / "undisturbed")
    assert [path for path in run_dir.glob(f"{CHECKPOINTS}/*") if not path.name.isdecimal()] == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    done = run_in_process("train", *HERE, "num_steps=4", *SAVING, "hydra.run.dir=run", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.mark.ci
def test_checkpoints_are_saved_by_the_clock_too(tmp_path):
    by_clock = ("checkpoint=disabled", "checkpoint.every_num_minutes=1e-9", "checkpoint.keep=9")
    done = run_in_process("train", *HERE, "num_steps=6", *by_clock, "hydra.run.dir=by-clock", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert finished_steps(tmp_path / "by-clock") == [1, 2, 3, 4, 5, 6]


@pytest.mark.ci
def test_two_runs_in_one_directory_are_refused(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run_in_process("train", *HERE, "num_steps=6", *SAVING, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 2
    assert "another run is in progress in run" in done.stderr
    assert finished_steps(tmp_path / "run") == [2, 4]


@pytest.mark.ci
def test_without_a_good_checkpoint_nothing_is_overwritten(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    for step in (2, 4):
        (tmp_path / "run" / CHECKPOINTS / str(step) / "data" / "data.json").write_text("{}")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = run_in_process("train", *HERE, "num_steps=6", *SAVING, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == STORAGE
    assert "compiled" not in done.stdout
    for step in (2, 4):
        assert f"checkpoint {step}: data/data.json has 2 bytes" in done.stderr
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert before.keys() == after.keys()
    changed = {path for path in before if before[path] != after[path]}
    assert {path.parent.name for path in changed - {tmp_path / "run/run.json"}} <= {".hydra", "logs"}
    assert json.loads((tmp_path / "run/run.json").read_text())["exit_code"] == STORAGE


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.ci
def test_a_full_disk_ends_the_run_and_leaves_the_last_good_checkpoint(small_disk, tmp_path):
    size, num_steps = "model.embed_dim=192", 400  # 1.6 MB a checkpoint
    run = (*HERE, size, f"num_steps={num_steps}", "checkpoint.every_num_steps=2", f"hydra.run.dir={small_disk}/run")
    done = run_in_process("train", *run, cwd=tmp_path)
    assert done.returncode == STORAGE
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "the checkpoint of step 4 could not be saved: No space left on device; the last good one is 2" in done.stderr
    assert "too little for the 3 that there will be at once" in done.stdout
    assert [path.name for path in (small_disk / "run" / CHECKPOINTS).iterdir()] == ["2"]
    assert damage_in(small_disk / "run" / CHECKPOINTS / "2", expected=EXPECTED, step=2) is None


@pytest.mark.ci
def test_a_disk_that_cannot_hold_one_checkpoint_is_told_before_compiling(small_disk, tmp_path):
    done = run_in_process("train", *HERE, "model.embed_dim=512", f"hydra.run.dir={small_disk}/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "compiled" not in done.stdout
    assert "are free on the disk of" in done.stderr


@pytest.mark.ci
def test_a_file_that_may_not_grow_is_told_as_a_full_disk_is(tmp_path):
    """For machines where no file system can be mounted: no file of this process may be larger than 1 MB."""
    run = (*HERE, "model.embed_dim=192", "num_steps=40", "checkpoint.every_num_steps=2")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        done = run_in_process("train", *run, "hydra.run.dir=run", cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == STORAGE, done.stderr
    assert "the checkpoint of step 2 could not be saved: File too large; none was saved before" in done.stderr
    assert list((tmp_path / "run" / CHECKPOINTS).iterdir()) == []


def _state(checkpoint: Path) -> Any:
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    metadata: Any = ocp.checkpointables_metadata(str(checkpoint)).metadata
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one_device), metadata["state"])
    return ocp.load_checkpointables(str(checkpoint), {"state": abstract})["state"]


@pytest.mark.ci
def test_nan_stops_the_run_and_is_never_saved(tmp_path):
    run = (*HERE, "num_steps=60", "checkpoint.every_num_steps=1", "checkpoint.keep=60")
    done = run_in_process("train", *run, "optimizer.learning_rate=1e30", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == NONFINITE
    last = metrics_of(tmp_path / "run")[-1]
    assert last["loss"] is None
    assert not last["skipped"]
    steps, bad = finished_steps(tmp_path / "run"), last["step"]
    batch = f'its batch, {{"next_batch": {bad - 1}}} in the data, has document'
    assert f"error: step {bad}: the loss is nan, the norm of the gradients nan; {batch}" in done.stderr
    assert f"; the last good checkpoint is {steps[-1]}" in done.stderr
    assert steps == list(range(1, bad))
    for step in steps:
        for path, x in leaves_by_path(_state(tmp_path / "run" / CHECKPOINTS / str(step))).items():
            assert np.isfinite(x).all(), (step, path)


@pytest.mark.ci
def test_a_state_that_overflowed_behind_a_finite_loss_is_not_saved(tmp_path):
    """The first update makes infinite parameters; only the second step's loss would show it."""
    run = (*HERE, "num_steps=9", "checkpoint.every_num_steps=1", "schedule.num_warmup_steps=0")
    done = run_in_process(
        "train", *run, *("optimizer.learning_rate=3e38", "optimizer.weight_decay=10"), "hydra.run.dir=run", cwd=tmp_path
    )
    assert done.returncode == NONFINITE
    assert "error: step 1: the state after it has NaN or infinity" in done.stderr
    assert metrics_of(tmp_path / "run")[0]["loss"] is not None
    assert finished_steps(tmp_path / "run") == []


@pytest.mark.ci
def test_skipped_steps_are_told_and_only_so_many_allowed(tmp_path):
    run = (*HERE, "num_steps=60", "optimizer.learning_rate=1e30", "on_nonfinite=skip", "num_skips_allowed=3")
    done = run_in_process("train", *run, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == NONFINITE
    skipped = [m["step"] for m in metrics_of(tmp_path / "run") if m["skipped"]]
    assert skipped == list(range(skipped[-1] - 3, skipped[-1] + 1))
    assert "and the 3 steps before it were skipped for the like" in done.stderr


def test_skips_are_counted_one_after_the_other():
    def refused_at(on_nonfinite: str, *are_finite: bool) -> int | None:
        skips = SkipCounter(spec_of(f"on_nonfinite={on_nonfinite}", "num_skips_allowed=2"))
        for number, is_finite in enumerate(are_finite):
            try:
                skips.count(NAN_STEP, {}, is_finite=is_finite)
            except NonFinite:
                return number
        return None

    assert refused_at("skip", False, False, True, False, False, True) is None
    assert refused_at("skip", False, True, False, False, False) == 4
    assert refused_at("stop", True, False) == 1


@pytest.mark.parametrize(("declared", "suggests"), [
    (("precision=fp8",), True),
    (("precision=fp8", "on_nonfinite=skip"), True),
    (("precision=fp8", "on_nonfinite=replay"), False),  # it did count
    (("precision=bfloat16",), False),
    (("precision=fp8", "precision.matmuls=[{match:null,forward:null,gradients:null,gather:fp8}]"), False),
    (("precision=float16", "precision.matmuls=[{match:null,forward:fp8,gradients:null}]"), False),  # skips it
])  # fmt: skip
def test_a_run_that_stops_suggests_a_replay_only_if_it_would_count_overflows(declared, suggests):
    skips = SkipCounter(spec_of("precision.emulate=true", "num_skips_allowed=0", *declared))
    with pytest.raises(NonFinite) as error:
        skips.count(NAN_STEP, {}, is_finite=False)
    (problem,) = error.value.failure(None, str).problems
    assert ("on_nonfinite=replay" in problem.fix) == suggests


@pytest.mark.ci
def test_programs_are_compiled_once_and_compute_the_same_when_loaded(tmp_path):
    cache = tmp_path / "cache"

    def said(name: str) -> str:
        run = (*QUICK, "num_steps=4", "checkpoint=disabled", "compilation_cache=cache", f"hydra.run.dir={name}")
        done = meshloom("train", *run, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert results_of(tmp_path / name) == results_of(tmp_path / "first")
        return done.stdout

    assert "\ncompiled in " in said("first")
    assert "\ncompiled before: loaded in " in said("second")
    (entry,) = cache.glob("jit_train_step-*-cache")
    entry.write_bytes(entry.read_bytes()[:-100])  # as a kill leaves it
    told = said("third")
    assert "\ncompiled in " in told
    assert "warning: jit_train_step was damaged in compilation_cache" in told
    assert not entry.exists()


@pytest.mark.ci
def test_a_cache_that_cannot_be_used_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    run = (*QUICK, "num_steps=2", "checkpoint=disabled", "compilation_cache=file/cache", "hydra.run.dir=run")
    done = run_in_process("train", *run, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "file/cache cannot be used as compilation_cache (Not a directory): compiling without it" in done.stdout
    assert "\ncompiled in " in done.stdout


@pytest.mark.ci
def test_ctrl_c_during_the_compile_of_a_run_ends_it_at_once(tmp_path):
    """A compile of 35 s, which no signal reaches; it is in a thread."""
    code = """
import time
from meshloom.runtime.cli import main as cli
from meshloom.runtime.compile import run_programs
def compiles(_):
    print("at work", flush=True)
    time.sleep(35)
run_programs.build = compiles
cli.main()
"""
    with start(["-c", code, "train", *QUICK, "num_steps=4", "hydra.run.dir=run"], cwd=tmp_path) as process:
        assert process.stdout
        while "at work" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        _, told = process.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert process.returncode == 128 + signal.SIGINT
    assert told == "interrupted while compiling the train step\n"
    assert list((tmp_path / "run" / CHECKPOINTS).iterdir()) == []
