"""Auxiliary losses and statistics of layers and head: added to the objective, and in the metrics, on every layout."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import plan_of, pointwise_plan
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.sharding.model_check import check_aux
from meshloom.models import Aux
from meshloom.runtime.checkpoint.checkpoints import Checkpoints
from meshloom.runtime.processes.distributed import Processes
from meshloom.runtime.processes.stop import StopRequest
from meshloom.runtime.train.metrics import NOTHING, Metrics, values_of
from meshloom.runtime.train.tensorboard import TensorBoard
from meshloom.runtime.train.trackers import MetricsLog, Trackers, tracked_run
from support.loops import Reported, loop_over, observers_of
from support.programs import Gradients, batch_of, programs_of
from support.tiers import tiered

PENALTY = 0.05
CASES = {
    "scan, fsdp 2x2, remat full, 2 microbatches": (
        "target=cpu-4", "sharding=fsdp", "mesh.data=2", "mesh.fsdp=2", "remat=full", "num_microbatches=2",
    ),
    "prefetch, hsdp 2x2, in backward, 2 microbatches, logits in blocks": (
        "target=cpu-4", "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2", "overlap=prefetch", "num_microbatches=2",
        "overlap.layers.reduce_in_backward=true", "loss.max_logits_bytes=16384", "loss.max_logits_share=0.0",
    ),
    "prefetch 2, tensor 2x2, 2 parts of the batch": (
        "target=cpu-4", "sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2", "overlap=prefetch",
        "overlap.layers.prefetch=2", "overlap.layers.batch_split=2",
    ),
}  # fmt: skip


def _reference(params, tokens):
    """(objective, (cross-entropy, metrics)) by plain operations: no scan, no mesh, no code of the model."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x, penalties, squares = params["embed"]["table_VE"][inputs], [], []
    for index in range(3):
        w = jax.tree.map(lambda x, index=index: x[index], params["layers"])
        turned = x * w["scale_E"] + jnp.cos(jnp.arange(inputs.shape[1]))[None, :, None]
        hidden = jnp.tanh(turned @ w["up_EM"])
        penalties.append(PENALTY * (hidden**2).sum(-1).mean())
        squares.append((hidden**2).mean((0, 1)))
        x = x + hidden @ w["down_ME"]
    logits = x @ params["head"]["kernel_EV"]
    log_z = jnp.log(jnp.exp(logits).sum(-1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    of_head = PENALTY * (log_z**2).mean()
    metrics = {
        "layers/penalty": jnp.stack(penalties),
        "layers/squares": jnp.stack(squares).mean(1),
        "head/log_z_penalty": of_head,
        "head/log_z": log_z.mean(),
    }
    return loss + sum(penalties) + of_head, (loss, metrics)


@pytest.mark.parametrize("name", tiered(CASES, plain=list(CASES)[-1:]))
def test_gradients_are_of_the_loss_and_every_auxiliary_loss(name, tokens, proof):
    plan = pointwise_plan(*CASES[name], f"model.penalty={PENALTY}")
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    (_, (loss, _)), expected = jax.jit(jax.value_and_grad(_reference, has_aux=True))(params, tokens[0])
    ours, gradients = step(params)
    assert ours == pytest.approx(float(loss), rel=1e-6)  # what is reported is without them
    for path, gradient in leaves_by_path(gradients).items():
        reference = leaves_by_path(expected)[path]
        np.testing.assert_allclose(gradient, reference, atol=2e-6 * np.abs(reference).max(), rtol=2e-5, err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize("layer_metrics", ["mean", "each"])
def test_metrics_of_a_run_are_means_over_tokens_and_by_choice_over_layers(layer_metrics, tokens, tmp_path):
    plan = pointwise_plan(*CASES[list(CASES)[1]], f"model.penalty={PENALTY}", "num_steps=1", "checkpoint=disabled",
                          "schedule=constant", "schedule.num_warmup_steps=0")  # fmt: skip
    programs, batch = programs_of(plan), {"inputs": tokens[0][:, :-1], "targets": tokens[0][:, 1:]}
    state, reported = programs["init"](), Reported()
    expected = _reference(jax.tree.map(np.array, state["params"]), tokens[0])[1][1]
    if layer_metrics == "each":
        logging = plan.spec.logging.model_copy(update={"layer_metrics": "each"})
        plan = replace(plan, spec=plan.spec.model_copy(update={"logging": logging}))
        each = (
            (f"{name}/{i}" if x.ndim else name, x.reshape(-1)[i]) for name, x in expected.items() for i in range(x.size)
        )
        expected = dict(each)
    with StopRequest(Processes()) as stop, Checkpoints(tmp_path, plan.spec) as checkpoints:
        loop = loop_over(batch, plan, programs, checkpoints, stop, observers_of(reported))
        loop.run(state, 0, 1000)
    assert reported.metrics[0].num_tokens == 1000 + tokens[0][:, 1:].size
    assert set(reported.metrics[0].auxiliary) == set(expected)
    for name, value in expected.items():
        assert reported.metrics[0].auxiliary[name] == pytest.approx(float(value.mean()), rel=2e-6), name


def test_metrics_file_and_curves_have_them_by_name(tmp_path):
    auxiliary = {"layers/penalty": 0.5, "head/log_z": float("inf")}
    metrics = Metrics(1, 2.0, None, 1.0, 0.1, False, 1.0, 1.0, 0.0, 256, None, 256, 0.0, NOTHING, auxiliary)
    run = tracked_run(plan_of(), tmp_path, 0)
    with MetricsLog(tmp_path, first_step=0) as log, Trackers((TensorBoard,), run, print) as trackers:
        log.step_reported(metrics)
        trackers.log(1, values_of(metrics))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["layers/penalty"], line["head/log_z"]) == (0.5, None)
    assert "auxiliary" not in line
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"layers/penalty" in events.read_bytes()


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        (Aux({"z": jnp.ones(3)}), "an array of shape (3) and type float32 as the loss 'z'"),
        (Aux({"z": jnp.ones((), jnp.int32)}), "type int32 as the loss 'z'"),
        (
            Aux({}, {"load": 1.0}),  # pyright: ignore[reportArgumentType]
            "an object of float as the statistic 'load'",
        ),
        (Aux({"z": jnp.ones(())}, {"z": jnp.ones(())}), "named 'z'"),
        (Aux({}, {"z": jnp.ones(())}, {"z": jnp.ones(3)}), "named 'z'"),
        (Aux({}, {}, {"tokens": jnp.ones(3, jnp.complex64)}), "complex64 as the total 'tokens'"),
        (Aux({"a/b": jnp.ones(())}), "named 'a/b'"),
    ],
)
def test_what_cannot_be_added_up_is_an_error_of_the_piece(aux, words):
    with pytest.raises(ConfigError) as raised:
        check_aux("Router", aux)
    assert "Router returned" in str(raised.value)
    assert words in str(raised.value)
