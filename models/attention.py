"""Causal attention: what every implementation computes, as plain operations.

Shapes: B batch, T and S length (of queries, of keys), H heads, K kv_heads, G heads per kv_head, D head_dim.
"""

import jax
import jax.numpy as jnp
from jax import Array

from .mask import Mask, is_same_document


def attend(
    q_BTHD: Array,
    k_BSKD: Array,
    v_BSKD: Array,
    segment_ids_BT: Array | None,
    sinks_H: Array | None = None,
    *,
    scale: float,
    mask: Mask,
    soft_cap: float | None,
    is_seen: Array | None = None,
) -> Array:
    """Returns softmax(scores) v of shape (B, T, H, D of v), scores = scale q k over the tokens that each token sees.

    mask: which tokens a token sees. soft_cap: scores become soft_cap tanh(scores / soft_cap)
    (Gemma 2, arXiv:2408.00118). segment_ids_BT: a token sees tokens with its own id alone. sinks_H: one more score of
    each head, of a key without a value: what it draws is lost (gpt-oss, arXiv:2508.10925). Scores and softmax are in
    float32; all of them are in memory at once: B H T S of them. is_seen: an array as `seen_tokens` makes it, which
    replaces `mask` and `segment_ids_BT`, where queries and keys are not of the same tokens.
    """
    B, T, H, D = q_BTHD.shape
    q_BTKGD = q_BTHD.reshape(B, T, k_BSKD.shape[2], -1, D)
    scores = scale * jnp.einsum("btkgd,bskd->bkgts", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if is_seen is None:
        is_seen = seen_tokens(T, mask, segment_ids_BT)
    scores = jnp.where(is_seen, scores, jnp.finfo(jnp.float32).min)
    if sinks_H is not None:
        sinks_KG11 = sinks_H.astype(jnp.float32).reshape(k_BSKD.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks_KG11, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = weights if sinks_H is None else weights[..., :-1]
    attended = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v_BSKD.dtype), v_BSKD)
    return attended.reshape(B, T, H, v_BSKD.shape[-1])


def seen_tokens(length: int, mask: Mask, segment_ids_BT: Array | None) -> Array:
    """Returns (B or 1, 1, 1, T, S): True where the query at T may attend to the key at S."""
    distance_TS = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    is_seen = mask.sees(distance_TS)[None]
    if segment_ids_BT is not None:
        is_seen &= is_same_document(segment_ids_BT, segment_ids_BT)
    return is_seen[:, None, None]
