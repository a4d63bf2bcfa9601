"""Causal attention as plain operations, which every implementation computes, and its mask as a value: which keys a
query sees.

A layer makes its mask once, of its config (decoder.py), and hands it to `Context.attend`. Kernels, exchanges and
estimates ask it; none of them works out a mask by itself. A new kind of mask is a field of `Mask`, its part in each
method here, and the key of a config that sets it. What a query sees has to follow from its distance to the keys: for
chunks that do not see each other, the methods would also take the place of the first key. A kernel that cannot compute
a mask refuses it (compiler/parallel/attention/attention.py).

Shapes: B batch, T and S length (of queries, of keys), H heads, K kv_heads, G heads per kv_head, D head_dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Mask:
    """A causal mask: a query sees the key of its own token, and the keys before it.

    window: how many keys it sees at most, its own included; None: any number.
    A distance is the place of a query less the place of a key, in tokens: of single tokens, or of the first ones of a
    block of queries and a block of keys.
    """

    window: int | None = None

    @property
    def sees_all_before(self) -> bool:
        """Returns True if a query sees every key before its own."""
        return self.window is None

    def within(self, length: int) -> "Mask":
        """Returns the same mask of sequences of this length, without a window that hides nothing of them."""
        return Mask() if self.window is not None and self.window >= length else self

    def sees(self, distance: Any) -> Any:
        """Returns True where a query sees a key at this distance."""
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Returns True where a query sees a key, by their places: `sees` in the form that a Pallas kernel takes."""
        is_before = queries >= keys
        return is_before if self.window is None else (queries - (self.window - 1) <= keys) & is_before

    def sees_any(self, distance: Any, num_queries: int, num_keys: int) -> Any:
        """Returns True where a query of a block sees a key of another block."""
        is_before = distance + num_queries > 0
        return is_before if self.window is None else is_before & (distance - num_keys + 1 < self.window)

    def sees_all(self, distance: Any, num_queries: int, num_keys: int) -> Any:
        """Returns True where every query of a block sees every key of another block."""
        is_before = distance >= num_keys - 1
        return is_before if self.window is None else is_before & (distance + num_queries <= self.window)

    def reach(self, block: int, num_blocks: int) -> int:
        """Returns how many blocks of keys before its own a block of queries sees, if only in part."""
        return num_blocks - 1 if self.window is None else min(num_blocks - 1, (self.window + block - 2) // block)

    def num_keys(self, places: np.ndarray) -> np.ndarray:
        """Returns how many keys the queries at some places of a sequence see."""
        return places + 1 if self.window is None else np.minimum(places + 1, self.window)

    def num_pairs(self, length: int) -> int:
        """Returns the pairs of a query and a key that it sees in a sequence: the area that is computed of the square
        of all scores."""
        width = length if self.window is None else min(self.window, length)
        return width * (width + 1) // 2 + (length - width) * width


OWN_KEY = Mask(window=1)  # the least that a query sees, whatever documents there are


def is_same_document(ids_BT: Array, ids_BS: Array) -> Array:
    """Returns (batch, queries, keys): True where query and key are of the same document, which is all that a query
    sees where sequences hold several."""
    return ids_BT[:, :, None] == ids_BS[:, None, :]


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
