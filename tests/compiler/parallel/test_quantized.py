"""Matmuls in few bits: their products and gradients, which sites have them and why, and that no mesh changes them."""

import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path, nested_dict
from meshloom.compiler.formats.operands import OperandFormat, operand_formats, register_operand
from meshloom.compiler.jaxpr.read_jaxpr import read_jaxpr
from meshloom.compiler.parallel.quantized import Arithmetic, SitePrecision, quantized_matmul
from meshloom.compiler.report.explain import precision_lines
from meshloom.compiler.step.train_step import build_init, build_loss
from support.programs import lowered_of

FP8, E5M2, INT8 = (operand_formats()[name] for name in ("fp8", "fp8_e5m2", "int8"))
EMULATED = "precision.emulate=true"
SHAPES = {"bte,ehd->bthd": ((2, 6, 8), (8, 2, 5)), "bthd,hde->bte": ((2, 6, 2, 5), (2, 5, 8))}


def _arithmetic(forward: OperandFormat, gradients: OperandFormat | None, **more) -> Arithmetic:
    values = {"rounds_at_random": False, "emulated": True, "tokens": ()}
    return Arithmetic(forward, gradients, **{**values, **more})


def _rounded_float(x: np.ndarray, digits: int, least: int, largest: float) -> np.ndarray:
    """To the nearest number with so many binary digits after the first, ties to even. least: the smallest exponent."""
    exponents = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), least)
    step = 2.0 ** (exponents - digits)
    return np.clip(np.round(x / step) * step, -largest, largest)


def _straight_through(of: OperandFormat, x: np.ndarray, letters: str, result: str) -> np.ndarray:
    """An operand as it is read again after rounding, in float64, by the definition of each type."""
    contracted = tuple(place for place, letter in enumerate(letters) if letter not in result)
    axes = None if of.scales == "tensor" else contracted
    scale = np.max(np.abs(x), axis=axes, keepdims=True) / {"fp8": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}[of.name]
    rounding = {
        "fp8": lambda y: _rounded_float(y, 3, -6, 448.0),
        "fp8_e5m2": lambda y: _rounded_float(y, 2, -14, 57344.0),
        "int8": lambda y: np.clip(np.round(y), -127, 127),
    }[of.name]
    return rounding(x / scale) * scale


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("subscripts", SHAPES)
@pytest.mark.parametrize(("forward", "gradients"), [(FP8, E5M2), (FP8, FP8), (INT8, INT8), (INT8, None), (FP8, None)])
def test_products_and_gradients_are_those_of_rounded_operands(subscripts, forward, gradients):
    """Against float64, where each product rounds its own operands and a rounding has the gradient of the identity."""
    rng = np.random.default_rng(1)
    of_x, of_weight, result = subscripts.replace("->", ",").split(",")
    x, weight = (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 2) for shape in SHAPES[subscripts])
    x, weight = (np.asarray(each, np.float32).astype(np.float64) for each in (x, weight))
    product = jax.jit(lambda x, w: quantized_matmul(_arithmetic(forward, gradients), x, w, subscripts))
    y, pull_back = jax.vjp(product, jnp.float32(x), jnp.float32(weight))
    g = np.asarray(rng.normal(size=y.shape), np.float32).astype(np.float64)
    found = (y, *pull_back(jnp.float32(g)))
    before, back = forward, gradients
    expected = [
        np.einsum(
            f"{a},{b}->{made}",
            _straight_through(of_a, left, a, made) if back else left,
            _straight_through(of_b, right, b, made) if back else right,
        )
        for a, b, made, left, right, of_a, of_b in (
            (result, of_weight, of_x, g, weight, back, before),
            (of_x, result, of_weight, x, g, before, back),
        )
    ]
    rounded = (_straight_through(forward, *each, result) for each in ((x, of_x), (weight, of_weight)))
    expected.insert(0, np.einsum(subscripts, *rounded))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.ci
