"""Each optimizer's steps against its paper's formulas in NumPy, and against torch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from conftest import plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.optim.optimizers import parameter_kind, stored_in

RATE, NUM_STEPS = 0.01, 4
FIXED = ("schedule=constant", "schedule.num_warmup_steps=0", f"optimizer.learning_rate={RATE}",
         "optimizer.max_grad_norm=null", "target=cpu-1")  # fmt: skip
NORMS = ("scale_E",)


def _trajectory(*overrides: str, params=None):
    """Parameters by path behind each of a few steps with random gradients: [before, after 1, ...], the gradients, and
    the optimizer's last state."""
    plan = plan_of(*FIXED, *overrides)
    chance = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape) * 0.1, jnp.float32), plan.model.abstract())
    state, curve, gradients = plan.optimizer.init(params), [_by_path(params)], []

    @jax.jit
    def step(params, state, grads):
        updates, state = plan.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(NUM_STEPS):
        grads = jax.tree.map(lambda x: jnp.asarray(chance.normal(size=x.shape), jnp.float32), params)
        params, state = step(params, state, grads)
        curve.append(_by_path(params))
        gradients.append(_by_path(grads))
    return curve, gradients, state


def _by_path(tree: Any) -> dict[str, Any]:
    return {path: np.asarray(x, np.float64) for path, x in leaves_by_path(tree).items()}


def _decay(path: str, weight_decay: float) -> float:
    return 0.0 if path.endswith(NORMS) else weight_decay


def _hold(curve, path, expected, rtol=2e-5):
    for step, x in enumerate(expected):
        np.testing.assert_allclose(curve[step][path], x, rtol=rtol, atol=2e-6, err_msg=f"{path}, step {step}")


def test_lion_is_the_sign_of_a_mean():
    curve, gradients, _ = _trajectory("optimizer=lion", "optimizer.b1=0.8", "optimizer.weight_decay=0.5")
    for path, p in curve[0].items():
        m, expected = np.zeros_like(p), [p]
        for grads in gradients:
            p = p - RATE * (np.sign(0.8 * m + 0.2 * grads[path]) + _decay(path, 0.5) * p)
            m = 0.99 * m + 0.01 * grads[path]
            expected.append(p)
        _hold(curve, path, expected)


@pytest.mark.parametrize("momentum", ["null", "0.9"])
def test_sgd_with_and_without_momentum(momentum):
    keys = ("optimizer=sgd", f"optimizer.momentum={momentum}", "optimizer.weight_decay=0.1", "optimizer.weight_decay_on=all")  # fmt: skip  # noqa: E501
    curve, gradients, state = _trajectory(*keys)
    for path, p in curve[0].items():
        v, expected = np.zeros_like(p), [p]
        for grads in gradients:
            v = (0.0 if momentum == "null" else 0.9) * v + grads[path]
            p = p - RATE * (v + 0.1 * p)  # on all: norm scales too
            expected.append(p)
        _hold(curve, path, expected)
    assert any(x.ndim for x in jax.tree.leaves(state)) == (momentum != "null")


