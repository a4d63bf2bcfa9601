"""Experts over a mesh: each exchange, with each sharding and loop, trains as one device does in float32."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from conftest import plan_of, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import combined, leaves_by_path
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.sharding.model_check import check_model, check_totals
from meshloom.compiler.spec.compiler_traits import read_compiler_traits
from meshloom.compiler.step.train_step import build_train_step
from meshloom.models import Aux, Context, Measure, UpdateRule, split_aux
from meshloom.runtime.weights.folder import match_saved
from support.collectives import written_collectives
from support.experts import MOE, documents_of, emulated_ragged_all_to_all, objective, without_padding
from support.pairwise import all_pairs, cover_pairs, cover_values, pairs_of
from support.programs import Gradients, batch_of, lowered_of, on_devices, on_host, programs_of
from support.reference import reference_steps
from support.tiers import tiered

EXPERT = ("sharding=fsdp_expert", "target=cpu-4", "mesh.fsdp=2", "mesh.expert=2")
PADDED, GATHERED, CAPACITY, RAGGED, DEDUPLICATED, HIERARCHICAL = (
    f"parallel.experts={name}" for name in ("padded", "gathered", "capacity", "ragged", "deduplicated", "hierarchical")
)
DEEP = (
    "model.num_dense_layers=1", "model.dense_mlp_dim=48", "model.num_shared_experts=2", "model.router_scores=sigmoid",
    "model.num_expert_groups=4", "model.num_groups_per_token=2", "model.router_scale=2.5", "model.num_experts=16",
)  # fmt: skip
LATENT = (
    "model.num_kv_heads=16", "model.latent_attention={query_dim:24,kv_dim:16,rope_head_dim:4,value_head_dim:6}",
)  # fmt: skip
LEVELS = {
    "mesh": {
        "fsdp 2, expert 2": EXPERT,
        "replica 2, expert 2": (*EXPERT[:2], "mesh.fsdp=1", "mesh.replica=2", "mesh.expert=2"),
        "context 2, expert 2": (*EXPERT[:2], "mesh.fsdp=1", "mesh.context=2", "mesh.expert=2"),
        "fsdp 2, expert 2, tensor 2": ("sharding=fsdp_expert", "mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"),
    },
    "exchange": {"padded": (PADDED,), "gathered": (GATHERED,), "ragged": (RAGGED,),
                 "deduplicated": (DEDUPLICATED,),
                 "capacity": (CAPACITY, "moe.capacity_factor=8")},  # room for all
    "remat": {"kept": (), "full": ("remat=full",), "dots": ("remat=save_dots",)},
    "cut": {"whole": (), "2 chunks": ("moe.num_chunks=2",), "2 parts": ("overlap.layers.batch_split=2",)},
    "loop": {"scan": (), "prefetch": ("overlap=prefetch",)},
    "microbatches": {"1": (), "2": ("num_microbatches=2",)},
    "documents": {"one": (), "packed": ("data.isolate_documents=true",),
                  "padded": ("data.isolate_documents=true", "data.packing=first_fit")},
    "family": {"mixtral": (), "deepseek": (*DEEP, *LATENT, "model.router_bias_update_rate=0.0")},
}  # fmt: skip


COVER = cover_pairs({factor: tuple(levels) for factor, levels in LEVELS.items()})
ROWS = {"; ".join(row.values()): row for row in COVER}
CASES = {
    "zero2 2x2, prefetch": ("sharding=zero2", "target=cpu-4", "mesh.data=4", "overlap=prefetch"),
    "fsdp_tensor 2x2, remat full": ("sharding=fsdp_tensor", "target=cpu-4", "remat=full"),
    "padded, replica 2, prefetch, in backward, 2 microbatches of 2 parts, with padding": (
        *EXPERT[:2], "mesh.fsdp=1", "mesh.replica=2", "mesh.expert=2", PADDED, "overlap=prefetch",
        "overlap.layers.reduce_in_backward=true", *LEVELS["documents"]["padded"], "num_microbatches=2",
        "overlap.layers.batch_split=2",
    ),
    "deduplicated by a ragged exchange, remat full, 2 chunks, 2 microbatches, with padding": (
        *EXPERT, DEDUPLICATED, *LEVELS["documents"]["padded"], "remat=full", "moe.num_chunks=2", "num_microbatches=2",
    ),
    "hierarchical over two nodes of 2 devices, remat full, 2 chunks, with padding": (
        *EXPERT[:2], "mesh.fsdp=1", "mesh.expert=4", HIERARCHICAL, *LEVELS["documents"]["padded"], "remat=full",
        "moe.num_chunks=2",
    ),
    "gathered, imbalance that fits": (*EXPERT, GATHERED, "moe.max_imbalance=1.9"),
    **{
        name: tuple(override for factor, level in row.items() for override in LEVELS[factor][level])
        for name, row in ROWS.items()
    },
}  # fmt: skip
CI = [*(name for name in CASES if name not in ROWS), *cover_values(ROWS)]


@pytest.fixture
def plan_for(monkeypatch):
    """The plan of a case. CPUs have no ragged all-to-all: it is emulated."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jax.numpy.full(shape, np.nan, dtype))

    def traits(*target):
        return read_compiler_traits(*target).model_copy(update={"ragged_all_to_all": True})

    def make(name):
        if "ragged" not in name:
            return plan_of(*MOE, *CASES[name])
        monkeypatch.setattr("meshloom.compiler.target.target.read_compiler_traits", traits)
        return plan_run(spec_of(*MOE, *CASES[name]))

    return make