@pytest.mark.parametrize(("forward", "gradients"), [(FP8, E5M2), (INT8, INT8)])
def test_what_a_target_multiplies_is_what_is_emulated(forward, gradients):
    """Elements multiplied as they are, or decoded: a processor does both, exactly."""
    x, weight = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(((2, 4, 8), (8, 6))))

    def loss(x: jax.Array, weight: jax.Array, *, emulated: bool) -> jax.Array:
        arithmetic = _arithmetic(forward, gradients, emulated=emulated)
        return jnp.sum(jnp.sin(quantized_matmul(arithmetic, x, weight, "bte,em->btm")))

    real, emulated = (jax.grad(loss, (0, 1))(x, weight, emulated=each) for each in (False, True))
    for ours, theirs in zip(real, emulated, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    lowered = jax.jit(jax.grad(loss, (0, 1)), static_argnames="emulated").lower(x, weight, emulated=False).as_text()
    dots = [line for line in lowered.splitlines() if "dot_general" in line]
    names = {"fp8": "f8E4M3FN", "fp8_e5m2": "f8E5M2", "int8": "i8"}
    operands = [line.split(" : (")[1].split(") ->")[0] for line in dots]
    assert [each.count(f"x{names[forward.name]}>") for each in operands] == ([2, 1, 1] if forward == FP8 else [2, 2, 2])
    assert all(f"x{names[gradients.name]}>" in each for each in operands[1:])


def test_a_gradient_rounded_at_random_is_right_on_average():
    """Over 400 gradients that differ by less than a rounding. To the nearest, all of them are rounded the same way."""
    x, weight = jnp.ones((1, 1, 2)), jnp.eye(2)
    g = jnp.array([[[127.0, 0.3]]]) + jnp.linspace(0, 0.01, 400)[:, None, None, None]

    def mean(*, at_random: bool) -> jax.Array:
        arithmetic = _arithmetic(INT8, INT8, rounds_at_random=at_random)
        _, pull_back = jax.vjp(lambda x: quantized_matmul(arithmetic, x, weight, "bte,em->btm"), x)
        return jnp.mean(jax.vmap(lambda each: pull_back(each)[0])(g), 0)[0, 0, 1]

    assert abs(mean(at_random=True) - 0.3) < 0.1
    assert mean(at_random=False) == 0


@pytest.mark.parametrize("of", [FP8, E5M2, INT8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_lost(of, bad):
    """A cast of NaN to int8 is 0, and a maximum over devices may pass over it."""
    x = jnp.ones((1, 4, 8)).at[0, 1, 2].set(bad)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    arithmetic = _arithmetic(of, of, tokens=("data",))
    spec = PartitionSpec(None, "data")
    product = jax.shard_map(
        lambda x, w: quantized_matmul(arithmetic, x, w, "bte,em->btm"),
        mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec,
    )  # fmt: skip
    y = jax.jit(product)(x, jnp.ones((8, 3)))
    assert not np.isfinite(y[0, 1]).any()
    assert of.scales == "channel" or np.isnan(y).all(), "one scale for all devices"


def test_a_weight_may_come_as_encoded():
    """Its values are not read then: the compiled program does not have them."""
    x, weight = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(((2, 4, 8), (8, 6))))
    encoded = FP8.of(2, (0,)).encode(weight)

    def product(x: jax.Array, weight: jax.Array, encoded: dict[str, jax.Array] | None) -> jax.Array:
        return quantized_matmul(_arithmetic(FP8, E5M2), x, weight, "bte,em->btm", encoded=encoded)

    np.testing.assert_array_equal(product(x, jnp.full_like(weight, 7.0), encoded), product(x, weight, None))


def test_an_activation_is_encoded_once_for_all_sites_that_read_it():
    """As XLA compiles it: of two sites that share x the estimate has three operands, forward."""

    def both(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        return [quantized_matmul(_arithmetic(FP8, E5M2), x, each, "bte,em->btm") for each in weights]

    shapes = (2, 4, 8), (8, 6), (8, 6)
    jaxpr = jax.make_jaxpr(both)(*(jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes)).jaxpr
    program = read_jaxpr(jaxpr, [((),) * len(each) for each in shapes], {})
    assert [each.name for each in program.walk()].count("reduce_max") == 3


@pytest.mark.ci
def test_devices_scale_their_parts_of_a_shared_inputs_gradient_before_they_add_them_up():
    """So nothing but an addition stands between the reductions of two sites, and compilers reduce once. The sums are
    those of one device."""
    mesh = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:4])
    shapes = (2, 8, 8), (8, 12), (8, 4)
    x, *weights = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
    layouts = {"result_spec": PartitionSpec(None, None, "tensor"), "gradient_spec": PartitionSpec(None, "tensor", None)}

    def total(arithmetic: Arithmetic, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        results = (quantized_matmul(arithmetic, x, each, "bte,em->btm") for each in weights)
        return sum((jnp.sum(jnp.sin(y)) for y in results), start=jnp.zeros(()))

    expected = jax.grad(partial(total, _arithmetic(FP8, E5M2)))(x, weights)
    gradient = jax.grad(partial(total, _arithmetic(FP8, E5M2, **layouts)))
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(gradient)(x, weights).jaxpr
        found = jax.jit(gradient)(x, weights)
    made_by = {x: equation.primitive.name for equation in jaxpr.eqns for x in equation.outvars}
    (addition,) = (each for each in jaxpr.eqns if each.primitive.name == "add_any")
    assert [made_by[x] for x in addition.invars] == ["shard_map", "shard_map"]
    assert str(jaxpr).count("= reduce_scatter[") == 2
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


OVER_THE_MESH = [
    ("target=cpu-8", "sharding=fsdp"),
    pytest.param(("target=cpu-8", "sharding=fsdp_tensor", "mesh.tensor=4", "parallel.matmul=collective_matmul",
                  "overlap=prefetch", "remat=full"), marks=pytest.mark.ci),
    pytest.param(("target=cpu-4", "sharding=fsdp", "remat=save_dots", "overlap=prefetch"), marks=pytest.mark.release),
]  # fmt: skip


TENSOR = ("sharding=fsdp_tensor", "mesh.tensor=2")
GRADIENTS_OF = {"fp8": "fp8_e5m2", "int8": "int8"}
EXPERTS_OVER_THE_MESH = [
    ("target=cpu-4", "sharding=fsdp_expert", "mesh.fsdp=1", "mesh.expert=2", "mesh.tensor=2",
     "parallel.experts=padded", "precision=fp8", "precision.dispatch=fp8", "precision.dispatch_gradients=fp8_e5m2"),
    ("target=cpu-8", "sharding=fsdp_expert", "mesh.expert=2", "mesh.tensor=2", "precision=int8",
     "parallel.experts=gathered", "overlap=prefetch", "remat=full"),
    pytest.param(("target=cpu-4", "sharding=fsdp_expert", "mesh.expert=4", "parallel.experts=capacity",
                  "precision=int8", "moe.capacity_factor=8", "num_microbatches=1",
                  "precision.matmuls=[{match:null,forward:int8,gradients:int8,gather:int8}]"),
                 marks=pytest.mark.release),
]  # fmt: skip


def _loss_and_gradients(*overrides: str) -> tuple[float, dict[str, np.ndarray]]:
    plan = plan_of("model.vocab_size=64", "model.num_layers=2", "sequence_length=32", *overrides)
    shape = (plan.spec.global_batch_size, plan.spec.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, 64, shape).astype(np.int32)[plan.batch.row_order.rows()]
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[: plan.target.num_devices])):
        params = jax.jit(build_init(plan))()["params"]
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        (loss, count), gradients, *_ = jax.jit(build_loss(plan, with_gradients=True))(params, batch)
    return float(loss / count), {path: np.asarray(x) for path, x in leaves_by_path(gradients).items()}


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("overrides", OVER_THE_MESH)
def test_no_mesh_and_no_remat_changes_elements_or_scales(precision, overrides):
    """Largest magnitudes are those of all devices, so what differs is the order of sums, which rounds few elements
    otherwise. Rounding itself changes gradients by a quarter (fp8) and a fifteenth (int8), as scales of each device's
    own would."""
    gather = "null" if "overlap=prefetch" in overrides else precision  # both, with the loops of each
    rule = f"[{{match:null,forward:{precision},gradients:{GRADIENTS_OF[precision]},gather:{gather}}}]"
    base = ("precision.compute=float32", "global_batch_size=16", EMULATED, f"precision={precision}",
            f"precision.matmuls={rule}")  # fmt: skip
    one, expected = _loss_and_gradients("target=cpu-1", *base)
    loss, found = _loss_and_gradients(*overrides, *base)
    assert loss == pytest.approx(one, rel=1e-5)
    for path, gradient in found.items():
        assert np.linalg.norm(gradient - expected[path]) < 0.03 * np.linalg.norm(expected[path]), path


