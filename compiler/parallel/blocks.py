"""Attention of some queries to some of the keys, as parts of a larger attention: the kernels that a ring calls.

    out, lse = kernel.forward(queries, keys, sight)       softmax over these keys alone, and the log of its denominator
    merged = merge((out_1, lse_1), (out_2, lse_2))        what softmax over both gives
    dq = kernel.dq(queries, keys, sight, gradient)        the part of each gradient that these keys bring; `gradient`
    dk, dv = kernel.dkv(queries, keys, sight, gradient)   has the lse over all keys

Shapes: B batch, H heads, K kv_heads, G heads per kv_head, T queries, S keys, D head_dim. Queries are scaled already.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.scopes import blocks_scope
from . import splash_blocks as splash

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
    """Of what all keys gave. dot_BHT: the sum over D of the output times its gradient, float32."""

    lse_BHT: Array
    out_BHTD: Array
    dot_BHT: Array


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
    return Gradient(attended.lse_BHT, d_out_BHTD, jnp.sum(products, axis=-1))


class BlockKernel(Protocol):
    """sight: which keys the queries see; of splash also its tables."""

    def forward(self, queries: Queries, keys: Keys, sight: Any) -> Attended: ...

    def dq(self, queries: Queries, keys: Keys, sight: Any, gradient: Gradient) -> Array: ...

    def dkv(self, queries: Queries, keys: Keys, sight: Any, gradient: Gradient) -> tuple[Array, Array]: ...


def merge(one: Attended, other: Attended) -> Attended:
    """What both sets of keys give together, in float32."""
    lse = jnp.logaddexp(one.lse_BHT, other.lse_BHT)
    parts = (jnp.exp(x.lse_BHT - lse)[..., None] * x.out_BHTD.astype(jnp.float32) for x in (one, other))
    return Attended(sum(parts, start=jnp.zeros((), jnp.float32)), lse)


@dataclass(frozen=True)
class PlainBlocks:
    """Plain operations: the scores of a block are in memory."""

    soft_cap: float | None

    def forward(self, queries: Queries, keys: Keys, sight: Sight) -> Attended:
        scores, _ = self._scores(queries, keys, sight)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1)
        weights = weights.astype(keys.v_BKSD.dtype)
        out = jnp.einsum("bkgts,bksd->bkgtd", weights, keys.v_BKSD, preferred_element_type=jnp.float32)
        lse = highest[..., 0] + jnp.log(total)
        return Attended(_ungrouped(out / total[..., None]), _ungrouped(lse))

    def dq(self, queries: Queries, keys: Keys, sight: Sight, gradient: Gradient) -> Array:
        _, d_scores = self._weights(queries, keys, sight, gradient)
        return _ungrouped(_product("bkgts,bksd->bkgtd", d_scores, keys.k_BKSD))

    def dkv(self, queries: Queries, keys: Keys, sight: Sight, gradient: Gradient) -> tuple[Array, Array]:
        weights, d_scores = self._weights(queries, keys, sight, gradient)
        group = partial(_grouped, num_kv_heads=keys.k_BKSD.shape[1])
        dk = _product("bkgts,bkgtd->bksd", d_scores, group(queries.q_BHTD))
        return dk, _product("bkgts,bkgtd->bksd", weights, group(gradient.out_BHTD))

    def _scores(self, queries: Queries, keys: Keys, sight: Sight) -> tuple[Array, Array | None]:
        """(scores, with HIDDEN where nothing is seen; the mask, None where all is)."""
        q = _grouped(queries.q_BHTD, keys.k_BKSD.shape[1])
        scores = jnp.einsum("bkgtd,bksd->bkgts", q, keys.k_BKSD, preferred_element_type=jnp.float32)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        is_seen = _is_seen(queries, keys, sight)
        return (scores if is_seen is None else jnp.where(is_seen, scores, HIDDEN)), is_seen

    def _weights(self, queries: Queries, keys: Keys, sight: Sight, gradient: Gradient) -> tuple[Array, Array]:
        """(softmax, gradient of the scores)."""
        scores, is_seen = self._scores(queries, keys, sight)
        lse, d_out, dot = (_grouped(x, keys.k_BKSD.shape[1]) for x in gradient)
        weights = jnp.exp(scores - lse[..., None])
        d_weights = jnp.einsum("bkgtd,bksd->bkgts", d_out, keys.v_BKSD, preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights - dot[..., None])
        if self.soft_cap is not None:
            slope = 1 - jnp.square(scores / self.soft_cap)
            d_scores = d_scores * (slope if is_seen is None else jnp.where(is_seen, slope, 0.0))
        return weights, d_scores


def _is_seen(queries: Queries, keys: Keys, sight: Sight) -> Array | None:
    shape = queries.q_BHTD.shape[2], keys.k_BKSD.shape[2]
    is_seen = None if sight.sees_all(*shape) else sight.mask(*shape)[None]
    if queries.ids_BT is not None and keys.ids_BS is not None:
        is_same = queries.ids_BT[:, :, None] == keys.ids_BS[:, None, :]
        is_seen = is_same if is_seen is None else is_seen & is_same
    return None if is_seen is None else is_seen[:, None, None]


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """In the type of the right factor, summed in float32."""
    return jnp.einsum(subscripts, left.astype(right.dtype), right, preferred_element_type=jnp.float32)


def _grouped(x: Array, num_kv_heads: int) -> Array:
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@dataclass(frozen=True)
class SplashBlocks:
    """Splash attention, whose scores stay in the chip's vector memory. interpret: run it operation by operation."""

    soft_cap: float | None
    interpret: bool

    def forward(self, queries: Queries, keys: Keys, sight: Sight | splash.Tables) -> Attended:
        tables = self._tables(queries, keys, sight)
        with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
            call = partial(splash.forward_with_lse, tables, soft_cap=self.soft_cap, interpret=self.interpret)
            return Attended(*jax.vmap(call)(queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, *both_ids(queries, keys)))

    def dq(self, queries: Queries, keys: Keys, sight: Sight | splash.Tables, gradient: Gradient) -> Array:
        return self._backward(splash.backward_dq, queries, keys, sight, gradient)

    def dkv(
        self, queries: Queries, keys: Keys, sight: Sight | splash.Tables, gradient: Gradient
    ) -> tuple[Array, Array]:
        return self._backward(splash.backward_dkv, queries, keys, sight, gradient)

    def _backward(
        self, run: Any, queries: Queries, keys: Keys, sight: Sight | splash.Tables, gradient: Gradient
    ) -> Any:
        tables = self._tables(queries, keys, sight)
        lse, d_out, dot = gradient
        of_all = (lse, d_out.astype(queries.q_BHTD.dtype), dot)
        with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
            call = partial(run, tables, soft_cap=self.soft_cap, interpret=self.interpret)
            return jax.vmap(call)(queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, of_all, *both_ids(queries, keys))

    def _tables(self, queries: Queries, keys: Keys, sight: Sight | splash.Tables) -> splash.Tables:
        if isinstance(sight, splash.Tables):
            return sight
        num_queries, num_keys = queries.q_BHTD.shape[2], keys.k_BKSD.shape[2]
        if sight.sees_all(num_queries, num_keys):
            return splash.whole_tables(num_queries, num_keys)
        if isinstance(sight.distance, Array):
            return splash.unknown_tables(sight.distance, num_queries, num_keys, sight.window)
        return splash.block_tables(sight.distance, num_queries, num_keys, sight.window)


def both_ids(queries: Queries, keys: Keys) -> tuple[Array, ...]:
    return () if queries.ids_BT is None or keys.ids_BS is None else (queries.ids_BT, keys.ids_BS)
