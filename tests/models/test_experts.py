"""Routing and experts on one device: invariants for any scores, and the sum of experts against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import plan_of
from meshloom.models import Context
from meshloom.models.parts import apply_experts, route
from support.experts import MOE, dense_experts

# (experts, chosen, groups, chosen groups): each compiles once.
SHAPES = [(4, 1, 1, 1), (6, 6, 2, 2), (8, 3, 4, 2), (9, 4, 3, 2)]


@st.composite
def routings(draw):
    """(scores (1, T, X), arguments of `route`)."""
    num_experts, num_chosen, num_groups, num_groups_chosen = draw(st.sampled_from(SHAPES))
    scores = np.random.default_rng(draw(st.integers(0, 9999))).uniform(0.01, 1, (1, 7, num_experts))
    options = {
        "num_chosen": num_chosen, "num_groups": num_groups, "num_groups_chosen": num_groups_chosen,
        "is_normalized": draw(st.booleans()), "scale": draw(st.sampled_from([1.0, 2.5])),
    }  # fmt: skip
    return scores.astype(np.float32), options


@settings(max_examples=40)
@given(routings())
def test_each_token_has_its_best_experts_of_its_best_groups_once(case):
    scores, options = case
    weights, ids = (np.asarray(x) for x in route(jnp.asarray(scores), **options))
    groups, size = options["num_groups"], scores.shape[-1] // options["num_groups"]
    for t in range(scores.shape[1]):
        score, chosen = scores[0, t].astype(np.float64), ids[0, t]
        assert len(set(chosen)) == options["num_chosen"]
        of_groups = [np.sort(score[g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
        best_groups = np.argsort(of_groups)[::-1][: options["num_groups_chosen"]]
        eligible = [x for x in range(len(score)) if x // size in best_groups]
        best = sorted(eligible, key=lambda x: -score[x])[: options["num_chosen"]]
        assert list(chosen) == best
        expected = score[best] / (score[best].sum() if options["is_normalized"] else 1) * options["scale"]
        np.testing.assert_allclose(weights[0, t], expected, rtol=1e-5)
        if options["is_normalized"]:
            assert weights[0, t].sum() == pytest.approx(options["scale"], rel=1e-5)


def test_groups_are_compared_below_zero_too():
    """An expert of another group must not be chosen because the score of the right one is below 0."""
    scores = jnp.asarray([[[-5.0, -6.0, -3.0, -4.0]]])
    _, ids = route(scores, num_chosen=2, num_groups=2, num_groups_chosen=1, is_normalized=False, scale=1.0)
    assert ids[0, 0].tolist() == [2, 3]


def test_experts_are_a_weighted_sum_of_gated_mlps():
    chance = np.random.default_rng(0)
    x, gate, up, down = (chance.normal(0, 0.5, s).astype(np.float32) for s in ((2, 6, 8), (5, 8, 4), (5, 8, 4), (5, 4, 8)))  # fmt: skip  # noqa: E501
    ids = np.stack([chance.permutation(5)[:3] for _ in range(12)]).reshape(2, 6, 3)
    weights = chance.uniform(0, 1, (2, 6, 3)).astype(np.float32)
    y, num_dropped = apply_experts(*map(jnp.asarray, (x, weights, ids, gate, up, down)), activation="silu")
    expected = dense_experts(x.reshape(12, 8), weights.reshape(12, 3), ids.reshape(12, 3), gate, up, down)
    np.testing.assert_allclose(np.asarray(y).reshape(12, 8), expected, atol=2e-6)
    assert num_dropped == 0


def test_the_gradient_of_a_weight_is_that_of_its_score_alone():
    """The choice has no gradient; weights that are normalised have one that adds up to zero."""
    scores = jnp.asarray([[[0.5, 0.2, 0.3]]])
    options = {"num_chosen": 2, "num_groups": 1, "num_groups_chosen": 1, "scale": 1.0}
    gradient = jax.grad(lambda s: route(s, is_normalized=True, **options)[0][0, 0, 0])(scores)
    np.testing.assert_allclose(gradient[0, 0], [0.3 / 0.64, 0, -0.5 / 0.64], rtol=1e-5)


def test_a_bias_decides_which_experts_and_not_their_weights():
    scores, bias = jnp.asarray([[[0.5, 0.4, 0.3, 0.2]]]), jnp.asarray([-0.25, 0.0, 0.0, 0.15])
    options = {"num_chosen": 2, "num_groups": 1, "num_groups_chosen": 1, "scale": 2.0}
    weights, ids = route(scores, bias, is_normalized=True, **options)
    assert ids[0, 0].tolist() == [1, 3]
    np.testing.assert_allclose(weights[0, 0], [2 * 0.4 / 0.6, 2 * 0.2 / 0.6], rtol=1e-5)
    _, of_groups = route(scores, bias, is_normalized=True, **options | {"num_groups": 2})
    assert of_groups[0, 0].tolist() == [3, 2]  # 0.35 + 0.3 against 0.4 + 0.25


def test_the_shared_expert_and_the_exchange_do_not_wait_for_each_other():
    """In the traced program, forward and backward: a compiler may run one beside the other."""
    config = plan_of(*MOE, "model.num_shared_experts=3").spec.model
    layer = config.build().stacks[0].layer

    def scoped(kind, _, plain, *operands, **options):
        with jax.named_scope("exchange" if kind == "experts" else "other"):
            return plain(*operands, **options)

    def derivative(params, x, g):
        context = Context(jnp.arange(4)[None], lambda name, x, *_, **__: x, scoped)
        y, pull_back = jax.vjp(lambda p, x: layer.apply(p, x, context)[0], params, x)
        return y, pull_back(g)

    x = jax.ShapeDtypeStruct((2, 4, 32), "float32")
    traced = jax.make_jaxpr(derivative)(layer.abstract, x, x)
    equations = traced.jaxpr.eqns
    exchange = {
        at
        for at, each in enumerate(equations)  # add_any: the gradients of x by the two, added up
        if "exchange" in str(each.source_info.name_stack) and each.primitive.name != "add_any"
    }
    width = 3 * 32  # of the shared expert, and of nothing else
    shared = {
        at
        for at, each in enumerate(equations)
        if each.primitive.name == "dot_general" and any(width in x.aval.shape for x in each.invars)
    }
    assert len(shared) == 9  # three matmuls, two derivatives of each
    for later, earlier in ((shared, exchange), (exchange, shared)):
        assert not _needed_by(equations, later) & earlier


def _needed_by(equations, which):
    """The equations that some are made from."""
    made_by = {id(x): at for at, each in enumerate(equations) for x in each.outvars}
    found, todo = set(), list(which)
    while todo:
        for x in equations[todo.pop()].invars:
            at = made_by.get(id(x))
            if at is not None and at not in found:
                found.add(at)
                todo.append(at)
    return found


def test_padding_is_sent_to_no_expert():
    """Whatever is in it: the others' sum, and every gradient, are those of the tokens alone."""
    chance = np.random.default_rng(0)
    shapes = ((2, 6, 8), (2, 6, 2), (5, 8, 4), (5, 8, 4), (5, 4, 8))
    x, weights, *matrices = (chance.normal(0, 0.5, shape).astype(np.float32) for shape in shapes)
    ids, is_token = (
        jnp.asarray(chance.integers(0, 5, (2, 6, 2)), jnp.int32),
        np.array([[True] * 4 + [False] * 2, [True] * 6]),
    )
    x[~is_token] = 1e30
    context = Context(jnp.arange(6)[None], lambda name, x, *axes, **_: x, is_token_BT=jnp.asarray(is_token))

    def total(x, weights, *matrices):
        y, num_dropped = context.apply_experts("routed", x, weights, ids, *matrices, activation="silu")
        return jnp.sum(jnp.sin(y)) + num_dropped, y

    (_, y), (of_x, of_weights, *_) = jax.value_and_grad(total, (0, 1, 2, 3, 4), has_aux=True)(x, weights, *matrices)
    expected = dense_experts(x[is_token], weights[is_token], ids[is_token], *matrices)
    np.testing.assert_allclose(y[is_token], expected, atol=1e-5)
    assert not np.any(y[~is_token])
    assert not np.any(of_x[~is_token])
    assert not np.any(of_weights[~is_token])
