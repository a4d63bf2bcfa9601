"""`meshloom evaluate`: the loss of a run's weights, alone, on any mesh and any data."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

import meshloom
from conftest import SMALL
from meshloom.runtime.inference import evaluate as module
from meshloom.runtime.inference.evaluate import Evaluation
from meshloom.runtime.inference.open_weights import OpenedWeights
from support.commands import run_in_process

RUN = (*SMALL, "num_steps=4", "evaluation.every_num_steps=2", "evaluation.num_batches=2",
       "checkpoint.every_num_steps=2", "checkpoint.keep=3", "sharding=fsdp_tensor", "logging.trackers=[]")  # fmt: skip

LOWER = module.lower


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    done = run_in_process("train", *RUN, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def _eval_losses(run_dir) -> dict[int, float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["eval_loss"] for row in rows if row["eval_loss"] is not None}


def _evaluated(place, *words) -> dict:
    done = run_in_process("evaluate", str(place), *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.ci
def test_the_loss_is_the_runs_own_and_only_its_parameters_and_one_program_are_needed(run_dir, monkeypatch):
    lowered = []
    monkeypatch.setattr(module, "lower", lambda plan, mesh, names: lowered.append(names) or LOWER(plan, mesh, names))
    of_run = _eval_losses(run_dir)
    for place, step in ((run_dir, 4), (run_dir / "checkpoints/2", 2)):
        found = _evaluated(place)
        assert found["losses"][0]["loss"] == of_run[step]
        assert found["weights"]["step"] == step
    assert lowered == [("evaluate",)] * 2


@pytest.mark.ci
@pytest.mark.parametrize("words", [
    ("sharding=ddp", "target=cpu-1"), ("sharding=fsdp", "num_microbatches=2"), ("sharding=fsdp_context",),
    ("optimizer=sgd",),  # whose state is another
], ids=" ".join)  # fmt: skip
def test_the_loss_is_the_same_on_every_mesh(run_dir, words):
    assert _evaluated(run_dir, *words)["losses"][0]["loss"] == pytest.approx(_eval_losses(run_dir)[4], rel=2e-3)


@pytest.mark.ci
def test_people_read_a_line_and_other_data_have_another_loss(run_dir):
    done = run_in_process("evaluate", str(run_dir), "data=synthetic", "evaluation.split=all", "sequence_length=100")
    assert done.returncode == 0, done.stderr
    assert f"weights: step 4 of {run_dir}/checkpoints" in done.stdout
    assert "all: loss " in done.stdout
    assert "bits per byte (" in done.stdout
    (found,) = _evaluated(run_dir, "data=synthetic", "evaluation.split=all", "sequence_length=100")["losses"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.ci
def test_weights_of_another_model_are_listed_before_anything_is_compiled(run_dir):
    done = run_in_process("evaluate", str(run_dir), "model.mlp_dim=128")
    assert done.returncode == 2
    assert "holds the parameters of another model" in done.stderr
    assert "params/layers/mlp/up_EM is float32" in done.stderr


@pytest.mark.ci
def test_from_python_it_is_the_same(run_dir):
    found = meshloom.evaluate(run_dir, "evaluation.num_batches=2")
    assert isinstance(found, Evaluation)
    assert found.loss == _eval_losses(run_dir)[4]
    assert (found.step, found.split) == (4, "held_out")
    assert repr(found).startswith("<Evaluation: held_out: loss ")


@pytest.mark.ci
def test_weights_that_are_not_finite_end_with_the_exit_code_of_a_run_that_is(run_dir, monkeypatch):
    opened = module.open_weights
    broken = lambda *args: jax.tree.map(lambda x: x * jnp.nan, opened(*args).params)  # noqa: E731
    monkeypatch.setattr(module, "open_weights", lambda *args: OpenedWeights(broken(*args), "run", 4))
    done = run_in_process("evaluate", str(run_dir))
    assert done.returncode == 5
    assert "the loss of data is nan" in done.stderr
