"""Parts of a batch run in turns: each waits for the one before, and computes what it would compute alone."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from conftest import plan_of
from meshloom.compiler.spec.compiler_traits import read_compiler_traits
from meshloom.compiler.step.turns import TurnNames, run_each, run_in_turns, turn_names
from meshloom.compiler.target import target
from support.experts import documents_of, objective, without_padding
from support.pairwise import Pair, all_pairs, cover_pairs, cover_values, pairs_of
from support.programs import Gradients, batch_of
from support.tiers import tiered

NAMES = TurnNames(frozenset({"begin"}), frozenset({"end"}))
TENSOR, BOTH = "sharding=tensor", "sharding=fsdp_tensor"
PARTS = "overlap.layers.batch_split=2"
GPT2 = (
    "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer", "model.mlp=plain",
    "model.biases=all",
)  # fmt: skip
CHOICES = {
    "mesh": {
        "tensor 4x2": (TENSOR, "mesh.data=4", "mesh.tensor=2"),
        "fsdp_tensor 2x2x2": (BOTH, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        "rings": (BOTH, "mesh.fsdp=4", "mesh.tensor=2", "parallel.matmul=collective_matmul"),
    },
    "loop": {"scan": (), "two layers": ("overlap.layers.unroll=2",), "prefetch": ("overlap=prefetch",)},
    "remat": {name: (f"remat={name}",) for name in ("none", "full", "minimal", "save_names")},
    "microbatches": {"1 microbatch": (), "2 microbatches": ("num_microbatches=2",)},
    "documents": {
        "whole sequences": (),
        "packed": ("data.isolate_documents=true",),
        "padded": ("data.isolate_documents=true", "data.packing=first_fit"),
    },
    "family": {"llama": (), "gpt2": GPT2, "groups": ("model.num_layers=4", "model.attention_windows=[4,null]")},
}
VALUES = {choice: list(values) for choice, values in CHOICES.items()}
COVER = {", ".join(row.values()): row for row in cover_pairs(VALUES)}
CASES = {
    name: tuple(override for choice, value in row.items() for override in CHOICES[choice][value])
    for name, row in COVER.items()
}


@pytest.fixture
def ordered(monkeypatch):
    """Simulated devices whose compiler is said to keep the order of barriers."""
    traits = read_compiler_traits("cpu", None).model_copy(update={"orders_by_barriers": True})
    monkeypatch.setattr(target, "read_compiler_traits", lambda *_: traits)


@jax.custom_vjp
def _compute(x):
    return jnp.sin(x)


_compute.defvjp(lambda x: (jnp.sin(x), None), lambda _, gradient: (jnp.tanh(gradient),))


def _layer(x):
    for _ in range(2):
        x = checkpoint_name(_compute(checkpoint_name(2 * x, "begin")), "end") + x
    return {"x": x}


def _chain(jaxpr, name):
    """For each operation of a kind but the first, whether it depends on the one before it."""
    needs, found = {}, []
    for number, each in enumerate(jaxpr.eqns):
        behind = set().union(*(needs.get(id(x), set()) for x in each.invars))
        if each.primitive.name == name:
            found.append((number, behind))
        needs |= {id(x): behind | {number} for x in each.outvars}
    return [earlier[0] in later[1] for earlier, later in pairwise(found)]


@pytest.mark.parametrize(("run", "waits"), [(partial(run_in_turns, NAMES), True), (run_each, False)])
def test_each_turn_waits_for_the_one_before_it_forward_and_backward(run, waits):
    """Two turns of three parts. Of parts that do not wait for each other, each waits for itself alone."""
    parts = tuple(jnp.full(4, float(number)) for number in range(1, 4))

    def total(parts):
        return sum(jnp.sum(each["x"]) for each in run(_layer, parts))

    program = jax.make_jaxpr(jax.grad(total))(parts).jaxpr
    assert all(_chain(program, "sin")) is waits
    assert all(_chain(program, "tanh")) is waits


def test_parts_in_turns_are_what_they_are_alone():
    parts = [{"x": jnp.arange(4.0) + number, "none": None} for number in range(3)]
    run = lambda part: _layer(part["x"])  # noqa: E731
    for ours, alone in zip(run_in_turns(NAMES, run, parts), run_each(run, parts), strict=True):
        np.testing.assert_array_equal(ours["x"], alone["x"])


def test_turns_are_between_what_is_gathered_and_what_is_multiplied_into_partial_results():
    plan = plan_of(BOTH, "mesh.fsdp=4", "mesh.tensor=2")
    own = [each for each in plan.operations if each.site.piece == "layers"]
    expected = TurnNames(frozenset({"attention_input", "mlp_input", "head_input"}), frozenset({"attended", "hidden"}))
    assert turn_names(plan.sharding, own) == expected
    plan = plan_of("sharding=fsdp")
    assert turn_names(plan.sharding, plan.operations) == TurnNames(frozenset(), frozenset())


def test_the_cover_has_every_pair():
    assert set[Pair]().union(*(pairs_of(row) for row in COVER.values())) == set(all_pairs(VALUES))


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("name", tiered(CASES, plain=cover_values(COVER)[:2]), ids=str)
def test_gradients_in_turns_are_those_of_one_device(name, tokens, proof):
    plan = plan_of(*CASES[name], PARTS)
    data = plan.spec.data
    documents = documents_of(tokens[0], is_padded=data.may_pad) if data.isolate_documents else {}
    step = Gradients(plan, batch_of(tokens[0], documents))
    is_alone = "groups" in name and "none" not in name  # layers of a group that are recomputed alone
    assert ("optimization_barrier" in step.parts[0].as_text()) is not is_alone
    if proof.is_known(step.parts):
        return
    params = jax.tree.map(np.asarray, plan.model.init(jax.random.key(plan.spec.seed)))
    alone = without_padding(tokens[0], documents, num_microbatches=1)
    loss, expected = jax.jit(jax.value_and_grad(lambda p: objective(plan.model, p, alone)[0]))(params)
    our_loss, ours = step(params)
    assert our_loss == pytest.approx(float(loss), rel=1e-6)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(ours), strict=True):
        if "key_bias_KD" not in str(path):  # zero but for rounding
            atol = 3e-6 * np.abs(one).max() + 1e-9
            np.testing.assert_allclose(other, one, atol=atol, rtol=2e-5, err_msg=str(path))
