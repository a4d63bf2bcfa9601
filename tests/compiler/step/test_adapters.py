"""Adapters: their gradients are those of the formulas, in every layout, and nothing of the base is trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of, pointwise_plan, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path, nested_dict
from meshloom.compiler.step.train_step import build_loss
from meshloom.models.adapter import is_adapter, merged, without_adapters
from support.collectives import collectives_per_step, written_collectives
from support.experts import MOE
from support.pairwise import cover_pairs, cover_values
from support.programs import Gradients, batch_of, programs_of
from support.reference import forward, reference_loss
from support.tiers import tiered

KINDS = ("lora", "rslora", "dora")
SMALL_RANK = ("adapter.rank=4", "adapter.alpha=6.0")


def _scale(adapter) -> float:
    return adapter.alpha / (adapter.rank**0.5 if adapter.kind == "rslora" else adapter.rank)


def _trained(plan):
    """Returns parameters after some steps, as it were: no B and no magnitude is zero any more."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), plan.model.init(jax.random.key(3)))
    rng = np.random.default_rng(4)
    leaves = {
        path: rng.normal(0, 0.1, x.shape).astype(np.float32) if path.endswith(("lora_B", "magnitude")) else x
        for path, x in leaves_by_path(params).items()
    }
    return nested_dict(leaves)


def _by_hand(plan, params, tokens):
    """Returns the loss and the gradients of the linear stack's adapters in float64, by the chain rule on paper."""
    p = {path: np.asarray(x, np.float64) for path, x in leaves_by_path(params).items()}
    inputs, targets = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    adapter, num_layers = plan.spec.adapter, plan.spec.model.num_layers
    scale, is_dora, at = _scale(adapter), adapter.kind == "dora", "layers/adapter/kernel_EM"
    w, a, b = p["layers/kernel_EM"], p[f"{at}/lora_A"], p[f"{at}/lora_B"]
    v = w + scale * a @ b
    lengths = np.sqrt((v**2).sum(axis=1, keepdims=True))
    m = np.sqrt((w**2).sum(axis=1, keepdims=True)) + p[f"{at}/magnitude"][:, None] if is_dora else lengths
    effective = v * m / lengths
    xs = [p["embed/table_VE"][inputs]]
    for i in range(num_layers):
        xs.append(xs[-1] @ effective[i])
    logits = xs[-1] @ p["head/kernel_EV"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    loss = -np.log(probabilities[rows, targets]).mean()
    probabilities[rows, targets] -= 1
    dx, by_layer = probabilities / len(targets) @ p["head/kernel_EV"].T, [None] * num_layers
    for i in reversed(range(num_layers)):
        by_layer[i] = xs[i].T @ dx
        dx = dx @ effective[i].T
    d_effective = np.stack(by_layer)
    dv = d_effective * m / lengths  # the lengths have no gradient
    grads = {f"{at}/lora_A": scale * dv @ b.swapaxes(1, 2), f"{at}/lora_B": scale * a.swapaxes(1, 2) @ dv}
    return loss, grads | ({f"{at}/magnitude": (d_effective * v / lengths).sum(axis=1)} if is_dora else {})


BY_HAND = {
    "lora, fsdp 8": ("adapter=lora", "sharding=fsdp"),
    "rslora, one device": ("adapter=rslora", "target=cpu-1"),
    "dora, fsdp_tensor 2x2x2, prefetch": (
        "adapter=dora", "sharding=fsdp_tensor", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "overlap=prefetch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(BY_HAND, plain=list(BY_HAND)[-1:]))
def test_gradients_are_those_of_float64_by_hand(name, tokens, proof):
    plan = plan_of(*LINEAR_STACK, *BY_HAND[name], *SMALL_RANK)
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params = _trained(plan)
    expected_loss, expected = _by_hand(plan, params, tokens[0])
    loss, grads = step(params)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    ours = leaves_by_path(grads)
    assert ours.keys() == expected.keys()
    for path, gradient in ours.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], rtol=2e-5, atol=3e-6 * scale, err_msg=path)


CHOICES = {
    "kind": KINDS,
    "sharding": ("ddp", "fsdp", "hsdp", "zero1", "zero2", "tensor", "fsdp_tensor", "fsdp_context"),
    "remat": ("none", "full", "save_dots", "save_names", "offload"),
    "overlap": ("xla", "prefetch"),
    "more": ("num_microbatches=1", "num_microbatches=2", "overlap.layers.reduce_in_backward=true"),
    "model": ("decoder", "gpt2", "experts"),
}
MODELS = {
    "decoder": ("adapter.targets=['layers/*',head/kernel_EV]",),
    "gpt2": (
        "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer",
        "model.mlp=plain", "model.biases=all", "model.embeddings=tied",
    ),
    "experts": (
        *MOE, "adapter.targets=['layers/*']", "model.load_balancing_weight=0.0", "model.router_z_loss_weight=0.0",
    ),
}  # fmt: skip


COVER = [
    *cover_pairs(CHOICES),
    *[dict(zip(CHOICES, (kind, "fsdp_expert", *rest, "experts"), strict=True)) for kind, *rest in (
        ("lora", "none", "xla", "parallel.experts=gathered"), ("dora", "full", "prefetch", "parallel.experts=padded"),
        ("rslora", "save_dots", "prefetch", "num_microbatches=2"),
    )],
]  # fmt: skip
ROWS = {",".join(row.values()): row for row in COVER}


def _overrides(row):
    sharding = [f"sharding={row['sharding']}"]
    sharding += {"fsdp_tensor": ["mesh.fsdp=4", "mesh.tensor=2"], "tensor": ["mesh.data=4", "mesh.tensor=2"]}.get(
        row["sharding"], []
    )
    chosen = [f"{key}={row[key]}" for key in ("remat", "overlap")]
    if row["model"] == "experts" and row["remat"] in ("save_names", "offload"):
        chosen.append("remat.names=[attended]")
    return (*sharding, *chosen, row["more"], f"adapter={row['kind']}", *SMALL_RANK, *MODELS[row["model"]])


def _dense(plan, params):
    """Returns parameters of the base whose matrices are those that the papers write: nothing of low rank is used."""
    leaves, scale = leaves_by_path(params), _scale(plan.spec.adapter)
    base = {path: x for path, x in leaves.items() if not is_adapter(path)}
    for path in plan.model.adapters:
        piece, _, within = path.partition("/")
        at = f"{piece}/adapter/{within}"
        w, a, b = base[path], leaves[f"{at}/lora_A"], leaves[f"{at}/lora_B"]
        num_in = a.ndim - 1 - (2 if "_X" in path else 1 if piece == "layers" else 0)
        num_first = a.ndim - 1 - num_in
        flat = jnp.reshape(a, (*a.shape[:num_first], -1, a.shape[-1])) @ jnp.reshape(b, (*b.shape[: num_first + 1], -1))
        v = w + scale * flat.reshape(w.shape)
        if plan.spec.adapter.kind == "dora":
            over = tuple(range(num_first, num_first + num_in))
            length = jax.lax.stop_gradient(jnp.sqrt((v**2).sum(over, keepdims=True)))
            m = jnp.sqrt((w**2).sum(over)) + leaves[f"{at}/magnitude"]
            v *= jnp.expand_dims(m, over) / length
        base[path] = v
    return nested_dict(base)


@pytest.fixture(scope="module")
def dense():
    """Gives, by kind and model, parameters, and the loss and gradients of dense matrices on one device."""
    cache = {}

    def get(row, plan, tokens):
        key = row["kind"], row["model"]
        if key not in cache:
            params, base = _trained(plan), plan.spec.model.build()
            leaves = jax.tree.map(jnp.asarray, leaves_by_path(params))

            def objective(adapters):
                return reference_loss(base, _dense(plan, nested_dict(leaves | adapters)), *_split(tokens))

            adapters = {path: x for path, x in leaves.items() if is_adapter(path)}
            cache[key] = params, *jax.jit(jax.value_and_grad(objective))(adapters)
        return cache[key]

    return get


@pytest.mark.parametrize("name", tiered(ROWS, plain=(), ci=[*cover_values(ROWS, times=2), *list(ROWS)[-3:]]))
def test_every_layout_computes_what_dense_matrices_do_on_one_device(name, tokens, dense, proof):
    row = ROWS[name]
    plan = plan_of(*_overrides(row))
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params, expected_loss, expected = dense(row, plan, tokens[0])
    loss, grads = step(params)
    assert loss == pytest.approx(float(expected_loss), rel=2e-6)
    ours = leaves_by_path(grads)
    assert ours.keys() == expected.keys()
    for path, gradient in ours.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-4, atol=1e-5 * scale, err_msg=path)


