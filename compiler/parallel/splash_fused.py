"""One backward kernel of splash attention in place of two: when, and by which tables.

Two kernels compute scores and their gradient each: seven matmuls, three for the queries' gradient and four for that of
keys and values. One kernel computes them once: five. It runs over blocks of keys, and so writes the queries' gradient
as a partial sum for each of them, which are added afterwards: as many arrays of the queries' size as there are blocks
of keys. `choose_backward` compares the arithmetic that is saved with the bytes that are written and read, in blocks of
keys of several sizes: larger ones make fewer partial sums, and compute more of what a causal mask hides at its edge.
Partial sums that are too large for a batch are made one sequence at a time; where they are too large for one, there are
two kernels.

The kernel's grid has all blocks of the square: a block that is hidden is skipped, but its partial sum is written.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..core.format import human_bytes
from ..target.target import TargetPlan

KEYS_BLOCKS = (512, 1024, 2048)  # tokens
# Tokens of a block of keys times the size of a head: 2,048 x 256 take 18.6 of the 16 MiB of vector memory on v5p.
KEYS_ELEMENTS = 2048 * 128
TABLE_BYTES = 3 * 2**18  # of the 1 MiB of scalar memory: two tables in int16 and int8, 512 x 512 blocks
PARTIALS_SHARE = 1 / 32  # of a device's memory, that partial sums may take
TWO_KERNELS, ONE_KERNEL = 7, 5  # matmuls

Seen = Callable[[int], np.ndarray]  # tokens of a block of keys -> (shards, blocks of queries, blocks of keys), of bool


@dataclass(frozen=True)
class Budget:
    """What one backward kernel may cost. partials_bytes: of partial sums. flops_per_byte: matmul FLOPs that take as
    long as a byte of memory. None of both: two kernels."""

    partials_bytes: int
    flops_per_byte: float


NO_BUDGET = Budget(0, 0.0)


@dataclass(frozen=True)
class AttentionShape:
    """Of one backward call on a device: `queries` tokens of `heads` see some of `keys` tokens, in `block` queries."""

    sequences: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    itemsize: int
    block: int

    def partials_bytes(self, keys_block: int) -> int:
        """Returns the size of one sequence's partial sums of the queries' gradient."""
        return self.keys // keys_block * self.heads * self.queries * self.head_dim * self.itemsize

    def matmul_flops(self, share: float) -> float:
        """Returns the FLOPs of one matmul of scores of one sequence, of this share of the square."""
        return 2.0 * self.heads * self.queries * self.keys * self.head_dim * share


@dataclass(frozen=True)
class Backward:
    """keys_block: tokens of a block of keys of the one kernel; None: two kernels. num_used: blocks that it computes, of
    `num_blocks` of the square. is_by_sequence: one sequence at a time. reason: in words."""

    keys_block: int | None
    num_used: int = 0
    num_blocks: int = 0
    is_by_sequence: bool = False
    reason: str = ""


def plan_budget(target: TargetPlan, share: float) -> Budget:
    """Returns what a device of the target allows. share: of the peak, that attention reaches."""
    memory, bandwidth = target.hbm_bytes_per_device, target.hbm_bytes_per_second_per_device
    if memory is None or bandwidth is None or target.peak_flops_per_second is None:
        return NO_BUDGET
    return Budget(int(memory * PARTIALS_SHARE), target.peak_flops_per_second * share / bandwidth)


def choose_backward(shape: AttentionShape, seen: Seen, budget: Budget) -> Backward:
    """Returns the backward kernels that take least time within the budget."""
    sizes = _keys_blocks(shape)
    fitting = [size for size in sizes if shape.partials_bytes(size) <= budget.partials_bytes]
    if budget == NO_BUDGET:
        return Backward(None, reason="two backward kernels")
    if not sizes:
        return Backward(None, reason="two backward kernels: the table of one exceeds the scalar memory")
    if not fitting:
        least = human_bytes(min(map(shape.partials_bytes, sizes)))
        return Backward(None, reason=f"two backward kernels: one needs {least} of partial sums")
    two = TWO_KERNELS * shape.matmul_flops(_share(seen(shape.block)))
    found = {size: _seconds_as_flops(shape, size, seen(size), budget) for size in fitting}
    best = min(found, key=lambda size: found[size])
    if found[best] >= two:
        return Backward(None, reason="two backward kernels: partial sums of one take longer than its matmuls save")
    used, num_bytes = seen(best), shape.partials_bytes(best)
    is_by_sequence = shape.sequences * num_bytes > budget.partials_bytes
    held = num_bytes * (1 if is_by_sequence else shape.sequences)
    return Backward(
        best, int(used.sum(axis=(1, 2)).max()), used[0].size, is_by_sequence,
        f"one backward kernel, {human_bytes(held)} of partial sums",
    )  # fmt: skip


def _keys_blocks(shape: AttentionShape) -> list[int]:
    """Sizes up to each of KEYS_BLOCKS, in whole blocks of queries, whose tables fit."""
    rows, steps = shape.queries // shape.block, shape.keys // shape.block
    divisors = [shape.block * n for n in range(1, steps + 1) if steps % n == 0]
    fitting = [size for size in divisors if size * shape.head_dim <= KEYS_ELEMENTS]
    sizes = {max((size for size in fitting if size <= most), default=0) for most in KEYS_BLOCKS}
    return sorted(size for size in sizes if size and 3 * rows * (shape.keys // size) <= TABLE_BYTES)


def _seconds_as_flops(shape: AttentionShape, keys_block: int, seen: np.ndarray, budget: Budget) -> float:
    """Partial sums are written and read."""
    moved = 2 * shape.partials_bytes(keys_block)
    return ONE_KERNEL * shape.matmul_flops(_share(seen)) + moved * budget.flops_per_byte


def _share(seen: np.ndarray) -> float:
    return float(seen.mean(axis=(1, 2)).max())


def seen_blocks(starts: np.ndarray, block: int, num_keys: int, window: int | None) -> Seen:
    """Returns which blocks of keys each block of queries sees anything of. starts: the first query of each block, in
    tokens from the first key, (shards, blocks)."""

    def seen(keys_block: int) -> np.ndarray:
        keys = np.arange(0, num_keys, keys_block)
        last, first = starts[..., None] + block - 1, starts[..., None]
        is_before = keys <= last
        return is_before if window is None else is_before & (first - (keys + keys_block - 1) < window)

    return seen


def all_blocks(num_queries: int, block: int, num_keys: int) -> Seen:
    """Returns `seen_blocks` of queries that see all keys, or of which only the device knows what they see."""
    return lambda keys_block: np.ones((1, num_queries // block, num_keys // keys_block), bool)


def fused_tables(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(shards, rows, columns) -> (data_next, block_mask), each (shards, 1, rows, columns): a block that is hidden reads
    the next queries that its keys are seen by, else the last."""
    rows = np.arange(seen.shape[1])[None, :, None]
    following = np.minimum.accumulate(np.where(seen, rows, seen.shape[1])[:, ::-1], axis=1)[:, ::-1]
    last = np.max(np.where(seen, rows, 0), axis=1, keepdims=True)
    data_next = np.minimum(following, last)
    data, mask = (x[:, None].astype(np.min_scalar_type(-1 - int(x.max()))) for x in (data_next, seen.astype(int)))
    return data, mask
