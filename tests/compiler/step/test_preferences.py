"""Objectives of pairs: losses by their formulas in float64, and the step's gradients by one device's own arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.models.loss import dpo_losses, simpo_losses
from support.programs import Gradients, batch_of, lowered_of, on_host, programs_of
from support.reference import forward
from support.tiers import tiered

LOG_PROBS = np.array([-3.0, -5.0, -40.0, -11.0, -7.5, -7.5])
REFERENCE = np.array([-4.0, -4.5, -20.0, -21.0, -7.5, -7.0])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_is_the_formula_of_its_paper(smoothing):
    """Equation 7, spelled out with probabilities: ratios of the model's to the reference's, to the power of beta."""
    beta = 0.3
    ratios = np.exp(LOG_PROBS) / np.exp(REFERENCE)
    chosen, rejected = ratios[0::2] ** beta, ratios[1::2] ** beta
    right = chosen / (chosen + rejected)
    expected = -(1 - smoothing) * np.log(right) - smoothing * np.log(1 - right)
    losses, margins = dpo_losses(jnp.asarray(LOG_PROBS), jnp.asarray(REFERENCE), beta=beta, label_smoothing=smoothing)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(margins, np.log(chosen / rejected), rtol=1e-5, atol=1e-6)


def test_simpo_is_the_formula_of_its_paper():
    lengths = np.array([3, 5, 8, 11, 1, 2])
    means = LOG_PROBS / lengths
    expected = -np.log(sigmoid(2.0 * (means[0::2] - means[1::2]) - 0.5))
    losses, _ = simpo_losses(jnp.asarray(LOG_PROBS), jnp.asarray(lengths), beta=2.0, margin=0.5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def by_hand(model, params, tokens, targets, beta, margin):
    """The mean over pairs, from logits on one device and the means of their rows."""
    log_probs = jax.nn.log_softmax(forward(model, params, tokens[:, :-1]).astype(jnp.float32))
    own = jnp.take_along_axis(log_probs, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    means = jnp.sum(jnp.where(targets >= 0, own, 0.0), axis=-1) / np.sum(targets >= 0, axis=-1)
    return jnp.mean(-jax.nn.log_sigmoid(beta * (means[::2] - means[1::2]) - margin))


CASES = {
    "fsdp x tensor, 2 microbatches, loss in chunks": (
        "sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=2", "num_microbatches=2", "loss.max_logits_bytes=4096",
        "loss.max_logits_share=0.0",
    ),
    "the length split": ("sharding=fsdp_context", "mesh.fsdp=4", "mesh.context=2"),
    "one device": ("target=cpu-1",),
    "stages that share the head": (
        "target=cpu-4", "mesh.stage=2", "mesh.fsdp=2", "num_microbatches=4", "pipeline=zb_h1", "pipeline.head=stages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(CASES, plain=()))
def test_gradients_of_a_step_are_those_of_pairs_one_by_one(name, tokens, proof):
    plan = plan_of(*CASES[name], "objective=simpo", "objective.margin=0.25", "model.num_layers=2")
    batch = tokens[0].copy()
    starts = np.arange(16) % 7  # the targets before are a prompt's, which has no loss
    targets = np.where(np.arange(16)[None] < starts[:, None], -1, batch[:, 1:])
    step = Gradients(plan, batch_of(batch, {"targets": targets}))
    if proof.is_known(step.parts):
        return
    params = jax.tree.map(np.asarray, jax.jit(plan.model.init)(jax.random.key(0)))
    loss, gradients = step(params)
    reference = jax.jit(jax.value_and_grad(lambda p: by_hand(plan.model, p, batch, targets, 2.5, 0.25)))
    expected, by_pair = reference(params)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for path, gradient in leaves_by_path(gradients).items():
        exact = leaves_by_path(by_pair)[path]
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max(), err_msg=path)


def test_a_pair_is_never_split():
    with pytest.raises(ConfigError, match="no whole pairs"):
        plan_of("objective=simpo", "num_microbatches=2")
    assert spec_of("objective=simpo").has_pairs


DPO = ("objective=dpo", "objective.label_smoothing=0.1", "model.num_layers=2")
LAYOUTS = {
    "the length split": ("sharding=fsdp_context", "mesh.fsdp=4", "mesh.context=2"),
    "stages": ("target=cpu-2", "sharding=ddp", "mesh.stage=2", "num_microbatches=4"),
}


@pytest.mark.ci
@pytest.mark.parametrize("layout", tiered(LAYOUTS, plain=()))
def test_a_dpo_step_follows_the_saved_reference(layout, tokens, proof):
    """By the step's own program for log-probabilities: the reference is another model than the one that is trained."""
    plan = plan_of(*DPO, *LAYOUTS[layout])
    programs, rows = programs_of(plan), plan.batch.row_order.rows()
    host = on_host(programs, tokens[0], plan.batch.token_order.of_sequence(16))
    first = jax.jit(plan.optimizer.init).lower(plan.model.abstract())
    if proof.is_known(lowered_of(plan, "log_probs", "train"), first, host, rows):
        return
    init, logits_of = jax.jit(plan.model.init), jax.jit(partial(forward, plan.model))
    models = [jax.tree.map(np.asarray, init(jax.random.key(seed))) for seed in (0, 1)]
    shardings = jax.tree.map(lambda x: x.sharding, programs.state)
    batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in host.items()}
    found = []
    for params in models:
        on_devices = jax.device_put(params, shardings["params"])
        found.append(np.asarray(programs["log_probs"](on_devices, batch)))
        logits = jax.nn.log_softmax(logits_of(params, tokens[0][:, :-1]))
        own = np.take_along_axis(np.asarray(logits), tokens[0][:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(found[-1], own.sum(-1), rtol=1e-5)
    batch["reference"] = jax.device_put(found[1][rows], programs.batch["reference"].sharding)
    state = jax.device_put(
        {"step": np.int32(0), "params": models[0], "optimizer": plan.optimizer.init(models[0])}, shardings
    )
    _, metrics = programs["train"](state, batch)
    losses, margins = dpo_losses(*map(jnp.asarray, found), beta=0.1, label_smoothing=0.1)
    assert float(metrics["loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)
    assert float(metrics["head/pair_margin"]) == pytest.approx(float(margins.mean()), rel=1e-4)
    assert float(metrics["head/pair_accuracy"]) == pytest.approx(float((margins > 0).mean()))
    assert int(metrics["num_targets"]) == 256
