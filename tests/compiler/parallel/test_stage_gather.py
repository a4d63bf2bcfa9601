"""When stages gather the weights of their layers: as it is declared, or by the memory of the target."""

from dataclasses import replace

import jax
import pytest

from conftest import plan_of
from meshloom.compiler.parallel.operation import OpInputs
from meshloom.compiler.parallel.pipeline_plan import plan_gather

FSDP = (
    "sharding=fsdp", "mesh.stage=2", "mesh.fsdp=2", "target=cpu-4", "num_microbatches=4", "model.num_layers=4",
    "remat=full",
)  # fmt: skip


@pytest.mark.parametrize(
    ("when", "gradients", "use"),
    [("step", "parameters", "hoisted"), ("step", "optimizer", "held"), ("use", "parameters", "gathered")],
)
def test_weights_are_gathered_when_it_is_declared(when, gradients, use):
    plan = plan_of(*FSDP, f"pipeline.gather={when}", f"sharding.gradients={gradients}")
    assert plan.gather
    assert plan.gather.when == when
    assert {each.use for each in jax.tree.leaves(plan.weights["layers"]) if each.gathered} == {use}


def chosen_with(plan, num_bytes):
    """Returns when the stages of a plan gather on devices of that many bytes."""
    target = replace(plan.target, hbm_bytes_per_device=num_bytes)
    inputs = OpInputs(plan.spec, plan.model, plan.arrays, plan.sharding, plan.mesh, plan.batch, target)
    gather = plan_gather(plan.pipeline, inputs, plan.memory.state_bytes)
    assert gather
    return gather


def test_they_are_gathered_once_if_the_memory_has_room_for_state_weights_gradients_and_inputs_of_layers():
    """Each device stores a half of what its stage holds, in float32, and uses it in bfloat16."""
    plan = plan_of(*FSDP, "precision=bfloat16")
    stored = sum(each.bytes_per_device for each in plan.sharding.parameters if each.array.path.startswith("layers"))
    weights, gradients = stored, 2 * stored
    assert plan.pipeline
    x = 16 // 2 // 4 * 16 * 32 * 2  # sequences of a device in a microbatch, tokens, width, bytes
    saved = max(plan.pipeline.in_flight) * 2 * x
    needed = plan.memory.state_bytes + weights + gradients + saved
    assert [chosen_with(plan, num_bytes).when for num_bytes in (needed - 1, needed)] == ["use", "step"]
    assert "KiB" in chosen_with(plan, needed).reason


def test_what_each_device_holds_whole_is_not_gathered_again():
    plan = plan_of("sharding=ddp", "mesh.stage=2", "target=cpu-2", "num_microbatches=4", "model.num_layers=4")
    assert chosen_with(plan, 1).when == "step"