@pytest.fixture(scope="module")
def reference():
    """Gives, by model, (initial parameters, (parameters, tokens, documents) -> (loss, gradients)), on one device
    without any of our step. A microbatch is so many sequences of the batch, whatever the mesh."""

    @cache
    def of_model(config, num_microbatches):
        model = config.build()
        grad = jax.jit(jax.value_and_grad(partial(objective, model), has_aux=True))

        def loss_and_gradients(params, tokens, documents):
            microbatches = without_padding(tokens, documents, num_microbatches=num_microbatches)
            (_, loss), grads = grad(params, microbatches)
            return loss, grads

        return jax.tree.map(np.asarray, model.init(jax.random.key(0))), loss_and_gradients

    return lambda plan: of_model(plan.spec.model, plan.spec.num_microbatches)


def test_the_cover_has_every_pair():
    factors = {factor: tuple(levels) for factor, levels in LEVELS.items()}
    assert set().union(*map(pairs_of, COVER)) == set(all_pairs(factors))
    assert len(COVER) == 21  # four meshes with five exchanges need 20


@pytest.mark.parametrize("name", tiered(CASES, plain=(), ci=CI))
def test_gradients_are_those_of_one_device(name, tokens, reference, plan_for, proof):
    plan = plan_for(name)
    data = plan.spec.data
    documents = documents_of(tokens[0], is_padded=data.may_pad) if data.isolate_documents else {}
    step = Gradients(plan, batch_of(tokens[0], documents))
    if proof.is_known(step.parts, sorted(plan.sharding.trained)):
        return
    params, loss_and_gradients = reference(plan)
    if "router_bias_X" in params["layers"]["mlp"]:  # starts at zero
        bias = np.random.default_rng(1).normal(0, 0.1, params["layers"]["mlp"]["router_bias_X"].shape)
        params = combined(params, {"layers": {"mlp": {"router_bias_X": bias.astype(np.float32)}}})
    loss, grads = loss_and_gradients(params, tokens[0], documents)
    our_loss, our_grads = step(params)
    assert our_loss == pytest.approx(float(loss), rel=2e-6)
    ours_by_path = leaves_by_path(our_grads)
    assert set(ours_by_path) == set(plan.sharding.trained)
    for path, expected in leaves_by_path(grads).items():
        if path not in ours_by_path:
            assert not np.any(expected), path
            continue
        ours = ours_by_path[path]
        np.testing.assert_allclose(ours, expected, atol=4e-6 * np.abs(expected).max(), rtol=2e-5, err_msg=path)


TEN_STEPS = ("fsdp 2, expert 2; padded; kept; whole; scan; 1; one; mixtral",
             "replica 2, expert 2; ragged; kept; 2 chunks; prefetch; 1; one; mixtral",
             "replica 2, expert 2; gathered; kept; whole; prefetch; 2; one; mixtral",
             "context 2, expert 2; deduplicated; full; 2 parts; scan; 2; one; mixtral",
             "context 2, expert 2; capacity; dots; 2 chunks; scan; 1; one; mixtral")  # fmt: skip