@pytest.mark.ci
def test_no_mesh_changes_tiles():
    """A shard has whole tiles of its weights and tokens. Over tensor sums are in another order, and few elements are
    rounded otherwise, of gradients as many as with a scale for each tensor; rounding itself changes them by 0.9."""
    base = ("precision=fp8_blockwise", "precision.compute=float32", "global_batch_size=16", EMULATED,
            "model.embed_dim=256", "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=64",
            "model.mlp_dim=512")  # fmt: skip
    one, expected = _loss_and_gradients("target=cpu-1", *base)
    for mesh, of_loss, of_gradient in ((("sharding=fsdp",), 1e-6, 1e-5), (TENSOR, 5e-5, 0.06)):
        loss, found = _loss_and_gradients("target=cpu-4", *mesh, *base)
        assert loss == pytest.approx(one, rel=of_loss)
        for path, gradient in found.items():
            assert np.linalg.norm(gradient - expected[path]) < of_gradient * np.linalg.norm(expected[path]), path


SENT = "precision.matmuls=[{match:layers/mlp/*,forward:null,gradients:null,gather:fp8}]"


@pytest.mark.ci
def test_a_weight_that_is_gathered_in_few_bits_has_the_gradient_of_what_it_stands_for():
    """Against a model whose weights are rounded outside of the step. What is gathered is elements and nothing else."""
    size = ("model.vocab_size=64", "model.num_layers=2", "sequence_length=32", "global_batch_size=8", "target=cpu-8")
    plan, plain = (plan_of(*size, "sharding=fsdp", "precision=float32", *more) for more in ((SENT,), ()))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 33)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:8])):
        params = jax.jit(build_init(plan))()["params"]
        lowered = jax.jit(build_loss(plan, with_gradients=True)).lower(params, batch)
        found = lowered.compile()(params, batch)
        rounded = dict(leaves_by_path(params))
        for path in [path for path in rounded if path.startswith("layers/mlp/")]:
            each = [_straight_through(FP8, np.asarray(one, np.float64), "ab", "") for one in rounded[path]]
            rounded[path] = jax.device_put(np.asarray(each, np.float32), rounded[path].sharding)
        expected = jax.jit(build_loss(plain, with_gradients=True))(nested_dict(rounded), batch)
    assert float(found[0][0]) == pytest.approx(float(expected[0][0]), rel=1e-5)
    theirs = dict(leaves_by_path(expected[1]))
    for path, gradient in leaves_by_path(found[1]).items():
        np.testing.assert_allclose(gradient, theirs[path], rtol=0, atol=1e-4 * np.abs(theirs[path]).max(), err_msg=path)
    gathers = [line for line in lowered.as_text().splitlines() if "all_gather" in line and "-> tensor" in line]
    assert sum("xf8E4M3FN>" in line for line in gathers) == sum(path.startswith("layers/mlp/") for path in rounded)


