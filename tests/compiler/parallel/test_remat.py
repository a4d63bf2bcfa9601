"""What each policy computes again, in FLOPs of the traced step, and where it keeps the rest."""

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from conftest import plan_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.jaxpr.flops import count_flops, matmul_flops
from meshloom.compiler.parallel.remat import policy_of
from meshloom.compiler.step.train_step import build_loss
from meshloom.models.family_configs import DecoderConfig, MoeConfig
from support.experts import MOE
from support.programs import Gradients, batch_of
from support.reference import reference_loss
from support.tiers import tiered

FLOAT32_BYTES = 4
LOOPS = {
    "scan": (),
    "prefetch": ("overlap=prefetch",),
    "unrolled": ("overlap.layers.unroll=3",),
    "two parts of the batch": ("overlap.layers.batch_split=2",),
}


@cache
def _flops(*overrides: str) -> int:
    """Matmul FLOPs of loss and gradients on one device."""
    return matmul_flops(_traced(*overrides))


def _with_groups(*overrides: str) -> int:
    """The same, with grouped matmuls of tiny_moe."""
    return count_flops(_traced(*MOE, *overrides), "step").known


def _traced(*overrides: str) -> Jaxpr:
    plan = plan_of("target=cpu-1", *overrides)
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:1])):
        return jax.make_jaxpr(build_loss(plan, with_gradients=True))(plan.abstract["params"], batch).jaxpr


@pytest.fixture(scope="module")
def matmul():
    """FLOPs of one pass through matrices of a layer, all layers, by the names of their sizes."""
    plan = plan_of("target=cpu-1")
    c, tokens = plan.spec.model, plan.spec.tokens_per_step
    assert isinstance(c, DecoderConfig)
    one = 2 * tokens * c.num_layers * c.embed_dim
    return {
        "query": one * c.num_heads * c.head_dim,
        "key": one * c.num_kv_heads * c.head_dim,
        "mlp": one * c.mlp_dim,
        "scores": 2 * tokens * c.num_layers * c.num_heads * c.head_dim * plan.spec.sequence_length,
        "step": plan.model_flops_per_step,
    }


def test_none_computes_nothing_again(matmul):
    assert _flops("remat=none") == matmul["step"]


def test_minimal_computes_no_matmul_with_weights_again(matmul):
    """Plain attention saves its result alone, so its scores are computed again."""
    assert _flops("remat=minimal") == matmul["step"] + matmul["scores"]


def test_full_computes_all_again_that_the_backward_pass_reads(matmul):
    # All but the last matmul of a layer, whose result is the input of the next one: gate, up; q, k, v, out; attention.
    again = 2 * matmul["mlp"] + 2 * matmul["query"] + 2 * matmul["key"] + 2 * matmul["scores"]
    assert _flops("remat=full") == matmul["step"] + again


@pytest.mark.parametrize(
    ("remat", "names", "saved"),
    [
        ("save_names", "mlp_gate", {"mlp": 1}),
        ("offload", "keys,values,mlp_up", {"key": 2, "mlp": 1}),
        pytest.param("save_names", "queries", {"query": 1}, marks=pytest.mark.ci),
        pytest.param("save_names", "layer_input", {}, marks=pytest.mark.ci),
    ],
)
def test_what_is_named_is_not_computed_again(matmul, remat, names, saved):
    fewer = sum(count * matmul[name] for name, count in saved.items())
    assert _flops("remat=full") - _flops(f"remat={remat}", f"remat.names=[{names}]") == fewer


@pytest.mark.ci
def test_grouped_matmuls_of_experts_are_saved_by_name_and_by_minimal():
    """One for each choice of each token, in all layers. Plain attention's scores are computed again."""
    plan = plan_of(*MOE, "target=cpu-1")
    c, tokens = plan.spec.model, plan.spec.tokens_per_step
    assert isinstance(c, MoeConfig)
    one = 2 * tokens * c.num_experts_per_token * c.num_layers * c.embed_dim * c.mlp_dim
    for names, saved in (("expert_gate", 1), ("expert_gate,expert_up", 2)):
        fewer = _with_groups("remat=full") - _with_groups("remat=save_names", f"remat.names=[{names}]")
        assert fewer == saved * one
    scores = 2 * tokens * c.num_layers * c.num_heads * c.head_dim * plan.spec.sequence_length
    assert _with_groups("remat=minimal") == _with_groups("remat=none") + scores


