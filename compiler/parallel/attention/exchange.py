"""How keys and values reach the queries of other devices, where mesh axes split the length of sequences.

    ring        keys and values visit all devices by permutes (ring.py)
    all_gather  every device gathers all keys and values; the gradient reduce-scatters theirs
    ulysses     an all-to-all gives each device all tokens of some of the heads, another its tokens of all of them
                (Jacobs et al. 2023, arXiv:2309.14509); a kv_head that has fewer copies than devices is repeated

Operands and results are this device's: its tokens in the order that sharding/batch.py gives, its heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models.attention import Mask

from ...core.partition_spec import Axes
from ...sharding.batch import TokenOrder
from .blocks import Attended, BlockKernel, Gradient, Gradients, Keys, Queries, Sight, TiledBlocks, attend_with
from .cudnn import CudnnBlocks
from .ring import AttentionRing, attend_in_ring
from .splash import SplashBlocks
from .splash_kernels import Budget

RING, ALL_GATHER, ULYSSES = "ring", "all_gather", "ulysses"
ExchangeName = Literal["ring", "all_gather", "ulysses"]
Attend = Callable[..., Array]  # with the signature of `models.attention.attend`


EXCHANGE = "exchange"  # the fact in a scope: how keys and values reach the queries


@dataclass(frozen=True)
class Exchange:
    """How keys and values reach queries. axes: the mesh axes that split the length."""

    name: ExchangeName
    axes: Axes
    order: TokenOrder


def attend_over_length(
    exchange: Exchange, block_kernel: Callable[[float | None], BlockKernel], attend_whole: Attend,
    q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, ids_BT: Array | None, sinks_H: Array | None = None,
    *, scale: float, mask: Mask, soft_cap: float | None,
) -> Array:  # fmt: skip
    """Returns attention, with the signature of `models.attention.attend` after the first three. block_kernel: makes the
    kernel for a part of the keys, of a soft cap. attend_whole: attends within whole sequences of some heads."""
    mask = mask.within(q_BTHD.shape[1] * exchange.order.num_shards)
    if exchange.name == ULYSSES:
        options = {"scale": scale, "mask": mask, "soft_cap": soft_cap}
        return _attend_by_heads(exchange, partial(attend_whole, **options), q_BTHD, k_BTKD, v_BTKD, ids_BT, sinks_H)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTHD * jnp.asarray(scale, q_BTHD.dtype), k_BTKD, v_BTKD))
    queries, keys, kernel = Queries(q, ids_BT), Keys(k, v, ids_BT), block_kernel(soft_cap)
    if exchange.name == RING:
        out = attend_in_ring(AttentionRing(exchange.axes, exchange.order, kernel), queries, keys, sinks_H, mask)
    else:
        out = _attend_gathered(exchange, kernel, queries, keys, sinks_H, mask)
    return jnp.swapaxes(out, 1, 2)


def _attend_gathered(
    exchange: Exchange, kernel: BlockKernel, queries: Queries, keys: Keys, sinks_H: Array | None, mask: Mask
) -> Array:
    """Returns attention to gathered keys. The backward pass gathers again: whole keys and values of every layer are not
    held until then."""
    length = queries.q_BHTD.shape[2]

    def sight() -> Any:
        return kernel.shard_sight(exchange.order, jax.lax.axis_index(exchange.axes), length, mask)

    def forward(queries: Queries, keys: Keys) -> Attended:
        return kernel.forward(queries, _whole(exchange, keys), sight())

    def gradients(queries: Queries, keys: Keys, gradient: Gradient) -> Gradients:
        dq, *of_keys = kernel.gradients(queries, _whole(exchange, keys), sight(), gradient)
        own = (keys.k_BKSD, keys.v_BKSD)
        return Gradients(dq, *(_scattered(exchange, d.astype(x.dtype), 2) for d, x in zip(of_keys, own, strict=True)))

    return attend_with(forward, gradients, queries, keys, sinks_H)


def attend_by_blocks(
    kernel: Callable[[float | None], BlockKernel], q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, ids_BT: Array | None,
    sinks_H: Array | None = None, *, scale: float, mask: Mask, soft_cap: float | None,
) -> Array:  # fmt: skip
    """Returns attention within whole sequences, with the signature of `models.attention.attend` after the kernel."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTHD * jnp.asarray(scale, q_BTHD.dtype), k_BSKD, v_BSKD))
    block_kernel, sight = kernel(soft_cap), Sight(0, mask)

    def forward(queries: Queries, keys: Keys) -> Attended:
        return block_kernel.forward(queries, keys, sight)

    def gradients(queries: Queries, keys: Keys, gradient: Gradient) -> Gradients:
        return block_kernel.gradients(queries, keys, sight, gradient)

    return jnp.swapaxes(attend_with(forward, gradients, Queries(q, ids_BT), Keys(k, v, ids_BT), sinks_H), 1, 2)


