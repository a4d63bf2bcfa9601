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

NAMES = TurnNames(frozenset({"begin"}), frozenset({"end"}), frozenset({"sum"}))
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


def _needs(jaxpr):
    """The numbers of the operations that each operation depends on."""
    of_variable, of_operation = {}, []
    for number, each in enumerate(jaxpr.eqns):
        behind = set().union(*(of_variable.get(id(x), set()) for x in each.invars))
        of_operation.append(behind)
        of_variable |= {id(x): behind | {number} for x in each.outvars}
    return of_operation


def _numbers(jaxpr, name):
    return [number for number, each in enumerate(jaxpr.eqns) if each.primitive.name == name]


def _chain(jaxpr, name):
    """For each operation of a kind but the first, whether it depends on the one before it."""
    needs = _needs(jaxpr)
    return [earlier in needs[later] for earlier, later in pairwise(_numbers(jaxpr, name))]


@pytest.mark.parametrize(("run", "waits"), [(partial(run_in_turns, NAMES), True), (run_each, False)])
def test_each_turn_waits_for_the_one_before_it_forward_and_backward(run, waits):
    """Two turns of three parts. Of parts that do not wait for each other, each waits for itself alone."""
    parts = tuple(jnp.full(4, float(number)) for number in range(1, 4))

    def total(parts):
        return sum(jnp.sum(each["x"]) for each in run(_layer, parts))

    program = jax.make_jaxpr(jax.grad(total))(parts).jaxpr
    assert all(_chain(program, "sin")) is waits
    assert all(_chain(program, "tanh")) is waits


def _summed_layer(x):
    """Two turns, each of a gather (2 x), a first matmul (sin), the rest (cos), a product (exp) and its sum (tan)."""
    for _ in range(2):
        made = checkpoint_name(jnp.sin(checkpoint_name(2 * x, "begin")), "made")
        x = x + checkpoint_name(jnp.tan(jnp.exp(checkpoint_name(jnp.cos(made), "end"))), "sum")
    return {"x": x}


def test_a_sum_runs_beside_the_first_matmul_of_the_next_turn_and_a_gather_beside_the_rest():
    """What runs beside each other needs neither the other; what follows needs both."""
    parts = tuple(jnp.full(4, float(number)) for number in (1, 2))
    program = jax.make_jaxpr(partial(run_in_turns, NAMES, _summed_layer))(parts).jaxpr
    needs = _needs(program)
    gathers, first, rest, products, sums = (_numbers(program, name) for name in ("mul", "sin", "cos", "exp", "tan"))
    for last, turn in pairwise(range(4)):
        assert first[turn] not in needs[sums[last]]
        assert sums[last] not in needs[first[turn]]
        assert sums[last] in needs[rest[turn]]
    for last, turn, following in ((0, 1, 2), (1, 2, 3)):  # the last part's turn comes before the first part's next one
        assert first[turn] in needs[gathers[following]]
        assert sums[last] in needs[gathers[following]]
    assert gathers[2] not in needs[products[1]]
    assert products[1] not in needs[gathers[2]]


def test_parts_in_turns_are_what_they_are_alone():
    parts = [{"x": jnp.arange(4.0) + number, "none": None} for number in range(3)]
    run = lambda part: _layer(part["x"])  # noqa: E731
    for ours, alone in zip(run_in_turns(NAMES, run, parts), run_each(run, parts), strict=True):
        np.testing.assert_array_equal(ours["x"], alone["x"])


def test_turns_are_between_what_is_gathered_and_what_is_multiplied_into_partial_results():
    plan = plan_of(BOTH, "mesh.fsdp=4", "mesh.tensor=2")
    own = [each for each in plan.operations if each.site.piece == "layers"]
    gathered, multiplied = {"attention_input", "mlp_input", "head_input"}, {"attended", "hidden"}
    sums = {"attention_output", "mlp_output"}
    assert turn_names(plan.sharding, own) == TurnNames(*map(frozenset, (gathered, multiplied, sums)))
    plan = plan_of("sharding=fsdp")
    assert turn_names(plan.sharding, plan.operations) == TurnNames(frozenset(), frozenset(), frozenset())


def test_the_cover_has_every_pair():
    assert set[Pair]().union(*(pairs_of(row) for row in COVER.values())) == set(all_pairs(VALUES))


@pytest.mark.usefixtures("ordered")
@pytest.mark.parametrize("name", tiered(CASES, plain=(), ci=cover_values(COVER)), ids=str)
def test_gradients_in_turns_are_those_of_one_device(name, tokens, proof):
    plan = plan_of(*CASES[name], PARTS)
    data = plan.spec.data
    documents = documents_of(tokens[0], is_padded=data.may_pad) if data.isolate_documents else {}
    step = Gradients(plan, batch_of(tokens[0], documents))
    is_alone = "groups" in name and "none" not in name  # layers of a group that are recomputed alone
    if "two layers" not in name:  # in a single trip, which has a barrier before its recomputation
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
