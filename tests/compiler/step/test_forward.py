"""The decoder's forward pass against an independent one in float64 NumPy."""

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.models.family_configs import DecoderConfig
from support.programs import evaluate, lowered_of, on_host, programs_of


def _norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def _rope(x, theta):
    """(batch, length, heads, dim): each pair (i, i + dim/2) is a complex number that turns with its position."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    turn = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    z = z * np.exp(1j * turn)[None, :, None, :]
    return np.concatenate([z.real, z.imag], -1)


def _attention(x, w, config):
    batch, length, _ = x.shape
    q = _rope(np.tensordot(x, w["query_EHD"], 1), config.rope_theta)
    k = _rope(np.tensordot(x, w["key_EKD"], 1), config.rope_theta)
    v = np.tensordot(x, w["value_EKD"], 1)
    out = np.zeros_like(q)
    for b in range(batch):
        for h in range(config.num_heads):
            kv = h // (config.num_heads // config.num_kv_heads)
            for t in range(length):
                scores = k[b, : t + 1, kv] @ q[b, t, h] / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, kv]
    return np.tensordot(out, w["out_HDE"], 2)


def numpy_loss(params, inputs, targets, config):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = params["embed"]["table_VE"][inputs]
    for i in range(config.num_layers):
        w = jax.tree.map(lambda x, i=i: x[i], params["layers"])
        x = x + _attention(_norm(x, w["attention_norm"]["scale_E"], config.norm_epsilon), w["attention"], config)
        h = _norm(x, w["mlp_norm"]["scale_E"], config.norm_epsilon)
        gate = h @ w["mlp"]["gate_EM"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp"]["up_EM"])) @ w["mlp"]["down_ME"]
    logits = _norm(x, params["head"]["norm"]["scale_E"], config.norm_epsilon) @ params["head"]["kernel_EV"]
    top = logits.max(-1, keepdims=True)
    log_z = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
    return (log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).mean()


@pytest.mark.parametrize("sharding", ["fsdp", "tensor"])
def test_loss_is_that_of_a_float64_forward_pass(sharding, tokens, proof):
    plan = plan_of(f"sharding={sharding}")
    programs = programs_of(plan)
    if proof.is_known(lowered_of(plan, "init", "evaluate"), on_host(programs, tokens[0])):
        return
    state = programs["init"]()
    assert isinstance(plan.spec.model, DecoderConfig)
    scale = np.random.default_rng(1).uniform(0.5, 1.5, (plan.spec.model.num_layers, plan.spec.model.embed_dim))
    norm = state["params"]["layers"]["attention_norm"]
    norm["scale_E"] = jax.device_put(scale.astype(np.float32), norm["scale_E"].sharding)  # scales other than one
    expected = numpy_loss(state["params"], tokens[0, :, :-1], tokens[0, :, 1:], plan.spec.model)
    ours = evaluate(programs, state["params"], tokens[0])
    assert ours == pytest.approx(expected, rel=2e-6)
