"""The loss: blocks, ignored targets and z-loss against optax and float64; dropout the same on every layout."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import LINEAR_STACK, plan_of
from meshloom.compiler.core.user_code import code_allowed_from
from meshloom.compiler.parallel.loss import sum_losses_in_blocks
from meshloom.models import IGNORED_TARGET, Context
from meshloom.models.loss import cross_entropy_sums, sum_losses
from meshloom.runtime.data import open_data
from support.programs import Gradients, batch_of, lowered_of, on_devices, on_host, programs_of
from support.reference import forward


def head(params, x, _=None):
    return jnp.tanh(x) @ params["kernel"] + params["bias"]


def problem(dtype=jnp.float32):
    draw = np.random.default_rng(0).normal
    params = {"kernel": jnp.asarray(draw(size=(8, 30)), dtype), "bias": jnp.asarray(draw(size=30), dtype)}
    targets = np.random.default_rng(1).integers(0, 30, (3, 12))
    targets[0, 4:7], targets[2] = IGNORED_TARGET, IGNORED_TARGET
    return params, jnp.asarray(draw(size=(3, 12, 8)), dtype), jnp.asarray(targets)


def by_optax(params, x, targets, z_loss_weight):
    logits = head(params, x).astype(jnp.float32)
    each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    log_z = jnp.log(jnp.sum(jnp.exp(logits), -1))
    counted = targets != IGNORED_TARGET
    cross_entropy = jnp.where(counted, each, 0).sum()
    return cross_entropy + z_loss_weight * jnp.where(counted, log_z**2, 0).sum(), cross_entropy


def _summed(num_blocks: int):
    return sum_losses if num_blocks == 1 else partial(sum_losses_in_blocks, num_blocks=num_blocks)


WHOLE, PARTS = [np.s_[:]], [np.s_[:3], np.s_[3:20], np.s_[20:]]


@pytest.mark.parametrize(
    ("vocabulary", "num_blocks", "z_loss_weight"),
    [
        (WHOLE, 1, 0.1),
        (WHOLE, 12, 0.0),
        (PARTS, 1, 0.0),
        (PARTS, 2, 0.1),
        pytest.param(WHOLE, 2, 0.1, marks=pytest.mark.ci),
        pytest.param(PARTS, 12, 0.1, marks=pytest.mark.ci),
    ],
    ids=lambda value: {1: "whole", 3: "in parts"}[len(value)] if isinstance(value, list) else None,
)
def test_loss_and_gradients_in_blocks_are_those_of_optax(vocabulary, num_blocks, z_loss_weight):
    params, x, targets = problem()

    def ours(params, x):
        parts = [jax.tree.map(lambda p, part=part: p[..., part], params) for part in vocabulary]
        return tuple(_summed(num_blocks)(head, parts, x, targets, z_loss_weight=z_loss_weight)[0])

    def expected(params, x):
        return by_optax(params, x, targets, z_loss_weight)

    (losses, of_optax), (got, gradients) = (
        jax.jit(jax.value_and_grad(each, (0, 1), has_aux=True))(params, x) for each in (expected, ours)
    )
    np.testing.assert_allclose(got, losses, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, of_optax)


@pytest.mark.ci
def test_a_heads_gradient_is_added_up_in_float32_over_the_blocks():
    """In bfloat16 each of 12 additions would round; here one rounding remains."""
    params, x, targets = problem(jnp.bfloat16)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, x))

    def gradient(params, x, num_blocks):
        return jax.grad(lambda p: _summed(num_blocks)(head, [p], x, targets, z_loss_weight=0.0)[0][0])(params)

    errors = {}
    for num_blocks in (1, 12):
        ours, exact = gradient(params, x, num_blocks)["kernel"], gradient(wide[0], wide[1], 1)["kernel"]
        errors[num_blocks] = float(jnp.linalg.norm(ours.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
    assert errors[12] < 1.3 * errors[1]


def test_logits_that_are_huge_do_not_overflow():
    for largest, accuracy in ((1e3, 1e-3), (3e38, 2)):
        loss = cross_entropy_sums([jnp.full((1, 1, 4), largest)], jnp.zeros((1, 1), int), z_loss_weight=0.0)
        assert float(loss[0]) == pytest.approx(np.log(4), abs=accuracy)


def test_parts_of_the_tokens_are_whole_in_each_shard_of_the_residual_stream():
    """A bound that no part is within: sequences of 16 tokens go one at a time, shards of 8 one token of each."""
    small = ("model.vocab_size=1024", "loss.max_logits_bytes=1")
    assert plan_of("sharding=fsdp", *small).operation("loss").chosen.parameters == 16
    assert plan_of("sharding=fsdp_tensor", "mesh.tensor=2", *small).operation("loss").chosen.parameters == 8


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout",
    [("sharding=fsdp_tensor", "num_microbatches=2"), pytest.param(("sharding=fsdp",), marks=pytest.mark.release)],
)
def test_the_declared_bound_holds_for_the_logits_of_the_compiled_step(layout, tokens, proof):
    """No float32 array of the program is as large as the logits of the whole microbatch; loss and gradients stay."""
    whole, blocked = plan_of(*layout, "model.vocab_size=1024"), plan_of(*layout, "model.vocab_size=1024", "loss.max_logits_bytes=16384")  # fmt: skip  # noqa: E501
    assert whole.operation("loss").chosen.parameters == 1
    assert blocked.operation("loss").chosen.parameters > 1
    shards = whole.mesh.num_shards(whole.sharding.roles.tokens)
    vocab = 1024 // whole.mesh.sizes["tensor"]
    sequences = 16 // shards // whole.spec.num_microbatches
    steps = [Gradients(plan, batch_of(tokens[0])) for plan in (whole, blocked)]
    trains = [lowered_of(plan, "train") for plan in (whole, blocked)]
    if proof.is_known(trains, [step.parts for step in steps], f"{sequences} {vocab}"):
        return
    params = whole.model.init(jax.random.key(0))
    for plan, is_there in ((whole, True), (blocked, False)):
        sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in
                 re.findall(r"f32\[([\d,]+)\]", programs_of(plan)["train"].as_text()) if str(vocab) in shape.split(",")
                 and "32" not in shape.split(",")]  # 32: the embed dimension of a weight  # fmt: skip
        assert (max(sizes) >= sequences * 16 * vocab) == is_there
    losses, gradients = zip(*(step(params) for step in steps), strict=True)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *gradients)


def losses_of(*plans, batches, proof):
    """Returns the losses of steps of each plan; None if it is known what the test finds of them."""
    programs = [programs_of(plan) for plan in plans]
    inputs = [[on_host(each, batch) for batch in batches] for each in programs]
    if proof.is_known([lowered_of(plan, "init", "train") for plan in plans], inputs):
        return None
    found = []
    for each in programs:
        state, losses = each["init"](), []
        for batch in batches:
            state, metrics = each["train"](state, on_devices(each, batch))
            losses.append(float(metrics["loss"]))
        found.append(losses)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("sharding=fsdp_tensor", "num_microbatches=2", "remat=full"), marks=pytest.mark.ci),
        pytest.param(("sharding=fsdp_tensor", "overlap.layers.batch_split=2"), marks=pytest.mark.release),
        pytest.param(("sharding=fsdp",), marks=pytest.mark.release),
        pytest.param(("sharding=tensor",), marks=pytest.mark.release),
    ],
)
def test_dropout_is_the_same_on_every_layout_and_other_in_every_step(layout, tokens, proof):
    """What is dropped belongs to the step, the sequence and the layer: not to the devices that compute them."""
    rate = ("model.dropout_rate=0.3", "optimizer.learning_rate=1e-12")
    plans = (plan_of("target=cpu-1", *rate), plan_of(*layout, *rate))
    if losses := losses_of(*plans, batches=[tokens[0]] * 4, proof=proof):
        one, ours = losses
        assert len(set(one)) == 4
        np.testing.assert_allclose(ours, one, rtol=1e-6)


@pytest.mark.ci
def test_another_seed_drops_otherwise(tokens, proof):
    rate = ("target=cpu-1", "model.dropout_rate=0.3", "optimizer.learning_rate=1e-12")
    plans = (plan_of(*rate, f"seed={seed}") for seed in (0, 1))
    if losses := losses_of(*plans, batches=[tokens[0]], proof=proof):
        ((one,), (other,)) = losses
        assert one != pytest.approx(other, rel=1e-6)


@pytest.mark.ci
def test_each_sequence_drops_by_a_key_of_its_own(tokens, proof):
    """One sequence, 16 times in a batch: of two of them, each alone with targets, the losses differ."""
    plan, losses = plan_of("target=cpu-1", "model.dropout_rate=0.3", "optimizer.learning_rate=1e-12"), []
    if proof.is_known(lowered_of(plan, "init", "train")):
        return
    programs = programs_of(plan)
    for row in (0, 1):
        targets = np.full((16, 16), IGNORED_TARGET, np.int32)
        targets[row] = tokens[0, 0, 1:]
        batch = {"inputs": np.tile(tokens[0, 0, :-1], (16, 1)), "targets": targets}
        on_mesh = {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}
        losses.append(float(programs["train"](programs["init"](), on_mesh)[1]["loss"]))
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_dropout_keeps_the_declared_share_and_the_mean():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(64))
    context = Context(jnp.arange(16)[None], lambda name, x, *axes, **_: x, dropout_keys_B=keys)
    dropped = context.dropout(jnp.ones((64, 16, 32)), 0.25, site=0)
    assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert not np.array_equal(dropped, context.dropout(jnp.ones((64, 16, 32)), 0.25, site=1))


@pytest.mark.ci
def test_ignored_targets_do_not_count(tokens, proof):
    """The loss is the mean over the targets that count, wherever they lie: uneven over devices and microbatches."""
    batch = np.array(tokens[0])
    arrays = {"inputs": batch[:, :-1], "targets": batch[:, 1:].copy()}
    arrays["targets"][3:11, 2:] = IGNORED_TARGET
    layouts, results = (("target=cpu-1",), ("sharding=fsdp", "num_microbatches=2"), ("sharding=fsdp_tensor",)), []
    plans = [plan_of(*layout) for layout in layouts]
    if proof.is_known([lowered_of(plan, "init", "train", "evaluate") for plan in plans]):
        return
    for programs in map(programs_of, plans):
        state = programs["init"]()
        on_mesh = {n: jax.device_put(arrays[n], x.sharding) for n, x in programs.batch.items()}
        loss, num_targets = programs["evaluate"](state["params"], on_mesh)
        metrics = programs["train"](state, on_mesh)[1]
        assert int(num_targets) == 16 * 16 - 8 * 14
        assert float(metrics["loss"]) == pytest.approx(float(loss / num_targets), rel=1e-6)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(results, [results[0]] * 3, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("sharding=fsdp", "num_microbatches=2"), marks=pytest.mark.release),
        pytest.param(("sharding=fsdp_tensor", "remat=full", "overlap.layers.batch_split=2"), marks=pytest.mark.ci),
    ],
)
def test_packed_documents_train_as_if_each_were_alone(layout, proof):
    """Real batches with segment ids and positions: the loss is that of every document in a sequence of its own."""
    plan = plan_of(*layout, "data.isolate_documents=true", "data.packing=first_fit", "sequence_length=64",
                   "model.positions=learned", "model.rope_theta=null", "model.num_positions=64")  # fmt: skip
    programs, batch = programs_of(plan), next(iter(open_data(plan.spec)["train"]))
    assert set(programs.batch) == {"inputs", "targets", "positions", "segment_ids"}
    arrays = {name: np.asarray(batch[name]) for name in programs.batch}
    if proof.is_known(lowered_of(plan, "init", "evaluate"), arrays):
        return
    params = programs["init"]()["params"]
    on_mesh = {name: jax.device_put(batch[name], x.sharding) for name, x in programs.batch.items()}
    loss, num_targets = programs["evaluate"](params, on_mesh)
    whole = jax.tree.map(jnp.asarray, jax.device_get(params))
    expected, count = 0.0, 0
    for row in range(2, 16, 5):  # of some sequences only, against the same sequences with all others ignored
        for document in set(batch["segment_ids"][row]) - {0}:
            where = np.flatnonzero(batch["segment_ids"][row] == document)
            targets = batch["targets"][row, where]
            logits = forward(plan.model, whole, jnp.asarray(batch["inputs"][row : row + 1, where]))[0]
            each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            expected += float(jnp.where(targets != IGNORED_TARGET, each, 0).sum())
            count += int((targets != IGNORED_TARGET).sum())
    others = np.setdiff1d(np.arange(16), np.arange(2, 16, 5))
    batch["targets"] = batch["targets"].copy()
    batch["targets"][others] = IGNORED_TARGET
    on_mesh["targets"] = jax.device_put(batch["targets"], programs.batch["targets"].sharding)
    part, num_part = programs["evaluate"](params, on_mesh)
    assert int(num_part) == count < int(num_targets)
    assert float(part) == pytest.approx(expected, rel=1e-5)
    assert float(loss) > float(part)


def test_each_layer_drops_by_a_key_of_its_own():
    """Of two layers that drop half: half of the elements are kept by one of them, none if both drop the same."""
    model = (*LINEAR_STACK, "model.family=support.dropping:DroppingConfig", "model.num_layers=2", "~model.embed_dim")
    with code_allowed_from(["support.dropping"]):
        programs = programs_of(plan_of("target=cpu-1", *model))
    batch = {name: jnp.zeros(x.shape, jnp.int32) for name, x in programs.batch.items()}
    assert float(programs["train"](programs["init"](), batch)[1]["loss"]) < 1e-6