STAGES = ("mesh.stage=2", "mesh.fsdp=2", "num_microbatches=2", "pipeline.gather=step")
LOOPS = {
    "saved": (),
    "recomputed": ("remat=full",),
    "hoisted": STAGES,
    "held": (*STAGES, "sharding.gradients=optimizer"),
    "frozen": ("adapter=lora",),
}


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("overrides", LOOPS.values(), ids=LOOPS)
def test_a_site_multiplies_what_was_gathered_and_encodes_no_weight_again(overrides):
    """As it is handed to a compiler: roundings to float8 of a weight's shape, forward and backward, with none left."""
    size = ("model.num_layers=2", "sequence_length=48", "global_batch_size=8", "target=cpu-4", "sharding=fsdp")
    rounded = {}
    for gather in ("null", "fp8"):
        rule = f"[{{match:null,forward:fp8,gradients:fp8_e5m2,gather:{gather}}}]"
        plan = plan_of(*size, *overrides, "precision=fp8", EMULATED, f"precision.matmuls={rule}")
        matrices = [x.shape[1:] for x in jax.tree.leaves(plan.model.abstract()["layers"]) if len(x.shape) > 2]
        shapes = {tuple(size for size in shape if size > 1) for shape in matrices}
        text = lowered_of(plan, "train")[0].as_text()
        found = re.findall(r"stablehlo.convert .* -> tensor<([\dx]+)xf8E4M3FN>", text)  # in blocks: 1x128x1x384
        rounded[gather] = sum(tuple(size for size in map(int, each.split("x")) if size > 1) in shapes for each in found)
    assert rounded["null"] >= 7  # matrices of a layer
    assert rounded["fp8"] == 0


