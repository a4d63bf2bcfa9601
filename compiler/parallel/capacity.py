"""A fixed number of rows for each expert from each device: what is more is dropped.

The weight of a choice goes with its row, and multiplies what the expert's last matrix multiplies. So the gradient of
the weight needs no result of the expert: a backward pass that computes the layer again stops before the last matmul
and sends nothing back a second time. And what lies in a place without a choice does not matter, as its weight is 0:
forward and backward, nothing of it is added to anything.

Rows are gathered in both directions, and so are their gradients: each place in the buffer knows its choice, and each
choice its place.

Shapes: as in dispatch.py; R places of the buffer, experts x devices x C.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from .dispatch import Experts

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
    """Gives a linear function of its first operand its derivative."""
    of.defvjp(  # pyright: ignore[reportFunctionMemberAccess]
        lambda x, choice_R, place_NK: (of(x, choice_R, place_NK), (choice_R, place_NK)),
        lambda saved, g: (transposed(g, *saved), None, None),
    )


_linear(_to_places, _from_places)
_linear(_from_places, _to_places)


def run_equal_groups(
    x_LCE: Array, weights_LC1: Array, gate: Array, up: Array, down: Array, activation: Callable[[Array], Array]
) -> Array:
    """Returns what each expert makes of its rows, times their weights."""
    gate_LCM, up_LCM = (jnp.einsum("lce,lem->lcm", x_LCE, w) for w in (gate, up))
    hidden = (activation(gate_LCM) * up_LCM).astype(jnp.float32) * weights_LC1
    return jnp.einsum("lcm,lme->lce", hidden.astype(x_LCE.dtype), down)
