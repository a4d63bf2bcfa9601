"""The layers of a pipeline, wherever the state holds them: where each chunk goes, and gradients."""

import itertools

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.pipeline.table import StagePlacement
from meshloom.compiler.step.placement_order import plan_rounds
from support.programs import Gradients, batch_of


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "is_v"),
    [*itertools.product((2, 3, 4, 8), (2, 3, 5), (False,)), (2, 2, True), (4, 2, True)],
)
def test_every_chunk_gets_to_the_stage_that_runs_it_and_back(num_stages, num_chunks, is_v):
    placement = StagePlacement(num_stages, num_chunks, is_v)
    stages = range(num_stages)
    held = [[stage * num_chunks + place for place in range(num_chunks)] for stage in stages]
    run, back = [[-1] * num_chunks for _ in stages], [[-1] * num_chunks for _ in stages]
    rounds = plan_rounds(placement)
    for each in rounds:
        assert sorted(each.to) == list(stages), "a permute"
        for stage in stages:
            run[each.to[stage]][each.puts[each.to[stage]]] = held[stage][each.sends[stage]]
    assert run == [[placement.virtual(stage, chunk) for chunk in range(num_chunks)] for stage in stages]
    for each in (one.reverse for one in rounds):
        for stage in stages:
            back[each.to[stage]][each.puts[each.to[stage]]] = run[stage][each.sends[stage]]
    assert back == held


INTERLEAVED = ("mesh.fsdp=2", "mesh.stage=2", "target=cpu-4", "pipeline=interleaved_1f1b", "num_microbatches=4")
TENSOR = ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.stage=2", "mesh.tensor=2", "num_microbatches=4")
# Each stage stores a part of the experts of each device of `expert`.
EXPERTS = ("sharding=fsdp_expert", "mesh.expert=2", "mesh.stage=2", "mesh.tensor=2", "num_microbatches=4")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "others"),
    [
        pytest.param(
            ("model.num_layers=4", "frozen_parameters=[layers/mlp/up_EM]"), INTERLEAVED, marks=pytest.mark.release
        ),
        (
            ("model.num_layers=4",),
            ("mesh.fsdp=1", "mesh.stage=2", "target=cpu-2", "pipeline=zb_v", "num_microbatches=4"),
        ),
        (("model.num_layers=5", "frozen_parameters=[layers/mlp/up_EM]"), (*INTERLEAVED, "pipeline.layers=[0,3,2,0]")),
        pytest.param(
            ("model.num_layers=5", "adapter=lora", "adapter.rank=4"),
            (*TENSOR, "target=cpu-8", "pipeline=zb_v"),
            marks=pytest.mark.release,
        ),
        (
            ("model=tiny_moe", "model.num_layers=5", "model.num_dense_layers=2", "model.dense_mlp_dim=64"),
            (*EXPERTS, "target=cpu-8", "pipeline=zb_h1", "pipeline.layers=[3,2]"),
        ),
        (
            (
                "model.num_layers=7",
                "model.attention_windows=[3,3,null]",
            ),  # two rounds of windows, and a stack of the rest
            ("sharding=zero1", "mesh.data=2", "mesh.stage=2", "target=cpu-4", "num_microbatches=4"),
        ),
    ],
)
def test_gradients_have_the_layers_of_the_state(model, others, tokens, proof):
    """Against one device, which knows no stages."""
    plans = (plan_of("target=cpu-1", "sharding=ddp", "num_microbatches=4", *model), plan_of(*model, *others))
    one, staged = (Gradients(plan, batch_of(tokens[0])) for plan in plans)
    if proof.is_known(one.parts, staged.parts):
        return
    params = jax.tree.map(np.asarray, one.plan.model.init(jax.random.key(0)))
    (expected_loss, expected), (loss, ours) = one(params), staged(params)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    reference = leaves_by_path(expected)
    assert leaves_by_path(ours).keys() == reference.keys()
    for path, gradient in leaves_by_path(ours).items():
        bound = 2e-6 * np.abs(reference[path]).max()
        np.testing.assert_allclose(gradient, reference[path], rtol=1e-4, atol=bound, err_msg=path)