@pytest.mark.ci
def test_stages_round_what_a_loop_over_layers_rounds():
    """Each microbatch has scales of its own, and is the same sequences on any mesh. Over as many shards, sums are in
    the same order, so no element is rounded otherwise."""
    base = ("precision.compute=float32", "global_batch_size=16", EMULATED, "precision=fp8", "num_microbatches=4",
            "precision.matmuls=[{match:null,forward:fp8,gradients:fp8_e5m2,gather:fp8}]", "sharding=fsdp",
            "mesh.fsdp=2")  # fmt: skip
    one, expected = _loss_and_gradients("target=cpu-2", *base)
    loss, found = _loss_and_gradients("target=cpu-4", "mesh.stage=2", *base)
    assert loss == pytest.approx(one, rel=1e-6)
    for path, gradient in found.items():
        assert np.linalg.norm(gradient - expected[path]) < 1e-5 * np.linalg.norm(expected[path]), path


HEAD_OVER_THE_MESH = {
    "fsdp": ("target=cpu-4", "sharding=fsdp"),
    "vocabulary over tensor": ("target=cpu-4", *TENSOR),
    "vocabulary over stages": ("target=cpu-4", "sharding=fsdp", "mesh.stage=2", "mesh.fsdp=2", "pipeline.head=stages"),
}


HEAD_RULES = "[{match:head/*,forward:fp8,gradients:fp8_e5m2}]"
HEAD = ("precision.compute=float32", "global_batch_size=16", "num_microbatches=2", "precision=fp8", EMULATED,
        "loss.num_chunks=2")  # fmt: skip


@cache
def _head_on_one_device(rules: str) -> tuple[float, dict[str, np.ndarray]]:
    return _loss_and_gradients("target=cpu-1", *HEAD, f"precision.matmuls={rules}")


@pytest.mark.ci
@pytest.mark.parametrize("overrides", HEAD_OVER_THE_MESH.values(), ids=HEAD_OVER_THE_MESH)
def test_a_head_that_a_rule_names_multiplies_in_few_bits_on_any_mesh(overrides):
    """Its scales are those of the whole vocabulary, and of the tokens of a chunk on all devices. In few bits it changes
    the loss, and its gradients by more than another order of sums does."""
    (as_it_is, plain), (one, expected) = (_head_on_one_device(rules) for rules in ("[]", HEAD_RULES))
    loss, found = _loss_and_gradients(*overrides, *HEAD, f"precision.matmuls={HEAD_RULES}")
    assert loss == pytest.approx(one, rel=1e-6)
    assert loss != pytest.approx(as_it_is, rel=1e-6)
    for path, gradient in found.items():
        assert np.linalg.norm(gradient - expected[path]) < 1e-3 * np.linalg.norm(expected[path]), path
    of_head = "head/kernel_EV"
    assert np.linalg.norm(plain[of_head] - expected[of_head]) > 1e-2 * np.linalg.norm(expected[of_head])


def test_a_head_with_the_weights_of_the_embedding_multiplies_as_they_are():
    rule = "precision.matmuls=[{match:null,forward:fp8,gradients:fp8_e5m2}]"
    plan = plan_of("precision=fp8", rule, EMULATED, "model.embeddings=tied")
    (logits,) = (each for each in plan.operations_of("matmul") if each.site.name == "logits")
    assert logits.precision == SitePrecision(None, "it is of the head, and the embedding has its weights")


