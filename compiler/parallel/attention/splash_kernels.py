"""The calls of JAX's splash attention kernel, forward with the log of the softmax's denominator, and backward.

JAX's kernel returns that logarithm from a forward pass that has no gradient (`save_residuals`), and its public
gradient knows only the denominator of its own keys. A ring merges several of them, and a remat policy saves it by
name, so both halves of the gradient are called here: `_splash_attention_bwd_dq` and `_splash_attention_bwd_dkv`. They
are private; this file alone imports them, and tests/compiler/parallel/test_exchange.py fails where another JAX has
changed them.

One backward kernel may run instead of two. Two kernels compute scores and their gradient each: seven matmuls, three
for the queries' gradient and four for that of keys and values. One kernel computes them once: five. It runs over
blocks of keys, and so writes the queries' gradient as a partial sum for each of them, which are added afterwards: as
many arrays of the queries' size as there are blocks of keys. `choose_backward` compares the arithmetic that is saved
with the bytes that are written and read, in blocks of keys of several sizes: larger ones make fewer partial sums, and
compute more of what a causal mask hides at its edge. Partial sums that are too large for a batch are made one sequence
at a time. Where they are too large for one, the kernel runs in turns, each over as many blocks of keys as fit and the
queries that see any of them, and each turn adds its partial sums to those before; where that takes too many turns, one
kv_head at a time, and else there are two kernels. The kernel's grid has all blocks of a turn: a block that is hidden is
skipped, but its partial sum is written.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meshloom.models.attention import Mask

from ...core.format import human_bytes
from ...core.kernels import AttentionCall
from ...jax_private import splash, splash_dkv, splash_dq
from ...jaxpr.program import LANES
from ...target.target import TargetPlan
from .blocks import Attended, Gradient, Gradients, Keys, Queries, blocks_scope, both_ids, some_tokens

if TYPE_CHECKING:
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

BLOCKS = (1024, 512)  # tokens, at most
# What the kernels' vector memory holds, as compiled by libtpu 0.0.42.1 with 2 and 24 heads of 64 to 256 values and
# documents. Tokens of a block times the bytes of a head; of a chip's vector memory, where it is small:
BLOCK_BYTES, BLOCK_SHARE = 1024 * 256 * 2, 1 / 128
# Tokens of the keys whose scores a backward kernel holds at once, times the square of a head and its bytes:
COMPUTED = 1024 * 128**2 * 2
KEYS_BYTES = 2048 * 128 * 2  # of its block of keys
KEYS_BLOCKS = (512, 1024, 2048)  # tokens
TABLE_BYTES = 3 * 2**18  # the part of the 1 MiB of scalar memory for two tables in int16 and int8, 512 x 512 blocks
PARTIALS_SHARE = 1 / 32  # the share of a device's memory that partial sums may take
TWO_KERNELS, ONE_KERNEL = 7, 5  # matmuls
MOST_TURNS = 8  # of the one backward kernel: each is compiled
LOST_SCORES = 660**2  # of v5p: where a chip's kernel has no price by block

Seen = Callable[[int], np.ndarray]  # tokens of a block of keys -> (shards, blocks of queries, blocks of keys), bool


@dataclass(frozen=True)
class Budget:
    """The memory that a device has for the kernels, and the cost of their blocks.

    partials_bytes: the bytes of the partial sums of one backward kernel; 0: two kernels. flops_per_byte: the matmul
    FLOPs that take as long as a byte of memory. lost_scores: a block takes as long as its scores and so many more
    (`AttentionKernel.lost_scores`). most_block: the tokens of a block that fits the vector memory."""

    partials_bytes: int
    flops_per_byte: float
    lost_scores: float = LOST_SCORES
    most_block: int = BLOCKS[0]


NO_BUDGET = Budget(0, 0.0)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one backward call on a device: `queries` tokens of `heads` see some of `keys` tokens of `kv_heads`,
    in `block` queries."""

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    itemsize: int
    block: int

    def partials_bytes(self, num_blocks: int) -> int:
        """Returns the size of one sequence's partial sums of the queries' gradient, in so many blocks."""
        return num_blocks * self.block * self.heads * self.head_dim * self.itemsize

    def matmul_flops(self, share: float) -> float:
        """Returns the FLOPs of one matmul of scores of one sequence, of this share of the square."""
        return 2.0 * self.heads * self.queries * self.keys * self.head_dim * share


