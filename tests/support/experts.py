"""What tests of experts share: references without sorting, buffers or devices."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from meshloom.models import PADDING_TARGET, Context, Model, split_aux

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


def documents_of(tokens: np.ndarray, *, is_padded: bool = False) -> dict[str, np.ndarray]:
    """Returns positions and segment ids of sequences (batch, length + 1) that are two documents each, cut at another
    place in each. is_padded: some end early, others have nothing at all, and targets say so."""
    cuts, places = 3 + np.arange(len(tokens))[:, None] % 9, np.arange(tokens.shape[1] - 1)[None]
    is_second = places >= cuts
    positions, ids = places - np.where(is_second, cuts, 0), 1 + is_second.astype(np.int32)
    if not is_padded:
        return {"positions": positions.astype(np.int32), "segment_ids": ids}
    lengths = np.arange(len(tokens))[:, None] * 5 % (tokens.shape[1] + 1)  # 0, 5, 10, 15, 2, ... of 16
    ids = np.where(places < lengths, ids, 0).astype(np.int32)
    targets = np.where(ids == 0, PADDING_TARGET, tokens[:, 1:])
    return {"positions": (positions * (ids > 0)).astype(np.int32), "segment_ids": ids, "targets": targets}


def without_padding(
    tokens: np.ndarray, documents: Mapping[str, Any], *, num_microbatches: int
) -> list[dict[str, np.ndarray]]:
    """Returns the microbatches of a batch (batch, length + 1), each as one sequence of all of its tokens, in which no
    document sees another: arrays (1, tokens). documents: as `documents_of` gives them, or nothing."""
    shape = (len(tokens), tokens.shape[1] - 1)
    arrays = {
        "inputs": tokens[:, :-1],
        "targets": documents.get("targets", tokens[:, 1:]),
        "positions": documents.get("positions", np.broadcast_to(np.arange(shape[1]), shape)),
        "segment_ids": documents.get("segment_ids", np.ones(shape, np.int32)),
    }
    is_token, parts = arrays["segment_ids"] > 0, np.split(np.arange(shape[0]), num_microbatches)
    arrays["segment_ids"] = arrays["segment_ids"] + 1000 * np.arange(shape[0])[:, None]
    return [{name: x[rows][is_token[rows]][None].astype(np.int32) for name, x in arrays.items()} for rows in parts]


def objective(model: Model, params: Any, microbatches: list[dict[str, Any]]) -> tuple[Array, Array]:
    """(mean cross-entropy plus the auxiliary losses of all layers, mean cross-entropy) on one device: no scan, no mesh,
    no planned operation, and no padding. microbatches: of `without_padding`."""
    cross_entropy, auxiliary, num_tokens = jnp.zeros(()), jnp.zeros(()), 0
    for batch in microbatches:
        context = Context(batch["positions"], lambda name, x, *axes, **_: x, segment_ids_BT=batch["segment_ids"])
        x = model.embed.apply(params["embed"], batch["inputs"], context)
        for stack in model.stacks:
            for i in range(stack.num_layers):
                layer = jax.tree.map(lambda w, i=i: w[i], params[stack.name])
                x, aux = split_aux(stack.layer.apply(layer, x, context))
                auxiliary += sum(aux.losses.values(), start=jnp.zeros(()))
        logits = model.head.apply(model.head_params(params["head"], params["embed"]), x, context)
        cross_entropy += optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).sum()
        num_tokens += batch["inputs"].size
    return (cross_entropy + auxiliary) / num_tokens, cross_entropy / num_tokens


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
