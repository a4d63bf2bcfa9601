"""Attention of some queries to some of the keys, as parts of a larger attention: the kernels that a ring calls.

    out, lse = kernel.forward(queries, keys, sight)       softmax over these keys alone, and the log of its denominator
    merged = merge((out_1, lse_1), (out_2, lse_2))        what softmax over both gives
    dq, dk, dv = kernel.gradients(queries, keys, sight, gradient)   the part that these keys bring; `gradient` has what
                                                          attention to all keys gave, and its lse

By plain operations they run in tiles of queries x keys, so that the scores of one tile are in memory. Online softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867): each tile corrects the sums of the tiles before it. The backward pass
computes the scores of a tile again (Dao et al. 2022, arXiv:2205.14135). Tiles that a mask hides whole are not visited:
`plan_visits` lists the others, and a loop runs over that list.

Shapes: B batch, H heads, K kv_heads, G heads per kv_head, T queries, S keys, D head_dim, t tokens of a tile, V visited
tiles. Queries are scaled already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshloom.models.attention import Mask, is_same_document

from ...core.scopes import OperationName, fact_scope
from ...sharding.batch import TokenOrder
from ..remat import ATTENTION_LSE, ATTENTION_RESULT, marked

HIDDEN = -0.7 * float(np.finfo(np.float32).max)  # a score that softmax gives no weight


class Queries(NamedTuple):
    q_BHTD: Array
    ids_BT: Array | None  # the documents of tokens


class Keys(NamedTuple):
    k_BKSD: Array
    v_BKSD: Array
    ids_BS: Array | None


BLOCKS = "blocks"  # the fact in a scope: the blocks that a kernel computes, of all


def blocks_scope(num_used: int, num_blocks: int) -> str:
    """Returns the scope of a kernel that computes so many of the blocks of queries x keys."""
    return fact_scope(BLOCKS, f"{num_used}_of_{num_blocks}")


def used_blocks(name: OperationName) -> tuple[int, int] | None:
    """Returns the blocks that a kernel computes, and those of all queries and keys; None where no scope tells it."""
    used, _, every = (name.fact(BLOCKS) or "").partition("_of_")
    return (int(used), int(every)) if every else None


class Attended(NamedTuple):
    """The result of attention to some keys. lse: the logarithm of the sum of the exponentials of scores, float32."""

    out_BHTD: Array
    lse_BHT: Array


class Gradient(NamedTuple):
    """The output of attention to all keys, and its gradient. result: the output; out: its gradient; dot: the sum over D
    of both, float32."""

    lse_BHT: Array
    out_BHTD: Array
    dot_BHT: Array
    result_BHTD: Array


class Gradients(NamedTuple):
    """The gradients of queries, keys and values."""

    q_BHTD: Array
    k_BKSD: Array
    v_BKSD: Array


@dataclass(frozen=True)
class Sight:
    """The part of some keys that queries see.

    distance: the place of the first query less the place of the first key, in tokens; an array where only the device
    knows it.
    """

    distance: int | Array
    mask: Mask

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Returns True if nothing is hidden from any query, as far as that is known now."""
        return not isinstance(self.distance, Array) and self.mask.sees_all(self.distance, num_queries, num_keys)

    def seen(self, num_queries: int, num_keys: int) -> Array:
        """Returns (queries, keys): True where a query sees a key."""
        return self.mask.sees(self.distance + jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None, :])


def split_length(tree: Any, num_parts: int) -> list[Any]:
    """Returns the chunks of arrays whose length is dimension 2, or 1 where they have two dimensions."""
    leaves, structure = jax.tree.flatten(tree)
    cut = [jnp.split(x, num_parts, axis=min(2, x.ndim - 1)) for x in leaves]
    return [structure.unflatten([parts[i] for parts in cut]) for i in range(num_parts)]


def some_tokens(tree: Any, which: slice) -> Any:
    """Returns some tokens of arrays whose length is dimension 2, or 1 where they have two dimensions."""
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, which.start, which.stop, axis=min(2, x.ndim - 1)), tree)


def gradient_of(attended: Attended, d_out_BHTD: Array) -> Gradient:
    products = attended.out_BHTD.astype(jnp.float32) * d_out_BHTD.astype(jnp.float32)
    return Gradient(attended.lse_BHT, d_out_BHTD, jnp.sum(products, axis=-1), attended.out_BHTD)


