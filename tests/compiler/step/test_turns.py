"""The order that turns impose on two layers that do not depend on each other, read from the program."""

import jax
import jax.numpy as jnp

from meshloom.compiler.step.turns import Turn, first_of, in_turn, no_turn

SIZE = 4


def forward(x, w):
    """A layer: its attention, its MLP, and what it has reached."""
    reached = []
    place = in_turn(lambda name, x: x, no_turn(), reached)
    x = place("attention_output", jnp.sin(x @ w))
    x = jnp.cos(place("mlp_input", x) @ w)
    return x, reached[0]


def backward(turn, x, w, dy):
    """The gradient of another such layer, which waits its turn."""

    def layer(x):
        place = in_turn(lambda name, x: x, turn, [])
        x = place("attention_output", jnp.tanh(x @ w))
        return jnp.exp(place("mlp_input", x) @ w)

    return jax.vjp(layer, x)[1](dy)[0]


def made_from(turn_of):
    """Returns what the results of each primitive are made from, and what the gradient is: names of primitives."""

    def both(x, other, w, dy):
        y, reached = forward(x, w)
        return backward(turn_of(reached, y), other, w, dy)

    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    jaxpr = jax.make_jaxpr(both)(square, square, square, square).jaxpr
    of_values, of_primitives = {}, {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        before = set().union(*(of_values.get(each, set()) for each in equation.invars if not hasattr(each, "val")))
        of_primitives[name] = of_primitives.get(name, set()) | before
        of_values |= dict.fromkeys(equation.outvars, before | {name})
    return of_primitives, of_values[jaxpr.outvars[0]]


def test_a_layer_computes_when_the_other_has_sent():
    """Attention again, a tanh, beside the forward attention, a sine; MLP again after it, beside the forward MLP, a
    cosine; the gradient of attention after that."""
    each, gradient = made_from(lambda reached, y: Turn(reached, first_of(y)))
    assert "sin" not in each["tanh"]
    assert "sin" in each["exp"]
    assert "cos" not in each["exp"]
    assert "cos" in gradient


def test_a_layer_without_a_turn_waits_for_nothing():
    assert not made_from(lambda *_: no_turn())[1] & {"sin", "cos"}
