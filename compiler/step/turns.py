"""Makes two layers take turns that do not depend on each other: one computes while the other sends.

A compiler's scheduler is free to run one layer after the other, and then each waits for its own collectives. So what
one layer has reached becomes a condition of what the other computes next, by values, as barriers are removed:

    forward     attention                MLP
    backward               MLP again                gradients of the MLP       gradients of attention
                           after the forward attention                         after the forward MLP

The names are those of a decoder's activations (models/decoder.py, moe.py); layers without them run as they do alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from ..parallel.weights import begun_after

RESULT_OF_ATTENTION = "attention_output"
INPUTS_OF_MLP = ("mlp_input", "experts_input")


@register_dataclass
@dataclass(frozen=True)
class Turn:
    """The results that a layer waits for: scalars, zero where it waits for nothing. after_attention: its MLP waits for
    it. after_layer: the gradient of its attention does."""

    after_attention: Array
    after_layer: Array


def no_turn() -> Turn:
    return Turn(jnp.zeros(()), jnp.zeros(()))


def in_turn(activation: Callable[..., Array], turn: Turn, reached: list[Array]) -> Callable[..., Array]:
    """Returns a function that lays out activations as `activation` does, and waits. reached: receives a scalar of the
    result of attention."""

    def laid_out(name: str, x: Array, *args: Any, **options: Any) -> Array:
        if name == RESULT_OF_ATTENTION:
            x = _with_gradient_after(x, turn.after_layer)
        x = activation(name, x, *args, **options)
        if name == RESULT_OF_ATTENTION:
            reached.append(first_of(x))
        return begun_after(turn.after_attention, x) if name in INPUTS_OF_MLP else x

    return laid_out


def first_of(x: Array) -> Array:
    """Returns the first element as a float32 scalar, without a gradient."""
    return jax.lax.stop_gradient(x)[(0,) * x.ndim].astype(jnp.float32)


def _with_gradient_after(x: Array, earlier: Array) -> Array:
    @jax.custom_vjp
    def use(x: Array, _: Array) -> Array:
        return x

    use.defvjp(lambda x, earlier: (x, earlier), lambda earlier, g: (begun_after(earlier, g), jnp.zeros_like(earlier)))
    return use(x, earlier)