@pytest.mark.parametrize(
    ("name", "keys", "make"),
    [
        ("sgd", ("optimizer.nesterov=true", "optimizer.weight_decay=0.0"),
         lambda torch, p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True)),
        ("adamw", ("optimizer.weight_decay_on=all",),
         lambda torch, p: torch.optim.AdamW(p, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    ],
)  # fmt: skip
def test_steps_are_those_of_torch(name, keys, make):
    torch = pytest.importorskip("torch")
    curve, gradients, _ = _trajectory(f"optimizer={name}", *keys)
    for path in ("layers/mlp/up_EM", "head/norm/scale_E"):
        parameter = torch.nn.Parameter(torch.tensor(curve[0][path], dtype=torch.float32))
        peer, expected = make(torch, [parameter]), [curve[0][path]]
        for grads in gradients:
            parameter.grad = torch.tensor(grads[path], dtype=torch.float32)
            peer.step()
            expected.append(parameter.detach().numpy().copy())
        _hold(curve, path, expected)


def _adafactor(p, gradients, *, min_dim, momentum):
    """Shazeer and Stern 2018, algorithms 4 and 5, on one array of one layer."""
    largest: Any = np.argsort(p.shape)[-2:] if p.ndim > 1 else ()
    is_factored = len(largest) == 2 and min(p.shape[d] for d in largest) >= min_dim
    rows = columns = second = mean = 0.0
    expected = [p]
    for t, g in enumerate(gradients, start=1):
        b2, square = 1 - t**-0.8, g**2 + 1e-30
        if is_factored:
            rows = b2 * rows + (1 - b2) * square.mean(largest[1], keepdims=True)
            columns = b2 * columns + (1 - b2) * square.mean(largest[0], keepdims=True)
            estimate = rows * columns / rows.mean(largest[0], keepdims=True)
        else:
            estimate = second = b2 * second + (1 - b2) * square
        u = g / np.sqrt(estimate)
        u = u / max(1.0, math.sqrt((u**2).mean())) * max(1e-3, math.sqrt((p**2).mean()))
        mean = momentum * mean + (1 - momentum) * u
        p = p - RATE * mean
        expected.append(p)
    return expected


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_adafactor_factors_each_layer_by_itself(momentum):
    keys = ("optimizer=adafactor", "optimizer.min_dim_size_to_factor=8")
    curve, gradients, _ = _trajectory(*keys, *([f"optimizer.momentum={momentum}"] if momentum else []))
    for path in curve[0]:
        layers = range(3) if path.startswith("layers/") else [...]
        for layer in layers:
            expected = _adafactor(
                curve[0][path][layer], [g[path][layer] for g in gradients], min_dim=8, momentum=momentum
            )
            _hold([{path: step[path][layer]} for step in curve], path, expected, rtol=1e-4)


def _orthogonal(x):
    """Five Newton-Schulz steps, Jordan 2024; on the shorter side."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if is_tall else x


# How each matrix of a layer is seen: its shape in a layer, inputs x outputs.
VIEWS = {"attention/query_EHD": (32, 64), "attention/key_EKD": (32, 32), "attention/out_HDE": (64, 32),
         "mlp/gate_EM": (32, 64), "mlp/down_ME": (64, 32)}  # fmt: skip


def test_muon_makes_the_momentum_of_each_layers_matrix_orthogonal():
    curve, gradients, _ = _trajectory("optimizer=muon", "optimizer.weight_decay=0.1")
    b = 0.95
    for name, view in VIEWS.items():
        path = f"layers/{name}"
        for layer in range(3):
            p, m, expected = curve[0][path][layer], 0.0, [curve[0][path][layer]]
            for grads in gradients:
                m = b * m + grads[path][layer]
                update = _orthogonal((grads[path][layer] + b * m).reshape(view)) * 0.2 * math.sqrt(max(view))
                p = p - RATE * (update.reshape(p.shape) + 0.1 * p)
                expected.append(p)
            _hold([{path: step[path][layer]} for step in curve], path, expected, rtol=1e-3)
            moved = (curve[1][path][layer] * 1.0 - curve[0][path][layer] * (1 - RATE * 0.1)).reshape(view)
            values = np.linalg.svd(moved / (-RATE * 0.2 * math.sqrt(max(view))), compute_uv=False)
            # All directions alike: what orthogonal means here. (A square matrix has some that are nearly none.)
            assert view[0] == view[1] or 0.6 < values.min() < values.max() < 1.2


def test_muon_leaves_embedding_head_and_norms_to_adamw():
    curve, gradients, _ = _trajectory("optimizer=muon", "optimizer.weight_decay=0.1")
    for path in ("embed/table_VE", "head/kernel_EV", "head/norm/scale_E", "layers/attention_norm/scale_E"):
        p, m, v, expected = curve[0][path], 0.0, 0.0, [curve[0][path]]
        for t, grads in enumerate(gradients, start=1):
            m, v = 0.9 * m + 0.1 * grads[path], 0.95 * v + 0.05 * grads[path] ** 2
            p = p - RATE * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + _decay(path, 0.1) * p)
            expected.append(p)
        _hold(curve, path, expected)


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "sgd"])
def test_bfloat16_moments_are_kept_in_bfloat16_and_stay_near(optimizer):
    curve, _, state = _trajectory(f"optimizer={optimizer}", "optimizer.moment_dtype=bfloat16")
    exact, _, _ = _trajectory(f"optimizer={optimizer}")
    types = {str(x.dtype) for x in jax.tree.leaves(state) if x.ndim}
    assert types == {"bfloat16"}
    moved = {path: exact[-1][path] - exact[0][path] for path in exact[0]}
    for path, expected in moved.items():
        ours = curve[-1][path] - curve[0][path]
        cosine = (ours * expected).sum() / np.linalg.norm(ours) / np.linalg.norm(expected)
        assert cosine > 0.99, path


def test_first_moments_alone_are_kept_in_bfloat16_and_stay_near():
    curve, _, state = _trajectory("optimizer.first_moment_dtype=bfloat16")
    (adam,) = (x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))
    types = [{str(x.dtype) for x in jax.tree.leaves(moments)} for moments in (adam.mu, adam.nu)]
    assert types == [{"bfloat16"}, {"float32"}]
    exact, _, _ = _trajectory()
    for path in exact[0]:
        ours, expected = curve[-1][path] - curve[0][path], exact[-1][path] - exact[0][path]
        cosine = (ours * expected).sum() / np.linalg.norm(ours) / np.linalg.norm(expected)
        assert cosine > 0.99, path


def test_stored_in_float32_changes_no_bit():
    adam, x = optax.scale_by_adam(), {"w": jnp.linspace(-1, 1, 12).reshape(3, 4)}
    expected, ours = (tx.update(x, tx.init(x), x) for tx in (adam, stored_in(adam, "float32")))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        (("layers", "embed", "heads", "head_dim"), ((1,), (2, 3))),
        (("layers", "heads", "head_dim", "embed"), ((1, 2), (3,))),
        (("layers", "embed"), ((1,),)),
        (("layers", "kv_heads", "head_dim"), ((1, 2),)),  # a bias
        (("layers", "experts", "embed", "mlp"), ((2,), (3,))),
        (("layers", "embed", "experts"), ((1,), (2,))),  # a router
        (("vocab", "embed"), ((0,), (1,))),
    ],
)
def test_dimensions_that_make_a_matrix(axes, groups):
    kind = parameter_kind(axes, is_in_stack=axes[0] == "layers")
    assert kind.groups == groups
    assert kind.is_matrix == (len(groups) == 2)


@pytest.mark.parametrize("square", [False, True])
def test_factored_state_lies_as_the_dimensions_that_are_left(square):
    keys = ("optimizer=adafactor", "optimizer.min_dim_size_to_factor=8", "sharding=fsdp_tensor", "mesh.fsdp=4")
    plan = plan_of(*keys, *(["model.mlp_dim=32"] if square else []))
    by_path = leaves_by_path(plan.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    shapes = {path: x.shape for path, x in leaves_by_path(plan.model.abstract()).items()}
    checked = 0
    for path, shape in shapes.items():
        piece, name = path.split("/", 1)
        first = 1 if piece == "layers" else 0
        if len(shape) - first < 2:
            continue
        smaller, larger = np.argsort(shape[first:])[-2:] + first
        full = tuple(by_path[f"params/{path}"])
        for state, dropped in (("v_row", larger), ("v_col", smaller)):
            (spec,) = [s for p, s in by_path.items() if p.endswith(f"/{state}/{name}") and f"/{piece}/" in p]
            expected = full[:dropped] + full[dropped + 1 :]
            assert tuple(spec) + (None,) * (len(expected) - len(spec)) == expected, path
            checked += 1
    assert checked == 2 * 9
    if square:
        rows = next(tuple(s) for p, s in by_path.items() if p.endswith("v_row/mlp/up_EM"))
        columns = next(tuple(s) for p, s in by_path.items() if p.endswith("v_col/mlp/up_EM"))
        assert {rows, columns} == {(None, "fsdp"), (None, "tensor")}
