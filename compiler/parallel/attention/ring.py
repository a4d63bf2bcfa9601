"""Ring attention over the devices that split the length of sequences, as a static program with balanced work.

Each device has queries, keys and values of some chunks of every sequence. Its queries stay; keys and values visit all
devices by permutes, and what each visit gives is merged by its log-sum-exp (Liu et al. 2023, arXiv:2310.01889). The
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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    attend_with,
    merge,
    split_length,
)


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
