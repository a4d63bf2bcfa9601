"""Tokens to their experts and back: each device has some tokens and some experts.

    local      all experts are here: tokens are sorted by expert
    ragged     each device sends each other the rows of its experts, as many as there are (ragged all-to-all, TPUs)
    padded     the same number of rows to each device, some of them empty (all-to-all)
    gathered   all tokens to all devices (all-gather), which take the rows of their experts, and add their results up
               (reduce-scatter)

The buffers have a fixed size; what does not fit is dropped and counted. A dropped choice adds nothing to its token.

A token whose experts have the number `num_experts` goes to none (padding): it takes no row and is not counted.

Shapes: N tokens of this device, E embed, K experts of a token, X experts, L experts of this device, n devices, R rows
of a buffer, C rows of an expert with a capacity.

With a capacity, each device has a fixed number of rows for each expert, and what is more is dropped. The weight of a
choice goes with its row, and multiplies what the expert's last matrix multiplies. So the gradient of the weight needs
no result of the expert: a backward pass that computes the layer again stops before the last matmul and sends nothing
back a second time. What lies in a place without a choice does not matter, as its weight is 0. Rows are gathered in
both directions, and so are their gradients: each place in the buffer knows its choice, and each choice its place.
There, R is the places of the buffer, experts x devices x C.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...core.partition_spec import Axes

# (rows sorted by expert, rows of each expert) -> what they make of them
RunExperts = Callable[[Array, Array], Array]
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


def without_unsent(dispatch: Dispatch, experts: Experts) -> Dispatch:
    """Returns a dispatch that takes tokens without an expert too, of NO_EXPERT: rows of no expert hold anything, and so
    do their gradients, which are cleared here."""

    def run(x_NE: Array, weights_NK: Array, ids_NK: Array, run_experts: RunExperts) -> tuple[Array, Array]:
        ids_NK = jnp.minimum(ids_NK, experts.num_experts)
        is_sent_N1 = ids_NK[:, :1] < experts.num_experts
        x_NE, weights_NK = (jnp.where(is_sent_N1, each, 0) for each in (x_NE, weights_NK))
        y_NE, num_dropped = dispatch(x_NE, weights_NK, ids_NK, run_experts)
        return jnp.where(is_sent_N1, y_NE, 0), num_dropped

    return run


def dispatch_local(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts
) -> tuple[Array, Array]:
    """Returns (the weighted sum of what a token's experts make of it (N, E), the number of choices dropped)."""
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    y_RE = run(take_rows(x_NE, order_R, inverse_R, ids_NK.shape[1]), counts_X)
    return combine(take_rows(y_RE, inverse_R, order_R, 1), weights_NK), jnp.zeros(())


def dispatch_padded(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device sends to each
    device."""
    n, L, N = experts.num_devices, experts.num_local, ids_NK.size
    order_R, inverse_R, counts_X = sort_by_expert(ids_NK, experts.num_experts)
    counts_nL = counts_X.reshape(n, L)
    to_R = ids_NK.reshape(-1)[order_R] // L  # the device of each row
    slot_R = jnp.arange(N) - _before(counts_nL.sum(1))[to_R]
    is_sent_R = to_R < n  # padding goes to no device
    fits_R = is_sent_R & (slot_R < rows)
    place_R = jnp.where(fits_R, to_R * rows + slot_R, n * rows)
    source = jnp.full(n * rows, N, jnp.int32).at[place_R].set(jnp.arange(N, dtype=jnp.int32), mode="drop")
    sent_nL = jnp.clip(rows - _before(counts_nL, axis=1), 0, counts_nL)
    got_nL = jax.lax.all_to_all(sent_nL, experts.axis, 0, 0, tiled=True)
    # Rows arrive by source, then by expert; the empty ones of each source go last.
    expert_nR = jnp.sum(jnp.arange(rows)[None, :, None] >= jnp.cumsum(got_nL, axis=1)[:, None, :], axis=-1)
    sorted_R = jnp.argsort(expert_nR.reshape(-1), stable=True)
    unsorted_R = jnp.argsort(sorted_R)

    def swap(x: Array) -> Array:
        return jax.lax.all_to_all(x, experts.axis, 0, 0, tiled=True)

    sent_RE = _packed(take_rows(x_NE, order_R, inverse_R, ids_NK.shape[1]), source, place_R)
    y_RE = run(take_rows(swap(sent_RE), sorted_R, unsorted_R, 1), got_nL.sum(0))
    y_RE = _unpacked(swap(take_rows(y_RE, unsorted_R, sorted_R, 1)), source, place_R)
    return combine(take_rows(y_RE, inverse_R, order_R, 1), weights_NK), jnp.sum(is_sent_R & ~fits_R, dtype=jnp.float32)


def dispatch_ragged(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int, is_dropless: bool
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
    sent, received = fits_nLn[:, :, me].reshape(-1), fits_nLn[me].T.reshape(-1)
    there = (_before(counts_X), sent, starts_nLn[:, :, me].reshape(-1), received)
    at_source = jax.lax.dynamic_slice_in_dim(_before(counts_nX, axis=1), me * L, L, 1).reshape(-1)
    back = (starts_nLn[me].T.reshape(-1), received, at_source, sent)
    x_RE = take_rows(x_NE, order_R, inverse_R, ids_NK.shape[1])
    here, buffer = _Buffer(ids_NK.size, is_dropless), _Buffer(rows, True)
    y_RE = run(_exchanged(experts.axis, here, buffer, x_RE, there, back), fits_nLn[me].sum(1))
    y_RE = _exchanged(experts.axis, buffer, here, y_RE, back, there)
    num_dropped = jnp.sum(sizes_nLn[:, :, me] - fits_nLn[:, :, me]).astype(jnp.float32)
    return combine(take_rows(y_RE, inverse_R, order_R, 1), weights_NK), num_dropped


def dispatch_gathered(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunExperts, *, experts: Experts, rows: int
) -> tuple[Array, Array]:
    """Returns what the experts of all devices make of this device's tokens. rows: the rows that a device takes of all
    tokens."""
    L, K = experts.num_local, ids_NK.shape[1]
    x_all, weights_all, ids_all = (
        jax.lax.all_gather(each, experts.axis, tiled=True) for each in (x_NE, weights_NK, ids_NK)
    )
    local = (ids_all - jax.lax.axis_index(experts.axis) * L).reshape(-1)
    local = jnp.where((local >= 0) & (local < L), local, L)
    counts_L = jnp.sum(local[:, None] == jnp.arange(L), axis=0, dtype=jnp.int32)
    rows = min(rows, local.size)  # a buffer is rounded up
    order_R = jnp.argsort(local, stable=True)[:rows]
    sizes_L = jnp.clip(rows - _before(counts_L), 0, counts_L)
    is_real_R1 = (jnp.arange(rows) < sizes_L.sum())[:, None]
    y_RE = run(jnp.where(is_real_R1, x_all[order_R // K], 0), sizes_L)
    # A place without a row may hold anything: it is cleared before it meets a weight, which has a gradient.
    y_RE = jnp.where(is_real_R1, y_RE, 0).astype(jnp.float32) * weights_all.reshape(-1)[order_R][:, None]
    sums_NE = jnp.zeros(x_all.shape, jnp.float32).at[order_R // K].add(y_RE).astype(x_NE.dtype)
    y_NE = jax.lax.psum_scatter(sums_NE, experts.axis, scatter_dimension=0, tiled=True)
    return y_NE, jnp.sum(counts_L - sizes_L).astype(jnp.float32)


def sort_by_expert(ids_NK: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Returns (order, inverse, counts): row i of what is sorted is choice order[i], which is of token order[i] // K."""
    order_R = jnp.argsort(ids_NK.reshape(-1), stable=True)
    counts_X = jnp.sum(ids_NK.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return order_R, jnp.argsort(order_R), counts_X


def combine(y_RE: Array, weights_NK: Array) -> Array:
    """Returns the weighted sum of the K rows of each token, summed in float32."""
    y_NKE = y_RE.reshape(*weights_NK.shape, -1).astype(jnp.float32)
    return jnp.einsum("nke,nk->ne", y_NKE, weights_NK.astype(jnp.float32)).astype(y_RE.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(x: Array, order: Array, inverse: Array, copies: int) -> Any:
    """Returns rows of `copies` copies of each row of x, in an order. Its gradient is a gather too, not a scatter:
    inverse: the place of each copy in the order."""
    del inverse
    return x[order // copies]


def _take_backward(copies: int, saved: tuple[Array, Array], g: Array) -> tuple[Array, None, None]:
    _, inverse = saved
    gathered = g[inverse]
    if copies > 1:
        gathered = gathered.reshape(-1, copies, g.shape[1]).sum(1, dtype=jnp.float32).astype(g.dtype)
    return gathered, None, None


take_rows.defvjp(
    lambda x, order, inverse, copies: (take_rows(x, order, inverse, copies), (order, inverse)), _take_backward
)


def _with_empty_row(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])


@jax.custom_vjp
def _packed(x: Array, source: Array, place: Array) -> Array:
    """Returns the rows of x in a larger buffer. source: the row of x of each row of the buffer, x's number of rows
    for an empty one. place: the place of each row of x in the buffer, the buffer's number of rows for one that is
    dropped."""
    del place
    return _with_empty_row(x)[source]


@jax.custom_vjp
def _unpacked(buffer: Array, source: Array, place: Array) -> Array:
    """Returns the rows that `_packed` has put into a buffer; dropped rows are zeros."""
    del source
    return _with_empty_row(buffer)[place]


_packed.defvjp(
    lambda x, source, place: (_packed(x, source, place), (source, place)),
    lambda saved, g: (_unpacked(g, *saved), None, None),
)
_unpacked.defvjp(
    lambda buffer, source, place: (_unpacked(buffer, source, place), (source, place)),
    lambda saved, g: (_packed(g, *saved), None, None),
)


def _before(counts: Array, axis: int = 0) -> Array:
    """Returns the sum of the counts before each."""
    return jnp.cumsum(counts, axis=axis) - counts


@dataclass(frozen=True)
class _Buffer:
    """The rows that a device receives. may_be_undefined: rows that nothing is sent to; zeros cost 2 to 3.5 ms of 1 GB
    on v5p (docs/experts.md)."""

    rows: int
    may_be_undefined: bool


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(axis: Any, sender: _Buffer, receiver: _Buffer, x: Array, there: Any, back: Any) -> Any:
    """Returns the rows of other devices, in the receiver's buffer. there, back: (offsets here, sizes sent, offsets
    there, sizes received) of each slice, of this exchange, and of the one that takes the rows back, as its gradient
    is."""
    del sender, back
    make = jax.lax.empty if receiver.may_be_undefined else jnp.zeros
    return jax.lax.ragged_all_to_all(x, make((receiver.rows, x.shape[1]), x.dtype), *there, axis_name=axis)


def _exchanged_backward(axis: Any, sender: _Buffer, receiver: _Buffer, saved: Any, g: Array) -> tuple[Any, None, None]:
    there, back = saved
    return _exchanged(axis, receiver, sender, g, back, there), None, None


_exchanged.defvjp(
    lambda axis, sender, receiver, x, there, back: (_exchanged(axis, sender, receiver, x, there, back), (there, back)),
    _exchanged_backward,
)


# (L, n C, E), weights (L, n C, 1) -> what each expert makes of its rows, times their weights
RunWeighted = Callable[[Array, Array], Array]


def dispatch_capacity(
    x_NE: Array, weights_NK: Array, ids_NK: Array, run: RunWeighted, *, experts: Experts, rows: int
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

    weights_R = _to_places(weights_NK.reshape(-1, 1), choice_R, place_NK.reshape(-1, 1))
    weights_R = jnp.where(choice_R[:, None] < ids_NK.size, weights_R, 0)
    got = (swap(each.reshape(n, L, rows, -1)) for each in (_to_places(x_NE, choice_R, place_NK), weights_R))
    y = run(*(each.swapaxes(0, 1).reshape(L, n * rows, -1) for each in got))
    y_RE = swap(y.reshape(L, n, rows, E).swapaxes(0, 1)).reshape(-1, E)
    return _from_places(y_RE, choice_R, place_NK), jnp.sum(~fits_NK, dtype=jnp.float32)


def _slots(ids_NK: Array, num_experts: int) -> Array:
    """Returns how many choices of the same expert come before each; 0 for no expert."""
    N, K = ids_NK.shape
    is_expert = ids_NK.T.reshape(-1, 1) == jnp.arange(num_experts)
    before = (jnp.cumsum(is_expert, axis=0) - is_expert) * is_expert
    return before.sum(1).reshape(K, N).T


@jax.custom_vjp
def _to_places(x_NE: Array, choice_R: Array, place_NK: Array) -> Array:
    """Returns the row of each place's choice, any row for a place without one."""
    return jnp.take(x_NE, choice_R // place_NK.shape[1], axis=0, mode="clip")


@jax.custom_vjp
def _from_places(x_RE: Array, choice_R: Array, place_NK: Array) -> Array:
    """Returns the sum of the rows at each token's places, added in float32; a choice without a place adds nothing."""
    del choice_R
    rows = (jnp.take(x_RE, place_N, axis=0, mode="fill", fill_value=0) for place_N in place_NK.T)
    return sum((each.astype(jnp.float32) for each in rows), start=jnp.zeros((), jnp.float32)).astype(x_RE.dtype)


def _linear(of: Callable[..., Array], transposed: Callable[..., Array]) -> None:
    """Returns a linear function of its first operand with its derivative."""
    of.defvjp(  # pyright: ignore[reportFunctionMemberAccess]
        lambda x, choice_R, place_NK: (of(x, choice_R, place_NK), (choice_R, place_NK)),
        lambda saved, g: (transposed(g, *saved), None, None),
    )


_linear(_to_places, _from_places)
_linear(_from_places, _to_places)


def run_equal_groups(
    x_LCE: Array, weights_LC1: Array, gate: Array, up: Array, down: Array, gated: Callable[[Array, Array], Array],
    biases: Sequence[Array] = (),
) -> Array:  # fmt: skip
    """Returns what each expert makes of its rows, times their weights."""
    gate_LCM, up_LCM = (jnp.einsum("lce,lem->lcm", x_LCE, w) for w in (gate, up))
    if biases:
        gate_LCM, up_LCM = gate_LCM + biases[0][:, None], up_LCM + biases[1][:, None]
    hidden = gated(gate_LCM, up_LCM).astype(jnp.float32) * weights_LC1
    y_LCE = jnp.einsum("lcm,lme->lce", hidden.astype(x_LCE.dtype), down)
    return (y_LCE + weights_LC1 * biases[2][:, None]).astype(x_LCE.dtype) if biases else y_LCE