def test_tokens_are_not_sent_again_where_the_rows_of_experts_are_saved():
    """`minimal` sends tokens forward, again for the gradients of the matrices, and both gradients back."""

    def exchanges(*remat):
        plan = plan_of(*MOE, "target=cpu-4", "sharding=fsdp_expert", "mesh.expert=4", "parallel.experts=padded", *remat)
        small = plan.spec.tokens_per_step * 256  # bytes: less than the rows of a layer, more than all else
        sent = estimate_step(plan).communication
        return sum(one.count for one in sent if one.kind == "all-to-all" and one.bytes > one.count * small)

    layers = 3  # with experts
    assert exchanges("remat=none") == exchanges("remat=minimal", "remat.names=[expert_input]") == 4 * layers
    assert exchanges("remat=minimal") == exchanges("remat=save_dots") == 5 * layers


@pytest.mark.ci
def test_a_policy_may_be_of_one_stack_alone():
    plan = plan_of("remat=none", "remat.stacks.layers=full")
    assert policy_of(plan.spec.remat, "layers") == "full"
    assert policy_of(plan.spec.remat, "others") == "none"
    assert _flops("remat=none", "remat.stacks.layers=full") == _flops("remat=full")
    assert _flops("remat=full", "remat.stacks.layers=none") == _flops("remat=none")


GROUPED = ("model.num_layers=6", "model.attention_windows=[16,16,null]")  # windows of the whole sequence


@pytest.mark.parametrize("loop", tiered(LOOPS, plain=["prefetch"], release=["unrolled"]))
@pytest.mark.parametrize("remat", [
    ("remat=full",), pytest.param(("remat=minimal",), marks=pytest.mark.ci),
    pytest.param(("remat=offload", "remat.names=[layer_input,mlp_up]"), marks=pytest.mark.ci),
])  # fmt: skip
def test_layers_of_a_group_are_computed_again_one_at_a_time(remat, loop):
    """As layers without a group: with the same FLOPs, in the same memory but for a few numbers."""
    single, grouped = (("model.num_layers=6", *remat, *LOOPS[loop]), (*GROUPED, *remat, *LOOPS[loop]))
    assert _flops(*grouped) == _flops(*single)
    expected, found = (estimate_step(plan_of("target=cpu-1", *each)).memory for each in (single, grouped))
    assert (found.activations, found.host_bytes) == (expected.activations, expected.host_bytes)
    weights = 2 * found.gradients // 6  # two more layers of a group are whole at once, and their gradients
    assert found.peak_bytes <= expected.peak_bytes + 2 * weights
    if loop != "two parts of the batch":  # of which a group computes one at a time again
        assert found.peak_bytes >= expected.peak_bytes - 2 * weights


@pytest.mark.parametrize("loop", tiered(LOOPS, plain=["scan", "prefetch"]))
def test_every_loop_keeps_offloaded_layer_inputs_on_the_host_alone(loop):
    plan = plan_of("target=cpu-1", "remat=offload", "remat.names=[layer_input]", *LOOPS[loop])
    model, memory = plan.spec.model, estimate_step(plan).memory
    assert isinstance(model, DecoderConfig)
    assert memory.host_bytes == model.num_layers * plan.spec.tokens_per_step * model.embed_dim * FLOAT32_BYTES
    assert memory.activations == 0


@pytest.mark.ci
def test_by_name_keeps_some_names_on_the_device_and_others_on_the_host():
    """A group's layers too. What is offloaded is layer_input and mlp_up; queries are saved, and the rest runs again."""
    by_name = ("remat=by_name", "remat.choices={mlp_up: offload, queries: save, attended: recompute}")
    plan = plan_of("target=cpu-1", *GROUPED, *by_name)
    assert plan.spec.remat.choices == {
        "layer_input": "offload", "mlp_up": "offload", "queries": "save", "attended": "recompute",
    }  # fmt: skip
    model, memory = plan.spec.model, estimate_step(plan).memory
    assert isinstance(model, DecoderConfig)
    numbers = model.num_layers * plan.spec.tokens_per_step * FLOAT32_BYTES
    assert memory.host_bytes == numbers * (model.embed_dim + model.mlp_dim)
    assert memory.activations == numbers * model.num_heads * model.head_dim
    of_names = ("remat=save_names", "remat.names=[layer_input,mlp_up,queries]")
    assert _flops(*GROUPED, *by_name) == _flops(*GROUPED, *of_names)


def test_stages_keep_on_the_host_what_is_offloaded_of_all_microbatches_in_flight():
    plan = plan_of("target=cpu-2", "sharding=ddp", "mesh.stage=2", "num_microbatches=4", "model.num_layers=4",
                   "remat=offload", "remat.names=[mlp_up]")  # fmt: skip
    model, tokens = plan.spec.model, plan.spec.tokens_per_step // 4
    assert isinstance(model, DecoderConfig)
    assert plan.pipeline
    layers = max(plan.pipeline.in_flight) * 2  # of each stage
    assert estimate_step(plan).memory.host_bytes == layers * tokens * model.mlp_dim * FLOAT32_BYTES


