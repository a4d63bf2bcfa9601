"""Whole runs, in processes of their own: what they leave behind, and that stopping them loses nothing."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from orbax.checkpoint import v1 as ocp
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] (made at run time)

from conftest import SMALL, plan_of, spec_of
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.find import Checkpoint
from meshloom.runtime.data import open_data
from meshloom.runtime.train.metrics import KINDS
from support.commands import meshloom, run_in_process
from support.forked import start
from support.programs import on_devices, programs_of
from support.run_files import documented_files, written_files

NUM_STEPS = 90
RUN = (*SMALL, f"num_steps={NUM_STEPS}", "evaluation.every_num_steps=30", "evaluation.num_batches=2",
       "checkpoint.every_num_steps=30")  # fmt: skip
KEYS = ["step", "loss", "eval_loss", "grad_norm", "learning_rate", "skipped", "tokens_per_second",
        "step_seconds", "input_wait_seconds", "num_targets", "mfu", "num_tokens", "time", "goodput", "num_starts",
        *(f"seconds/{kind}" for kind in KINDS)]  # fmt: skip


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _seconds(metrics: dict) -> float:
    return sum(metrics[f"seconds/{kind}"] for kind in KINDS)


def _curves(run_dir: Path) -> dict[str, list[float]]:
    """What TensorBoard would show: its files are records of (length, checksum, protocol buffer, checksum)."""
    curves: dict[str, list[float]] = {}
    for path in (run_dir / "tensorboard").iterdir():
        content, at = path.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                curves.setdefault(value.tag, []).append(value.simple_value)
    return curves


def _state(run_dir: Path, step: int) -> dict:
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one_device), plan_of(*RUN[len(SMALL) :]).abstract
    )
    return ocp.load_checkpointables(f"{run_dir.resolve()}/checkpoints/{step}", {"state": abstract})["state"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing disturbed, on devices that are told to be attached: those have a peak, hence an MFU."""
    folder = tmp_path_factory.mktemp("finished")
    devices = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }
    attached = ("target=local", "target.peak_flops_per_second=1e12")
    done = meshloom("train", *RUN, *attached, "hydra.run.dir=run", cwd=folder, **devices)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "run", done.stdout


@pytest.mark.ci
def test_a_run_leaves_its_contract_behind(finished):
    run_dir, said = finished
    assert written_files(run_dir) == documented_files("train")
    metrics = _metrics(run_dir)
    assert [m["step"] for m in metrics] == list(range(1, NUM_STEPS + 1))
    assert all(list(m) == KEYS for m in metrics)
    assert [m["step"] for m in metrics if m["eval_loss"] is not None] == [30, 60, 90]
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 1
    flops = json.loads((run_dir / "plan.json").read_text())["program"]["model_flops_per_step"]
    for m in metrics:
        assert m["mfu"] == pytest.approx(flops / (m["step_seconds"] * 8e12))
        assert m["tokens_per_second"] == pytest.approx(16 * 16 / m["step_seconds"])
        assert m["num_tokens"] == 16 * 16 * m["step"]
    began = metrics[0]["time"] - _seconds(metrics[0])
    assert [_seconds(m) for m in metrics] == pytest.approx([m["time"] - began for m in metrics], abs=0.5)
    assert metrics[-1]["seconds/steps"] == pytest.approx(sum(m["step_seconds"] for m in metrics), rel=0.3)
    assert yaml.safe_load((run_dir / "spec.yaml").read_text())["num_steps"] == NUM_STEPS
    assert _curves(run_dir)["loss"] == [np.float32(m["loss"]) for m in metrics]
    assert set(_curves(run_dir)) == {*KEYS} - {"step"}
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["60", "90"]  # the last two
    assert f"held-out loss: {metrics[-1]['eval_loss']:.3f} nats per byte" in said
    assert "checkpoint: run/checkpoints/90" in said


