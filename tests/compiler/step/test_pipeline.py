"""The executor of pipelines against one device: losses and gradients, leaf by leaf."""

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler import driver
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.step import train_step
from meshloom.compiler.step.pipeline import PipelineSchedule
from meshloom.compiler.step.pipeline_columns import gpipe_rows, one_f_one_b_rows
from support.programs import gradients_of

pytestmark = pytest.mark.ci

ROWS = {"gpipe": gpipe_rows, "1f1b": one_f_one_b_rows}


@pytest.mark.parametrize(
    ("order", "num_stages", "num_microbatches", "others"),
    [
        ("gpipe", 2, 4, ("sharding=ddp",)),
        ("1f1b", 2, 4, ("sharding=ddp",)),
        ("1f1b", 2, 4, ("sharding=fsdp", "mesh.fsdp=2")),
        ("1f1b", 2, 4, ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2")),
        ("1f1b", 2, 4, ("sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2")),
        ("1f1b", 2, 4, ("sharding=fsdp", "mesh.fsdp=2", "overlap.layers.batch_split=2")),
        ("1f1b", 2, 4, ("sharding=fsdp", "mesh.fsdp=2", "model=tiny_moe")),
        ("1f1b", 2, 4, ("sharding=fsdp_expert", "mesh.expert=2", "model=tiny_moe")),
        ("gpipe", 4, 8, ("sharding=fsdp", "mesh.fsdp=2")),
        ("1f1b", 4, 8, ("sharding=fsdp", "mesh.fsdp=2")),
        ("1f1b", 4, 4, ("sharding=fsdp", "mesh.fsdp=2", "model.embeddings=tied")),
    ],
)
def test_gradients_of_a_pipeline_are_those_of_one_device(
    order, num_stages, num_microbatches, others, tokens, monkeypatch
):
    model = ("model.num_layers=4",)
    tied = tuple(each for each in others if each.startswith("model"))
    # A balance of experts is one of each microbatch.
    one = plan_of("target=cpu-1", "sharding=ddp", f"num_microbatches={num_microbatches}", *model, *tied)
    params = jax.tree.map(np.asarray, one.model.init(jax.random.key(0)))
    expected_loss, expected = gradients_of(one, params, tokens[0])
    monkeypatch.setattr(driver, "usable_mesh", lambda spec: spec.mesh)
    sizes = [int(each.split("=")[1]) for each in others if each.startswith("mesh.")]
    devices = num_stages * int(np.prod(sizes))
    plan = plan_of(
        f"target=cpu-{devices}", f"+mesh.stage={num_stages}", f"num_microbatches={num_microbatches}", *others, *model
    )
    schedule = PipelineSchedule(ROWS[order](num_stages, num_microbatches), num_stages, num_microbatches)
    monkeypatch.setattr(train_step, "choose_schedule", lambda plan: schedule)
    loss, ours = gradients_of(plan, params, tokens[0])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for path, gradient in leaves_by_path(ours).items():
        reference = leaves_by_path(expected)[path]
        np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=2e-6 * np.abs(reference).max(), err_msg=path)
