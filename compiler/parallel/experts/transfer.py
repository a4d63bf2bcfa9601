"""Rows of tokens on their way to experts and back, in the type of the operands or in few bits.

    dispatched  tokens  -> encoded -> a row for each place -> there -> decoded      backward: as results go
    returned    results -> back -> the sum of each token's rows                     backward: as tokens go

Each is the transpose of the other; the gradient of a rounding is that of the identity (straight-through). What goes
there may be in few bits: tokens, and the gradients of results. What comes back is added up, in the type of the
operands. Each token has a scale, so elements are the same on any mesh and in any exchange. It is encoded before it is
copied to its places, so that copies and transfers move elements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

from ...core.scopes import encoding_scope
from ...formats.block import ELEMENTS, SCALES, per_channel
from ...formats.operands import OperandFormat
from .device_group import DeviceGroup


@dataclass(frozen=True)
class RowTypes:
    """How rows are written on their way to experts. tokens: forward. gradients: those of results, backward. None: they
    are sent as they are."""

    tokens: OperandFormat | None = None
    gradients: OperandFormat | None = None

    @property
    def how(self) -> str:
        """Returns the types in words, as they follow a description: ', tokens in fp8'; empty for none."""
        of_tokens = f", tokens in {self.tokens.name}" if self.tokens else ""
        return of_tokens + (f", gradients of results in {self.gradients.name}" if self.gradients else "")


@dataclass(frozen=True)
class RowTransfer:
    """there: (rows (R, E), route) -> the rows that arrive. back: takes rows home, the transpose of `there`. numbers: as
    `there`, of one number for each row. types: how rows are written on their way there."""

    there: Callable[[Array, Any], Array]
    back: Callable[[Array, Any], Array]
    numbers: Callable[[Array, Any], Array]
    types: RowTypes


class TokenPlaces(NamedTuple):
    """The places of tokens in a buffer. source_R: the token in each place. place_NK: the places of each token, one past
    the end for none."""

    source_R: Array
    place_NK: Array


def dispatched(transfer: RowTransfer, x_NE: Array, places: TokenPlaces | None, route: Any) -> Array:
    """Returns the rows that arrive of all devices. places: in the sender's buffer; None: tokens go as they lie."""
    return cast(Array, _dispatched(transfer, x_NE, places, route))


def returned(transfer: RowTransfer, y_RE: Array, places: TokenPlaces | None, route: Any) -> Array:
    """Returns what the experts of all devices made of each token, added up."""
    return cast(Array, _returned(transfer, y_RE, places, route))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatched(transfer: RowTransfer, x_NE: Array, places: TokenPlaces | None, route: Any) -> Array:
    return _to_experts(transfer, transfer.types.tokens, x_NE, places, route)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _returned(transfer: RowTransfer, y_RE: Array, places: TokenPlaces | None, route: Any) -> Array:
    return _from_experts(transfer, y_RE, places, route)


_dispatched.defvjp(
    lambda transfer, x, places, route: (_dispatched(transfer, x, places, route), (places, route)),
    lambda transfer, saved, g: (_from_experts(transfer, g, *saved), None, None),
)
_returned.defvjp(
    lambda transfer, y, places, route: (_returned(transfer, y, places, route), (places, route)),
    lambda transfer, saved, g: (_to_experts(transfer, transfer.types.gradients, g, *saved), None, None),
)


def _to_experts(
    transfer: RowTransfer, written: OperandFormat | None, x_NE: Array, places: TokenPlaces | None, route: Any
) -> Array:
    def rows(x: Array) -> Array:
        return x if places is None else to_places(x, *places)

    if written is None:
        return transfer.there(rows(x_NE), route)
    format = per_channel(written.element, (1,), 2)
    with jax.named_scope(encoding_scope(written.name)):
        encoded = format.encode(x_NE)
    elements = transfer.there(rows(encoded[ELEMENTS]), route)
    scales = transfer.numbers(rows(encoded[SCALES][:, 0]), route)
    return format.decode({ELEMENTS: elements, SCALES: scales[:, None]}, x_NE.dtype)


def _from_experts(transfer: RowTransfer, y_RE: Array, places: TokenPlaces | None, route: Any) -> Array:
    y_RE = transfer.back(y_RE, route)
    return y_RE if places is None else from_places(y_RE, *places)


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


def nowhere(types: RowTypes) -> RowTransfer:
    """Returns the transfer of rows that stay: they are rounded as others are."""
    return RowTransfer(_stay, _stay, _stay, types)


def swapped(group: DeviceGroup, types: RowTypes) -> RowTransfer:
    """Returns the transfer of as many rows to each device, which are put in the order of the route (there, back)."""
    swap = group.swap

    def there(x: Array, route: Any) -> Array:
        return swap(x) if route is None else jnp.take(swap(x), route[0], axis=0, mode="clip")

    def back(y: Array, route: Any) -> Array:
        return swap(y if route is None else jnp.take(y, route[1], axis=0, mode="clip"))

    return RowTransfer(there, back, there, types)


def gathered(group: DeviceGroup, types: RowTypes) -> RowTransfer:
    """Returns the transfer of all rows to all devices, whose results are added up."""

    def there(x: Array, _: Any) -> Array:
        return group.gather(x)

    def back(y: Array, _: Any) -> Array:
        return group.sum_parts(y)

    return RowTransfer(there, back, there, types)


class RaggedRoute(NamedTuple):
    """there, back: (offsets here, sizes sent, offsets there, sizes received) of each slice, of an exchange and of the
    one that takes rows back. from_R: the place of each row that arrives among those of all senders."""

    there: tuple[Array, ...]
    back: tuple[Array, ...]
    from_R: Array


def ragged(axis: Any, sender_rows: int, receiver_rows: int, types: RowTypes) -> RowTransfer:
    """Returns the transfer of as many rows as there are, between buffers of these sizes. Rows that nothing is sent to
    are undefined: zeros cost 2 to 3.5 ms of 1 GB on v5p. Numbers, each of which would be sent as 512 bytes, are
    gathered from all devices."""

    def moved(x: Array, rows: int, slices: tuple[Array, ...]) -> Array:
        return jax.lax.ragged_all_to_all(x, jax.lax.empty((rows, x.shape[1]), x.dtype), *slices, axis_name=axis)

    return RowTransfer(
        lambda x, route: moved(x, receiver_rows, route.there),
        lambda y, route: moved(y, sender_rows, route.back),
        lambda x, route: jnp.take(jax.lax.all_gather(x, axis, tiled=True), route.from_R, mode="clip"),
        types,
    )


def _stay(x: Array, _: Any) -> Array:
    return x