def attend_with(
    forward: Callable[[Queries, Keys], Attended], gradients: Callable[[Queries, Keys, Gradient], Gradients],
    queries: Queries, keys: Keys, sinks_H: Array | None,
) -> Array:  # fmt: skip
    """Returns what `forward` gives, beside the sinks, with the derivative that `gradients` computes. The result and its
    log-sum-exp have names, so that a remat policy which saves attention saves all that its derivative reads."""

    @jax.custom_vjp
    def attend(queries: Queries, keys: Keys, sinks_H: Array | None) -> Array:
        return with_sinks(forward(queries, keys), sinks_H).out_BHTD.astype(queries.q_BHTD.dtype)

    def run(queries: Queries, keys: Keys, sinks_H: Array | None) -> tuple[Array, Any]:
        attended = named(with_sinks(forward(queries, keys), sinks_H), queries.q_BHTD.dtype)
        return attended.out_BHTD, (queries, keys, sinks_H, attended)

    def pull_back(saved: Any, d_out: Array) -> tuple[Queries, Keys, Array | None]:
        queries, keys, sinks_H, attended = saved
        gradient = gradient_of(attended, d_out)
        found = gradients(queries, keys, gradient)
        dq, dk, dv = (d.astype(x.dtype) for d, x in zip(found, (queries.q_BHTD, *keys[:2]), strict=True))
        d_sinks = None if sinks_H is None else gradient_of_sinks(sinks_H, gradient.lse_BHT, gradient.dot_BHT)
        return Queries(dq, None), Keys(dk, dv, None), d_sinks

    attend.defvjp(run, pull_back)
    return attend(queries, keys, sinks_H)


def with_sinks(attended: Attended, sinks_H: Array | None) -> Attended:
    """Returns attention whose softmax has one more score in each head, of a key without a value: the result is less by
    the share of the sink. The derivatives by keys and values need no other change: they are made of the logarithm of
    the whole denominator, and of the result."""
    if sinks_H is None:
        return attended
    lse_BHT = jnp.logaddexp(attended.lse_BHT, sinks_H.astype(jnp.float32)[:, None])
    share_BHT1 = jnp.exp(attended.lse_BHT - lse_BHT)[..., None]
    out_BHTD = (attended.out_BHTD.astype(jnp.float32) * share_BHT1).astype(attended.out_BHTD.dtype)
    return Attended(out_BHTD, lse_BHT)


def gradient_of_sinks(sinks_H: Array, lse_BHT: Array, dot_BHT: Array) -> Array:
    """Returns the gradient of the sinks: the weight of a sink takes from the result in its own proportion."""
    weights_BHT = jnp.exp(sinks_H.astype(jnp.float32)[:, None] - lse_BHT)
    return -jnp.sum(weights_BHT * dot_BHT, axis=(0, 2)).astype(sinks_H.dtype)


def named(attended: Attended, dtype: Any) -> Attended:
    """Returns both arrays under the names by which a remat policy knows them, the result in this type."""
    return Attended(marked(ATTENTION_RESULT, attended.out_BHTD.astype(dtype)), marked(ATTENTION_LSE, attended.lse_BHT))


class BlockKernel(Protocol):
    """Attention of some queries to some of the keys. sight: the keys that the queries see, as a Sight or as the
    kernel's `shard_sight`."""

    def forward(self, queries: Queries, keys: Keys, sight: Any) -> Attended: ...

    def gradients(self, queries: Queries, keys: Keys, sight: Any, gradient: Gradient) -> Gradients: ...

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, mask: Mask) -> Any:
        """Returns what the queries of one shard see of all keys of a sequence. length: tokens of a shard."""
        ...


def merge(one: Attended, other: Attended) -> Attended:
    """Returns what both sets of keys give together, in float32."""
    lse = jnp.logaddexp(one.lse_BHT, other.lse_BHT)
    parts = (jnp.exp(x.lse_BHT - lse)[..., None] * x.out_BHTD.astype(jnp.float32) for x in (one, other))
    return Attended(sum(parts, start=jnp.zeros((), jnp.float32)), lse)


def both_ids(queries: Queries, keys: Keys) -> tuple[Array, ...]:
    return () if queries.ids_BT is None or keys.ids_BS is None else (queries.ids_BT, keys.ids_BS)


TILE = 512  # in tokens
QUERIES, KEYS, IDS = 3, 2, 1  # the dimension that is the length, with heads in groups of a kv_head


class Visits(NamedTuple):
    """Pairs of tiles of queries and of keys, (V) each. distance: that of the first query from the first key, in
    tokens."""

    queries: Array
    keys: Array
    distance: Array