def _split(tokens):
    return tokens[:, :-1], tokens[:, 1:]


def _logits(model, params, inputs):
    return np.asarray(jax.tree.leaves(jax.jit(lambda p: forward(model, p, inputs))(params))[0])


EXPERTS = (*MODELS["experts"], "model.num_dense_layers=1", "model.dense_mlp_dim=48")
ADAPTED = {"decoder": MODELS["decoder"], "experts": EXPERTS}


MERGED = [f"{kind}-{name}" for kind in ("rslora", "dora") for name in ADAPTED]


@pytest.mark.parametrize("case", tiered(MERGED, plain=()))
def test_merged_weights_compute_what_the_adapter_does(case, tokens):
    kind, name = case.split("-")
    plan = plan_of(f"adapter={kind}", *SMALL_RANK, *ADAPTED[name])
    params, base, inputs = _trained(plan), plan.spec.model.build(), tokens[0][:2, :-1]
    weights = jax.jit(lambda params: merged(plan.model, params))(params)
    assert jax.tree.map(np.shape, weights) == jax.tree.map(np.shape, base.abstract())
    whole, adapted, plain = (
        _logits(model, each, inputs)
        for model, each in ((base, weights), (plan.model, params), (base, without_adapters(params)))
    )
    np.testing.assert_allclose(adapted, whole, atol=2e-5 * np.abs(whole).max())
    assert np.abs(adapted - plain).max() > 0.05 * np.abs(whole).max()