def _whole(exchange: Exchange, keys: Keys) -> Keys:
    ids = None if keys.ids_BS is None else _gathered(exchange, keys.ids_BS, 1)
    return Keys(_gathered(exchange, keys.k_BKSD, 2), _gathered(exchange, keys.v_BKSD, 2), ids)


def _gathered(exchange: Exchange, x: Array, dimension: int) -> Array:
    """Returns the whole length, in the order of the sequence."""
    by_shard = jax.lax.all_gather(x, exchange.axes, axis=dimension)
    return _in_sequence(exchange.order, by_shard, dimension)


def _scattered(exchange: Exchange, x: Array, dimension: int) -> Array:
    """Returns this device's own tokens of the sum over all devices."""
    by_shard = _by_shard(exchange.order, x, dimension)
    return jax.lax.psum_scatter(by_shard, exchange.axes, scatter_dimension=dimension, tiled=True)


def _in_sequence(order: TokenOrder, by_shard: Array, dimension: int) -> Array:
    """Returns (.., length, ..) of (.., shards, tokens of each, ..), with the shards at `dimension`."""
    before, after = by_shard.shape[:dimension], by_shard.shape[dimension + 2 :]
    if order.chunks_per_shard == 1:
        return by_shard.reshape(*before, -1, *after)
    chunks = by_shard.reshape(*before, order.num_shards, 2, -1, *after)
    up, down = (jax.lax.index_in_dim(chunks, i, dimension + 1, keepdims=False) for i in (0, 1))
    return jnp.concatenate([up, jnp.flip(down, dimension)], axis=dimension).reshape(*before, -1, *after)


def _by_shard(order: TokenOrder, x: Array, dimension: int) -> Array:
    """Returns (.., length, ..) with the shards' tokens one after the other: `_in_sequence` undone."""
    if order.chunks_per_shard == 1:
        return x
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    chunks = x.reshape(*before, 2, order.num_shards, -1, *after)
    up, down = (jax.lax.index_in_dim(chunks, i, dimension, keepdims=False) for i in (0, 1))
    return jnp.stack([up, jnp.flip(down, dimension)], axis=dimension + 1).reshape(x.shape)


def _attend_by_heads(
    exchange: Exchange, attend: Attend, q_BTHD: Array, k_BTKD: Array, v_BTKD: Array, ids_BT: Array | None,
    sinks_H: Array | None,
) -> Array:  # fmt: skip
    n, order = exchange.order.num_shards, exchange.order
    copies = max(1, n // k_BTKD.shape[2])

    def all_tokens(x_BTHD: Array) -> Array:
        B, T, H, D = x_BTHD.shape
        x = jax.lax.all_to_all(x_BTHD, exchange.axes, split_axis=2, concat_axis=1, tiled=True)
        return _in_sequence(order, x.reshape(B, n, T, H // n, D), 1)

    k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k_BTKD, v_BTKD))
    ids = None if ids_BT is None else _gathered(exchange, ids_BT, 1)
    if sinks_H is not None:  # those of the heads that this device gets
        num_heads = sinks_H.shape[0] // n
        sinks_H = jax.lax.dynamic_slice_in_dim(sinks_H, jax.lax.axis_index(exchange.axes) * num_heads, num_heads)
    out = attend(all_tokens(q_BTHD), all_tokens(k), all_tokens(v), ids, sinks_H)
    back: Any = _by_shard(order, out, 1)
    return jax.lax.all_to_all(back, exchange.axes, split_axis=1, concat_axis=2, tiled=True)


BlocksOf = Callable[[float | None], BlockKernel]  # takes a soft cap


def block_kernel(implementation: str, budget: Budget) -> BlocksOf:
    """Returns the kernel for parts of the keys of an implementation of attention. budget: of splash's backward."""
    made: dict[str, BlocksOf] = {
        "xla": TiledBlocks,
        "splash": partial(SplashBlocks, budget=budget, interpret=False),
        "cudnn": lambda _: CudnnBlocks(),
    }
    return made[implementation]
