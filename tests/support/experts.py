"""What tests of experts share: references without sorting, buffers or devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from meshloom.models import Context, Model, split_aux

MOE = ("model=tiny_moe", "model.mlp_dim=32")


def dense_experts(x_NE, weights_NK, ids_NK, gate_XEM, up_XEM, down_XME, *, cleared_NK=None):
    """Every expert on every token, in float64; a weight of 0 for those that are not chosen. cleared_NK: True for
    choices that are dropped."""
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x_NE, weights_NK, gate_XEM, up_XEM, down_XME))
    kept = weights if cleared_NK is None else np.where(cleared_NK, 0, weights)
    of_expert_NX = np.zeros((len(x), len(gate)))
    np.add.at(of_expert_NX, (np.arange(len(x))[:, None], np.asarray(ids_NK)), kept)
    turned = np.einsum("ne,xem->nxm", x, gate)
    hidden = turned / (1 + np.exp(-turned)) * np.einsum("ne,xem->nxm", x, up)
    return np.einsum("nxm,xme,nx->ne", hidden, down, of_expert_NX)


def documents_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns positions and segment ids of sequences (batch, length + 1) that are two documents each, cut at another
    place in each."""
    cuts, places = 3 + np.arange(len(tokens))[:, None] % 9, np.arange(tokens.shape[1] - 1)[None]
    is_second = places >= cuts
    positions = places - np.where(is_second, cuts, 0)
    return {"positions": positions.astype(np.int32), "segment_ids": 1 + is_second.astype(np.int32)}


def objective(
    model: Model, params: Any, inputs: Array, targets: Array, documents: Mapping[str, Any]
) -> tuple[Array, Array]:
    """(mean cross-entropy plus the auxiliary losses of all layers, mean cross-entropy) on one device: no scan, no mesh,
    no planned operation. documents: positions and segment ids, or nothing."""
    positions = documents.get("positions", jnp.arange(inputs.shape[1])[None])
    segment_ids = documents.get("segment_ids")
    context = Context(positions, lambda name, x, *axes, **_: x, segment_ids_BT=segment_ids)
    x, losses = model.embed.apply(params["embed"], inputs, context), []
    for stack in model.stacks:
        for i in range(stack.num_layers):
            layer = jax.tree.map(lambda w, i=i: w[i], params[stack.name])
            x, aux = split_aux(stack.layer.apply(layer, x, context))
            losses += aux.losses.values()
    logits = model.head.apply(model.head_params(params["head"], params["embed"]), x, context)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return loss + sum(losses, start=jnp.zeros(())) / inputs.size, loss


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name, axis_index_groups=None
):
    """`jax.lax.ragged_all_to_all` by its documentation, from an all-gather: CPUs have none."""
    del recv_sizes, axis_index_groups
    n, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    per_device = input_offsets.shape[0] // n
    gathered = [jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)]
    rows = jnp.arange(output.shape[0])
    for source in range(n):
        for k in range(per_device):
            x, first, size, place = (x[source] for x in gathered)
            slot = me * per_device + k
            is_sent = (rows >= place[slot]) & (rows < place[slot] + size[slot])
            taken = x[jnp.clip(first[slot] + rows - place[slot], 0, operand.shape[0] - 1)]
            output = jnp.where(is_sent[:, None], taken, output)
    return output
