"""Exchanges of tokens with devices that have their experts: each against every expert on every token, in float64."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from meshloom.compiler.formats.operands import operand_formats
from meshloom.compiler.jaxpr.flops import matmul_flops
from meshloom.compiler.parallel.experts import dispatch
from meshloom.compiler.parallel.experts.dispatch import (
    Experts,
    dispatch_capacity,
    sort_by_expert,
)
from meshloom.compiler.parallel.experts.expert_mlp import weighted_mlp
from meshloom.compiler.parallel.experts.grouped_matmul import Kernels, grouped_matmul
from meshloom.compiler.parallel.experts.hierarchical import dispatch_hierarchical
from meshloom.compiler.parallel.experts.transfer import RowTypes, from_places, to_places
from support.experts import dense_experts, emulated_ragged_all_to_all
from support.proofs import Computation
from support.tiers import tiered

N, E, M, X, K, DEVICES = 16, 8, 4, 8, 2, 4  # tokens of each device; the rest as in dispatch.py
EXPERTS = Experts(X, ("expert",), DEVICES)
FEW_BITS = RowTypes(operand_formats()["fp8"], operand_formats()["fp8_e5m2"])


@settings(max_examples=40)
@given(st.sampled_from([(1, 1, 3), (9, 2, 4), (6, 3, 5)]), st.integers(0, 9999))
def test_sorting_is_undone_and_sends_each_choice_to_its_expert_once(sizes, seed):
    num_tokens, num_chosen, num_experts = sizes
    chance = np.random.default_rng(seed)
    ids = np.stack([chance.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)])
    order, inverse, counts = (np.asarray(a) for a in sort_by_expert(jnp.asarray(ids), num_experts))
    assert sorted(order) == list(range(ids.size))
    assert np.array_equal(order[inverse], np.arange(ids.size))
    sorted_ids = ids.reshape(-1)[order]
    assert np.array_equal(sorted_ids, np.repeat(np.arange(num_experts), counts))
    x = chance.normal(size=(num_tokens, 3)).astype(np.float32)
    places = jnp.asarray(inverse.reshape(num_tokens, num_chosen))
    rows = to_places(jnp.asarray(x), jnp.asarray(order // num_chosen), places)
    back = np.asarray(rows)[inverse].reshape(num_tokens, num_chosen, 3)
    assert np.array_equal(back, np.repeat(x[:, None], num_chosen, axis=1))
    np.testing.assert_allclose(from_places(rows, jnp.asarray(order // num_chosen), places), num_chosen * x, rtol=1e-6)


def _inputs(*, skewed: bool, num_chosen: int = K):
    """Tokens of all devices, their choices, the experts. skewed: many tokens choose the experts of device 0."""
    chance = np.random.default_rng(0)
    x = chance.normal(size=(DEVICES * N, E))
    weights = chance.uniform(0.1, 1, (DEVICES * N, num_chosen))
    scores = chance.uniform(size=(DEVICES * N, X)) + (np.array([0.6, 0.3] + [0] * 6) if skewed else 0)
    ids = np.argsort(-scores, axis=1)[:, :num_chosen].astype(np.int32)
    matrices = [chance.normal(0, 0.5, shape) for shape in ((X, E, M), (X, E, M), (X, M, E))]
    return [a.astype(np.float32) if a.dtype == np.float64 else a for a in (x, weights, ids, *matrices)]


def _lowered(how, inputs, matmul=jax.lax.ragged_dot, **options):
    """The computation of y, choices dropped of each device, and gradients of sum(y * cos) by everything but ids."""
    auto = (AxisType.Auto,)
    devices = jax.make_mesh((DEVICES,), ("expert",), auto, devices=jax.devices()[:DEVICES])

    def local(x, weights, ids, gate, up, down):
        def run(rows, sizes, weights):
            def multiply(x, matrices):
                equal = partial(jnp.einsum, "lce,lem->lcm")
                return tuple(equal(x, w) if sizes is None else matmul(x, w, sizes) for w in matrices)

            return weighted_mlp(rows, weights, (gate, up, down), [None] * 3, (multiply, multiply), "silu")

        y, dropped = how(x, weights, ids, run, experts=EXPERTS, **options)
        return y, dropped[None]

    spec = P("expert")
    mapped = jax.shard_map(local, mesh=devices, in_specs=(spec,) * 6, out_specs=(spec, spec), check_vma=False)

    def total(floats, ids):
        y, dropped = mapped(floats[0], floats[1], ids, *floats[2:])
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), (y, dropped)

    x, weights, ids, *matrices = inputs
    return Computation(jax.value_and_grad(total, has_aux=True), (x, weights, *matrices), ids)


def _run(computation):
    (_, (y, dropped)), gradients = computation.run()
    return np.asarray(y), np.asarray(dropped), gradients


def _reference_gradients(inputs, cosines=None):
    x, weights, ids, *matrices = inputs
    cosines = jnp.cos(jnp.arange(x.size).reshape(x.shape)) if cosines is None else cosines

    def total(floats):
        x, weights, gate, up, down = floats
        of_expert = jnp.zeros((len(x), X)).at[jnp.arange(len(x))[:, None], ids].add(weights)
        hidden = jax.nn.silu(jnp.einsum("ne,xem->nxm", x, gate)) * jnp.einsum("ne,xem->nxm", x, up)
        return jnp.sum(jnp.einsum("nxm,xme,nx->ne", hidden, down, of_expert) * cosines)

    return jax.grad(total)((x, weights, *matrices))


DROPLESS = {
    "padded": (dispatch.dispatch_padded, {"rows": N * K}),
    "gathered": (dispatch.dispatch_gathered, {"rows": DEVICES * N * K + 128}),  # rounded up, beyond all choices
    "ragged": (dispatch.dispatch_ragged, {"rows": DEVICES * N * K}),
    "capacity": (dispatch_capacity, {"rows": N}),
    "deduplicated, padded": (
        dispatch.dispatch_deduplicated, {"rows": DEVICES * N * K, "tokens": N, "is_ragged": False},
    ),
    "deduplicated, ragged": (
        dispatch.dispatch_deduplicated, {"rows": DEVICES * N * K, "tokens": DEVICES * N, "is_ragged": True},
    ),
    "hierarchical": (
        dispatch_hierarchical, {"rows": DEVICES * N * K, "num_nodes": 2, "tokens_to_node": N, "tokens": 2 * N},
    ),
    "hierarchical, all to all nodes": (
        dispatch_hierarchical, {"rows": DEVICES * N * K, "num_nodes": 2, "tokens_to_node": None, "tokens": 2 * N},
    ),
}  # fmt: skip
DEDUPLICATED = ("deduplicated, padded", "deduplicated, ragged")
HIERARCHICAL = ("hierarchical", "hierarchical, all to all nodes")


@pytest.fixture(autouse=True)
def _ragged_on_cpus(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    # What is undefined must not matter: it is no number.
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


def _check_dropless(computation, inputs):
    y, dropped, gradients = _run(computation)
    np.testing.assert_allclose(y, dense_experts(*inputs), atol=2e-6)
    assert dropped.sum() == 0
    for ours, expected in zip(gradients, _reference_gradients(inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", tiered(DROPLESS, plain=["gathered"]))
def test_with_room_for_any_imbalance_nothing_is_dropped_and_every_gradient_is_right(name, proof):
    inputs = _inputs(skewed=True)
    how, options = DROPLESS[name]
    computation = _lowered(how, inputs, **options)
    if proof.is_known(computation.parts):
        return
    _check_dropless(computation, inputs)


def _rounded(x, element):
    """Each row over its largest magnitude, in NumPy's type of few bits."""
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(ml_dtypes.finfo(element).max)
    return (x / scales).astype(element).astype(np.float32) * scales