@pytest.mark.ci
@pytest.mark.parametrize("overrides", EXPERTS_OVER_THE_MESH)
def test_no_exchange_changes_elements_or_scales_of_experts(overrides):
    """Tokens of all devices share the scales of a tensor, and so do experts. Rounded to the types
    of `fp8` and `int8`, gradients differ by as much as above from those of float32. The router, which sees roundings
    that differ, sends no token elsewhere in this batch."""
    base = ("model=tiny_moe", "precision.compute=float32", "global_batch_size=16", EMULATED, "model.router_jitter=0")
    alone = [each for each in overrides if each.startswith(("precision", "moe.")) or each.endswith("=capacity")]
    one, expected = _loss_and_gradients("target=cpu-1", *base, *alone)
    loss, found = _loss_and_gradients(*base, *overrides)
    assert loss == pytest.approx(one, rel=1e-5)
    for path, gradient in found.items():
        assert np.linalg.norm(gradient - expected[path]) < 0.03 * np.linalg.norm(expected[path]), path


def test_the_first_rule_that_matches_is_the_sites():
    rules = (
        "[{match:layers/mlp/down*,forward:null,gradients:null},{match:layers/mlp/*,forward:int8,gradients:null},"
        "{match:null,forward:fp8,gradients:fp8_e5m2}]"
    )
    plan = plan_of("precision=fp8", f"precision.matmuls={rules}", EMULATED)
    found = {}
    for each in plan.operations_of("matmul"):
        assert each.precision
        used = each.precision.arithmetic
        found[each.site.name] = (used and used.forward.name, each.precision.reason)
    attention = ("fp8", "precision.matmuls[2]")
    assert found == {
        **dict.fromkeys(("queries", "keys", "values", "attention_output"), attention),
        **dict.fromkeys(("mlp_up", "mlp_gate"), ("int8", "precision.matmuls[1]")),
        "mlp_output": (None, "precision.matmuls[0]"),
        "logits": (None, "it is of the head, and no rule names that"),
    }


def test_routers_and_adapters_multiply_as_they_are():
    def reasons(*overrides: str) -> dict[str, str]:
        plans = plan_of(*overrides, EMULATED).operations
        return {each.site.name: each.precision.reason for each in plans if each.precision}

    moe = reasons("precision=fp8", "model=tiny_moe")
    assert moe["router_logits"] == "it is computed in float32"
    assert moe["routed"] == "precision.matmuls[0]"
    lora = reasons("precision=int8", "adapter=lora")
    assert (lora["queries"], lora["queries_lora_A"]) == ("precision.matmuls[0]", "it is of an adapter")


def test_explain_says_which_site_multiplies_in_which_type_and_why():
    rules = "precision.matmuls=[{match:layers/mlp/*,forward:int8,gradients:int8}]"
    attention, mlp, head = precision_lines(plan_of("precision=int8", rules, "target=v6e-8").operations)
    assert attention.endswith("layers/attention_output: as their operands are: no rule matches it")
    assert mlp == (
        "layers/mlp_up, layers/mlp_gate, layers/mlp_output: int8 (a scale for each channel), gradients too: "
        "precision.matmuls[0]"
    )
    assert head == "head/logits: as their operands are: it is of the head, and no rule names that"
    assert list(precision_lines(plan_of().operations)) == []


def test_experts_are_left_out_where_their_kernel_has_16_bits_alone():
    """A rule for all passes over them; one that names them is an error."""
    plan = plan_of("model=tiny_moe", "precision=fp8", "target=h100-8", "precision.compute=bfloat16")
    (routed,) = plan.operations_of("experts")
    why = "grouped matmuls of GPUs multiply in 16 bits"
    assert routed.precision == SitePrecision(None, why)
    rule = "precision.matmuls=[{match:layers/mlp/*_X*,forward:fp8,gradients:fp8_e5m2}]"
    with pytest.raises(ConfigError, match=why):
        plan_of("model=tiny_moe", "precision=fp8", "target=h100-8", rule)
    (routed,) = plan_of("model=tiny_moe", "precision=fp8", "target=tpu7x-8", rule).operations_of("experts")
    assert routed.precision
    assert routed.precision.reason == "precision.matmuls[0]"


