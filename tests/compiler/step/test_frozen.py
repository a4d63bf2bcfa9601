"""Frozen parameters: no gradient, no state, no collective of a gradient; everything else as without them."""

import io

import jax
import numpy as np
import pytest

from conftest import LINEAR_STACK, plan_of, pointwise_plan
from meshloom.compiler.core.console import Console
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.jaxpr.flops import count_model_flops
from meshloom.compiler.report.explain import explain, plan_as_json
from meshloom.runtime.checkpoint.checkpoints import Checkpoints, restore
from meshloom.runtime.checkpoint.find import Checkpoint
from meshloom.runtime.data import open_data
from support.collectives import written_collectives
from support.programs import Gradients, batch_of, on_devices, programs_of
from support.tiers import tiered

FROZEN = "frozen_parameters=[embed/*,layers/up_EM]"
FSDP = ("target=cpu-4", "sharding=fsdp")
CASES = {
    "scan, fsdp 4": FSDP,
    "prefetch, hsdp 2x2, in backward, 2 microbatches": (
        "target=cpu-4", "sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2", "overlap=prefetch", "num_microbatches=2",
        "overlap.layers.reduce_in_backward=true", "remat=full",
    ),
    "prefetch, zero2, logits in blocks": (
        "target=cpu-4", "sharding=zero2", "overlap=prefetch", "loss.max_logits_bytes=16384",
        "loss.max_logits_share=0.0",
    ),
}  # fmt: skip
NUM_LAYERS, E, M, V = 3, 32, 64, 264  # of the pointwise model
SIZES = {"embed/table_VE": V * E, "layers/scale_E": NUM_LAYERS * E, "layers/up_EM": NUM_LAYERS * E * M,
         "layers/down_ME": NUM_LAYERS * E * M, "head/kernel_EV": E * V}  # fmt: skip


@pytest.mark.parametrize("name", tiered(CASES, plain=()))
def test_gradients_of_the_others_are_those_of_a_run_without_frozen_ones(name, tokens, proof):
    whole, some = (Gradients(pointwise_plan(*CASES[name], *more), batch_of(tokens[0])) for more in ((), (FROZEN,)))
    if proof.is_known(whole.parts, some.parts):
        return
    params = jax.tree.map(np.asarray, whole.plan.model.init(jax.random.key(0)))
    (loss, expected), (our_loss, ours) = whole(params), some(params)
    assert our_loss == pytest.approx(loss, rel=1e-6)
    expected, ours = leaves_by_path(expected), leaves_by_path(ours)
    assert expected.keys() - ours.keys() == {"embed/table_VE", "layers/up_EM"}
    for path, gradient in ours.items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-5, atol=1e-6 * scale, err_msg=path)


@pytest.fixture(scope="module")
def bfloat16():
    """Frozen parameters stored in bfloat16, the others in float32."""
    return pointwise_plan(*FSDP, FROZEN, "precision.frozen=bfloat16", "schedule.num_warmup_steps=0")


@pytest.mark.ci
def test_frozen_parameters_keep_every_bit_and_resume(bfloat16, tokens, tmp_path):
    programs, batches = programs_of(bfloat16), iter(open_data(bfloat16.spec)["train"])
    state = programs["init"]()
    before = leaves_by_path(jax.tree.map(np.array, state["params"]))
    for batch in tokens[:2]:
        state, _ = programs["train"](state, on_devices(programs, batch))
    after = leaves_by_path(jax.tree.map(np.array, state["params"]))
    for path, was in before.items():
        is_frozen = path in ("embed/table_VE", "layers/up_EM")
        assert was.dtype == ("bfloat16" if is_frozen else "float32")
        assert (after[path].tobytes() == was.tobytes()) == is_frozen, path
    with Checkpoints(tmp_path, bfloat16.spec) as checkpoints:
        checkpoints.save(2, state, batches, num_tokens=0, eval_loss=None)
    saved = [np.array(x) for x in jax.tree.leaves(state)]
    restored = restore(Checkpoint(tmp_path / "checkpoints" / "2", 2, is_own=False, damaged={}), programs.state, batches)
    for x, y in zip(jax.tree.leaves(restored.state), saved, strict=True):
        np.testing.assert_array_equal(np.array(x), y)


def test_memory_holds_no_state_of_frozen_parameters(bfloat16):
    frozen = SIZES["embed/table_VE"] + SIZES["layers/up_EM"]
    trained = sum(SIZES.values()) - frozen
    memory = bfloat16.memory
    assert memory.parameters == (2 * frozen + 4 * trained) // 4  # bytes each, over 4 devices
    assert memory.optimizer == 2 * 4 * trained // 4  # two moments of AdamW
    assert memory.gradients == 4 * trained // 4
    assert memory.working_parameters == 4 * frozen // 4  # cast to the compute type; the others are in it
    takes = programs_of(bfloat16)["train"].memory_analysis().argument_size_in_bytes
    assert takes == memory.state_bytes + memory.batch
    masters = pointwise_plan(*FSDP, FROZEN, "precision=bfloat16_params").memory
    assert (masters.parameters, masters.master) == (2 * (frozen + trained) // 4, 4 * trained // 4)


def test_no_gradient_of_a_frozen_parameter_crosses_the_network():
    gathered, reduced = (
        [
            written_collectives(pointwise_plan(*FSDP, "parallel.embedding=all_gather", *more))[0][kind]
            for more in ((), (FROZEN,))
        ]
        for kind in ("all-gather", "reduce-scatter")
    )
    assert gathered[0] == gathered[1]
    assert reduced == [1 + 3 * NUM_LAYERS + 1, 2 * NUM_LAYERS + 1]


def test_flops_leave_out_what_is_not_differentiated():
    for overrides in ((), LINEAR_STACK):
        plan = plan_of("target=cpu-1", *overrides)
        # `nothing` is no parameter: both passes are counted one by one, and give three times the forward pass.
        assert count_model_flops(plan.model, plan.spec, plan.ops, ["nothing"]) == plan.model_flops
    tokens = plan_of("target=cpu-1").spec.tokens_per_step
    whole, frozen = (
        pointwise_plan("target=cpu-1", f"frozen_parameters={patterns}").model_flops_per_step or 0
        for patterns in ("[]", "[embed/*,layers/up_EM,layers/scale_E]")
    )
    # The gradient of up_EM in each layer; and in the first, where down_ME alone is trained, those of both its inputs.
    assert whole - frozen == (NUM_LAYERS + 2) * 2 * tokens * E * M


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["frozen_parameters=[embd/*]"], ["frozen_parameters[0]: no parameter matches 'embd/*'", "'embed/table_VE'"]),
        (["frozen_parameters=['*']"], ["all 5 parameters of the model are frozen"]),
        (["precision.frozen=bfloat16"], ["precision.frozen: no parameter is frozen"]),
    ],
)
def test_what_cannot_be_frozen_is_an_error(overrides, words):
    with pytest.raises(ConfigError) as raised:
        pointwise_plan(*FSDP, *overrides)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_explain_says_what_is_frozen():
    plan, out = pointwise_plan(*FSDP, FROZEN), io.StringIO()
    explain(plan, Console(out))
    lines = [line for line in out.getvalue().splitlines() if "frozen" in line]
    assert [line.split()[0] for line in lines] == ["embed/table_VE", "layers/up_EM"]
    rows = plan_as_json(plan)["arrays"]["parameters"]
    assert {row["path"] for row in rows if not row["is_trained"]} == {"embed/table_VE", "layers/up_EM"}