def test_offloaded_gate_and_up_are_apart_and_of_one_microbatch():
    plan = plan_of("target=cpu-2", "num_microbatches=2", "remat=offload", "remat.names=[mlp_gate,mlp_up]")
    model, tokens = plan.spec.model, plan.spec.tokens_per_step // 2 // 2  # of a device and microbatch
    assert isinstance(model, DecoderConfig)
    assert estimate_step(plan).memory.host_bytes == 2 * model.num_layers * tokens * model.mlp_dim * FLOAT32_BYTES


@pytest.mark.ci
def test_the_input_of_any_models_layers_has_a_name():
    plan = plan_of("target=cpu-1", "model=linear_stack", "~model.num_heads", "~model.num_kv_heads", "~model.head_dim",
                   "~model.mlp_dim", "~model.initializer_stddev", "remat=offload",
                   "remat.names=[layer_input]")  # fmt: skip
    assert estimate_step(plan).memory.host_bytes == 3 * 16 * 16 * 32 * FLOAT32_BYTES


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("remat=offload", "remat.names=[layer_inputs]"), "remat.names[0]"),
        (("remat=by_name", "remat.choices={layer_inputs: offload, queries: save}"), "remat.choices.layer_inputs"),
    ],
)
def test_a_name_that_no_layer_has_is_an_error_with_the_nearest_one(overrides, where):
    with pytest.raises(ConfigError) as refused:
        plan_of("target=cpu-1", *overrides)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert "layer_input" in problem.fix.replace(",", " ").split()


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("remat=by_name", "remat.choices={layer_input: keep}"), "remat.choices.layer_input"),
        (("remat=by_name", "remat.choices={layer_input: recompute}"), "remat.choices.layer_input"),
        (("remat=by_name", "remat.choices=null"), "remat.choices"),
        (("remat=full", "remat.choices={queries: save}"), "remat.choices"),
    ],
)
def test_choices_that_cannot_be_are_errors(overrides, where):
    with pytest.raises(ConfigError) as refused:
        plan_of("target=cpu-1", *overrides)
    assert [problem.where for problem in refused.value.problems] == [where]


@pytest.mark.parametrize("loop", tiered(LOOPS, plain=(), release=["unrolled"]))
def test_gradients_with_offloaded_layer_inputs_are_those_of_one_device(loop, tokens, proof):
    plan = plan_of("target=cpu-4", "mesh.fsdp=4", "model.num_layers=2", "remat=offload",
                   "remat.names=[layer_input,mlp_up]", *LOOPS[loop])  # fmt: skip
    step = Gradients(plan, batch_of(tokens[0]))
    if proof.is_known(step.parts):
        return
    params = plan.model.init(jax.random.key(1))
    inputs, targets = jnp.asarray(tokens[0][:, :-1]), jnp.asarray(tokens[0][:, 1:])
    expected = jax.jit(jax.grad(lambda p: reference_loss(plan.model, p, inputs, targets)))(params)
    _, gradients = step(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max() + 1e-7), gradients, expected)


def test_minimal_saves_results_of_matmuls_and_of_attention_alone():
    """A token's arrays in a layer, in bfloat16: the layer's input, queries, keys, values, attention's result and what
    is made of it, gate and up; and the log-sum-exp of each head in float32."""
    plan = plan_of(*ATTENTION, "global_batch_size=4", "target=h100-4", "remat=minimal")
    model, tokens = plan.spec.model, plan.spec.tokens_per_step // plan.mesh.num_devices
    assert isinstance(model, DecoderConfig)
    heads = 2 * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) + FLOAT32_BYTES * model.num_heads
    token = 2 * (2 * model.embed_dim + 2 * model.mlp_dim) + heads
    assert estimate_step(plan).memory.activations == model.num_layers * tokens * token


def test_none_saves_each_array_of_a_layer_once():
    """A token's arrays in bfloat16: the layer's input, the results of both norms, queries, keys, values, attention's
    result, the residual stream between attention and MLP, gate, up and their product. In float32 the log-sum-exp of
    each head and the sum of each norm."""
    plan = plan_of(*ATTENTION, "global_batch_size=4", "target=h100-4", "remat=none")
    model, tokens = plan.spec.model, plan.spec.tokens_per_step // plan.mesh.num_devices
    assert isinstance(model, DecoderConfig)
    heads = 2 * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads) + FLOAT32_BYTES * model.num_heads
    token = 2 * (4 * model.embed_dim + 3 * model.mlp_dim) + heads + 2 * FLOAT32_BYTES
    found = estimate_step(plan).memory.activations
    assert found == pytest.approx(model.num_layers * tokens * token, rel=1e-3)  # wavelengths are saved once a layer