def test_the_matrices_of_experts_multiply_in_one_type():
    rule = "precision.matmuls=[{match:layers/mlp/up_*,forward:fp8,gradients:fp8_e5m2}]"
    with pytest.raises(ConfigError, match=r"matches some of layers/mlp/gate_XEM, .*, which multiply in one type"):
        plan_of("model=tiny_moe", "precision=fp8", rule, EMULATED)


RULE = (
    "precision.matmuls=[{{match:{match},forward:{forward},gradients:{gradients},rounding:{rounding},gather:{gather}}}]"
)
MATCH, FORWARD, GRADIENTS = (
    "precision.matmuls[0].match",
    "precision.matmuls[0].forward",
    "precision.matmuls[0].gradients",
)


@pytest.mark.parametrize(
    ("rule", "where", "what", "fix"),
    [
        ({"match": "layers/mpl/*"}, MATCH, "no weight of a matmul matches 'layers/mpl/*'", "did you mean"),
        ({"match": "*kernel_EV"}, MATCH, "no weight of a matmul matches '*kernel_EV'", "did you mean"),
        ({"match": "embed/*"}, MATCH, "'embed/*' matches 'embed/table_VE', of which rows are looked up", "use one of"),
        ({"match": "head/*", "gather": "fp8"}, "precision.matmuls[0].gather",
         "'head/*' is of the head, whose weights are gathered in the compute type", "set gather: null"),
        ({"match": "head*", "forward": "mxfp8", "gradients": "mxfp8"}, FORWARD,
         "'head*' is of the head, whose chunks of tokens and vocabulary may cut blocks", "did you mean 'fp8'"),
        ({"forward": "fp9"}, FORWARD, "'fp9' is not a type of operands", "did you mean 'fp8'"),
        ({"gradients": "int8"}, GRADIENTS, "'int8' cannot be multiplied with 'fp8': float8 and int8", "use one of fp8"),
        ({"rounding": "stochastic"}, "precision.matmuls[0].rounding", "'fp8_e5m2' is rounded to the nearest alone",
         "set rounding: nearest, or choose int8"),
        ({"gather": "int8"}, "precision.matmuls[0].gather", "weights gathered in int8 would be rounded again to fp8",
         "set gather: fp8, or null"),
        ({"forward": "null", "gradients": "null", "gather": "fp9"}, "precision.matmuls[0].gather",
         "'fp9' is not a type of operands", "did you mean 'fp8'"),
        ({"forward": "null"}, GRADIENTS, "gradients cannot be in fp8_e5m2 where x and the weight are as they are",
         "set gradients: null"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_followed_is_one_error(rule, where, what, fix):
    values = {
        "match": "null",
        "forward": "fp8",
        "gradients": "fp8_e5m2",
        "rounding": "nearest",
        "gather": "null",
        **rule,
    }
    with pytest.raises(ConfigError) as error:
        plan_of("precision=fp8", RULE.format(**values), EMULATED)
    (problem,) = error.value.problems
    assert (problem.where, problem.what) == (where, what)
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("target", "precision", "chips"),
    [("v6e-8", "fp8", "h100, h200, tpu7x"), ("h100-8", "int8", "v5e, v5p, v6e"), ("cpu-8", "fp8", "h100, h200, tpu7x")],
)
def test_a_type_that_a_compiler_only_imitates_is_refused_with_targets_that_have_it(target, precision, chips):
    with pytest.raises(ConfigError) as error:
        plan_of(f"target={target}", f"precision={precision}")
    (problem,) = error.value.problems
    assert problem.where == FORWARD
    assert problem.what.startswith(f"the compiler for {target} makes no matmul faster in ")
    assert chips in problem.fix
    plan = plan_of(f"target={target}", f"precision={precision}", EMULATED)
    assert "emulated: multiplied in float32" in next(precision_lines(plan.operations))


def test_a_type_from_outside_is_declared_like_ours():
    name = "int8_of_tests"
    register_operand(replace(INT8, name=name, scales="tensor"))
    rule = RULE.format(match="null", forward=name, gradients=name, rounding="stochastic", gather="null")
    plan = plan_of("precision=int8", rule, "target=v5e-8")
    assert f"{name} (int8, a scale for each tensor), gradients too, rounded at random" in next(
        precision_lines(plan.operations)
    )