@dataclass(frozen=True)
class TiledSight:
    """The tiles of the keys that queries see. tile: the tokens of one. is_masked: False where all visits see all
    keys."""

    visits: Visits
    tile: int
    mask: Mask
    is_masked: bool


def tile_size(*lengths: int, wanted: int = TILE) -> int:
    """Returns the common divisor of all lengths that is nearest to the wanted one, by their ratio."""
    common = int(np.gcd.reduce(lengths))
    divisors = (size for size in range(1, common + 1) if common % size == 0)
    return min(divisors, key=lambda size: abs(log(size / wanted)))


def plan_visits(starts: np.ndarray, num_keys: int, tile: int, mask: Mask) -> np.ndarray:
    """Returns the visits of each shard, (shards, 3, V): a tile of its queries, a tile of the keys, their distance.

    starts: the place of each shard's tiles of queries, in tokens from the first key, (shards, tiles). All shards have
    as many visits as the one with most: others visit the first tiles at a distance at which nothing is seen.
    """
    distance = starts[:, :, None] - tile * np.arange(num_keys // tile)
    is_seen = mask.sees_any(distance, tile, tile)
    most = max(1, int(is_seen.sum(axis=(1, 2)).max()))
    found = np.zeros((len(starts), 3, most), np.int32)
    found[:, 2] = -tile
    for shard, (seen, far) in enumerate(zip(is_seen, distance, strict=True)):
        rows, columns = np.nonzero(seen)
        found[shard, :, : len(rows)] = rows, columns, far[rows, columns]
    return found


def tiles_of(sight: Sight, num_queries: int, num_keys: int, *, wanted: int) -> TiledSight:
    """Returns all tiles, where only the device knows how far the queries are from the keys."""
    tile = tile_size(num_queries, num_keys, wanted=wanted)
    starts = tile * np.arange(num_queries // tile)[None]
    if isinstance(sight.distance, Array):
        rows, columns = (x.reshape(-1) for x in np.indices((num_queries // tile, num_keys // tile), np.int32))
        visits = Visits(jnp.asarray(rows), jnp.asarray(columns), sight.distance + jnp.asarray(tile * (rows - columns)))
    else:
        visits = Visits(*map(jnp.asarray, plan_visits(sight.distance + starts, num_keys, tile, sight.mask)[0]))
    return TiledSight(visits, tile, sight.mask, is_masked=not sight.sees_all(num_queries, num_keys))


@dataclass(frozen=True)
class TiledBlocks:
    """Plain operations, which run anywhere. tile: the wanted number of tokens of a tile."""

    soft_cap: float | None
    tile: int = TILE

    def forward(self, queries: Queries, keys: Keys, sight: Sight | TiledSight) -> Attended:
        tiles = self._tiles(queries, keys, sight)
        q = _grouped(queries.q_BHTD, keys.k_BKSD.shape[1])
        rows = q.shape[:-1]

        def visit(sums: Any, visit: Visits) -> Any:
            out, highest, total = (_tile(x, visit.queries, tiles.tile, QUERIES) for x in sums)
            scores, _ = self._scores(queries, keys, tiles, visit)
            most = jnp.maximum(highest, jnp.max(scores, axis=-1))
            weights, before = jnp.exp(scores - most[..., None]), jnp.exp(highest - most)
            v = _tile(keys.v_BKSD, visit.keys, tiles.tile, KEYS)
            out = out * before[..., None] + _product("bkgts,bksd->bkgtd", weights, v)
            total = total * before + jnp.sum(weights, axis=-1)
            made = zip(sums, (out, most, total), strict=True)
            return tuple(_with_tile(x, new, visit.queries, tiles.tile, QUERIES) for x, new in made)

        out = jnp.zeros((*rows, keys.v_BKSD.shape[-1]), jnp.float32)
        sums = out, jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32)
        out, highest, total = _over(tiles.visits, visit, sums)
        total = jnp.where(total == 0, 1.0, total)  # queries that no visit brought a key
        return Attended(_ungrouped(out / total[..., None]), _ungrouped(highest + jnp.log(total)))

    def gradients(self, queries: Queries, keys: Keys, sight: Sight | TiledSight, gradient: Gradient) -> Gradients:
        tiles, num_kv_heads = self._tiles(queries, keys, sight), keys.k_BKSD.shape[1]
        of_queries = tuple(_grouped(x, num_kv_heads) for x in (queries.q_BHTD, *gradient[:3]))

        def visit(sums: Any, visit: Visits) -> Any:
            scores, is_seen = self._scores(queries, keys, tiles, visit)
            q, lse, d_out, dot = (_tile(x, visit.queries, tiles.tile, QUERIES) for x in of_queries)
            k, v = (_tile(x, visit.keys, tiles.tile, KEYS) for x in (keys.k_BKSD, keys.v_BKSD))
            weights = jnp.exp(scores - lse[..., None])
            d_scores = weights * (_scores_of(d_out, v) - dot[..., None])
            if self.soft_cap is not None:
                slope = 1 - jnp.square(scores / self.soft_cap)
                d_scores = d_scores * (slope if is_seen is None else jnp.where(is_seen, slope, 0.0))
            dq, dk, dv = sums
            dq = _added(dq, _product("bkgts,bksd->bkgtd", d_scores, k), visit.queries, tiles.tile, QUERIES)
            dk = _added(dk, _product("bkgts,bkgtd->bksd", d_scores, q), visit.keys, tiles.tile, KEYS)
            dv = _added(dv, _product("bkgts,bkgtd->bksd", weights, d_out), visit.keys, tiles.tile, KEYS)
            return dq, dk, dv

        zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (of_queries[0], keys.k_BKSD, keys.v_BKSD))
        dq, dk, dv = _over(tiles.visits, visit, zeros)
        return Gradients(_ungrouped(dq), dk, dv)

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, mask: Mask) -> TiledSight:
        chunk = length // order.chunks_per_shard
        tile = tile_size(chunk, wanted=self.tile)
        starts = order.chunks()[:, :, None] * chunk + tile * np.arange(chunk // tile)
        visits = plan_visits(starts.reshape(order.num_shards, -1), order.num_shards * length, tile, mask)
        return TiledSight(Visits(*jnp.asarray(visits)[shard]), tile, mask, is_masked=True)

    def _tiles(self, queries: Queries, keys: Keys, sight: Sight | TiledSight) -> TiledSight:
        if isinstance(sight, TiledSight):
            return sight
        return tiles_of(sight, queries.q_BHTD.shape[2], keys.k_BKSD.shape[2], wanted=self.tile)

    def _scores(self, queries: Queries, keys: Keys, tiles: TiledSight, visit: Visits) -> tuple[Array, Array | None]:
        """Returns the scores of a tile, with HIDDEN where nothing is seen, and the mask, None where all is seen."""
        tile = tiles.tile
        q = _tile(_grouped(queries.q_BHTD, keys.k_BKSD.shape[1]), visit.queries, tile, QUERIES)
        scores = _scores_of(q, _tile(keys.k_BKSD, visit.keys, tile, KEYS))
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        is_seen = Sight(visit.distance, tiles.mask).seen(tile, tile)[None] if tiles.is_masked else None
        if queries.ids_BT is not None and keys.ids_BS is not None:
            of_queries = _tile(queries.ids_BT, visit.queries, tile, IDS)
            is_same = is_same_document(of_queries, _tile(keys.ids_BS, visit.keys, tile, IDS))
            is_seen = is_same if is_seen is None else is_seen & is_same
        if is_seen is None:
            return scores, None
        is_seen = is_seen[:, None, None]
        return jnp.where(is_seen, scores, HIDDEN), is_seen


def _over(visits: Visits, visit: Any, sums: Any) -> Any:
    """Returns the sums after all visits. A single visit needs no loop."""
    if visits.keys.shape[0] == 1:
        return visit(sums, jax.tree.map(lambda x: x[0], visits))
    return jax.lax.scan(lambda sums, one: (visit(sums, one), None), sums, visits)[0]


def _scores_of(left: Array, right: Array) -> Array:
    return jnp.einsum("bkgtd,bksd->bkgts", left, right, preferred_element_type=jnp.float32)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    """Returns a product in the type of the right factor, summed in float32."""
    return jnp.einsum(subscripts, left.astype(right.dtype), right, preferred_element_type=jnp.float32)


def _tile(x: Array, index: Array, tile: int, axis: int) -> Array:
    return x if x.shape[axis] == tile else jax.lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _with_tile(x: Array, new: Array, index: Array, tile: int, axis: int) -> Array:
    return new if x.shape[axis] == tile else jax.lax.dynamic_update_slice_in_dim(x, new, index * tile, axis)


def _added(x: Array, more: Array, index: Array, tile: int, axis: int) -> Array:
    return _with_tile(x, _tile(x, index, tile, axis) + more, index, tile, axis)


def _grouped(x: Array, num_kv_heads: int) -> Array:
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _ungrouped(x: Array) -> Array:
    return x.reshape(x.shape[0], -1, *x.shape[3:])
