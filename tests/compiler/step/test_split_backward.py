"""The passes of a layer apart, against the derivative that JAX makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshloom.compiler.core.scopes import OperationName
from meshloom.compiler.step.split_backward import by_dimensions, rejoined, split_passes

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}
WIDTH = 4
SCALE = 0.5


def layer(accumulators, known, x):
    """A gated layer, whose scale and matrices are arguments twice: a gradient flows to the accumulators."""
    weights, shift = known
    scale, up, gate, down = (w + a for w, a in zip(weights, accumulators, strict=True))
    (x_of,) = x
    h = x_of * jax.lax.rsqrt(jnp.mean(jnp.square(x_of), -1, keepdims=True) + 1e-6) * scale + shift
    with jax.named_scope("mlp"):
        y = x_of + (jax.nn.silu(h @ gate) * (h @ up)) @ down
    return (y,), jnp.mean(jnp.square(y))


def case():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(WIDTH,), (WIDTH, 6), (WIDTH, 6), (6, WIDTH)]
    weights = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    x, dy = (jax.random.normal(key, (3, WIDTH)) for key in keys[4:])
    return jax.tree.map(jnp.zeros_like, weights), (weights, jnp.float32(0.3)), (x,), (dy,)


def passes_of(policy, recomputes):
    accumulators, known, x, _ = case()
    return split_passes(
        layer, POLICIES[policy], accumulators, known, x, cotangent=lambda _: SCALE, recomputes=recomputes
    )


def run(passes, recomputes):
    """Returns y, dx and dw in two ways: by both gradients at once, and apart."""
    accumulators, known, x, dy = case()
    (y, _), saved = passes.forward(known, x)
    held = passes.recompute(known, saved) if recomputes else saved
    at_once, dw = passes.backward(known, held, dy)
    dx, vectors, cut = passes.input_gradient(known, held, dy)
    apart = rejoined(accumulators, vectors, passes.weight_gradient(known, [] if recomputes else saved, cut))
    return (y, at_once, rejoined(accumulators, *dw)), (y, dx, apart)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_apart_are_those_of_the_layer(policy, recomputes):
    accumulators, known, x, dy = case()
    (y, _), pull_back = jax.vjp(lambda a, x: layer(a, known, x), accumulators, x)
    dw, dx = pull_back((dy, jnp.float32(SCALE)))
    for ours in run(passes_of(policy, recomputes), recomputes):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, (y, dx, dw))


def matmuls(function, *arguments):
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


def test_each_matmul_of_the_backward_pass_is_in_one_part():
    """Three for dx, three for dw, and three again: the auxiliary output is made of the layer's result."""
    _, known, x, dy = case()
    passes = passes_of("nothing", recomputes=True)
    held = passes.recompute(known, passes.forward(known, x)[1])
    cut = passes.input_gradient(known, held, dy)[2]
    found = (
        matmuls(passes.recompute, known, passes.forward(known, x)[1]),
        matmuls(passes.input_gradient, known, held, dy),
        matmuls(passes.weight_gradient, known, [], cut),
    )
    assert found == (3, 3, 3)


def test_a_layer_that_is_computed_again_saves_its_input_alone():
    assert [each.shape for each in passes_of("nothing", recomputes=False).saved] == [(3, WIDTH)]
    assert len(passes_of("everything", recomputes=False).saved) > 3


def test_what_the_forward_pass_saves_is_not_left_to_the_gradients_of_weights_again():
    """The cut is the gradient of the result of each of the three matmuls."""
    passes = passes_of("everything", recomputes=False)
    assert sorted(each.shape for each in passes.cut) == [(3, WIDTH), (3, 6), (3, 6)]


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_made_of_weights_alone_is_made_again(recomputes):
    """As a gathered weight is, here two copies of what is stored. It is made in each pass that reads it."""

    def of_shards(accumulators, known, x):
        ((stored,), shift), (x_of,) = known, x
        whole = jnp.concatenate([stored + accumulators[0]] * 2)
        return (jnp.tanh(x_of @ whole.T + shift) @ whole,), jnp.float32(0)

    stored, shift, x = jnp.arange(20.0).reshape(5, WIDTH) / 20, jnp.float32(0.3), (jnp.ones((3, WIDTH)),)
    accumulators, known, dy = [jnp.zeros_like(stored)], ([stored], shift), (jnp.ones((3, WIDTH)),)
    passes = split_passes(
        of_shards, POLICIES["nothing"], accumulators, known, x, cotangent=lambda _: SCALE, recomputes=recomputes
    )
    assert {each.shape for each in (*passes.saved, *passes.kept, *passes.cut)}.isdisjoint({(10, WIDTH), (WIDTH, 10)})
    saved = passes.forward(known, x)[1]
    held = passes.recompute(known, saved) if recomputes else saved
    dx, _, cut = passes.input_gradient(known, held, dy)
    (dw,), expected = jax.vjp(lambda a, x: of_shards(a, known, x)[0], accumulators, x)[1](dy)
    np.testing.assert_allclose(dx[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(passes.weight_gradient(known, [] if recomputes else saved, cut)[0], dw, rtol=1e-5)


def test_operations_keep_their_scopes():
    _, known, x, dy = case()
    passes = passes_of("nothing", recomputes=False)
    held = passes.forward(known, x)[1]
    found = jax.make_jaxpr(passes.input_gradient)(known, held, dy)
    scopes = [
        OperationName(str(each.source_info.name_stack)) for each in found.eqns if each.params.get("dimension_numbers")
    ]
    assert {each.in_pass for each in scopes} == {"recomputed", "backward"}
    assert all("mlp" in each.words for each in scopes)


def test_weights_are_taken_apart_by_dimensions_and_joined():
    weights = case()[0]
    vectors, matrices = by_dimensions(weights)
    assert [w.shape for w in vectors] == [(WIDTH,)]
    assert [w.shape for w in rejoined(weights, vectors, matrices)] == [w.shape for w in weights]