@pytest.mark.parametrize("name", tiered(TEN_STEPS, plain=(), ci=[TEN_STEPS[1], TEN_STEPS[3]]))
def test_ten_steps_are_those_of_one_device(name, tokens, reference, plan_for, proof):
    plan = plan_for(name)
    programs, order = programs_of(plan), plan.batch.token_order.of_sequence(16)
    inputs = [on_host(programs, batch, order) for batch in tokens]
    if proof.is_known(lowered_of(plan, "init", "train"), inputs):
        return
    params, loss_and_gradients = reference(plan)
    _, curve = reference_steps(plan.spec, params, tokens, lambda now, batch: loss_and_gradients(now, batch, {}))
    state, ours = programs["init"](), []
    for batch in tokens:
        state, metrics = programs["train"](state, on_devices(programs, batch, order))
        ours.append([float(metrics[key]) for key in ("loss", "grad_norm", "learning_rate")])
        assert not metrics["layers/dropped"].any()
    np.testing.assert_allclose(np.array(ours), curve, rtol=5e-4, atol=1e-7)


PADDED_DOCUMENTS = LEVELS["documents"]["padded"]


@pytest.mark.ci
def test_metrics_say_how_evenly_tokens_are_spread_and_what_is_dropped(tokens):
    """From the router's own choices, layer by layer, in NumPy: of the whole batch, and without its padding."""
    plan = plan_of(*MOE, *EXPERT, CAPACITY, "moe.capacity_factor=0.5", "num_microbatches=2", *PADDED_DOCUMENTS)
    programs, documents = programs_of(plan), documents_of(tokens[0], is_padded=True)
    state, is_token = programs["init"](), documents["segment_ids"] > 0
    params = jax.tree.map(np.asarray, state["params"])
    host = {"inputs": tokens[0][:, :-1], **documents}
    rows = plan.batch.row_order.rows()
    batch = {name: jax.device_put(host[name][rows], x.sharding) for name, x in programs.batch.items()}
    _, metrics = programs["train"](state, batch)
    seen = []

    def recorded(kind, _, plain, *operands, **options):
        if kind == "experts":
            seen.append(np.asarray(operands[2]))
            x, weights, ids, *matrices = operands
            kept = np.where(_cleared(ids, is_token), 0, weights)
            return plain(x, kept, ids, *matrices, **options)
        return plain(*operands, **options)

    positions, ids = jax.numpy.asarray(documents["positions"]), jax.numpy.asarray(documents["segment_ids"])
    context = Context(positions, lambda name, x, *axes, **_: x, recorded, ids)
    x = plan.model.embed.apply(params["embed"], tokens[0][:, :-1], context)
    (stack,) = plan.model.stacks
    for i in range(stack.num_layers):
        x, _ = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
    counts = np.array([np.bincount(ids[is_token].reshape(-1), minlength=8) for ids in seen])
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-20))).sum(1) / math.log(8)
    np.testing.assert_allclose(metrics["layers/expert_load"], shares.max(1) * 8, rtol=1e-5)
    np.testing.assert_allclose(metrics["layers/expert_entropy"], entropy, rtol=1e-5)
    dropped = np.array([_cleared(ids, is_token)[is_token].mean() for ids in seen])
    assert 0.1 < dropped.mean() < 0.9
    np.testing.assert_allclose(metrics["layers/dropped"], dropped, rtol=1e-5)
    assert int(metrics["num_padding"]) == (~is_token).sum() > 50


def _cleared(ids, is_token):
    """True for the choices that 4 devices drop, each with room for half of the mean of its 2 sequences x 16 tokens of
    each of 2 microbatches; padding takes no room."""
    ids, rows, cleared = np.asarray(ids), 2 * 16 * 2 // 8 // 2, np.zeros(ids.shape, bool)
    for first in range(0, 16, 2):  # of 8 sequences of a microbatch, 2 on each device
        used = Counter()
        for k in range(2):
            for at in np.ndindex(2, 16):
                place = (first + at[0], at[1], k)
                if is_token[place[:2]]:
                    used[ids[place]] += 1
                    cleared[place] = used[ids[place]] > rows
    return cleared