@pytest.mark.parametrize("name", tiered(DROPLESS, plain=["deduplicated, padded"]))
def test_in_few_bits_tokens_and_gradients_of_results_are_rounded_once_by_a_scale_of_their_own(name, proof):
    """The result and every gradient are those of rounded tokens and rounded gradients: straight-through."""
    x, *others = _inputs(skewed=True)
    x *= np.geomspace(1e-3, 1e3, len(x), dtype=np.float32)[:, None]  # which one scale for all could not hold
    others = [np.float32(0.01) * each if each.ndim == 3 else each for each in others]
    how, options = DROPLESS[name]
    computation = _lowered(how, [x, *others], **options, types=FEW_BITS)
    if proof.is_known(computation.parts):
        return
    y, _, gradients = _run(computation)
    sent = [_rounded(x, ml_dtypes.float8_e4m3fn), *others]
    expected = dense_experts(*sent)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max(), rtol=1e-5)
    cosines = _rounded(np.cos(np.arange(x.size, dtype=np.float32).reshape(x.shape)), ml_dtypes.float8_e5m2)
    for ours, reference in zip(gradients, _reference_gradients(sent, cosines), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5 * np.abs(reference).max())


@pytest.mark.parametrize("name", [name for name in DROPLESS if "ragged" not in name])
def test_elements_go_to_experts_and_sums_come_back_as_the_operands_are(name):
    """Of the program as it is handed to a compiler: each collective of rows, with the type of what it moves. In two
    steps it is so in each."""
    how, options = DROPLESS[name]
    (lowered, _) = _lowered(how, _inputs(skewed=True), **options, types=FEW_BITS).parts
    moved = re.findall(r'"stablehlo\.all_(?:to_all|gather)"\(.*: \(tensor<(?:\d+x)*8x(f\w+)>\)', lowered.as_text())
    num_steps, num_scattered = 2 if name in HIERARCHICAL else 1, "gathered" in name or name == HIERARCHICAL[1]
    back = ["f32", "f32"] * (num_steps - num_scattered)  # others are reduce-scatters
    assert sorted(moved) == sorted([*["f8E4M3FN", "f8E5M2"] * num_steps, *back])