def _interrupt(folder: Path, with_signal: signal.Signals, after: int) -> tuple[int, str, str]:
    process = start(["-m", "meshloom", "train", *RUN, "hydra.run.dir=run"], cwd=folder)
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > after):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(with_signal)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.ci
def test_a_stopped_run_goes_on_as_if_nothing_had_been(finished, tmp_path):
    stopped_at = 0
    for with_signal, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")):
        before = stopped_at
        code, out, err = _interrupt(tmp_path, with_signal, before + 10)
        assert code == 128 + with_signal, err
        assert err.startswith(f"\n{name}: stopping; waiting for the step that is running and its checkpoint")
        assert err.count("\n") == 2
        stopped_at = _metrics(tmp_path / "run")[-1]["step"]
        assert before + 10 < stopped_at < NUM_STEPS
        assert f"stopped: by {with_signal.name} after step {stopped_at} of {NUM_STEPS}" in out
        again = out.split("continue: meshloom train ")[1].splitlines()[0]
        assert "hydra.run.dir=run" in again
    done = meshloom("train", *RUN, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {stopped_at}" in done.stdout
    undisturbed, continued = _metrics(finished[0]), _metrics(tmp_path / "run")
    for key in ("step", "loss", "eval_loss", "grad_norm", "learning_rate"):
        assert [m[key] for m in continued] == [m[key] for m in undisturbed], key
    jax.tree.map(
        np.testing.assert_array_equal, _state(tmp_path / "run", NUM_STEPS), _state(finished[0], NUM_STEPS)
    )  # bit by bit


@pytest.mark.ci
def test_a_run_that_is_done_says_so(finished):
    run_dir, _ = finished
    done = run_in_process("train", *RUN, "checkpoint=disabled", "hydra.run.dir=run", cwd=run_dir.parent)
    assert done.returncode == 0, done.stderr
    assert f"nothing to do: {NUM_STEPS} steps are done already" in done.stdout
    assert "compiled" not in done.stdout
    assert len(_metrics(run_dir)) == NUM_STEPS


@pytest.mark.ci
def test_another_run_is_continued_on_another_mesh(finished, tmp_path):
    run_dir, _ = finished
    more = (*RUN, "sharding=fsdp_tensor", f"num_steps={NUM_STEPS + 20}", f"checkpoint.restore_from={run_dir}")
    done = run_in_process("train", *more, "compilation_cache=null", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = _metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == list(range(NUM_STEPS + 1, NUM_STEPS + 21))
    assert metrics[0]["loss"] == pytest.approx(_metrics(run_dir)[-1]["loss"], rel=0.2)


@pytest.mark.ci
def test_another_model_is_refused_with_what_differs(finished):
    run_dir, _ = finished
    done = run_in_process("train", *RUN, "model.mlp_dim=128", "hydra.run.dir=run", cwd=run_dir.parent)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model: ")
    assert "compiled" not in done.stdout
    assert "is float32[3,64,32] there, float32[3,128,32] here" in done.stderr


def _saved(tmp_path: Path, tokens: np.ndarray):
    """A run directory with one checkpoint behind two steps on an fsdp mesh, and its values."""
    plan = plan_of("sharding=fsdp")
    programs = programs_of(plan)
    batches = iter(open_data(plan.spec)["train"])
    state = programs["init"]()
    for batch in tokens[:2]:
        state, _ = programs["train"](state, on_devices(programs, batch))
        next(batches)
    with Checkpoints(tmp_path, plan.spec) as checkpoints:
        checkpoints.save(2, state, batches, num_tokens=2**40 + 1, eval_loss=None)
        values = jax.tree.map(np.asarray, state)
        programs["train"](state, on_devices(programs, tokens[2]))  # donates the buffers while they are being saved
    return values, batches


def _start(run_dir: Path) -> Checkpoint:
    return Checkpoint(run_dir / "checkpoints" / "2", 2, is_own=False, damaged={})


@pytest.mark.parametrize(
    "overrides", [("sharding=tensor", "mesh.tensor=2"), ("sharding=fsdp", "mesh.data=2"), ("target=cpu-1",)]
)
def test_a_checkpoint_comes_back_on_any_mesh(tmp_path, tokens, overrides):
    values, batches = _saved(tmp_path, tokens)
    plan = plan_of(*overrides)
    programs = programs_of(plan)
    restored_batches = iter(open_data(plan.spec)["train"])
    restored = restore(_start(tmp_path), programs.state, restored_batches)
    assert (restored.step, restored.other_data, restored.num_tokens) == (2, (), 2**40 + 1)
    state = restored.state
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), values)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, programs.state)
    np.testing.assert_array_equal(next(restored_batches)["inputs"], next(batches)["inputs"])


def test_other_data_starts_at_its_beginning(tmp_path, tokens):
    _saved(tmp_path, tokens)
    spec = spec_of("data.shuffle_seed=5")
    programs = programs_of(plan_of("data.shuffle_seed=5"))
    batches, fresh = (iter(open_data(spec)["train"]) for _ in range(2))
    restored = restore(_start(tmp_path), programs.state, batches)
    assert restored.other_data == ("data.shuffle_seed",)
    np.testing.assert_array_equal(next(batches)["inputs"], next(fresh)["inputs"])


@pytest.mark.ci
def test_restoring_from_nothing_is_an_error(tmp_path):
    done = run_in_process("train", *SMALL, f"checkpoint.restore_from={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2
    assert "checkpoint.restore_from" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_disabled_checkpoints_save_nothing(tmp_path):
    quiet = ("checkpoint=disabled", "logging=quiet")
    done = meshloom("train", *SMALL, "model.num_layers=1", *quiet, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (tmp_path / "run").iterdir() if path.name[0] != ".")
    assert files == ["logs", "metrics.jsonl", "plan.json", "run.json", "spec.yaml"]