ATTENTION = ("model.num_layers=2", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=128",
             "sequence_length=2048", "precision=bfloat16")  # fmt: skip
OVER_LENGTH = ("sharding=fsdp_context", "mesh.context=4")
KERNELS = {
    "splash": ("target=v5e-4",),
    "splash on a part of the heads": ("target=v5p-8", "sharding=fsdp_tensor", "mesh.tensor=2"),
    "splash in a ring": ("target=v5p-8", *OVER_LENGTH, "parallel.context=ring"),
    "splash on gathered keys": ("target=v5p-8", *OVER_LENGTH, "parallel.context=all_gather"),
    "splash on exchanged heads": ("target=v5p-8", *OVER_LENGTH, "parallel.context=ulysses"),
    "cudnn": ("target=h100-4",),
    "cudnn in a ring": ("target=h100-4", *OVER_LENGTH, "parallel.context=ring"),
    "tiles in a ring": ("target=cpu-4", *OVER_LENGTH, "parallel.context=ring"),
}
KERNELS_BY_TIER = tiered(
    KERNELS, plain=["cudnn"], ci=["splash", "splash in a ring", "splash on exchanged heads", "tiles in a ring"]
)


@cache
def _attention(*overrides: str) -> tuple[int, dict[str, int]]:
    """(FLOPs of attention in the traced step; how often each kind of collective exchanges keys and values)."""
    found = estimate_step(plan_of(*ATTENTION, "global_batch_size=4", *overrides))
    (flops,) = [part.flops for part in found.roofline if part.name == "attention"]
    assert isinstance(flops, int)
    exchanged = Counter[str]()
    for each in found.communication:
        if str(each.origin).startswith("attention"):
            exchanged[each.kind] += each.count
    return flops, dict(exchanged)


@pytest.mark.parametrize("kernel", KERNELS_BY_TIER)
@pytest.mark.parametrize("policy", tiered(["save_names", "minimal", "offload"], plain=["save_names"]))
def test_saved_attention_does_not_run_again(kernel, policy):
    """Neither a kernel nor what sends keys and values to it runs more often than where all is saved; but heads are
    exchanged again, as queries, keys and values are computed again."""
    names = () if policy == "minimal" else ("remat.names=[attended]",)
    saved, everything, nothing = (
        _attention(*KERNELS[kernel], *remat)
        for remat in ((f"remat={policy}", *names), ("remat=none",), ("remat=full",))
    )
    assert saved[0] == everything[0] < nothing[0]
    if "heads" not in kernel:
        assert saved[1] == everything[1]


@pytest.mark.parametrize("kernel", KERNELS_BY_TIER)
def test_what_attention_saves_is_counted_once(kernel):
    """Its result in bfloat16, and the log-sum-exp of each row of each head in float32."""
    plan = plan_of(*ATTENTION, "global_batch_size=4", "remat=offload", "remat.names=[attended]", *KERNELS[kernel])
    model, tokens = plan.spec.model, plan.spec.tokens_per_step // plan.mesh.num_devices
    assert isinstance(model, DecoderConfig)
    expected = model.num_layers * tokens * model.num_heads * (2 * model.head_dim + FLOAT32_BYTES)
    assert estimate_step(plan).memory.host_bytes == expected


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(("layers", "unroll"), [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2)])
@pytest.mark.parametrize("overlap", ["xla", "prefetch"])
def test_a_barrier_keeps_apart_what_no_loop_does(overlap, layers, unroll):
    """XLA unrolls a loop of one trip; a layer that fills no trip runs after the loop. Then it may merge a layer's
    forward pass with its recomputation, as it did for a single layer on v5p, which took as long as with `none`."""
    plan = plan_of(
        "target=cpu-1", "remat=full", f"overlap={overlap}", f"overlap.layers.unroll={unroll}",
        f"model.num_layers={layers}",
    )  # fmt: skip
    batch = {name: jax.ShapeDtypeStruct((16, 16), np.int32) for name in ("inputs", "targets")}
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:1])):
        step = jax.jit(build_loss(plan, with_gradients=True)).lower(plan.abstract["params"], batch)
    in_whole_trips = layers >= 2 * unroll and layers % unroll == 0
    assert ("optimization_barrier" in step.as_text()) is not in_whole_trips
