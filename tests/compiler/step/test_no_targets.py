"""Batches, microbatches and held-out data in which no token has a target: nothing is divided by zero."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.step.train_step import build_init, build_update
from meshloom.models import IGNORED_TARGET
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train.loop import MissingTargets
from support.loops import Reported, loop_over, observers_of
from support.programs import programs_of
from support.reference import reference_adamw, reference_loss

STEPS = ("num_steps=2", "evaluation.every_num_steps=1", "checkpoint=disabled", "schedule.num_warmup_steps=0")


@pytest.fixture(scope="module")
def compiled():
    plan = plan_of("target=cpu-2", "num_microbatches=2", *LINEAR_STACK, "model.num_layers=1", *STEPS)
    return plan, programs_of(plan)


def _batch(tokens: np.ndarray, *, ignored: slice) -> dict[str, np.ndarray]:
    targets = tokens[0][:, 1:].copy()
    targets[ignored] = IGNORED_TARGET
    return {"inputs": tokens[0][:, :-1].copy(), "targets": targets}


def _placed(programs: Any, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}


@pytest.mark.ci
def test_a_batch_without_targets_makes_the_update_of_zero_gradients(compiled, tokens):
    plan, programs = compiled
    state = programs["init"]()
    before = jax.tree.map(np.array, state["params"])
    state, metrics = programs["train"](state, _placed(programs, _batch(tokens, ignored=slice(None))))
    assert {name: float(metrics[name]) for name in ("loss", "grad_norm", "num_targets")} == {
        "loss": 0, "grad_norm": 0, "num_targets": 0,
    }  # fmt: skip
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), before)
    moments = (jax.tree.map(np.copy, zeros), jax.tree.map(np.copy, zeros))
    expected, _, rate = reference_adamw(plan.spec, before, zeros, moments, 0)
    assert rate > 0
    for ours, theirs, old in zip(*map(jax.tree.leaves, (state["params"], expected, before)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert not np.array_equal(ours, old)  # the weights decay


def test_a_microbatch_without_targets_leaves_the_mean_over_the_others(compiled, tokens):
    plan, programs = compiled
    on_device = np.arange(16).reshape(2, 2, 4)  # sequences by device and microbatch
    state = programs["init"]()
    params = jax.tree.map(np.array, state["params"])
    batch = _batch(tokens, ignored=on_device[:, 1].ravel())  # pyright: ignore[reportArgumentType]
    kept = on_device[:, 0].ravel()
    expected = reference_loss(plan.model, params, *(jnp.asarray(batch[name][kept]) for name in ("inputs", "targets")))
    _, metrics = programs["train"](state, _placed(programs, batch))
    assert float(metrics["num_targets"]) == kept.size * 16
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "muon", "sgd"])
def test_each_optimizer_stands_still_at_zero_gradients(optimizer):
    plan = plan_of("target=cpu-1", f"optimizer={optimizer}", "optimizer.weight_decay=0.0", *LINEAR_STACK, *STEPS)
    state = jax.jit(build_init(plan))()
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), plan.abstract["params"])
    after, _ = jax.jit(build_update(plan))(state, jnp.zeros(()), zeros, {}, {})
    for ours, old in zip(*map(jax.tree.leaves, (after["params"], state["params"])), strict=True):
        np.testing.assert_array_equal(ours, old)


def test_a_run_without_targets_goes_on_and_warns_once_of_each_kind(compiled, tokens, tmp_path):
    plan, programs = compiled
    batch = _batch(tokens, ignored=slice(None))
    reported, warned = Reported(), []
    with StopRequest(Processes()) as stop, Checkpoints(tmp_path, plan.spec) as checkpoints:
        loop = loop_over(
            batch, plan, programs, checkpoints, stop, observers_of(reported, MissingTargets(warned.append))
        )
        assert loop.run(programs["init"](), 0) == 2
    assert [(m.loss, m.eval_loss, m.num_targets) for m in reported.metrics] == [(0.0, None, 0)] * 2
    assert [problem.where for problem in warned] == ["evaluation", "step 1"]
