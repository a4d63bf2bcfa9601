"""How keys and values reach the queries of other devices, where mesh axes split the length of sequences.

    ring        keys and values visit all devices by permutes
    all_gather  every device gathers all keys and values; the gradient reduce-scatters theirs
    ulysses     an all-to-all gives each device all tokens of some of the heads, another its tokens of all of them
                (Jacobs et al. 2023, arXiv:2309.14509); a kv_head that has fewer copies than devices is repeated

Operands and results are this device's: its tokens in the order that sharding/batch.py gives, its heads.

The ring is a static program with balanced work. Each device has queries, keys and values of some chunks of every
sequence. Its queries stay; what each visit gives is merged by its log-sum-exp (Liu et al. 2023, arXiv:2310.01889). The
next keys are on the way while these are computed: an optimization barrier pairs the arrival of one step with the sums
of the step before, so that the scheduler may not delay a permute.

    zigzag    for the full causal mask, in zig-zag order: device i of n has chunks lo = i and hi = 2n-1-i.
              own step: lo sees lo and hi sees hi, both causal; hi sees lo.
              step s, chunks of device i-s: hi sees lo; and lo sees lo if i >= s, else hi sees hi.
              So each step is two whole blocks on every device, and nothing that is masked is computed.
    conveyor  for windows: the chunks of all devices in line, each moving one place up per step, for as many steps as
              the window reaches. In zig-zag order the line turns at the last device: lo moves up, hi moves down.

Backward, gradients of keys and values travel in float32: around the ring with their block, or against the conveyor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from meshloom.models.attention import Mask

from ...core.partition_spec import Axes
from ...sharding.batch import TokenOrder
from .blocks import (
    HIDDEN,
    Attended,
    BlockKernel,
    Gradient,
    Gradients,
    Keys,
    Queries,
    Sight,
    TiledBlocks,
    attend_with,
    merge,
    split_length,
)
from .cudnn import CudnnBlocks
from .splash import SplashBlocks
from .splash_kernels import Budget


@dataclass(frozen=True)
class AttentionRing:
    """A ring of devices. axes: the mesh axes that split the length. kernel: computes attention between two chunks."""

    axes: Axes
    order: TokenOrder
    kernel: BlockKernel


def attend_in_ring(ring: AttentionRing, queries: Queries, keys: Keys, sinks_H: Array | None, mask: Mask) -> Array:
    """Returns attention of this device's queries to all keys that they see. Operands are this device's, in the ring's
    order."""
    chunk = queries.q_BHTD.shape[2] // ring.order.chunks_per_shard
    is_line = mask.reach(chunk, ring.order.num_chunks) < full_steps(ring.order)
    forward, backward = (_conveyor_forward, _conveyor_backward) if is_line else (_zigzag_forward, _zigzag_backward)

    return attend_with(partial(forward, ring, mask), partial(backward, ring, mask), queries, keys, sinks_H)


def full_steps(order: TokenOrder) -> int:
    """Returns the steps of a conveyor that take as long as the whole ring."""
    return order.num_shards


def _moved(tree: Any, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)


def _select(condition: Array, one: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), one, other)


def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _joined(lo: Array, hi: Array) -> Array:
    return jnp.concatenate([lo, hi], axis=min(2, lo.ndim - 1))


# --- the full causal mask, in zig-zag order


@dataclass(frozen=True)
class _Zigzag:
    """One device's place in the ring. next_one: the pairs of the permute."""

    ring: AttentionRing
    mask: Mask
    chunk: int

    @property
    def n(self) -> int:
        return self.ring.order.num_shards

    @property
    def index(self) -> Array:
        return jax.lax.axis_index(self.ring.axes)

    def up(self, tree: Any) -> Any:
        return _moved(tree, self.ring.axes, [(i, (i + 1) % self.n) for i in range(self.n)])

    def own(self) -> Sight:
        return Sight(0, self.mask)

    def across(self, step: int) -> Sight:
        """Returns the sight of hi on the lo of the device `step` before."""
        source = (self.index - step) % self.n
        return self._sight(2 * self.n - 1 - self.index - source)

    def along(self, step: int) -> Sight:
        """Returns the sight of lo on the lo, or of hi on the hi, of the device `step` before."""
        return self._sight(jnp.abs((self.index - step) % self.n - self.index))

    def _sight(self, num_chunks: Array) -> Sight:
        return Sight(self.chunk if self.mask.sees_all_before else num_chunks * self.chunk, self.mask)


