"""JAX's splash attention for TPUs, with its tables of blocks written down instead of searched for.

The kernel works on blocks of queries x keys and reads from small tables which blocks have anything to compute. JAX's
own `make_splash_mha` fills them by evaluating the mask on every block: 65,536 blocks of 512 x 512 at 131,072 tokens,
for each of three kernels, a minute of processor time. Which blocks a causal mask leaves is arithmetic, so the tables
here take as long as their own entries do. They are equal to JAX's (tests/compiler/parallel/test_splash.py).

The size of a block is the one that takes least time (`block_scores`): a larger block has less overhead, and computes
more of what a mask hides at its edge. A TPU reads the tables from its scalar memory, which is small. Where no tables
would fit, the queries are cut in parts, and each part is a kernel of its own over the keys up to its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshloom.models.attention import Mask

from ...core.kernels import Deferred
from ...sharding.batch import TokenOrder
from .blocks import Attended, Gradient, Gradients, Keys, Queries, Sight, attend_with, some_tokens
from .splash_kernels import (
    PARTLY,
    TABLE_BYTES,
    WHOLE,
    Budget,
    SplashOptions,
    Tables,
    all_blocks,
    attend,
    block_scores,
    block_sizes,
    gradients,
    seen_blocks,
)

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

tables_of_jax: Any = Deferred("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info")


def attend_splash(
    q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segment_ids_BT: Array | None, sinks_H: Array | None = None,
    *, scale: float, mask: Mask, soft_cap: float | None, budget: Budget, interpret: bool,
) -> Array:  # fmt: skip
    """Returns attention by the kernel. budget: what one backward kernel may cost. interpret: run it operation by
    operation, anywhere."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTHD * jnp.asarray(scale, q_BTHD.dtype), k_BSKD, v_BSKD))
    whole = _Whole(mask, SplashOptions(soft_cap, budget, interpret=interpret))
    queries, keys = Queries(q, segment_ids_BT), Keys(k, v, segment_ids_BT)
    return jnp.swapaxes(attend_with(whole.forward, whole.gradients, queries, keys, sinks_H), 1, 2)


@dataclass(frozen=True)
class _Whole:
    """Attention within whole sequences, in as many kernels as `plan_cut` says."""

    mask: Mask
    options: SplashOptions

    def forward(self, queries: Queries, keys: Keys) -> Attended:
        parts = [attend(tables, *operands, self.options) for tables, _, operands in self._parts(queries, keys)]
        return Attended(*(jnp.concatenate(each, axis=2) for each in zip(*parts, strict=True)))

    def gradients(self, queries: Queries, keys: Keys, gradient: Gradient) -> Gradients:
        found = [
            gradients(tables, *operands, some_tokens(gradient, own), self.options)
            for tables, own, operands in self._parts(queries, keys)
        ]
        dq, *of_keys = zip(*found, strict=True)
        return Gradients(jnp.concatenate(dq, axis=2), *(_sum_of_beginnings(each) for each in of_keys))

    def _parts(self, queries: Queries, keys: Keys) -> list[tuple[Tables, slice, tuple[Queries, Keys]]]:
        """Returns the tables of each kernel, its queries, and its operands."""
        length = queries.q_BHTD.shape[2]
        cut = plan_cut(length, self.mask, self.options.budget)
        parts = []
        for first in range(0, length, cut.part):
            own = slice(first, first + cut.part)
            operands = some_tokens(queries, own), some_tokens(keys, slice(0, own.stop))
            parts.append((_tables(cut, first, self.mask), own, operands))
        return parts


def _sum_of_beginnings(parts: Sequence[Array]) -> Array:
    """Returns the sum of gradients of the first keys, each of more of them than the one before."""
    *others, total = parts
    for part in others:
        total = total.at[:, :, : part.shape[2]].add(part)
    return total