BALANCED = (*DEEP, "model.router_bias_update_rate=0.01", "model.num_layers=3")
BALANCES = {
    "one device": ("target=cpu-1", "mesh.fsdp=1"),
    "padded, 2 microbatches, remat full, prefetch": (
        *EXPERT, PADDED, "num_microbatches=2", "remat=full", "overlap=prefetch",
    ),
    "gathered, tensor 2, 2 parts of the batch": (
        *EXPERT[:2], "mesh.fsdp=1", "mesh.expert=2", "mesh.tensor=2", GATHERED, "overlap.layers.batch_split=2",
    ),
    "2 stages, a dense layer and one of experts, and one of experts": (
        *EXPERT[:2], "mesh.fsdp=1", "mesh.expert=2", "mesh.stage=2", "num_microbatches=4", "pipeline.layers=[2,1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(BALANCES, plain=()))
def test_a_bias_follows_the_tokens_of_the_whole_batch(name, tokens, proof):
    """Three steps; the choices are those of one device without our step, the rule is written in NumPy."""
    plan = plan_of(*MOE, *BALANCED, *BALANCES[name])
    programs = programs_of(plan)
    assert not [path for path in leaves_by_path(plan.abstract["optimizer"]) if "router_bias" in path]
    if proof.is_known(lowered_of(plan, "init", "train"), [on_host(programs, batch) for batch in tokens[:3]]):
        return
    choices = _choices_of(plan.model)
    state, expected = programs["init"](), np.zeros((2, 16), np.float32)
    for batch in tokens[:3]:
        chosen = choices(jax.tree.map(np.asarray, state["params"]), batch[:, :-1], {})
        counts = np.stack([np.bincount(np.asarray(ids).reshape(-1), minlength=16) for ids in chosen])
        expected += np.float32(0.01) * np.sign(counts.mean(1, keepdims=True) - counts).astype(np.float32)
        state, _ = programs["train"](state, on_devices(programs, batch))
        np.testing.assert_array_equal(state["params"]["layers"]["mlp"]["router_bias_X"], expected)
    assert len(np.unique(expected)) > 3


def test_a_frozen_bias_stays_and_a_wrong_rule_is_an_error():
    frozen = plan_of(*MOE, *BALANCED, "frozen_parameters=[layers/mlp/router_bias_X]")
    how = {plan.array.path: plan.array.updated_by for plan in frozen.sharding.parameters}
    assert how["layers/mlp/router_bias_X"] == "nothing"
    model = plan_of(*MOE, *BALANCED).model
    *_, stack = model.stacks
    aux = Aux(totals={"tokens": jax.numpy.ones(16)})
    grown = {"mlp/router_bias_X": UpdateRule("tokens", lambda bias, tokens: bias[:3] + tokens[:3])}
    for rules, words in ((stack.rules, "reads the total 'expert_tokens'"), (grown, "makes an array of shape (3)")):
        with pytest.raises(ConfigError, match=re.escape(words)):
            check_totals(replace(stack, rules=rules, measures={}), aux)
    for of, total, words in (
        (lambda tokens: tokens.max(), "load", "the measure 'load' of stack 'layers' reads the total 'load'"),
        (lambda tokens: tokens, "tokens", "the measure 'load' of stack 'layers' is not a scalar"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            check_totals(replace(stack, rules={}, measures={"load": Measure(total, of)}), aux)
    unknown = replace(stack, rules={"mlp/bias": UpdateRule("tokens", lambda bias, tokens: bias)})
    with pytest.raises(ConfigError, match="has a rule for 'mlp/bias'"):
        check_model("moe", replace(model, stacks=(unknown,)))


GLOBAL = (*DEEP, "model.num_layers=3", "model.load_balancing_weight=0.3", "model.load_balancing_counts=global")
COUNTS = {
    "one device": ("target=cpu-1", "mesh.fsdp=1"),
    "padded, 4 microbatches, remat full, prefetch": (
        *EXPERT, PADDED, "num_microbatches=4", "remat=full", "overlap=prefetch",
    ),
    "2 stages of 4 microbatches, padding": (
        *EXPERT[:2], "mesh.fsdp=1", "mesh.expert=2", "mesh.stage=2", "num_microbatches=4", "pipeline.layers=[2,1]",
        *LEVELS["documents"]["padded"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(COUNTS, plain=()))
def test_a_loss_of_global_counts_is_that_of_the_whole_batch(name, tokens, proof):
    """Gradients of the second step, whatever the microbatches and stages, are those of one device that sees all tokens
    at once, with the shares of the first step's choices, counted in NumPy."""
    plan = plan_of(*MOE, *GLOBAL, *COUNTS[name])
    documents = documents_of(tokens[0], is_padded=True) if plan.spec.data.may_pad else {}
    step, programs = Gradients(plan, batch_of(tokens[1], documents)), programs_of(plan)
    first = batch_of(tokens[0], documents)
    if proof.is_known(lowered_of(plan, "init", "train"), first, step.parts):
        return
    state = programs["init"]()
    params = jax.tree.map(np.asarray, state["params"])
    np.testing.assert_array_equal(params["layers"]["mlp"]["counted"]["shares_X"], np.full((2, 16), 1 / 16, np.float32))
    chosen = _choices_of(plan.model)(params, tokens[0][:, :-1], documents)
    is_token = documents["segment_ids"] > 0 if documents else np.ones(tokens[0][:, 1:].shape, bool)
    counts = np.stack([np.bincount(np.asarray(ids)[is_token].reshape(-1), minlength=16) for ids in chosen])
    rows = plan.batch.row_order.rows()
    placed = {name: jax.device_put(first[name][rows], x.sharding) for name, x in programs.batch.items()}
    state, _ = programs["train"](state, placed)
    after = jax.tree.map(np.asarray, state["params"])
    shares = counts / counts.sum(1, keepdims=True)
    np.testing.assert_allclose(after["layers"]["mlp"]["counted"]["shares_X"], shares, rtol=1e-6)
    assert 16 * np.square(shares).sum(1).min() > 1.05  # not even: the loss has a gradient
    whole = without_padding(tokens[1], documents, num_microbatches=1)
    (_, loss), expected = jax.jit(jax.value_and_grad(partial(objective, plan.model), has_aux=True))(after, whole)
    ours_loss, ours = step(after)
    assert ours_loss == pytest.approx(float(loss), rel=2e-6)
    ours, expected = leaves_by_path(ours), leaves_by_path(expected)
    assert set(ours) == set(plan.sharding.trained) == set(expected) - {"layers/mlp/counted/shares_X"}
    for path, found in ours.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(found, expected[path], atol=4e-6 * scale, rtol=2e-5, err_msg=path)


def test_counts_are_no_weights():
    """They are not frozen with weights, weights may come without them, and adapters refuse them."""
    path, patterns = "layers/mlp/counted/shares_X", "frozen_parameters=[layers/mlp/*,embed/*]"
    plan = plan_of(*MOE, *GLOBAL, patterns)
    how = {each.array.path: each.array.updated_by for each in plan.sharding.parameters}
    assert (how[path], how["layers/mlp/router_EX"], how["layers/attention/out_HDE"]) == ("rule", "nothing", "optimizer")
    with pytest.raises(ConfigError, match="adapters are saved without it"):
        plan_of(*MOE, *GLOBAL, "adapter=lora")
    with pytest.raises(ConfigError, match="no parameter matches 'layers/mlp/counted"):
        plan_of(*MOE, *GLOBAL, "frozen_parameters=[layers/mlp/counted/*]")
    with pytest.raises(ConfigError, match="load_balancing_weight=0 does not use it"):
        spec_of(*MOE, "model.load_balancing_weight=0", "model.load_balancing_counts=global")
    *others, stack = plan.model.stacks
    with pytest.raises(ConfigError, match="no rule updates it"):
        check_model("moe", replace(plan.model, stacks=(*others, replace(stack, rules={}))))
    params = leaves_by_path(plan.abstract["params"])
    others = {name: x for name, x in params.items() if name != path}
    assert match_saved("there", others, params, ()) == tuple(others)
    assert match_saved("there", params, others, ()) == tuple(others)
    assert match_saved("there", params, params, ()) == tuple(params)


def _choices_of(model):
    """Returns (parameters, inputs, documents) -> the experts that tokens choose, by layer, on one device."""

    @jax.jit
    def choices(params, inputs, documents):
        seen = []

        def recorded(kind, _, plain, *operands, **options):
            seen.extend([operands[2]] if kind == "experts" else [])
            return plain(*operands, **options)

        positions, ids = documents.get("positions", jax.numpy.arange(16)[None]), documents.get("segment_ids")
        context = Context(positions, lambda name, x, *axes, **_: x, recorded, ids)
        x = model.embed.apply(params["embed"], inputs, context)
        for stack in model.stacks:
            for i in range(stack.num_layers):
                x, _ = split_aux(stack.layer.apply(jax.tree.map(lambda w, i=i: w[i], params[stack.name]), x, context))
        return seen

    return choices


@pytest.mark.parametrize("name", tiered(["padded", "gathered", "capacity"], plain=["padded"]))
def test_an_exchange_has_the_collectives_that_its_strategy_promises(name):
    """Of a layer, forward and backward; experts' gradients are never summed over the devices that have others."""
    plan = plan_of(*MOE, *EXPERT, f"parallel.experts={name}", "moe.num_chunks=2")
    without = plan_of(*MOE, *EXPERT, f"parallel.experts={name}")
    promised = Counter[str]()
    for each in plan.operation("experts").chosen.collectives:
        promised[each.kind] += 3 * each.count  # layers
    half = Counter({kind: count // 2 for kind, count in promised.items()})  # what a second chunk adds
    both, one = (written_collectives(each)[0] for each in (plan, without))
    assert both - one == half


def test_experts_are_gathered_over_fsdp_alone_and_other_weights_over_both():
    plan = plan_of(*MOE, *EXPERT, GATHERED)
    planned = estimate_step(plan).communication
    of = {
        each.origin.name: each.mesh_axes
        for each in planned
        if each.kind == "all-gather" and each.origin.name.startswith("layers/")
    }
    assert of["layers/mlp/up_XEM"] == ("fsdp",)
    assert of["layers/attention/query_EHD"] == ("fsdp", "expert")
    scattered = {each.origin.name: each.mesh_axes for each in planned if each.kind == "reduce-scatter"}
    assert scattered["layers/mlp/down_XME"] == ("fsdp",)
    assert plan.weights["layers"]["mlp"]["up_XEM"].reduced == ()
    with_data = plan_of(*MOE, *EXPERT[:2], "mesh.fsdp=1", "mesh.data=2", "mesh.expert=2", GATHERED)
    assert with_data.weights["layers"]["mlp"]["up_XEM"].reduced == ("data",)
    assert with_data.weights["layers"]["attention"]["query_EHD"].reduced == ("data",)


def test_a_router_is_float32_in_any_precision():
    """Stored, gathered, and after an update; the other weights are bfloat16."""
    plan = plan_of(*MOE, *BALANCED, "sharding=fsdp", "target=cpu-2", "mesh.fsdp=2", "precision=bfloat16_pure")
    types = {path: str(x.dtype) for path, x in leaves_by_path(plan.abstract["params"]).items()}
    assert [path for path, dtype in types.items() if dtype == "float32"] == [
        "layers/mlp/router_EX",
        "layers/mlp/router_bias_X",
    ]
    with jax.set_mesh(plan.mesh.of_devices(jax.devices()[:2])):
        batch = {name: jax.ShapeDtypeStruct((16, 16), "int32") for name in ("inputs", "targets")}
        traced = jax.jit(build_train_step(plan)).trace(plan.abstract, batch)
    state, _ = traced.out_info
    assert {path: str(x.dtype) for path, x in leaves_by_path(state["params"]).items()} == types
    gathered = re.findall(r"all_gather.*?-> tensor<([\dx]*)x(\w+)>", traced.lower().as_text())
    assert {dtype for shape, dtype in gathered if shape == "32x16"} == {"f32"}
    assert {dtype for shape, dtype in gathered if shape != "32x16"} == {"bf16", "i32"}


def test_a_step_may_have_more_tokens_than_an_int32_has_numbers():
    """2^32 of them; `tune` traces steps of as many microbatches as tell what grows with them."""
    plan = plan_of(*MOE, *EXPERT, "sequence_length=16", f"global_batch_size={2**28}", "num_microbatches=64")
    assert plan.spec.tokens_per_step == 2**32
    try:
        estimate_step(plan)
    except OverflowError as error:
        pytest.fail(f"{error}")