@dataclass(frozen=True)
class Turn:
    """The part of the square of queries x keys that one call of the one backward kernel computes, in tokens. num_used:
    the blocks that it computes, of `num_blocks`."""

    queries: slice
    keys: slice
    num_used: int
    num_blocks: int


AtOnce = Literal["batch", "sequence", "kv_head"]


@dataclass(frozen=True)
class Backward:
    """The kernels of a backward pass. keys_block: the tokens of a block of keys of the one kernel; None: two kernels.
    turns: its calls, one after the other. at_once: how much of the batch a call has. reason: why, in words."""

    keys_block: int | None
    turns: tuple[Turn, ...] = ()
    at_once: AtOnce = "batch"
    reason: str = ""


def plan_budget(target: TargetPlan, head_dim: int, itemsize: int) -> Budget:
    """Returns what a device of the target allows for heads of this size."""
    memory, bandwidth = target.hbm_bytes_per_device, target.hbm_bytes_per_second_per_device
    rate = target.kernel_rate(AttentionCall(head_dim, matmuls=ONE_KERNEL))
    vector_memory = target.chip and target.chip.vector_memory_bytes
    fitting = min(BLOCK_BYTES, int(vector_memory * BLOCK_SHARE)) if vector_memory else BLOCK_BYTES
    most_block = max(LANES, min(BLOCKS[0], fitting // (head_dim * itemsize)))
    if memory is None or bandwidth is None or rate is None or target.chip is None:
        return replace(NO_BUDGET, most_block=most_block)
    lost_scores = target.chip.attention.lost_scores(head_dim) or LOST_SCORES
    return Budget(int(memory * PARTIALS_SHARE), rate / bandwidth, lost_scores, most_block)


def choose_backward(shape: AttentionShape, seen: Seen, budget: Budget) -> Backward:
    """Returns the backward kernels that take least time within the budget."""
    sizes = _keys_blocks(shape)
    if not budget.partials_bytes:
        return Backward(None, reason="two backward kernels")
    if not sizes:
        return Backward(None, reason="two backward kernels: the table of one exceeds the scalar memory")
    ways = [way for size in sizes if (way := _within(budget, shape, size, seen(size)))]
    if not ways:
        least = human_bytes(shape.partials_bytes(seen(sizes[-1])[0].size))
        return Backward(None, reason=f"two backward kernels: one needs {least} of partial sums")
    took, best = min(
        ((_seconds_as_flops(shape, way, budget), way) for way in _fewest_turns(ways)), key=lambda each: each[0]
    )
    if took >= TWO_KERNELS * shape.matmul_flops(_share(seen(shape.block))):
        return Backward(None, reason="two backward kernels: partial sums of one take longer than its matmuls save")
    held = max(shape.partials_bytes(turn.num_blocks) for turn in best.turns)
    held = held * shape.sequences if best.at_once == "batch" else held
    held = held // shape.kv_heads if best.at_once == "kv_head" else held
    turns = f" in {len(best.turns)} turns" if len(best.turns) > 1 else ""
    return replace(best, reason=f"one backward kernel{turns}, {human_bytes(held)} of partial sums")


def _fewest_turns(ways: Sequence[Backward]) -> list[Backward]:
    """Returns those of one turn, if there are any: no more than they has to be compiled."""
    return [way for way in ways if len(way.turns) == 1] or list(ways)


def _within(budget: Budget, shape: AttentionShape, keys_block: int, seen: np.ndarray) -> Backward | None:
    """Returns the one kernel by blocks of keys of this size, in as few turns as fit the budget; None where these are
    too many."""
    whole, most = shape.partials_bytes(seen[0].size), budget.partials_bytes
    at_once: AtOnce = "batch" if shape.sequences * whole <= most or shape.sequences == 1 else "sequence"
    ways = (
        Backward(keys_block, _turns(shape, keys_block, seen, most), at_once),
        Backward(keys_block, _turns(shape, keys_block, seen, most * shape.kv_heads), "kv_head"),
    )
    return next((way for way in ways if way.turns), None)


def _turns(shape: AttentionShape, keys_block: int, seen: np.ndarray, most_bytes: int) -> tuple[Turn, ...]:
    """Returns the turns whose partial sums have at most these bytes, in order of the keys; none where that is more
    than MOST_TURNS. seen: (shards, blocks of queries, blocks of keys). A turn has the queries from the first to the
    last that see any of its keys in any shard; one of all keys has all queries."""
    _, num_rows, num_columns = seen.shape
    most_blocks = most_bytes // shape.partials_bytes(1)
    if num_rows * num_columns <= most_blocks:
        return (_turn(shape, keys_block, seen, slice(0, num_rows), slice(0, num_columns)),)
    is_seen = np.asarray(seen.any(axis=0))
    begins = np.where(is_seen.any(axis=0), is_seen.argmax(axis=0), num_rows)
    stops = np.where(is_seen.any(axis=0), num_rows - is_seen[::-1].argmax(axis=0), 0)
    turns, first = [], 0
    while first < num_columns:
        begin, stop = np.minimum.accumulate(begins[first:]), np.maximum.accumulate(stops[first:])
        num_blocks = np.maximum(stop - begin, 1) * np.arange(1, num_columns - first + 1)
        count = int((num_blocks <= most_blocks).sum())
        if not count or len(turns) == MOST_TURNS:
            return ()
        rows = slice(int(begin[count - 1]), int(stop[count - 1])) if stop[count - 1] else slice(0, 1)
        turns.append(_turn(shape, keys_block, seen, rows, slice(first, first + count)))
        first += count
    return tuple(turns)


def _turn(shape: AttentionShape, keys_block: int, seen: np.ndarray, rows: slice, columns: slice) -> Turn:
    queries, keys = (slice(x.start * n, x.stop * n) for x, n in ((rows, shape.block), (columns, keys_block)))
    part = seen[:, rows, columns]
    # Devices do not wait for each other between turns, so the blocks of the one that has most in all turns count.
    busiest = seen.sum(axis=(1, 2)).argmax()
    return Turn(queries, keys, int(part[busiest].sum()), part[0].size)


def _keys_blocks(shape: AttentionShape) -> list[int]:
    """Returns sizes up to each of KEYS_BLOCKS, in whole blocks of queries, whose tables fit."""
    rows, steps = shape.queries // shape.block, shape.keys // shape.block
    divisors = [shape.block * n for n in range(1, steps + 1) if steps % n == 0]
    fitting = [size for size in divisors if size * shape.head_dim * shape.itemsize <= KEYS_BYTES]
    sizes = {max((size for size in fitting if size <= most), default=0) for most in KEYS_BLOCKS}
    return sorted(size for size in sizes if size and 3 * rows * (shape.keys // size) <= TABLE_BYTES)


def _seconds_as_flops(shape: AttentionShape, way: Backward, budget: Budget) -> float:
    """Returns the time of a choice in FLOPs. Partial sums are written and read; each turn but the first reads and
    writes the float32 sum of its queries, and copies them and their gradient."""
    assert way.keys_block is not None
    whole = shape.queries * shape.keys // (shape.block * way.keys_block)
    moved = 2 * sum(shape.partials_bytes(turn.num_blocks) for turn in way.turns)
    again = sum((turn.queries.stop - turn.queries.start) // shape.block for turn in way.turns[1:])
    moved += shape.partials_bytes(again) * (8 / shape.itemsize + 4)
    return (
        ONE_KERNEL * shape.matmul_flops(sum(turn.num_used for turn in way.turns) / whole)
        + moved * budget.flops_per_byte
    )


def _share(seen: np.ndarray) -> float:
    return float(seen.mean(axis=(1, 2)).max())


def seen_blocks(starts: np.ndarray, block: int, num_keys: int, mask: Mask) -> Seen:
    """Returns which blocks of keys each block of queries sees anything of. starts: the first query of each block, in
    tokens from the first key, (shards, blocks)."""

    def seen(keys_block: int) -> np.ndarray:
        return mask.sees_any(starts[..., None] - np.arange(0, num_keys, keys_block), block, keys_block)

    return seen


def all_blocks(num_queries: int, block: int, num_keys: int) -> Seen:
    """Returns `seen_blocks` of queries that see all keys, or whose keys only the device knows."""
    return lambda keys_block: np.ones((1, num_queries // block, num_keys // keys_block), bool)


def fused_tables(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (data_next, block_mask), each (shards, 1, rows, columns), of (shards, rows, columns): a block that is
    hidden reads the next queries that its keys are seen by, else the last."""
    rows = np.arange(seen.shape[1])[None, :, None]
    following = np.minimum.accumulate(np.where(seen, rows, seen.shape[1])[:, ::-1], axis=1)[:, ::-1]
    last = np.max(np.where(seen, rows, 0), axis=1, keepdims=True)
    data_next = np.minimum(following, last)
    data, mask = (x[:, None].astype(np.min_scalar_type(-1 - int(x.max()))) for x in (data_next, seen.astype(int)))
    return data, mask


PARTLY, WHOLE = 1, 2  # how much of a block the mask leaves; 0 where nothing is


@dataclass(frozen=True)
class Tables:
    """The blocks of the keys that each block of queries sees. block: the tokens of a block. queries_first, keys_first:
    as the kernels read them. mask: which keys a query sees within a block; None: all. num_used: the blocks that are
    computed, of `num_blocks` of the whole square. seen: the same for blocks of keys of another size; shard: which of
    its shards this device is."""

    block: int
    queries_first: "MaskInfo"
    keys_first: "MaskInfo"
    mask: Mask | None
    num_used: int
    num_blocks: int
    seen: Seen
    shard: Array | int = 0

    def of_turn(self, turn: "Turn", keys_block: int) -> "MaskInfo":
        """Returns the tables of a turn of the one backward kernel; where the others have none, it needs none. Its
        queries have their places from its first key."""
        info, places = self.keys_first, self.keys_first.q_sequence
        if places is not None and turn.keys.start:
            info = info._replace(q_sequence=places[turn.queries] - turn.keys.start)
        elif places is not None and turn.queries != slice(0, len(places)):
            info = info._replace(q_sequence=places[turn.queries])
        if info.data_next is None:
            return info
        in_blocks = ((turn.queries, self.block), (turn.keys, keys_block))
        rows, columns = (slice(x.start // n, x.stop // n) for x, n in in_blocks)
        data, used = (jnp.asarray(x)[self.shard] for x in fused_tables(self.seen(keys_block)[:, rows, columns]))
        return info._replace(data_next=data, block_mask=used)


def block_sizes(budget: Budget, *lengths: int) -> tuple[int, ...]:
    """Returns the tokens that a block may have, larger ones first: for each of BLOCKS the most that fit and divide all
    lengths, in whole rows of registers."""
    limits = (min(most, budget.most_block) for most in BLOCKS)
    sizes = (_divisor(most, *lengths) for most in limits)
    return tuple(dict.fromkeys(sizes))


def _divisor(most: int, *lengths: int) -> int:
    return next(size for size in range(most // LANES * LANES, 0, -LANES) if not any(n % size for n in lengths))


def block_scores(block: int, num_used: int, budget: Budget) -> float:
    """Returns what so many visited blocks of a size cost, as a number of scores."""
    return num_used * (block**2 + budget.lost_scores)


@dataclass(frozen=True)
class SplashOptions:
    """Options of the kernels. budget: what one backward kernel may cost. interpret: run the kernel's operations one by
    one, on any platform."""

    soft_cap: float | None
    budget: Budget
    interpret: bool


def attend(tables: Tables, queries: Queries, keys: Keys, options: SplashOptions) -> Attended:
    """Returns attention of every sequence to the keys that the tables name. It has no gradient."""
    call = partial(_forward_of_one, tables, soft_cap=options.soft_cap, interpret=options.interpret)
    with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
        return Attended(*jax.vmap(call)(queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, *both_ids(queries, keys)))


def gradients(tables: Tables, queries: Queries, keys: Keys, gradient: Gradient, options: SplashOptions) -> Gradients:
    """Returns the part of the gradients that these keys bring."""
    lse, d_out, dot, _ = gradient
    of_all = (lse, d_out.astype(queries.q_BHTD.dtype), dot)
    operands: Any = (queries.q_BHTD, keys.k_BKSD, keys.v_BKSD, of_all, *both_ids(queries, keys))
    how = {"soft_cap": options.soft_cap, "interpret": options.interpret}
    backward = choose_backward(_shape(tables, queries, keys), tables.seen, options.budget)
    if backward.keys_block is None:
        with jax.named_scope(blocks_scope(tables.num_used, tables.num_blocks)):
            dq = jax.vmap(partial(_dq_of_one, tables, **how))(*operands)
            return Gradients(dq, *jax.vmap(partial(_dkv_of_one, tables, **how))(*operands))
    total: Any = None
    of_keys: list[list[Array]] = []
    for turn in backward.turns:
        if total is not None:  # the partial sums of two turns are not in memory together
            total, operands = jax.lax.optimization_barrier((total, operands))
        with jax.named_scope(blocks_scope(turn.num_used, turn.num_blocks)):
            call = partial(_fused_of_one, tables, turn, backward.keys_block, **how)
            own = operands if len(backward.turns) == 1 else _of_turn(turn, *operands)
            part, *of_these = _run(call, backward.at_once, own)
        total = _added(total, part, turn.queries, queries.q_BHTD.shape)
        of_keys.append(of_these)
    dk, dv = (each[0] if len(each) == 1 else jnp.concatenate(each, axis=2) for each in zip(*of_keys, strict=True))
    return Gradients(total, dk, dv)


def _of_turn(turn: Turn, q: Array, k: Array, v: Array, gradient: Any, *ids: Array) -> tuple[Any, ...]:
    """Returns the operands of a turn."""
    q, gradient, *of_queries = some_tokens((q, gradient, *ids[:1]), turn.queries)
    k, v, *of_keys = some_tokens((k, v, *ids[1:]), turn.keys)
    return (q, k, v, gradient, *of_queries, *of_keys)


def _run(call: Callable[..., Any], at_once: AtOnce, operands: tuple[Any, ...]) -> Any:
    """Returns what `call`, which takes one sequence, gives for all: at once, or one sequence or kv_head at a time."""
    if at_once == "batch":
        return jax.vmap(call)(*operands)
    if at_once == "sequence":
        return jax.lax.map(lambda one: call(*one), operands)
    of_heads, ids = operands[:4], operands[4:]
    sequences, kv_heads = operands[1].shape[:2]
    apart = jax.tree.map(lambda x: x.reshape(sequences * kv_heads, -1, *x.shape[2:]), of_heads)
    found = jax.lax.map(lambda one: call(*one), (*apart, *(jnp.repeat(x, kv_heads, axis=0) for x in ids)))
    return jax.tree.map(lambda x: x.reshape(sequences, -1, *x.shape[2:]), found)


def _added(total: Any, part: Array, where: slice, shape: tuple[int, ...]) -> Array:
    """Returns the sum of gradients of all queries, of this shape, and of some."""
    if total is None:
        if part.shape == shape:
            return part
        total = jnp.zeros(shape, part.dtype)
    return total.at[:, :, where].add(part)


def _shape(tables: Tables, queries: Queries, keys: Keys) -> AttentionShape:
    sequences, heads, num_queries, head_dim = queries.q_BHTD.shape
    (_, kv_heads, num_keys, _), itemsize = keys.k_BKSD.shape, queries.q_BHTD.dtype.itemsize
    return AttentionShape(sequences, heads, kv_heads, num_queries, num_keys, head_dim, itemsize, tables.block)


def _forward_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, *ids: Array, soft_cap: float | None, interpret: bool
) -> tuple[Array, Array]:
    """Returns (attention, lse_HT) of one sequence. It has no gradient."""
    kernel = splash.SplashAttentionKernel(
        tables.queries_first, None, None, block_sizes=splash.BlockSizes(tables.block, tables.block, tables.block),
        is_mqa=False, save_residuals=True, mask_value=splash.DEFAULT_MASK_VALUE, attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=None, mask_function=tables.mask, interpret=interpret,
    )  # fmt: skip
    result: Any = kernel(q_HTD, k_KSD, v_KSD, *_segment_ids(ids))
    out, (lse,) = result
    return out, lse


def _dq_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> Array:  # fmt: skip
    """Returns the part of the queries' gradient that these keys bring. gradient: (lse over all keys, gradient of the
    output, sum of the output times that)."""
    (segments,), no_sinks = _segment_ids(ids) or (None,), None
    lse, d_out, dot = gradient
    return splash_dq(
        q_HTD, k_KSD, v_KSD, segments, no_sinks, lse, d_out, dot, bq=tables.block, bkv=tables.block,
        mask_info=tables.queries_first, **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip


def _dkv_of_one(
    tables: Tables, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the part of the gradients of these keys and values that these queries bring."""
    _, dk, dv = _by_keys(
        q_HTD, k_KSD, v_KSD, gradient, ids, bq=tables.block, bkv=tables.block,
        bkv_compute=_keys_at_once(tables, q_HTD), mask_info=tables.keys_first, use_fused_bwd_kernel=False,
        **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip
    return dk, dv


def _fused_of_one(
    tables: Tables, turn: Turn, keys_block: int, q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, *ids: Array,
    soft_cap: float | None, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns both parts, by one kernel, of the queries and keys of a turn. The parts of the queries' gradient are
    added here, in float32: the kernel's own sum of them is one reduction, for which XLA estimates 3.96 ms for 1.07 GB
    on v5p; as additions it is 0.8 ms."""
    call = partial(
        _by_keys, bq=tables.block, bkv=keys_block, bkv_compute=_keys_at_once(tables, q_HTD),
        mask_info=tables.of_turn(turn, keys_block), use_fused_bwd_kernel=True,
        **_options(tables, soft_cap, interpret=interpret),
    )  # fmt: skip
    parts, dk, dv = _kernel_results(call, q_HTD, k_KSD, v_KSD, gradient, ids)
    return reduce(jnp.add, (part.astype(jnp.float32) for part in parts)), dk, dv


def _keys_at_once(tables: Tables, q_HTD: Array) -> int:
    """Returns the tokens of the keys whose scores a backward kernel holds at once."""
    head_dim = math.ceil(q_HTD.shape[-1] / LANES) * LANES
    most = max(LANES, COMPUTED // (head_dim**2 * q_HTD.dtype.itemsize))
    return _divisor(min(tables.block, most), tables.block)


def _kernel_results(call: Any, *operands: Any) -> Any:
    """Returns the last three results of the kernel that `call` runs, before what `call` does to them."""
    closed = jax.make_jaxpr(call)(*operands)
    (kernel,) = (each for each in closed.eqns if each.primitive.name == "pallas_call")
    until_kernel = closed.jaxpr.replace(outvars=kernel.outvars[-3:])
    return jaxpr_as_fun(ClosedJaxpr(until_kernel, closed.consts))(*jax.tree.leaves(operands))


def _by_keys(q_HTD: Array, k_KSD: Array, v_KSD: Array, gradient: Any, ids: tuple[Array, ...], **options: Any) -> Any:
    (segments,), no_sinks = _segment_ids(ids) or (None,), None
    return splash_dkv(q_HTD, k_KSD, v_KSD, segments, no_sinks, *gradient, **options)


def _options(tables: Tables, soft_cap: float | None, *, interpret: bool) -> dict[str, Any]:
    layout = splash.QKVLayout.HEAD_DIM_MINOR
    return {
        "is_mqa": False, "mask_value": splash.DEFAULT_MASK_VALUE, "attn_logits_soft_cap": soft_cap,
        "q_layout": layout, "k_layout": layout, "v_layout": layout, "mask_function": tables.mask,
        "interpret": interpret,
    }  # fmt: skip


def _segment_ids(ids: tuple[Array, ...]) -> tuple[Any, ...]:
    return (splash.SegmentIds(*ids),) if ids else ()