@dataclass(frozen=True)
class Cut:
    """The kernels of whole sequences. block: the tokens of a block. part: the queries of a kernel, all of them but in
    long sequences."""

    block: int
    part: int


def plan_cut(length: int, mask: Mask, budget: Budget) -> Cut:
    """Returns the block that takes least time among those whose tables fit, else the largest with as few parts as
    fit."""
    sizes = block_sizes(budget, length)
    whole = [Cut(block, length) for block in sizes]
    if fitting := [cut for cut in whole if _table_bytes(cut, length, mask) <= TABLE_BYTES]:
        return min(fitting, key=lambda cut: block_scores(cut.block, _num_used(cut, 0, mask), budget))
    num_blocks = length // sizes[0]
    parts = (Cut(sizes[0], length // n) for n in range(2, num_blocks + 1) if num_blocks % n == 0)
    return next(cut for cut in parts if _table_bytes(cut, length, mask) <= TABLE_BYTES)


def _num_used(cut: Cut, first: int, mask: Mask) -> int:
    """Returns the blocks that the mask leaves to the kernel whose first query this is."""
    rows, num_keys = np.arange(first, first + cut.part, cut.block) // cut.block, (first + cut.part) // cut.block
    return int((np.minimum(rows, mask.reach(cut.block, num_keys)) + 1).sum())


def _table_bytes(cut: Cut, length: int, mask: Mask) -> int:
    """Returns the bytes of the longer of both tables of the last part, in int16 and int8."""
    rows, reach = length // cut.block, mask.reach(cut.block, length // cut.block)
    return 3 * max(cut.part // cut.block * (reach + 1), rows * min(cut.part // cut.block, reach + 1))


def _tables(cut: Cut, first: int, mask: Mask) -> Tables:
    """Returns the tables of the kernel whose first query this is."""
    queries_first, keys_first = (
        jax.tree.map(jnp.asarray, mask_info(first, first + cut.part, cut.block, mask, keys_first=keys_first))
        for keys_first in (False, True)
    )
    keys_first = keys_first._replace(q_sequence=queries_first.q_sequence)  # one constant of the program
    seen = seen_blocks(np.arange(first, first + cut.part, cut.block)[None], cut.block, first + cut.part, mask)
    num_blocks = cut.part // cut.block * ((first + cut.part) // cut.block)
    return Tables(cut.block, queries_first, keys_first, mask, _num_used(cut, first, mask), num_blocks, seen)


def mask_info(first: int, last: int, block: int, mask: Mask, *, keys_first: bool) -> "MaskInfo":
    """Returns the tables of one kernel, for all heads: of the queries first .. last, and the keys 0 .. last.

    They are (1, queries, entries), or with keys_first (1, entries, keys), in blocks. Query block i sees the key blocks
    i - reach .. i. A row has an entry for each of them; a row at the edge also has empty ones, after them, or before
    them with keys_first. data_next: which block an entry is; block_mask: how much of it the mask leaves.
    4 blocks, no window:  data_next [[0 0 0 0] [0 1 0 0] [0 1 2 0] [0 1 2 3]], block_mask [[1 0 0 0] [2 1 0 0] ...].
    """
    begin, end = first // block, last // block
    reach = mask.reach(block, end)
    if keys_first:
        keys = np.arange(end, dtype=np.int32)[:, None]
        begins, ends = np.maximum(keys, begin), np.minimum(end, keys + reach + 1)
        entries = np.arange(min(end - begin, reach + 1), dtype=np.int32)[None, :]
        queries = ends - entries.size + entries
        is_used, other = queries >= begins, queries - begin
    else:
        queries = np.arange(begin, end, dtype=np.int32)[:, None]
        keys = other = np.maximum(0, queries - reach) + np.arange(reach + 1, dtype=np.int32)[None, :]
        is_used = keys <= queries
    is_whole = mask.sees_all((queries - keys) * block, block, block)
    data_next = np.where(is_used, other, 0)
    block_mask = np.where(is_used, np.where(is_whole, WHOLE, PARTLY), 0)
    tables = [(x.T if keys_first else x)[None] for x in (data_next, block_mask)]
    data_next, block_mask = (x.astype(np.min_scalar_type(-1 - x.max())) for x in tables)
    return tables_of_jax.MaskInfo(data_next, None, block_mask, None, np.arange(first, last, dtype=np.int32))


def whole_tables(num_queries: int, num_keys: int, budget: Budget) -> Tables:
    """Returns the tables where every query sees every key: none, and no mask. A larger block computes nothing more."""
    block = block_sizes(budget, num_queries, num_keys)[0]
    nothing = tables_of_jax.MaskInfo(None, None, None, None, None)
    num_blocks = (num_queries // block) * (num_keys // block)
    seen = all_blocks(num_queries, block, num_keys)
    return Tables(block, nothing, nothing, None, num_blocks, num_blocks, seen)


def unknown_tables(distance: Array, num_queries: int, num_keys: int, mask: Mask, budget: Budget) -> Tables:
    """Returns the tables where only the device knows how far the queries are from the keys: every block is computed,
    and masked."""
    whole = whole_tables(num_queries, num_keys, budget)
    masked = _info(None, distance + jnp.arange(num_queries, dtype=jnp.int32))
    return replace(whole, queries_first=masked, keys_first=masked, mask=mask)


def block_tables(distance: int, num_queries: int, num_keys: int, mask: Mask, budget: Budget) -> Tables:
    """Returns the tables of queries that are `distance` tokens behind the keys."""
    made = []
    for size in block_sizes(budget, num_queries, num_keys, distance):
        places = np.arange(distance // size, (distance + num_queries) // size)
        made.append((size, *tables_of(places[None], num_keys // size, size, mask)))
    block, forward, backward, num_used = _cheapest(made, budget)
    places = np.arange(distance // block, (distance + num_queries) // block)
    queries = jnp.asarray(distance + np.arange(num_queries, dtype=np.int32))
    first, other = (_info([x[0] for x in table], queries) for table in (forward, backward))
    seen = seen_blocks(places[None] * block, block, num_keys, mask)
    return Tables(block, first, other, mask, num_used, len(places) * (num_keys // block), seen)


def shard_tables(chunks: np.ndarray, shard: Array, queries: Array, num_keys: int, mask: Mask, budget: Budget) -> Tables:
    """Returns the tables of one shard, of queries that see all keys before them.

    chunks: the chunks of the sequence that each shard's queries are, (shards, chunks of each). queries: the place in
    the sequence of each of this shard's.
    """
    chunk = queries.shape[0] // chunks.shape[1]
    made = [
        (size, *tables_of(shard_places(chunks, chunk, size), num_keys // size, size, mask))
        for size in block_sizes(budget, chunk, num_keys)
    ]
    block, forward, backward, num_used = _cheapest(made, budget)
    first, other = (_info([jnp.asarray(x)[shard] for x in table], queries) for table in (forward, backward))
    num_blocks = queries.shape[0] // block * (num_keys // block)
    seen = seen_blocks(shard_places(chunks, chunk, block) * block, block, num_keys, mask)
    return Tables(block, first, other, mask, num_used, num_blocks, seen, shard)


def shard_places(chunks: np.ndarray, chunk: int, block: int) -> np.ndarray:
    """Returns the places of the rows of queries of each shard, in blocks."""
    return (chunks[:, :, None] * (chunk // block) + np.arange(chunk // block)).reshape(len(chunks), -1)


def _cheapest(made: Sequence["Made"], budget: Budget) -> "Made":
    """Returns the tables that take least time among those that fit a TPU's scalar memory; if none does, those of the
    largest block."""
    fitting = [
        each for each in made if all(sum(x[0].nbytes for x in table) <= TABLE_BYTES for table in (each[1], each[2]))
    ]
    return min(fitting or made[:1], key=lambda each: block_scores(each[0], each[3], budget))


def _info(table: Any, queries: Array) -> "MaskInfo":
    """Returns the kernel's own form of tables. table: which blocks entries are, and how much of each the mask leaves;
    None: all blocks, in order."""
    data, used = (None, None) if table is None else map(jnp.asarray, table)
    places: Any = queries
    return tables_of_jax.MaskInfo(data, None, used, None, places)


BlockTable = tuple[np.ndarray, np.ndarray]  # which block an entry is; how much of it the mask leaves
Made = tuple[int, BlockTable, BlockTable, int]  # the tokens of a block; forward, backward; how many blocks are used


def tables_of(places: np.ndarray, num_keys: int, block: int, mask: Mask) -> tuple[BlockTable, BlockTable, int]:
    """Returns tables (shards, 1, rows, entries) and (shards, 1, entries, keys), in blocks, of (shards, rows of
    queries); and how many entries of the shard with most are used. A row of queries that sees nothing has one entry,
    which the mask hides: the kernel divides by what it has summed."""
    distance = (places[..., None] - np.arange(num_keys)) * block
    is_seen = mask.sees_any(distance, block, block)  # (shards, rows, keys)
    is_seen[..., -1] |= ~is_seen.any(axis=-1)
    is_whole = mask.sees_all(distance, block, block)
    value = np.where(is_seen, np.where(is_whole, WHOLE, PARTLY), 0)
    forward = _packed(value)
    backward = tuple(np.swapaxes(x, 1, 2) for x in _packed(np.swapaxes(value, 1, 2)))
    used = int(is_seen.sum(axis=(1, 2)).max())
    return _typed(forward), _typed(backward), used


def _packed(value: np.ndarray) -> BlockTable:
    """Returns the columns that each row of (shards, rows, columns) uses, first; and their values."""
    width = max(1, int((value > 0).sum(axis=2).max()))
    columns = np.argsort(value == 0, axis=2, kind="stable")[..., :width]
    used = np.take_along_axis(value, columns, axis=2)
    return np.where(used > 0, columns, 0), used


def _typed(table: Any) -> BlockTable:
    data, used = (x[:, None].astype(np.min_scalar_type(-1 - int(x.max()))) for x in table)
    return data, used


@dataclass(frozen=True)
class SplashBlocks:
    """Splash attention, whose scores stay in the chip's vector memory. budget: what one backward kernel may cost.
    interpret: run it operation by operation."""

    soft_cap: float | None
    budget: Budget
    interpret: bool

    def forward(self, queries: Queries, keys: Keys, sight: Sight | Tables) -> Attended:
        return attend(self._tables(queries, keys, sight), queries, keys, self._options)

    def gradients(self, queries: Queries, keys: Keys, sight: Sight | Tables, gradient: Gradient) -> Gradients:
        return gradients(self._tables(queries, keys, sight), queries, keys, gradient, self._options)

    def shard_sight(self, order: TokenOrder, shard: Array, length: int, mask: Mask) -> Tables:
        places = order.of_shard(length, shard)
        return shard_tables(order.chunks(), shard, places, order.num_shards * length, mask, self.budget)

    def _tables(self, queries: Queries, keys: Keys, sight: Sight | Tables) -> Tables:
        if isinstance(sight, Tables):
            return sight
        num_queries, num_keys = queries.q_BHTD.shape[2], keys.k_BKSD.shape[2]
        if sight.sees_all(num_queries, num_keys):
            return whole_tables(num_queries, num_keys, self.budget)
        if isinstance(sight.distance, Array):
            return unknown_tables(sight.distance, num_queries, num_keys, sight.mask, self.budget)
        return block_tables(sight.distance, num_queries, num_keys, sight.mask, self.budget)

    @property
    def _options(self) -> SplashOptions:
        return SplashOptions(self.soft_cap, self.budget, interpret=self.interpret)
