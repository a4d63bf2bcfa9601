"""Attention of some queries to some of the keys, as parts of a larger attention: the kernels that a ring calls.

    out, lse = kernel.forward(queries, keys, sight)       softmax over these keys alone, and the log of its denominator
    merged = merge((out_1, lse_1), (out_2, lse_2))        what softmax over both gives
    dq, dk, dv = kernel.gradients(queries, keys, sight, gradient)   the part that these keys bring; `gradient` has what
                                                          attention to all keys gave, and its lse

Shapes: B batch, H heads, K kv_heads, G heads per kv_head, T queries, S keys, D head_dim. Queries are scaled already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..sharding.batch import TokenOrder
from .remat import ATTENTION_LSE, ATTENTION_RESULT, marked

HIDDEN = -0.7 * float(np.finfo(np.float32).max)  # a score that softmax gives no weight


class Queries(NamedTuple):
    q_BHTD: Array
    ids_BT: Array | None  # of documents


class Keys(NamedTuple):
    k_BKSD: Array
    v_BKSD: Array
    ids_BS: Array | None


class Attended(NamedTuple):
    """lse: log of the sum of the exponentials of scores, float32."""

    out_BHTD: Array
    lse_BHT: Array


class Gradient(NamedTuple):
    """Of what all keys gave. result: the output; out: its gradient; dot: the sum over D of both, float32."""

    lse_BHT: Array
    out_BHTD: Array
    dot_BHT: Array
    result_BHTD: Array


class Gradients(NamedTuple):
    """Of queries, keys and values."""

    q_BHTD: Array
    k_BKSD: Array
    v_BKSD: Array


@dataclass(frozen=True)
class Sight:
    """Which keys the queries see: those that come `distance` before, of `window` tokens at most (None: any number).

    distance: of the first query from the first key, in tokens; an array where only the device knows it.
    """

    distance: int | Array
    window: int | None

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Returns True if nothing is hidden from any query, as far as that is known now."""
        if isinstance(self.distance, Array):
            return False
        is_near = self.window is None or self.distance + num_queries <= self.window
        return self.distance >= num_keys - 1 and is_near

    def mask(self, num_queries: int, num_keys: int) -> Array:
        """(queries, keys): True where a query sees a key."""
        distance = self.distance + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None, :]
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)


def split_length(tree: Any, num_parts: int) -> list[Any]:
    """The chunks of arrays whose length is dimension 2, or 1 where they have two dimensions."""
    leaves, structure = jax.tree.flatten(tree)
    cut = [jnp.split(x, num_parts, axis=min(2, x.ndim - 1)) for x in leaves]
    return [structure.unflatten([parts[i] for parts in cut]) for i in range(num_parts)]


def gradient_of(attended: Attended, d_out_BHTD: Array) -> Gradient:
    products = attended.out_BHTD.astype(jnp.float32) * d_out_BHTD.astype(jnp.float32)
    return Gradient(attended.lse_BHT, d_out_BHTD, jnp.sum(products, axis=-1), attended.out_BHTD)


def attend_with(
    forward: Callable[[Queries, Keys], Attended], gradients: Callable[[Queries, Keys, Gradient], Gradients],
    queries: Queries, keys: Keys,
) -> Array:  # fmt: skip
    """Returns what `forward` gives, with the derivative that `gradients` computes. The result and its log-sum-exp have
    names, so that a remat policy which saves attention saves all that its derivative reads."""

    @jax.custom_vjp
    def attend(queries: Queries, keys: Keys) -> Array:
        return forward(queries, keys).out_BHTD.astype(queries.q_BHTD.dtype)

    def run(queries: Queries, keys: Keys) -> tuple[Array, Any]:
        attended = named(forward(queries, keys), queries.q_BHTD.dtype)
        return attended.out_BHTD, (queries, keys, attended)

    def pull_back(saved: Any, d_out: Array) -> tuple[Queries, Keys]:
        queries, keys, attended = saved
        found = gradients(queries, keys, gradient_of(attended, d_out))
        dq, dk, dv = (d.astype(x.dtype) for d, x in zip(found, (queries.q_BHTD, *keys[:2]), strict=True))
        return Queries(dq, None), Keys(dk, dv, None)

    attend.defvjp(run, pull_back)
    return attend(queries, keys)


def named(attended: Attended, dtype: Any) -> Attended:
    """Returns both arrays under the names by which a remat policy knows them, the result in this type."""
    return Attended(marked(ATTENTION_RESULT, attended.out_BHTD.astype(dtype)), marked(ATTENTION_LSE, attended.lse_BHT))


class BlockKernel(Protocol):
    """sight: which keys the queries see, as a Sight or as the kernel's `shard_sight`."""

    def forward(self, queries: Queries, keys: Keys, sight: Any) -> Attended: ...

    def gradients(self, queries: Queries, keys: Keys, sight: Any, gradient: Gradient) -> Gradients: ...

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, window: int | None) -> Any:
        """Returns what the queries of one shard see of all keys of a sequence. length: tokens of a shard."""
        ...


def merge(one: Attended, other: Attended) -> Attended:
    """What both sets of keys give together, in float32."""
    lse = jnp.logaddexp(one.lse_BHT, other.lse_BHT)
    parts = (jnp.exp(x.lse_BHT - lse)[..., None] * x.out_BHTD.astype(jnp.float32) for x in (one, other))
    return Attended(sum(parts, start=jnp.zeros((), jnp.float32)), lse)


def both_ids(queries: Queries, keys: Keys) -> tuple[Array, ...]:
    return () if queries.ids_BT is None or keys.ids_BS is None else (queries.ids_BT, keys.ids_BS)