def test_with_more_choices_than_a_device_has_experts_gathered_takes_each(proof):
    inputs = _inputs(skewed=True, num_chosen=3)
    computation = _lowered(dispatch.dispatch_gathered, inputs, rows=DEVICES * N * X // DEVICES)
    if proof.is_known(computation.parts):
        return
    _check_dropless(computation, inputs)


def test_spare_places_after_a_device_whose_tokens_all_come_hold_none(proof):
    """All tokens of the last device go to the first, and some of the others: behind them there is room left."""
    inputs = _inputs(skewed=True)
    inputs[2][-N:] = 0, 1
    how, options = DROPLESS["deduplicated, ragged"]
    computation = _lowered(how, inputs, **options)
    if proof.is_known(computation.parts):
        return
    _check_dropless(computation, inputs)


@pytest.mark.parametrize("name", tiered(["padded", "gathered", "ragged", *DEDUPLICATED, *HIERARCHICAL], plain=()))
def test_rows_of_no_expert_do_not_matter_where_a_kernel_leaves_them_undefined(name, proof):
    """Those of the kernel for GPUs, interpreted, are no numbers."""
    matmul = partial(grouped_matmul, how=Kernels("triton"), interpret=True)
    inputs = _inputs(skewed=False)
    how, options = DROPLESS[name]
    some = Computation(matmul, jnp.ones((9, E)), jnp.ones((2, E, M)), jnp.asarray([3, 4], jnp.int32))
    computation = _lowered(how, inputs, matmul, **options)
    if proof.is_known(some.parts, computation.parts):
        return
    assert np.isnan(some.run()[-2:]).all()
    y, _, gradients = _run(computation)
    np.testing.assert_allclose(y, dense_experts(*inputs), atol=2e-6)
    for ours, expected in zip(gradients, _reference_gradients(inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=4e-6 * np.abs(expected).max())


def _dropped_by_hand(name, ids, rows, device=None):
    """True for choices (N, K) that do not fit, from the description of each exchange alone. device: of each token."""
    device, owner = np.arange(len(ids)) // N if device is None else device, ids // (X // DEVICES)
    if name in HIERARCHICAL:  # tokens come from the devices of a node, which have those of their rails
        device = device % 2 * 2 + device // 2
    dropped, used = np.zeros(ids.shape, bool), {}
    order = [(t, k) for t in range(len(ids)) for k in range(K)]
    if name == "capacity":
        order.sort(key=lambda at: (device[at[0]], at[1], at[0]))
    else:
        order.sort(key=lambda at: (ids[at], device[at[0]], *at))  # sorted by expert, then by source
    for t, k in order:
        to = {"padded": (device[t], owner[t, k]), "capacity": (device[t], ids[t, k])}.get(name, (owner[t, k],))
        used[to] = used.get(to, 0) + 1
        dropped[t, k] = used[to] > rows
    return dropped


ROWS = {"padded": 10, "gathered": 40, "ragged": 40, "capacity": 5} | dict.fromkeys((*DEDUPLICATED, *HIERARCHICAL), 40)


def _with_rows(name, inputs, rows, **more):
    how, options = DROPLESS[name]
    return _lowered(how, inputs, **options | {"rows": rows} | more)


@pytest.mark.parametrize("name", tiered(ROWS, plain=["ragged"]))
def test_what_does_not_fit_is_dropped_counted_and_has_no_gradient(name, proof):
    rows = ROWS[name]
    inputs = _inputs(skewed=True)
    cleared = _dropped_by_hand(name, inputs[2], rows)
    assert 0 < cleared.sum() < cleared.size / 2
    computation = _with_rows(name, inputs, rows)
    if proof.is_known(computation.parts):
        return
    y, dropped, gradients = _run(computation)
    np.testing.assert_allclose(y, dense_experts(*inputs, cleared_NK=cleared), atol=2e-6)
    assert dropped.sum() == cleared.sum()
    kept = [inputs[0], np.where(cleared, 0, inputs[1]), *inputs[2:]]
    expected = list(_reference_gradients(kept))
    expected[1] = np.where(cleared, 0, expected[1])
    for ours, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=4e-6 * np.abs(reference).max())


def _dropped_tokens(ids, tokens, *, is_ragged):
    """True for choices (N, K) whose token has no place on the device of their expert: it comes there once, in the order
    of the devices and of their tokens. tokens: the places for those of all devices (is_ragged), or of each."""
    used, dropped = {}, np.zeros(ids.shape, bool)
    for t in range(len(ids)):
        for owner in set(ids[t] // (X // DEVICES)):
            to = owner if is_ragged else (owner, t // N)
            used[to] = used.get(to, 0) + 1
            dropped[t] |= (ids[t] // (X // DEVICES) == owner) & (used[to] > tokens)
    return dropped


def _assert_dropped(computation, inputs, cleared):
    """Asserts that the exchange computes as if the choices that are cleared had no expert, and counts these."""
    y, dropped, gradients = _run(computation)
    np.testing.assert_allclose(y, dense_experts(*inputs, cleared_NK=cleared), atol=2e-6)
    assert dropped.sum() == cleared.sum()
    expected = list(_reference_gradients([inputs[0], np.where(cleared, 0, inputs[1]), *inputs[2:]]))
    expected[1] = np.where(cleared, 0, expected[1])
    for ours, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=4e-6 * np.abs(reference).max())


@pytest.mark.parametrize("name", tiered(DEDUPLICATED, plain=["deduplicated, ragged"]))
def test_a_token_that_does_not_fit_is_dropped_with_all_of_its_choices_there(name, proof):
    is_ragged = name.endswith("ragged")
    tokens, inputs = 33 if is_ragged else 9, _inputs(skewed=True, num_chosen=3)
    cleared = _dropped_tokens(inputs[2], tokens, is_ragged=is_ragged)
    assert 0 < cleared.sum() < cleared.size / 2
    computation = _with_rows(name, inputs, DEVICES * N * 2, tokens=tokens)
    if not proof.is_known(computation.parts):
        _assert_dropped(computation, inputs, cleared)


def _dropped_in_steps(ids, tokens_to_node, tokens):
    """True for choices (N, K) whose token has no place in one of two steps: on the way from its device to the node of
    the expert, or from there to the expert's device. Both in the order of the devices and of their tokens."""
    used, dropped = {}, np.zeros(ids.shape, bool)
    for t in range(len(ids)):
        source, owner = t // N, ids[t] // (X // DEVICES)
        for node in {device // 2 for device in owner}:
            used[source, node] = used.get((source, node), 0) + 1
            if used[source, node] > tokens_to_node:
                dropped[t] |= owner // 2 == node
                continue
            for to in {device for device in owner if device // 2 == node}:
                rail = "rail", source % 2, to
                used[rail] = used.get(rail, 0) + 1
                dropped[t] |= (owner == to) & (used[rail] > tokens)
    return dropped


@pytest.mark.parametrize("room", tiered(["32", "15"], plain=["15"]))
def test_a_token_may_have_no_place_on_its_way_to_a_node_or_within_it(room, proof):
    """Within a node there is room for all 32 tokens of two devices, or for 15."""
    inputs, inside = _inputs(skewed=True, num_chosen=3), int(room)
    cleared, of_first = (_dropped_in_steps(inputs[2], 14, size) for size in (inside, 2 * N))
    assert (cleared.sum() > of_first.sum() > 0) == (inside < 2 * N)
    computation = _with_rows(HIERARCHICAL[0], inputs, DEVICES * N * 2, tokens_to_node=14, tokens=inside)
    if not proof.is_known(computation.parts):
        _assert_dropped(computation, inputs, cleared)


@pytest.mark.parametrize("name", tiered(ROWS, plain=["padded"]))
def test_tokens_of_no_expert_take_no_row(name, proof):
    """All of them would go to one expert, before the others: with it there is room for fewer."""
    rows, inputs = ROWS[name], _inputs(skewed=True)
    is_sent, ids = np.arange(DEVICES * N) % 3 > 0, inputs[2]
    inputs[2] = np.where(is_sent[:, None], ids, X).astype(np.int32)
    cleared = np.zeros(ids.shape, bool)
    cleared[is_sent] = _dropped_by_hand(name, ids[is_sent], rows, np.flatnonzero(is_sent) // N)
    assert 0 < cleared.sum() < _dropped_by_hand(name, ids, rows).sum()
    computation = _with_rows(name, inputs, rows)
    if proof.is_known(computation.parts):
        return
    y, dropped, gradients = _run(computation)
    gone = cleared | ~is_sent[:, None]
    np.testing.assert_allclose(y, dense_experts(inputs[0], inputs[1], ids, *inputs[3:], cleared_NK=gone), atol=2e-6)
    assert dropped.sum() == cleared.sum()
    expected = list(_reference_gradients([inputs[0], np.where(gone, 0, inputs[1]), ids, *inputs[3:]]))
    expected[1] = np.where(gone, 0, expected[1])
    for ours, reference in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=4e-6 * np.abs(reference).max())


@pytest.mark.ci
def test_padded_drops_by_pair_and_the_others_by_device(proof):
    """An even load of each device that is uneven between pairs: a buffer for the device's total is enough."""
    inputs = _inputs(skewed=False)
    inputs[2] = np.stack([np.arange(DEVICES * N) // N * 2, np.arange(DEVICES * N) // N * 2 + 1], 1).astype(np.int32)
    rows = N * K  # each device's tokens choose its own experts
    some = {"padded": {"rows": rows // DEVICES}, "gathered": {"rows": rows}, "ragged": {"rows": rows}}
    computations = {name: _lowered(DROPLESS[name][0], inputs, **options) for name, options in some.items()}
    if proof.is_known([each.parts for each in computations.values()]):
        return
    counts = {name: _run(each)[1].sum() for name, each in computations.items()}
    assert counts == {"padded": DEVICES * (rows - rows // DEVICES), "gathered": 0, "ragged": 0}


def test_one_device_sorts_and_sends_nothing():
    inputs = _inputs(skewed=True)
    x, weights, ids, gate, up, down = map(jnp.asarray, inputs)

    def run(rows, sizes, weights):
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        return jax.lax.ragged_dot(hidden, down, sizes) * weights[:, None]

    local: Any = partial(dispatch.dispatch_local, experts=Experts(X, (), 1))
    np.testing.assert_allclose(local(x, weights, ids, run)[0], dense_experts(*inputs), atol=2e-6)
    primitives = str(jax.make_jaxpr(lambda *a: local(*a, run))(x, weights, ids))
    assert not any(name in primitives for name in ("all_to_all", "all_gather", "psum", "ppermute"))


SENT = {  # rows to experts, forward and recomputed; back, forward alone; and both gradients
    "padded": {"40,8] = all_to_all": 3 + 2},
    "gathered": {"64,8] = all_gather": 2 + 1, "16,8] = reduce_scatter": 2},
    "ragged": {"40,8] = ragged_all_to_all": 2 + 1, "32,8] = ragged_all_to_all": 2},
    "capacity": {"5,8] = all_to_all": 3 + 2},
    # A row for each token and device, whatever the number of its experts there.
    "deduplicated, padded": {"64,8] = all_to_all": 3 + 2},
    "deduplicated, ragged": {"64,8] = ragged_all_to_all": 2 + 1, "32,8] = ragged_all_to_all": 2},
    # To two nodes, and from two devices of a node to each.
    "hierarchical": {"32,8] = all_to_all": 3 + 2, "64,8] = all_to_all": 3 + 2},
    "hierarchical, all to all nodes": {
        "32,8] = all_gather": 2 + 1, "16,8] = reduce_scatter": 2, "64,8] = all_to_all": 3 + 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_a_recomputed_layer_sends_nothing_back_again_and_omits_the_last_matmul(name, monkeypatch):
    """The weight of a choice multiplies what goes into the last matmul: its gradient needs no result of the expert."""
    monkeypatch.undo()  # the primitive, which is only traced
    devices = jax.make_mesh((DEVICES,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    spec, rows = P("expert"), {"capacity": 5, "padded": 10}.get(name, 40)

    def equal_groups(x, matrices):
        x_LCE = x.reshape(len(matrices[0]), -1, x.shape[-1])
        return tuple(jnp.einsum("lce,lem->lcm", x_LCE, w).reshape(*x.shape[:-1], -1) for w in matrices)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    @partial(jax.shard_map, mesh=devices, in_specs=(spec,) * 6, out_specs=spec, check_vma=False)
    def layer(x, weights, ids, gate, up, down):
        def run(rows, _, weights):
            return weighted_mlp(rows, weights, (gate, up, down), [None] * 3, (equal_groups, equal_groups), "silu")

        how, options = DROPLESS[name]
        return how(x, weights, ids, run, experts=EXPERTS, **options | {"rows": rows})[0]

    x, weights, ids, *matrices = _inputs(skewed=True)

    def total(x, weights, *matrices):
        return jnp.sum(layer(x, weights, ids, *matrices) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(x, weights, *matrices).jaxpr
    one = 2 * 40 * E * M  # of all places of a device, by one matrix
    assert matmul_flops(jaxpr) == (3 + 2 + 6) * one
    assert {what: str(jaxpr).count(what) for what in SENT[name]} == SENT[name]
