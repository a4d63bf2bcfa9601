"""Tokens to their experts and back: each device has some tokens and some experts.

    local      all experts are here: tokens are sorted by expert
    ragged     each device sends each other the rows of its experts, as many as there are (ragged all-to-all, TPUs)
    padded     the same number of rows to each device, some of them empty (all-to-all)
    gathered   all tokens to all devices (all-gather), which take the rows of their experts, and add their results up
               (reduce-scatter)
    deduplicated  each token once to each device that has one of its experts, which takes rows of it for each of them,
               adds their results up, and sends one row back (ragged all-to-all or all-to-all)

Where devices lie in several nodes, hierarchical.py combines two of them.

The buffers have a fixed size; what does not fit is dropped and counted. A dropped choice adds nothing to its token.

**The weight of a choice goes with its row**, and multiplies what the expert's last matrix multiplies. So the gradient
of the weight needs no result of the expert: a backward pass that computes the layer again stops before the last matmul
and sends nothing back a second time. A token adds up the rows of its choices.

Rows are gathered in both directions, and so are their gradients: each place in a buffer knows what it holds, and each
choice its place, one past the end where it has none: it was dropped, or its token goes to no expert. Nobody reads what
lies in a place without a choice, which may be anything.

A token whose experts have the number `num_experts` goes to none (padding): it takes no row and is not counted.

Shapes: N tokens of this device, T tokens that are here to meet its experts, E embed, K experts of a token, X experts, L
experts of this device, n devices, R rows of a buffer, C rows of an expert with a capacity: there, R is experts x
devices x C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from ...core.partition_spec import Axes
from ...core.traffic import AxisGroups
from .device_group import DeviceGroup
from .transfer import (
    RaggedRoute,
    RowTransfer,
    RowTypes,
    TokenPlaces,
    dispatched,
    gathered,
    nowhere,
    ragged,
    returned,
    swapped,
    to_places,
)

# (rows sorted by expert (R, E), rows of each expert, weights of the rows (R,)) -> what the experts make of them, times
# the weights. With a capacity, each expert has as many: rows (L, n C, E), no sizes, weights (L, n C).
RunExperts = Callable[[Array, Any, Array], Array]
Dispatch = Callable[[Array, Array, Array, RunExperts], tuple[Array, Array]]
AS_THEY_ARE = RowTypes()


@dataclass(frozen=True)
class Experts:
    """The experts of all devices, or of a group of them. axes: the mesh axes that split them. num_devices: the devices
    along these axes, or of the group. groups: as of `DeviceGroup`."""

    num_experts: int
    axes: Axes
    num_devices: int
    groups: AxisGroups | None = None

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_devices

    @property
    def group(self) -> DeviceGroup:
        return DeviceGroup(self.axes, self.groups)

    @property
    def axis(self) -> Any:
        return self.group.axis


def dispatch_local(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, types: RowTypes = AS_THEY_ARE
) -> tuple[Array, Array]:
    """Returns (the weighted sum of what a token's experts make of it (N, E), the number of choices dropped)."""
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    place_NK = _places(inverse_R.reshape(ids_NK.shape), ids_NK < experts.num_experts, ids_NK.size)
    places, stay = TokenPlaces(order_R // ids_NK.shape[1], place_NK), nowhere(types)
    x_RE = dispatched(stay, x_NE, places, None)
    y_RE = run(x_RE, counts_X, _weights_sent(weights_NK, order_R, place_NK))
    return returned(stay, y_RE, places, None), jnp.zeros(())


def dispatch_padded(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int,
    types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device sends to each
    device."""
    n, L, K = experts.num_devices, experts.num_local, ids_NK.shape[1]
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    counts_nL = counts_X.reshape(n, L)
    to_NK = ids_NK // L  # the device of each choice
    slot_NK = inverse_R.reshape(ids_NK.shape) - _before(counts_nL.sum(1))[to_NK]
    is_sent_NK = to_NK < n  # padding goes to no device
    fits_NK = is_sent_NK & (slot_NK < rows)
    place_NK = _places(to_NK * rows + slot_NK, fits_NK, n * rows)
    # Each device has the choices that follow one another in the order, from its first one on.
    first_n1 = _before(counts_nL.sum(1))[:, None]
    choice_R = jnp.take(order_R, first_n1 + jnp.arange(rows), mode="clip").reshape(-1)
    sent_nL = jnp.clip(rows - _before(counts_nL, axis=1), 0, counts_nL)
    got_nL = jax.lax.all_to_all(sent_nL, experts.axis, 0, 0, tiled=True)
    # Rows arrive by source, then by expert; the empty ones of each source go last.
    expert_nR = jnp.sum(jnp.arange(rows)[None, :, None] >= jnp.cumsum(got_nL, axis=1)[:, None, :], axis=-1)
    sorted_R = jnp.argsort(expert_nR.reshape(-1), stable=True)
    unsorted_R = jnp.argsort(sorted_R)
    places, route = TokenPlaces(choice_R // K, place_NK), (sorted_R, unsorted_R)
    transfer = swapped(experts.group, types)
    weights_R = jax.lax.all_to_all(_weights_sent(weights_NK, choice_R, place_NK), experts.axis, 0, 0, tiled=True)
    weights_R = to_places(weights_R, sorted_R, unsorted_R[:, None])
    y_RE = run(dispatched(transfer, x_NE, places, route), got_nL.sum(0), weights_R)
    num_dropped = jnp.sum(is_sent_NK & ~fits_NK, dtype=jnp.float32)
    return returned(transfer, y_RE, places, route), num_dropped


def dispatch_ragged(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int,
    types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device receives.
    There is a slice for each expert and source, so that rows arrive sorted by expert."""
    n, L = experts.num_devices, experts.num_local
    me = jax.lax.axis_index(experts.axis)
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    counts_nX = jax.lax.all_gather(counts_X, experts.axis)  # by source
    sizes_nLn = counts_nX.reshape(n, n, L).transpose(1, 2, 0)  # by destination, its expert, source
    starts_nLn = _before(sizes_nLn.reshape(n, -1), axis=1).reshape(sizes_nLn.shape)
    fits_nLn = jnp.clip(rows - starts_nLn, 0, sizes_nLn)
    starts_nLn = jnp.minimum(starts_nLn, rows)
    sent_X, starts_X = (each[:, :, me].reshape(-1) for each in (fits_nLn, starts_nLn))
    received, first = fits_nLn[me].T.reshape(-1), starts_nLn[me].T.reshape(-1)
    there = (_before(counts_X), sent_X, starts_X, received)
    at_source_nL = jax.lax.dynamic_slice_in_dim(_before(counts_nX, axis=1), me * L, L, 1)
    back = (first, received, at_source_nL.reshape(-1), sent_X)
    # A choice is so many rows behind the first one of its expert, here as there.
    slot_NK = inverse_R.reshape(ids_NK.shape) - _before(counts_X)[ids_NK]
    fits_NK = (ids_NK < experts.num_experts) & (slot_NK < sent_X[ids_NK])
    place_NK = _places(inverse_R.reshape(ids_NK.shape), fits_NK, ids_NK.size)
    there_R = ((ids_NK // L) * rows + starts_X[ids_NK] + slot_NK).reshape(-1)[order_R]
    from_R = _steps(starts_nLn[me].reshape(-1), (jnp.arange(n) * ids_NK.size + at_source_nL.T).reshape(-1), rows)

    places, route = TokenPlaces(order_R // ids_NK.shape[1], place_NK), RaggedRoute(there, back, from_R)
    transfer = ragged(experts.axis, ids_NK.size, rows, types)
    sent_R = _weights_sent(weights_NK, order_R, place_NK)
    weights_R = cast(Array, _taken(experts.axis, sent_R, from_R, there_R))
    y_RE = run(dispatched(transfer, x_NE, places, route), fits_nLn[me].sum(1), weights_R)
    num_dropped = jnp.sum(sizes_nLn[:, :, me] - fits_nLn[:, :, me]).astype(jnp.float32)
    return returned(transfer, y_RE, places, route), num_dropped


def dispatch_gathered(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int,
    types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of all
    tokens."""
    return _at_local_experts(to_all(x_NE, weights_NK, ids_NK, experts, types), run, experts.num_local, rows)


def dispatch_deduplicated(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int, tokens: int,
    is_ragged: bool, types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of the
    tokens that it receives. tokens: those that it receives in total if the exchange is ragged, else of each device."""
    arrived = once_to_each(x_NE, weights_NK, ids_NK, experts, tokens, types, is_ragged=is_ragged)
    return _at_local_experts(arrived, run, experts.num_local, rows)


class Arrived(NamedTuple):
    """Tokens that came to a device, and their choices. x_TE: the tokens. weights_TK: of their choices. local_TK: as
    `_local` gives it. num_missed: the choices of experts here whose tokens had no place. back: takes a row for each
    token home, where those of all devices are added up."""

    x_TE: Array
    weights_TK: Array
    local_TK: Array
    num_missed: Array
    back: Callable[[Array], Array]


def to_all(x_NE: Array, weights_NK: Array, ids_NK: Array, experts: Experts, types: RowTypes) -> Arrived:
    """Returns the tokens of all devices."""
    weights_all, ids_all = (experts.group.gather(each) for each in (weights_NK, ids_NK))
    transfer = gathered(experts.group, types)
    x_all = dispatched(transfer, x_NE, None, None)
    back = partial(returned, transfer, places=None, route=None)
    return Arrived(x_all, weights_all, _local(ids_all, experts), jnp.zeros((), jnp.int32), back)


def once_to_each(
    x_NE: Array, weights_NK: Array, ids_NK: Array, experts: Experts, tokens: int, types: RowTypes, *, is_ragged: bool
) -> Arrived:
    """Returns the tokens that have an expert here. Each device knows the choices of all tokens, and so what it
    receives. tokens: as of `dispatch_deduplicated`."""
    n, L, N = experts.num_devices, experts.num_local, len(x_NE)
    weights_all, ids_all = (experts.group.gather(each) for each in (weights_NK, ids_NK))
    local_all = _local(ids_all, experts)
    goes_nN = jnp.any(ids_NK // L == jnp.arange(n)[:, None, None], axis=-1)
    comes_nN = jnp.any(local_all < L, axis=1).reshape(n, N)
    at_most = min(ids_NK.shape[1], n)  # devices that have experts of one token
    found: Any = partial(_ragged_route, most_sent=N * at_most) if is_ragged else _padded_route
    sent, received, route, transfer = found(goes_nN, comes_nN, tokens, experts.group, types)

    places = TokenPlaces(sent.token_R % N, _first(sent.place_nN.T, at_most))
    x_TE = dispatched(transfer, x_NE, places, route)
    weights_TK = to_places(weights_all, received.token_R, received.place_nN.reshape(-1, 1))
    local_TK = jnp.where(received.is_used_R[:, None], local_all[received.token_R], L)
    num_missed = jnp.sum(local_all < L) - jnp.sum(local_TK < L)
    return Arrived(x_TE, weights_TK, local_TK, num_missed, partial(returned, transfer, places=places, route=route))


def _local(ids_NK: Array, experts: Experts) -> Array:
    """Returns the place of each chosen expert among this device's, and the number of these for one that is not here."""
    local = ids_NK - experts.group.index * experts.num_local
    return jnp.where((local >= 0) & (local < experts.num_local), local, experts.num_local)


def _at_local_experts(arrived: Arrived, run: RunExperts, num_local: int, rows: int) -> tuple[Array, Array]:
    """Returns (what the experts of all devices make of this device's tokens, the number of choices dropped here)."""
    x_TE, weights_TK, local_TK, num_missed, back = arrived
    rows = min(rows, local_TK.size)  # a buffer is rounded up
    order_R, inverse_R, counts_L = sort_by_expert(local_TK, num_local)
    sizes_L = jnp.clip(rows - _before(counts_L), 0, counts_L)
    place_TK = inverse_R.reshape(local_TK.shape)
    place_TK = _places(place_TK, place_TK < sizes_L.sum(), rows)
    choice_R = order_R[:rows]
    places, here = TokenPlaces(choice_R // local_TK.shape[1], _first(place_TK, num_local)), nowhere(AS_THEY_ARE)
    y_RE = run(dispatched(here, x_TE, places, None), sizes_L, _weights_sent(weights_TK, choice_R, place_TK))
    num_dropped = num_missed + counts_L.sum() - sizes_L.sum()
    return back(returned(here, y_RE, places, None)), num_dropped.astype(jnp.float32)


class _Packed(NamedTuple):
    """Tokens of n groups of N in the places of a buffer, one group after another. token_R: of the n N, the one in each
    place. is_used_R: the place holds one. place_nN: the place of each token, one past the end for one that has none."""

    token_R: Array
    is_used_R: Array
    place_nN: Array


def _packed(is_in_nN: Array, first_n: Array, fits_n: Array, num_places: int) -> _Packed:
    """Returns the places of those tokens that are in a buffer. first_n: the place of each group's first one. fits_n:
    how many of a group have a place."""
    slot_nN = _before(is_in_nN.astype(jnp.int32), axis=1)
    place_nN = _places(first_n[:, None] + slot_nN, is_in_nN & (slot_nN < fits_n[:, None]), num_places)
    place_R = jnp.arange(num_places)
    group_R = jnp.sum(place_R[:, None] >= first_n, axis=1) - 1
    slot_R = place_R - first_n[group_R]
    token_nN = jnp.argsort(~is_in_nN, axis=1, stable=True)
    num_tokens = is_in_nN.shape[1]
    token_R = group_R * num_tokens + token_nN[group_R, jnp.minimum(slot_R, num_tokens - 1)]
    return _Packed(token_R, slot_R < fits_n[group_R], place_nN)


class _Route(NamedTuple):
    """How tokens go to other devices and back. sent, received: their places in the buffers. route: what the transfer
    takes."""

    sent: _Packed
    received: _Packed
    route: Any
    transfer: RowTransfer


def _padded_route(goes_nN: Array, comes_nN: Array, tokens: int, group: DeviceGroup, types: RowTypes) -> _Route:
    """Returns the route of the same number of tokens to each device. goes_nN: this device's tokens that go to each
    device. comes_nN: those of each device that come here."""
    first_n = jnp.arange(len(goes_nN)) * tokens
    num_places = len(goes_nN) * tokens
    sent, received = (
        _packed(each, first_n, jnp.minimum(each.sum(1), tokens), num_places) for each in (goes_nN, comes_nN)
    )
    return _Route(sent, received, None, swapped(group, types))


def _ragged_route(
    goes_nN: Array, comes_nN: Array, tokens: int, group: DeviceGroup, types: RowTypes, *, most_sent: int
) -> _Route:
    """Returns the route of as many tokens as there are. tokens: those that a device receives at most; most_sent: that
    it sends."""
    me = group.index
    counts_nn = jax.lax.all_gather(goes_nN.sum(1), group.axis)  # by source, destination
    starts_nn = jnp.minimum(_before(counts_nn), tokens)
    fits_nn = jnp.minimum(tokens - starts_nn, counts_nn)
    firsts_nn = _before(counts_nn, axis=1)
    there = (firsts_nn[me], fits_nn[me], starts_nn[me], fits_nn[:, me])
    back = (starts_nn[:, me], fits_nn[:, me], firsts_nn[:, me], fits_nn[me])
    sent = _packed(goes_nN, firsts_nn[me], fits_nn[me], most_sent)
    received = _packed(comes_nN, starts_nn[:, me], fits_nn[:, me], tokens)
    from_R = _steps(starts_nn[:, me], jnp.arange(len(goes_nN)) * most_sent + firsts_nn[:, me], tokens)
    return _Route(sent, received, RaggedRoute(there, back, from_R), ragged(group.axis, most_sent, tokens, types))


def sort_by_expert(ids_NK: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Returns (order, inverse, counts): row i of what is sorted is choice order[i], which is of token order[i] // K."""
    order_R = jnp.argsort(ids_NK.reshape(-1), stable=True)
    counts_X = jnp.sum(ids_NK.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return order_R, jnp.argsort(order_R), counts_X


def _before(counts: Array, axis: int = 0) -> Array:
    """Returns the sum of the counts before each."""
    return jnp.cumsum(counts, axis=axis) - counts


def _places(place_NK: Array, fits_NK: Array, num_places: int) -> Array:
    """Returns the place of each choice, the number of places for one that has none."""
    return jnp.where(fits_NK, place_NK, num_places)


def _first(place_NK: Array, at_most: int) -> Array:
    """Returns the places of each token, of which so many are places at most."""
    return place_NK if place_NK.shape[1] <= at_most else jnp.sort(place_NK, axis=1)[:, :at_most]


def _weights_sent(weights_NK: Array, choice_R: Array, place_NK: Array) -> Array:
    """Returns the weight of each place's choice."""
    return to_places(weights_NK.reshape(-1), choice_R, place_NK.reshape(-1, 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(axis: Any, weights_R: Array, from_R: Array, there_R: Array) -> Array:
    """Returns the weights of the rows that a ragged exchange brings, one number each, of all devices': a ragged
    exchange of TPUs would send 512 bytes for each. from_R: the place of each among those of all devices; there_R: the
    place that each of this device's goes to, likewise."""
    del there_R
    return jnp.take(jax.lax.all_gather(weights_R, axis, tiled=True), from_R, mode="clip")


_taken.defvjp(
    lambda axis, weights_R, from_R, there_R: (_taken(axis, weights_R, from_R, there_R), (from_R, there_R)),
    lambda axis, saved, g: (_taken(axis, g, saved[1], saved[0]), None, None),
)


def _steps(starts_S: Array, values_S: Array, length: int) -> Array:
    """Returns the numbers from values_S on, each from its place on up to the next one."""
    ahead_S = values_S - starts_S
    steps_S = ahead_S - jnp.concatenate([jnp.zeros(1, ahead_S.dtype), ahead_S[:-1]])
    ahead_R = jnp.cumsum(jnp.zeros(length, ahead_S.dtype).at[starts_S].add(steps_S, mode="drop"))
    return jnp.arange(length) + ahead_R


def dispatch_capacity(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int,
    types: RowTypes = AS_THEY_ARE,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns (the weighted sum of what a token's experts make of it (N, E), the number of choices dropped). rows: that
    an expert takes of each device; first choices before second ones, then in the order of the tokens."""
    n, L, E = experts.num_devices, experts.num_local, x_NE.shape[1]
    slot_NK = _slots(ids_NK, experts.num_experts)
    fits_NK = slot_NK < rows
    num_places = experts.num_experts * rows
    place_NK = jnp.where(fits_NK & (ids_NK < experts.num_experts), ids_NK * rows + slot_NK, num_places)
    choices = jnp.arange(ids_NK.size, dtype=jnp.int32)
    choice_R = jnp.full(num_places, ids_NK.size, jnp.int32).at[place_NK.reshape(-1)].set(choices, mode="drop")

    def there(x: Array, _: Any) -> Array:
        return swap(x.reshape(n, L, rows, *x.shape[1:])).swapaxes(0, 1).reshape(x.shape)

    def back(y: Array, _: Any) -> Array:
        return swap(y.reshape(L, n, rows, E).swapaxes(0, 1)).reshape(y.shape)

    def swap(x: Array) -> Array:
        return jax.lax.all_to_all(x, experts.axis, 0, 0, tiled=True) if experts.axes else x

    places, transfer = TokenPlaces(choice_R // ids_NK.shape[1], place_NK), RowTransfer(there, back, there, types)
    weights_R = _weights_sent(weights_NK, choice_R, place_NK)
    weights_R = jnp.where(choice_R < ids_NK.size, weights_R, 0)  # matmuls take all rows of an expert
    x_LCE = dispatched(transfer, x_NE, places, None).reshape(L, n * rows, E)
    y_LCE = run(x_LCE, None, there(weights_R, None).reshape(L, n * rows))
    y_NE = returned(transfer, y_LCE.reshape(-1, E), places, None)
    return y_NE, jnp.sum(~fits_NK, dtype=jnp.float32)


def _slots(ids_NK: Array, num_experts: int) -> Array:
    """Returns how many choices of the same expert come before each; 0 for no expert."""
    N, K = ids_NK.shape
    is_expert = ids_NK.T.reshape(-1, 1) == jnp.arange(num_experts)
    before = (jnp.cumsum(is_expert, axis=0) - is_expert) * is_expert
    return before.sum(1).reshape(K, N).T