def _zigzag_forward(ring: AttentionRing, mask: Mask, queries: Queries, keys: Keys) -> Attended:
    place = _Zigzag(ring, mask, queries.q_BHTD.shape[2] // 2)
    run, dtype = ring.kernel.forward, queries.q_BHTD.dtype
    (q_lo, q_hi), (kv_lo, kv_hi) = split_length(queries, 2), split_length(keys, 2)
    arriving = place.up((kv_lo, kv_hi))
    lo = _float32(run(q_lo, kv_lo, place.own()))
    hi = merge(run(q_hi, kv_hi, place.own()), run(q_hi, kv_lo, place.across(0)))
    for step in range(1, place.n):
        (kv_lo, kv_hi), lo, hi = jax.lax.optimization_barrier((arriving, lo, hi))
        if step < place.n - 1:
            arriving = place.up((kv_lo, kv_hi))
        is_before = place.index >= step
        hi = merge(hi, run(q_hi, kv_lo, place.across(step)))
        found = run(_select(is_before, q_lo, q_hi), _select(is_before, kv_lo, kv_hi), place.along(step))
        merged = merge(_select(is_before, lo, hi), found)
        lo, hi = _select(is_before, merged, lo), _select(is_before, hi, merged)
    return Attended(_joined(lo.out_BHTD, hi.out_BHTD).astype(dtype), _joined(lo.lse_BHT, hi.lse_BHT))


def _zigzag_backward(ring: AttentionRing, mask: Mask, queries: Queries, keys: Keys, gradient: Gradient) -> Gradients:
    """Returns the gradients. Two halves of the own step hide a permute each: lo on lo and hi on hi the first, of keys;
    hi on lo the last, of gradients that come home."""
    place = _Zigzag(ring, mask, queries.q_BHTD.shape[2] // 2)
    run = partial(_gradients, ring.kernel)
    (q_lo, q_hi), (kv_lo, kv_hi), (g_lo, g_hi) = (split_length(x, 2) for x in (queries, keys, gradient))
    own_lo = kv_lo
    arriving = place.up((kv_lo, kv_hi))
    (dq_lo, home_lo), (dq_hi, home_hi) = run(q_lo, kv_lo, place.own(), g_lo), run(q_hi, kv_hi, place.own(), g_hi)
    travelling = None
    for step in range(1, place.n):
        (kv_lo, kv_hi), dq_lo, dq_hi, travelling = jax.lax.optimization_barrier((arriving, dq_lo, dq_hi, travelling))
        if step < place.n - 1:
            arriving = place.up((kv_lo, kv_hi))
        travelled = None if travelling is None else place.up(travelling)
        is_before = place.index >= step
        q, kv, of_q = (_select(is_before, *pair) for pair in ((q_lo, q_hi), (kv_lo, kv_hi), (g_lo, g_hi)))
        dq_across, d_across = run(q_hi, kv_lo, place.across(step), g_hi)
        dq_along, d_along = run(q, kv, place.along(step), of_q)
        dq_lo = dq_lo + jnp.where(is_before, dq_along, 0.0)
        dq_hi = dq_hi + dq_across + jnp.where(is_before, 0.0, dq_along)
        zeros = jax.tree.map(jnp.zeros_like, d_along)
        made = (_add(d_across, _select(is_before, d_along, zeros)), _select(is_before, zeros, d_along))
        travelling = made if travelled is None else _add(travelled, made)
    travelling, dq_lo, dq_hi, g_hi = jax.lax.optimization_barrier((travelling, dq_lo, dq_hi, g_hi))
    d_lo, d_hi = place.up(travelling)
    dq_across, d_across = run(q_hi, own_lo, place.across(0), g_hi)
    d_lo, d_hi = _add(d_lo, _add(home_lo, d_across)), _add(d_hi, home_hi)
    dk, dv = (_joined(of_lo, of_hi) for of_lo, of_hi in zip(d_lo, d_hi, strict=True))
    return Gradients(_joined(dq_lo, dq_hi + dq_across), dk, dv)


def _gradients(
    kernel: BlockKernel, queries: Queries, keys: Keys, sight: Sight, gradient: Gradient
) -> tuple[Array, tuple[Array, Array]]:
    """Returns the gradients of the queries, and those of keys and values, in float32."""
    dq, *d_keys = _float32(kernel.gradients(queries, keys, sight, gradient))
    return dq, tuple(d_keys)


# --- windows: all chunks in a line, which moves past the queries


@dataclass(frozen=True)
class _Line:
    """A line of devices. Slots of a device are parts of its batch dimension: queries of all slots meet keys that are as
    far from them."""

    ring: AttentionRing
    num_slots: int

    @property
    def n(self) -> int:
        return self.ring.order.num_shards

    def slots(self, tree: Any) -> list[Any]:
        return split_length(tree, self.num_slots)

    def stacked(self, slots: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: jnp.concatenate(x), *slots)

    def unstacked(self, tree: Any) -> list[Any]:
        leaves, structure = jax.tree.flatten(tree)
        cut = [jnp.split(x, self.num_slots) for x in leaves]
        return [structure.unflatten([parts[slot] for parts in cut]) for slot in range(self.num_slots)]

    def moved(self, slots: Sequence[Any], *, is_back: bool = False) -> list[Any]:
        """Returns each chunk at the next place of the line; is_back: at the place before. Zeros where none comes."""
        up, down = [(i, i + 1) for i in range(self.n - 1)], [(i + 1, i) for i in range(self.n - 1)]
        first_way, second_way = (down, up) if is_back else (up, down)
        moved_first = _moved(slots[0], self.ring.axes, first_way)
        if self.num_slots == 1:
            return [moved_first]
        is_turn = jax.lax.axis_index(self.ring.axes) == self.n - 1
        moved_second = _moved(slots[1], self.ring.axes, second_way)
        if is_back:
            return [_select(is_turn, slots[1], moved_first), moved_second]
        return [moved_first, _select(is_turn, slots[0], moved_second)]

    def is_empty(self, distance: int, batch: int) -> Array:
        """Returns (slots x batch, 1, 1): True where the line has brought nothing yet."""
        shard = jax.lax.axis_index(self.ring.axes)
        places = jnp.stack([shard, 2 * self.n - 1 - shard][: self.num_slots])
        return jnp.repeat(places < distance, batch)[:, None, None]


def _conveyor_forward(ring: AttentionRing, mask: Mask, queries: Queries, keys: Keys) -> Attended:
    line, batch = _Line(ring, ring.order.chunks_per_shard), queries.q_BHTD.shape[0]
    stacked, slots = line.stacked(line.slots(queries)), line.slots(keys)
    chunk = stacked.q_BHTD.shape[2]
    last = mask.reach(chunk, ring.order.num_chunks)
    arriving = line.moved(slots) if last else slots
    total = _float32(ring.kernel.forward(stacked, line.stacked(slots), Sight(0, mask)))
    for step in range(1, last + 1):
        slots, total = jax.lax.optimization_barrier((arriving, total))
        if step < last:
            arriving = line.moved(slots)
        found = ring.kernel.forward(stacked, line.stacked(slots), Sight(step * chunk, mask))
        lse = jnp.where(line.is_empty(step, batch), HIDDEN, found.lse_BHT)
        total = merge(total, Attended(found.out_BHTD, lse))
    out, lse = (_rejoined(line, x) for x in total)
    return Attended(out.astype(queries.q_BHTD.dtype), lse)


def _conveyor_backward(ring: AttentionRing, mask: Mask, queries: Queries, keys: Keys, gradient: Gradient) -> Gradients:
    """Returns the gradients. The farthest keys come first: their gradients go home against the line, and meet those of
    nearer places on the way."""
    line, batch = _Line(ring, ring.order.chunks_per_shard), queries.q_BHTD.shape[0]
    stacked, of_all = line.stacked(line.slots(queries)), line.stacked(line.slots(gradient))
    chunk = stacked.q_BHTD.shape[2]
    visits = [line.slots(keys)]
    for _ in range(mask.reach(chunk, ring.order.num_chunks)):
        visits.append(line.moved(visits[-1]))
    dq, travelling = jnp.zeros((), jnp.float32), None
    for step in reversed(range(len(visits))):
        seen = line.stacked(visits[step])
        lse = jnp.where(line.is_empty(step, batch), -HIDDEN, of_all.lse_BHT) if step else of_all.lse_BHT
        arguments = (stacked, seen, Sight(step * chunk, mask), of_all._replace(lse_BHT=lse))
        home = None if travelling is None else line.moved(travelling, is_back=True)
        d_queries, d_keys = _gradients(ring.kernel, *arguments)
        dq, made = dq + d_queries, line.unstacked(d_keys)
        travelling = made if home is None else _add(home, made)
    dk, dv = (_rejoined(line, x) for x in line.stacked(travelling or []))
    return Gradients(_rejoined(line, dq), dk, dv)


def _rejoined(line: _Line, x: Array) -> Array:
    """Returns (batch, heads, length, ..) of (slots x batch, heads, chunk, ..)."""
    parts = jnp.split(x, line.num_slots)
    return parts[0] if line.num_slots == 1 else _joined(*parts)


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
