"""Tokens to their experts and back: each device has some tokens and some experts.

    local      all experts are here: tokens are sorted by expert
    ragged     each device sends each other the rows of its experts, as many as there are (ragged all-to-all, TPUs)
    padded     the same number of rows to each device, some of them empty (all-to-all)
    gathered   all tokens to all devices (all-gather), which take the rows of their experts, and add their results up
               (reduce-scatter)
    deduplicated  each token once to each device that has one of its experts, which takes rows of it for each of them,
               adds their results up, and sends one row back (ragged all-to-all or all-to-all)

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...core.partition_spec import Axes

# (rows sorted by expert (R, E), rows of each expert, weights of the rows (R,)) -> what the experts make of them, times
# the weights. With a capacity, each expert has as many: rows (L, n C, E), no sizes, weights (L, n C).
RunExperts = Callable[[Array, Any, Array], Array]
Dispatch = Callable[[Array, Array, Array, RunExperts], tuple[Array, Array]]


@dataclass(frozen=True)
class Experts:
    """The experts of all devices. axes: the mesh axes that split them. num_devices: the devices along these axes."""

    num_experts: int
    axes: Axes
    num_devices: int

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_devices

    @property
    def axis(self) -> Any:
        return self.axes[0] if len(self.axes) == 1 else self.axes


def dispatch_local(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts
) -> tuple[Array, Array]:
    """Returns (the weighted sum of what a token's experts make of it (N, E), the number of choices dropped)."""
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    place_NK = _places(inverse_R.reshape(ids_NK.shape), ids_NK < experts.num_experts, ids_NK.size)
    x_RE, weights_R = _sent(x_NE, weights_NK, order_R, place_NK)
    y_RE = run(x_RE, counts_X, weights_R)
    return from_places(y_RE, order_R // ids_NK.shape[1], place_NK), jnp.zeros(())


def dispatch_padded(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
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

    def swap(x: Array) -> Array:
        return jax.lax.all_to_all(x, experts.axis, 0, 0, tiled=True)

    x_RE, weights_R = (swap(each) for each in _sent(x_NE, weights_NK, choice_R, place_NK))
    x_RE, weights_R = (to_places(each, sorted_R, unsorted_R[:, None]) for each in (x_RE, weights_R))
    y_RE = to_places(run(x_RE, got_nL.sum(0), weights_R), unsorted_R, sorted_R[:, None])
    num_dropped = jnp.sum(is_sent_NK & ~fits_NK, dtype=jnp.float32)
    return from_places(swap(y_RE), choice_R // K, place_NK), num_dropped


def dispatch_ragged(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
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

    x_RE, weights_R = _sent(x_NE, weights_NK, order_R, place_NK)
    received_RE: Any = _exchanged(experts.axis, ids_NK.size, rows, x_RE, there, back)
    y_RE = run(received_RE, fits_nLn[me].sum(1), _taken(experts.axis, weights_R, from_R, there_R))
    y_RE = _exchanged(experts.axis, rows, ids_NK.size, y_RE, back, there)
    num_dropped = jnp.sum(sizes_nLn[:, :, me] - fits_nLn[:, :, me]).astype(jnp.float32)
    return from_places(y_RE, order_R // ids_NK.shape[1], place_NK), num_dropped


def dispatch_gathered(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of all
    tokens."""
    x_all, weights_all, ids_all = (
        jax.lax.all_gather(each, experts.axis, tiled=True) for each in (x_NE, weights_NK, ids_NK)
    )
    local_all = _local(ids_all, experts)
    sums_all, num_kept = _at_local_experts(x_all, weights_all, local_all, run, experts.num_local, rows)
    y_NE = jax.lax.psum_scatter(sums_all, experts.axis, scatter_dimension=0, tiled=True)
    return y_NE, (jnp.sum(local_all < experts.num_local) - num_kept).astype(jnp.float32)


def dispatch_deduplicated(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int, tokens: int,
    is_ragged: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of the
    tokens that it receives. tokens: those that it receives in total if the exchange is ragged, else of each device.
    Each device knows the choices of all tokens, and so what it receives."""
    n, L, N = experts.num_devices, experts.num_local, len(x_NE)
    weights_all, ids_all = (jax.lax.all_gather(each, experts.axis, tiled=True) for each in (weights_NK, ids_NK))
    local_all = _local(ids_all, experts)
    goes_nN = jnp.any(ids_NK // L == jnp.arange(n)[:, None, None], axis=-1)
    comes_nN = jnp.any(local_all < L, axis=1).reshape(n, N)
    at_most = min(ids_NK.shape[1], n)  # devices that have experts of one token
    route: Any = partial(_ragged_route, most_sent=N * at_most) if is_ragged else _padded_route
    sent, received, there, back = route(goes_nN, comes_nN, tokens, experts.axis)

    token_R, place_Nn = sent.token_R % N, _first(sent.place_nN.T, at_most)
    x_TE = there(to_places(x_NE, token_R, place_Nn))
    weights_TK = to_places(weights_all, received.token_R, received.place_nN.reshape(-1, 1))
    local_TK = jnp.where(received.is_used_R[:, None], local_all[received.token_R], L)
    sums_TE, num_kept = _at_local_experts(x_TE, weights_TK, local_TK, run, L, rows)
    return from_places(back(sums_TE), token_R, place_Nn), (jnp.sum(local_all < L) - num_kept).astype(jnp.float32)


def _local(ids_NK: Array, experts: Experts) -> Array:
    """Returns the place of each chosen expert among this device's, and the number of these for one that is not here."""
    local = ids_NK - jax.lax.axis_index(experts.axis) * experts.num_local
    return jnp.where((local >= 0) & (local < experts.num_local), local, experts.num_local)


def _at_local_experts(
    x_TE: Array, weights_TK: Array, local_TK: Array, run: RunExperts, num_local: int, rows: int
) -> tuple[Array, Array]:
    """Returns (the weighted sums of what this device's experts make of tokens (T, E), the number of choices that have a
    row). local_TK: as `_local` gives it."""
    rows = min(rows, local_TK.size)  # a buffer is rounded up
    order_R, inverse_R, counts_L = sort_by_expert(local_TK, num_local)
    sizes_L = jnp.clip(rows - _before(counts_L), 0, counts_L)
    place_TK = inverse_R.reshape(local_TK.shape)
    place_TK = _places(place_TK, place_TK < sizes_L.sum(), rows)
    choice_R = order_R[:rows]
    x_RE, weights_R = _sent(x_TE, weights_TK, choice_R, place_TK, at_most=num_local)
    y_RE = run(x_RE, sizes_L, weights_R)
    return from_places(y_RE, choice_R // local_TK.shape[1], _first(place_TK, num_local)), sizes_L.sum()


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
    """How tokens go to other devices and back. sent, received: their places in the buffers."""

    sent: _Packed
    received: _Packed
    there: Callable[[Array], Array]
    back: Callable[[Array], Array]


def _padded_route(goes_nN: Array, comes_nN: Array, tokens: int, axis: Any) -> _Route:
    """Returns the route of the same number of tokens to each device. goes_nN: this device's tokens that go to each
    device. comes_nN: those of each device that come here."""
    first_n = jnp.arange(len(goes_nN)) * tokens
    num_places = len(goes_nN) * tokens
    sent, received = (
        _packed(each, first_n, jnp.minimum(each.sum(1), tokens), num_places) for each in (goes_nN, comes_nN)
    )
    swap: Any = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    return _Route(sent, received, swap, swap)


def _ragged_route(goes_nN: Array, comes_nN: Array, tokens: int, axis: Any, *, most_sent: int) -> _Route:
    """Returns the route of as many tokens as there are. tokens: those that a device receives at most; most_sent: that
    it sends."""
    me = jax.lax.axis_index(axis)
    counts_nn = jax.lax.all_gather(goes_nN.sum(1), axis)  # by source, destination
    starts_nn = jnp.minimum(_before(counts_nn), tokens)
    fits_nn = jnp.minimum(tokens - starts_nn, counts_nn)
    firsts_nn = _before(counts_nn, axis=1)
    there = (firsts_nn[me], fits_nn[me], starts_nn[me], fits_nn[:, me])
    back = (starts_nn[:, me], fits_nn[:, me], firsts_nn[:, me], fits_nn[me])
    sent = _packed(goes_nN, firsts_nn[me], fits_nn[me], most_sent)
    received = _packed(comes_nN, starts_nn[:, me], fits_nn[:, me], tokens)
    return _Route(
        sent,
        received,
        lambda x: _exchanged(axis, most_sent, tokens, x, there, back),
        lambda y: _exchanged(axis, tokens, most_sent, y, back, there),
    )


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


def _sent(
    x_NE: Array, weights_NK: Array, choice_R: Array, place_NK: Array, *, at_most: int | None = None
) -> tuple[Array, Array]:
    """Returns the row and the weight of each place's choice. at_most: the choices of a token that have a place."""
    K = weights_NK.shape[1]
    x_RE = to_places(x_NE, choice_R // K, _first(place_NK, at_most or K))
    return x_RE, to_places(weights_NK.reshape(-1), choice_R, place_NK.reshape(-1, 1))


@jax.custom_vjp
def to_places(x: Array, source_R: Array, place_NK: Array) -> Array:
    """Returns the row of x that each place holds. place_NK: the places of each row of x, one past the end for none."""
    del place_NK
    return jnp.take(x, source_R, axis=0, mode="clip")


@jax.custom_vjp
def from_places(x_R: Array, source_R: Array, place_NK: Array) -> Array:
    """Returns the sum of what lies at each row's places, added in float32: the transpose of `to_places`."""
    del source_R
    rows = (jnp.take(x_R, place_N, axis=0, mode="fill", fill_value=0) for place_N in place_NK.T)
    return sum((each.astype(jnp.float32) for each in rows), start=jnp.zeros((), jnp.float32)).astype(x_R.dtype)


def _linear(of: Callable[..., Array], transposed: Callable[..., Array]) -> None:
    """Gives a linear function of its first operand its derivative."""
    of.defvjp(  # pyright: ignore[reportFunctionMemberAccess]
        lambda x, source_R, place_NK: (of(x, source_R, place_NK), (source_R, place_NK)),
        lambda saved, g: (transposed(g, *saved), None, None),
    )


_linear(to_places, from_places)
_linear(from_places, to_places)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(axis: Any, sender_rows: int, receiver_rows: int, x: Array, there: Any, back: Any) -> Any:
    """Returns the rows of other devices, in the receiver's buffer. there, back: (offsets here, sizes sent, offsets
    there, sizes received) of each slice, of this exchange, and of the one that takes the rows back, as its gradient
    is. Rows that nothing is sent to are undefined: zeros cost 2 to 3.5 ms of 1 GB on v5p."""
    del sender_rows, back
    return jax.lax.ragged_all_to_all(x, jax.lax.empty((receiver_rows, x.shape[1]), x.dtype), *there, axis_name=axis)


def _exchanged_backward(
    axis: Any, sender_rows: int, receiver_rows: int, saved: Any, g: Array
) -> tuple[Any, None, None]:
    there, back = saved
    return _exchanged(axis, receiver_rows, sender_rows, g, back, there), None, None


_exchanged.defvjp(
    lambda axis, here, buffer, x, there, back: (_exchanged(axis, here, buffer, x, there, back), (there, back)),
    _exchanged_backward,
)


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
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
    """Returns (the weighted sum of what a token's experts make of it (N, E), the number of choices dropped). rows: that
    an expert takes of each device; first choices before second ones, then in the order of the tokens."""
    n, L, E = experts.num_devices, experts.num_local, x_NE.shape[1]
    slot_NK = _slots(ids_NK, experts.num_experts)
    fits_NK = slot_NK < rows
    num_places = experts.num_experts * rows
    place_NK = jnp.where(fits_NK & (ids_NK < experts.num_experts), ids_NK * rows + slot_NK, num_places)
    choices = jnp.arange(ids_NK.size, dtype=jnp.int32)
    choice_R = jnp.full(num_places, ids_NK.size, jnp.int32).at[place_NK.reshape(-1)].set(choices, mode="drop")

    def swap(x: Array) -> Array:
        return jax.lax.all_to_all(x, experts.axis, 0, 0, tiled=True) if experts.axes else x

    x_RE, weights_R = _sent(x_NE, weights_NK, choice_R, place_NK)
    weights_R = jnp.where(choice_R < ids_NK.size, weights_R, 0)  # matmuls take all rows of an expert
    x_LCE, weights_LC = (swap(each.reshape(n, L, rows, *each.shape[1:])).swapaxes(0, 1) for each in (x_RE, weights_R))
    y = run(x_LCE.reshape(L, n * rows, E), None, weights_LC.reshape(L, n * rows))
    y_RE = swap(y.reshape(L, n, rows, E).swapaxes(0, 1)).reshape(-1, E)
    return from_places(y_RE, choice_R // ids_NK.shape[1], place_NK), jnp.sum(~fits_NK, dtype=jnp.float32)


def _slots(ids_NK: Array, num_experts: int) -> Array:
    """Returns how many choices of the same expert come before each; 0 for no expert."""
    N, K = ids_NK.shape
    is_expert = ids_NK.T.reshape(-1, 1) == jnp.arange(num_experts)
    before = (jnp.cumsum(is_expert, axis=0) - is_expert) * is_expert
    return before.sum(1).reshape(K, N).T