@pytest.mark.ci
def test_an_adapted_model_starts_as_its_base(tokens):
    plan = plan_of("adapter=dora", *EXPERTS)
    base, key = plan.spec.model.build(), jax.random.key(0)
    params, of_base = plan.model.init(key), base.init(key)
    for path, x in leaves_by_path(of_base).items():
        np.testing.assert_array_equal(x, leaves_by_path(params)[path], err_msg=path)
    adapted, plain = (_logits(m, p, tokens[0][:2, :-1]) for m, p in ((plan.model, params), (base, of_base)))
    np.testing.assert_allclose(adapted, plain, atol=1e-5)


def test_no_gradient_of_the_base_is_reduced_or_stored():
    """Of each adapter the part that `embed` splits is reduce-scattered layer by layer; the rest is summed once."""
    more = ("parallel.embedding=all_gather", "precision=bfloat16")
    whole, adapted = plan_of(*more), plan_of("adapter=lora", *more)
    num_layers, matrices, of_base = 3, 7, 9  # a layer has 7 matrices and 2 norms
    (before, _), (after, elements) = written_collectives(whole), written_collectives(adapted)
    assert before["reduce-scatter"] == num_layers * of_base + 3  # the table, the head and its norm
    assert after["reduce-scatter"] == num_layers * matrices
    sizes = {path: x.size // 8 for path, x in leaves_by_path(adapted.abstract["params"]).items() if is_adapter(path)}
    split = {plan.array.path for plan in adapted.sharding.optimizer if any(d.axes for d in plan.dimensions)}
    assert elements["reduce-scatter"] == sum(size for path, size in sizes.items() if path in split)
    memory, of_adapters = adapted.memory, sum(p.bytes_per_device for p in adapted.sharding.optimizer)
    assert memory.optimizer == 2 * of_adapters
    assert memory.gradients == of_adapters
    base = sum(x.size for path, x in leaves_by_path(adapted.abstract["params"]).items() if not is_adapter(path))
    assert memory.parameters == of_adapters + 2 * base // 8  # in the compute type, as they are never updated
    assert memory.by_role == {"base": 2 * base // 8, "adapters": of_adapters}
    assert adapted.adapter == f"lora of rank 16 beside 7 matrices, {sum(sizes.values()) * 8:,} parameters"
    assert {path.split("/")[1] for path in adapted.sharding.trained} == {"adapter"}


@pytest.mark.ci
def test_the_compiled_program_of_an_adapter_reduces_what_the_step_writes():
    plan = plan_of("adapter=lora", "sharding=fsdp", "parallel.embedding=all_gather")
    counts = collectives_per_step(programs_of(plan)["train"].as_text())
    written, _ = written_collectives(plan)
    assert counts["reduce-scatter"] == written["reduce-scatter"] == 3 * 7


WRONG = {
    "adapter.targets=['layers/atention/*']": ["adapter.targets[0]: no parameter matches", "did you mean 'layers/"],
    "adapter.targets=['layers/*',layers/mlp_norm/scale_E]": [
        "adapter.targets[1]: 'layers/mlp_norm/scale_E' matches", "no matmul reads it", "layers/mlp/up_EM",
    ],
    "adapter.targets=[embed/table_VE]": ["which cannot be adapted: no matmul reads it"],
    "adapter.targets=[]": ["adapter.targets"],
    "adapter=none": ["adapter.rank: there is no such key"],
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_what_cannot_be_adapted_is_an_error(override):
    with pytest.raises(ConfigError) as raised:
        plan_of("adapter=lora", override, "adapter.rank=4")
    assert all(word in str(raised.value) for word in WRONG[override]), str(raised.value)


def test_other_refusals_say_what_works():
    with pytest.raises(
        ConfigError, match=r"adapter.dropout: the input of 'layers/mlp/.*\n  fix: set adapter.dropout=0"
    ):
        plan_of("adapter=lora", *EXPERTS, "adapter.dropout=0.1")
    with pytest.raises(ConfigError, match=r"context\.matmul"):
        pointwise_plan("adapter=lora")
    with pytest.raises(ConfigError, match="the embedding and the head share it"):
        plan_of("adapter=lora", "model.embeddings=tied", "adapter.targets=[embed/table_VE]")
    assert spec_of().adapter is None


@pytest.mark.ci
def test_dropout_is_of_the_adapters_input_alone(tokens):
    """The base is not dropped: with B of zeros nothing changes, and otherwise the loss of training does."""
    plans = [plan_of(*LINEAR_STACK, "adapter=lora", f"adapter.dropout={rate}") for rate in (0.0, 0.5)]
    fresh, trained = plans[0].model.init(jax.random.key(0)), _trained(plans[0])
    key = jax.random.key(1)

    def loss(plan, params):
        batch = {"inputs": tokens[0][:, :-1], "targets": tokens[0][:, 1:]}
        with jax.set_mesh(plan.mesh.of_devices(jax.devices())):
            return float(jax.jit(build_loss(plan, with_gradients=True))(params, batch, key)[0][0])

    assert loss(plans[0], fresh) == loss(plans[1], fresh)
    assert loss(plans[0], trained) != pytest.approx(loss(plans[1], trained), rel=1e-4)
