"""Splash attention of some queries to some of the keys: the tables of what is seen, for a ring and gathered keys."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from ..sharding.batch import TokenOrder
from .blocks import Attended, Gradient, Gradients, Keys, Queries, Sight
from .splash_fused import TABLE_BYTES, Budget, all_blocks, seen_blocks
from .splash_kernels import (
    BLOCKS,
    PARTLY,
    WHOLE,
    CausalMask,
    SplashOptions,
    Tables,
    attend,
    block_size,
    gradients,
)


def whole_tables(num_queries: int, num_keys: int) -> Tables:
    """Every query sees every key: no tables, and no mask."""
    block, nothing = block_size(num_queries, num_keys, most=BLOCKS[0]), MaskInfo(None, None, None, None, None)
    num_blocks = (num_queries // block) * (num_keys // block)
    seen = all_blocks(num_queries, block, num_keys)
    return Tables(block, nothing, nothing, None, num_blocks, num_blocks, seen)


def unknown_tables(distance: Array, num_queries: int, num_keys: int, window: int | None) -> Tables:
    """Only the device knows how far the queries are from the keys: every block is computed, and masked."""
    whole = whole_tables(num_queries, num_keys)
    masked = _info(None, distance + jnp.arange(num_queries, dtype=jnp.int32))
    return replace(whole, queries_first=masked, keys_first=masked, mask=CausalMask(window))


def block_tables(distance: int, num_queries: int, num_keys: int, window: int | None) -> Tables:
    """Queries that are `distance` tokens behind the keys."""
    block = block_size(num_queries, num_keys, *([distance] if distance else []), most=BLOCKS[0])
    places = np.arange(distance // block, (distance + num_queries) // block)
    forward, backward, num_used = tables_of(places[None], num_keys // block, block, window)
    queries = jnp.asarray(distance + np.arange(num_queries, dtype=np.int32))
    first, other = (_info([x[0] for x in table], queries) for table in (forward, backward))
    seen = seen_blocks(places[None] * block, block, num_keys, window)
    return Tables(block, first, other, CausalMask(window), num_used, len(places) * (num_keys // block), seen)


def shard_tables(chunks: np.ndarray, shard: Array, queries: Array, num_keys: int, window: int | None) -> Tables:
    """The tables of one shard, of queries that see all keys before them.

    chunks: the chunks of the sequence that each shard's queries are, (shards, chunks of each). queries: the place in
    the sequence of each of this shard's. Blocks are larger where tables would not fit a TPU's scalar memory.
    """
    chunk = queries.shape[0] // chunks.shape[1]
    sizes = [block_size(chunk, num_keys, most=most) for most in BLOCKS]
    made = [_tables_of_shards(chunks, chunk, num_keys, size, window) for size in dict.fromkeys(sizes)]
    block, forward, backward, num_used = next((each for each in made if _fits(*each[1:3])), made[-1])
    first, other = (_info([jnp.asarray(x)[shard] for x in table], queries) for table in (forward, backward))
    num_blocks = queries.shape[0] // block * (num_keys // block)
    seen = seen_blocks(_places(chunks, chunk, block) * block, block, num_keys, window)
    return Tables(block, first, other, CausalMask(window), num_used, num_blocks, seen, shard)


def _tables_of_shards(
    chunks: np.ndarray, chunk: int, num_keys: int, block: int, window: int | None
) -> tuple[int, "BlockTable", "BlockTable", int]:
    return block, *tables_of(_places(chunks, chunk, block), num_keys // block, block, window)


def _places(chunks: np.ndarray, chunk: int, block: int) -> np.ndarray:
    """Returns the places of the rows of queries of each shard, in blocks."""
    return (chunks[:, :, None] * (chunk // block) + np.arange(chunk // block)).reshape(len(chunks), -1)


def _fits(*tables: "BlockTable") -> bool:
    return all(sum(x[0].nbytes for x in table) <= TABLE_BYTES for table in tables)


def _info(table: Any, queries: Array) -> MaskInfo:
    """table: which blocks entries are, and how much of each the mask leaves; None: all blocks, in order."""
    data, used = (None, None) if table is None else map(jnp.asarray, table)
    places: Any = queries
    return MaskInfo(data, None, used, None, places)


BlockTable = tuple[np.ndarray, np.ndarray]  # which block an entry is; how much of it the mask leaves


def tables_of(places: np.ndarray, num_keys: int, block: int, window: int | None) -> tuple[BlockTable, BlockTable, int]:
    """(shards, rows of queries) -> tables (shards, 1, rows, entries), and (shards, 1, entries, keys); and how many
    entries of the shard with most are used. All in blocks. A row of queries that sees nothing has one entry, which the
    mask hides: the kernel divides by what it has summed."""
    reach = num_keys if window is None else (window + block - 2) // block
    lowest = np.minimum(np.maximum(places - reach, 0), num_keys - 1)
    highest = np.maximum(np.minimum(places, num_keys - 1), lowest)
    keys = np.arange(num_keys)
    is_seen = (lowest[..., None] <= keys) & (keys <= highest[..., None])  # (shards, rows, keys)
    distance = (places[..., None] - keys) * block
    is_whole = (distance >= block - 1) & (window is None or distance + block <= window)
    value = np.where(is_seen, np.where(is_whole, WHOLE, PARTLY), 0)
    forward = _packed(value)
    backward = tuple(np.swapaxes(x, 1, 2) for x in _packed(np.swapaxes(value, 1, 2)))
    used = int(is_seen.sum(axis=(1, 2)).max())
    return _typed(forward), _typed(backward), used


def _packed(value: np.ndarray) -> BlockTable:
    """(shards, rows, columns) -> the columns that each row uses, first; and their values."""
    width = max(1, int((value > 0).sum(axis=2).max()))
    columns = np.argsort(value == 0, axis=2, kind="stable")[..., :width]
    used = np.take_along_axis(value, columns, axis=2)
    return np.where(used > 0, columns, 0), used


def _typed(table: Any) -> BlockTable:
    data, used = (x[:, None].astype(np.min_scalar_type(-1 - int(x.max()))) for x in table)
    return data, used


@dataclass(frozen=True)
class SplashBlocks:
    """Splash attention, whose scores stay in the chip's vector memory. budget: of one backward kernel. interpret: run
    it operation by operation."""

    soft_cap: float | None
    budget: Budget
    interpret: bool

    def forward(self, queries: Queries, keys: Keys, sight: Sight | Tables) -> Attended:
        return attend(self._tables(queries, keys, sight), queries, keys, self._options)

    def gradients(self, queries: Queries, keys: Keys, sight: Sight | Tables, gradient: Gradient) -> Gradients:
        return gradients(self._tables(queries, keys, sight), queries, keys, gradient, self._options)

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, window: int | None) -> Tables:
        places = order.of_shard(length, shard)
        return shard_tables(order.chunks(), shard, places, order.num_shards * length, window)

    def _tables(self, queries: Queries, keys: Keys, sight: Sight | Tables) -> Tables:
        if isinstance(sight, Tables):
            return sight
        num_queries, num_keys = queries.q_BHTD.shape[2], keys.k_BKSD.shape[2]
        if sight.sees_all(num_queries, num_keys):
            return whole_tables(num_queries, num_keys)
        if isinstance(sight.distance, Array):
            return unknown_tables(sight.distance, num_queries, num_keys, sight.window)
        return block_tables(sight.distance, num_queries, num_keys, sight.window)

    @property
    def _options(self) -> SplashOptions:
        return SplashOptions(self.soft_cap, self.budget, interpret=self.interpret)
