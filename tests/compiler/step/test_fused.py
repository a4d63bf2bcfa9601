"""A microbatch forward beside the one before it backward: gradients, what is moved, and what is saved."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.estimate.estimate import estimate_declared
from meshloom.compiler.search.overlap import overlap_candidates
from meshloom.compiler.sharding.batch import check_fused
from meshloom.compiler.step.train_step import build_loss
from support.collectives import written_collectives
from support.experts import MOE, documents_of, objective, without_padding
from support.programs import gradients_of
from support.tiers import tiered

FUSED, TIED = "overlap=fused", "model.embeddings=tied"
FSDP, TENSOR, EXPERT = "sharding=fsdp", "sharding=fsdp_tensor", "sharding=fsdp_expert"
TWO_STACKS = (*MOE, "model.dense_mlp_dim=48")
CASES = {
    "fsdp, 2 microbatches, all saved": (FSDP, "num_microbatches=2"),
    "zero2, 4 microbatches, remat full, 2 layers in a trip": (
        "sharding=zero2", "mesh.data=4", "target=cpu-4", "num_microbatches=4", "remat=full", "overlap.layers.unroll=2",
    ),
    "fsdp_tensor, 4 microbatches of 2 parts, save_dots, tied": (
        TENSOR, "mesh.fsdp=2", "mesh.tensor=2", "target=cpu-4", "num_microbatches=4", "overlap.layers.batch_split=2",
        "remat=save_dots", TIED,
    ),
    "hsdp, 2 microbatches, padded documents, remat full": (
        "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2", "target=cpu-4", "num_microbatches=2",
        "data.isolate_documents=true", "data.packing=first_fit", "remat=full",
    ),
    "context, 2 microbatches, remat full": (
        "sharding=fsdp_context", "mesh.fsdp=2", "mesh.context=2", "target=cpu-4", "num_microbatches=2", "remat=full",
    ),
    "experts, 4 microbatches, remat full, balanced": (
        *MOE, EXPERT, "mesh.fsdp=2", "mesh.expert=2", "target=cpu-4", "num_microbatches=4", "remat=full",
        "model.load_balancing_weight=0.1",
    ),
    "a dense layer before 2 with experts, balanced": (
        *TWO_STACKS, EXPERT, "mesh.fsdp=2", "mesh.expert=2", "target=cpu-4", "num_microbatches=2",
        "model.num_dense_layers=1", "model.load_balancing_weight=0.1",
    ),
    "2 dense layers before one with experts, remat full, balanced": (
        *TWO_STACKS, EXPERT, "mesh.fsdp=1", "mesh.expert=2", "target=cpu-2", "num_microbatches=4",
        "model.num_dense_layers=2", "model.load_balancing_weight=0.1", "remat=full",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    """Gives (initial parameters, a function of them and of microbatches: loss and gradients), without our step."""

    @cache
    def of_model(config):
        model = config.build()
        grad = jax.jit(jax.value_and_grad(partial(objective, model), has_aux=True))
        return jax.tree.map(np.asarray, model.init(jax.random.key(0))), grad

    return lambda plan: of_model(plan.spec.model)


@pytest.mark.parametrize("name", tiered(CASES, plain=(), is_halved=True))
def test_gradients_are_those_of_one_device(name, tokens, reference):
    plan = plan_of(FUSED, *CASES[name])
    params, loss_and_gradients = reference(plan)
    data = plan.spec.data
    documents = documents_of(tokens[0], is_padded=data.may_pad) if data.isolate_documents else {}
    microbatches = without_padding(tokens[0], documents, num_microbatches=plan.spec.num_microbatches)
    (_, loss), grads = loss_and_gradients(params, microbatches)
    our_loss, our_grads = gradients_of(plan, params, tokens[0], documents)
    assert our_loss == pytest.approx(float(loss), rel=2e-6)
    ours = leaves_by_path(our_grads)
    for path, expected in leaves_by_path(grads).items():
        largest = np.abs(expected).max()
        np.testing.assert_allclose(ours[path], expected, atol=4e-6 * largest, rtol=2e-5, err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize(
    "others", [("model.dropout_rate=0.2",), ("adapter=lora", "adapter.rank=4")], ids=["drop", "lora"]
)
def test_dropout_and_frozen_weights_are_those_of_microbatches_one_after_the_other(tokens, others):
    layout = (FSDP, "mesh.fsdp=2", "target=cpu-2", "num_microbatches=2", "remat=full", *others)
    fused, plain = (_with_dropout(plan_of(*layout, *loop), tokens[0]) for loop in ((FUSED,), ()))
    assert fused.keys() == plain.keys()
    for path, expected in plain.items():
        np.testing.assert_allclose(fused[path], expected, atol=4e-6 * np.abs(expected).max(), rtol=2e-5, err_msg=path)


def _with_dropout(plan, tokens):
    """Returns gradients by path, and auxiliary outputs, with a key of dropout."""
    mesh, rows = plan.mesh.of_devices(jax.devices()[:2]), plan.roles.tokens_spec
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(0)))
    noisy = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(0).normal(size=x.shape).astype(x.dtype), params)
    specs = plan.specs["params"]
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), noisy, specs)
    host = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = {name: jax.device_put(x[plan.row_order.rows()], NamedSharding(mesh, rows)) for name, x in host.items()}
    with jax.set_mesh(mesh):
        loss, grads, auxiliary, _ = jax.jit(build_loss(plan, with_gradients=True))(sharded, batch, jax.random.key(7))
    return {"loss": np.asarray(loss), **leaves_by_path(jax.tree.map(np.asarray, {"of": grads, "aux": auxiliary}))}


def test_as_much_is_gathered_and_reduced_as_one_microbatch_after_the_other():
    layout = (FSDP, "num_microbatches=4", "global_batch_size=32", "remat=full", "parallel.embedding=all_gather")
    assert written_collectives(plan_of(FUSED, *layout)) == written_collectives(plan_of(*layout))


def test_two_microbatches_save_into_one_buffer():
    """As much as one microbatch saves: where another would have a buffer of its own, it would be twice as much."""
    layout = (FSDP, "num_microbatches=2", "model.num_layers=16", "sequence_length=512", "remat=full")
    one, fused = (estimate_declared(plan_of(*layout, *loop)).memory.activations for loop in ((), (FUSED,)))
    assert one >= 16 * 512 * 32 * 4  # the inputs of all layers, of one sequence of a device
    assert one <= fused <= 1.1 * one


def test_what_a_fused_loop_does_not_do_is_told_at_once():
    with pytest.raises(ConfigError) as told:
        plan_of(FSDP, FUSED, "overlap.layers.prefetch=1", "overlap.layers.reduce_in_backward=true", "remat=offload")
    keys = {problem.where for problem in told.value.problems}
    loop = "overlap.layers"
    assert keys == {f"{loop}.fuse_microbatches", f"{loop}.prefetch", f"{loop}.reduce_in_backward", "remat"}


def test_stages_order_microbatches_themselves():
    spec = spec_of(FSDP, FUSED, "num_microbatches=2")
    staged = spec.model_copy(update={"mesh": spec.mesh.model_copy(update={"stage": 2})})
    with pytest.raises(ConfigError, match=r"on mesh.stage=2 the pipeline orders microbatches"):
        check_fused(staged)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ((TENSOR, "num_microbatches=2", "global_batch_size=32"), {1, 2}),
        pytest.param(
            (EXPERT, *MOE, "mesh.fsdp=4", "mesh.expert=4", "num_microbatches=2", "global_batch_size=32"),
            {1},
            marks=pytest.mark.ci,
        ),
        pytest.param((TENSOR, "global_batch_size=32"), set(), marks=pytest.mark.ci),  # one microbatch
        # No activation is exchanged.
        pytest.param((FSDP, "num_microbatches=2", "global_batch_size=32"), set(), marks=pytest.mark.ci),
    ],
)
def test_a_search_fuses_microbatches_where_layers_exchange_activations(overrides, parts):
    plan = plan_of("target=v5p-32", *overrides)
    fused = [
        each.way for each in overlap_candidates(plan, estimate_declared(plan)) if each.way.layers.fuse_microbatches
    ]
    assert {way.layers.batch_split for way in fused} == parts
    assert all(way.name.startswith("fused") for way in fused)
