"""Pipelines with everything that they work with: a pairwise cover against one float32 device."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from conftest import plan_of
from meshloom.compiler.core.trees import leaves_by_path
from meshloom.compiler.pipeline.schedules import build_table
from meshloom.compiler.pipeline.table import TickForm
from meshloom.compiler.step import train_step
from support.experts import documents_of
from support.pairwise import all_pairs, cover_pairs, cover_values, pairs_of
from support.programs import Gradients, batch_of, schedule_of
from support.tiers import tiered

# The number of stages, and overrides.
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 stages": (2, ("sharding=ddp",)),
    "2 stages, fsdp 2, tensor 2": (2, ("sharding=fsdp_tensor", "mesh.fsdp=2", "mesh.tensor=2")),
    "2 stages, replica 2, fsdp 2": (2, ("sharding=hsdp", "mesh.replica=2", "mesh.fsdp=2")),
    "2 stages, context 2, gathered": (2, ("sharding=fsdp_context", "mesh.context=2", "parallel.context=all_gather")),
    "2 stages, context 2, ulysses": (2, ("sharding=fsdp_context", "mesh.context=2", "parallel.context=ulysses")),
    "2 stages, zero2": (2, ("sharding=zero2", "mesh.data=2")),
    "4 stages, fsdp 2": (4, ("sharding=fsdp", "mesh.fsdp=2")),
    "4 stages, tensor 2": (4, ("sharding=fsdp_tensor", "mesh.tensor=2")),
}
# The name of the schedule, its chunks, the form of ticks, and whether layers are run again by an operation of its own.
SCHEDULES = {
    "gpipe": ("gpipe", 1, TickForm.MULTI, False),
    "1f1b": ("1f1b", 1, TickForm.MULTI, False),
    "1f1b, unit ticks, R": ("1f1b", 1, TickForm.UNIT, True),
    "interleaved": ("interleaved_1f1b", 2, TickForm.MULTI, False),
    "interleaved, 3 chunks": ("interleaved_1f1b_breadth_first", 3, TickForm.UNIT, False),
    "zb_h1": ("zb_h1", 1, TickForm.UNIT, False),
    "zb_h2": ("zb_h2", 1, TickForm.UNIT, False),
    "zb_v": ("zb_v", 2, TickForm.UNIT, False),
    "dualpipe_v, R": ("dualpipe_v", 2, TickForm.UNIT, True),
}
FAMILIES = {
    "llama": (),
    "gpt2": (
        "model.positions=learned", "model.rope_theta=null", "model.num_positions=16", "model.norm=layer",
        "model.mlp=plain", "model.biases=all", "model.embeddings=tied", "model.vocab_size=264",
    ),
    "gemma2": ("model.norm_placement=before_and_after", "model.attention_windows=[4,null]",
               "model.attention_soft_cap=3.0"),
    "experts": ("model=tiny_moe", "model.mlp_dim=32"),
}  # fmt: skip
REMAT = {
    "kept": ("remat=none",),
    "full": ("remat=full",),
    "dots": ("remat=save_dots",),
    "names": ("remat=save_names", "remat.names=[queries,attended]"),
    "offloaded": ("remat=offload", "remat.names=[layer_input,attended]"),
}
DOCUMENTS = {
    "whole": (),
    "packed": ("data.isolate_documents=true",),
    "padded": ("data.isolate_documents=true", "data.packing=first_fit"),
}
GATHER = {
    "per step": ("pipeline.gather=step",),
    "per step, gradients in shards": ("pipeline.gather=step", "sharding.gradients=optimizer"),
    "per use": ("pipeline.gather=use",),
}
CHOICES = {
    "mesh": list(MESHES),
    "schedule": list(SCHEDULES),
    "family": list(FAMILIES),
    "remat": list(REMAT),
    "documents": list(DOCUMENTS),
    "dropout": ["no dropout", "dropout"],
    "gather": list(GATHER),
    "head": ["last", "stages"],
}
COVER = {"; ".join(row.values()): row for row in cover_pairs(CHOICES)}
NUM_MICROBATCHES = 8


def test_the_cover_has_every_pair():
    assert set().union(*map(pairs_of, COVER.values())) == set(all_pairs(CHOICES))
    assert len(COVER) >= 30


def model_of(row: dict[str, str], num_virtual: int) -> tuple[str, ...]:
    """Returns the overrides of the model: a layer for each virtual stage, or two."""
    num_layers = num_virtual * (2 if row["family"] == "gemma2" or num_virtual < 4 else 1)
    # Devices that hold parts of the same sequences drop by keys of their own.
    drops = row["dropout"] == "dropout" and "context" not in row["mesh"]
    dropout = ("model.dropout_rate=0.2",) if drops else ()
    return (
        *FAMILIES[row["family"]],
        "global_batch_size=32",
        f"model.num_layers={num_layers}",
        *dropout,
        *DOCUMENTS[row["documents"]],
    )


@cache
def on_one_device(model: tuple[str, ...]) -> Gradients:
    return gradients(plan_of("target=cpu-1", "sharding=ddp", f"num_microbatches={NUM_MICROBATCHES}", *model))


@cache
def expected_of(model: tuple[str, ...]) -> tuple[Any, float, Any]:
    """Returns parameters, the loss and its gradients on one device."""
    one = on_one_device(model)
    params = jax.tree.map(np.asarray, one.plan.model.init(jax.random.key(0)))
    return params, *one(params)


def gradients(plan: Any) -> Gradients:
    tokens = np.random.default_rng(0).integers(0, 257, (32, 17), dtype=np.int32)
    data = plan.spec.data
    documents = documents_of(tokens, is_padded=data.may_pad) if data.isolate_documents else {}
    return Gradients(plan, batch_of(tokens, documents), jax.random.key(7))


@pytest.mark.parametrize("case", tiered(COVER, plain=(), ci=cover_values(COVER, times=2)))
def test_gradients_are_those_of_one_device(case, proof, monkeypatch):
    row = COVER[case]
    stages, mesh = MESHES[row["mesh"]]
    name, chunks, form, recomputes = SCHEDULES[row["schedule"]]
    table = build_table(name, stages, chunks, NUM_MICROBATCHES, form, recomputes)
    model = model_of(row, table.placement.num_virtual)
    one = on_one_device(model)  # by its own schedule
    devices = stages * int(np.prod([int(each.split("=")[1]) for each in mesh if each.startswith("mesh.")]))
    plan = plan_of(
        f"target=cpu-{devices}", f"mesh.stage={stages}", *mesh, *REMAT[row["remat"]], *model,
        f"num_microbatches={NUM_MICROBATCHES}", *GATHER[row["gather"]], f"pipeline.head={row['head']}",
    )  # fmt: skip
    monkeypatch.setattr(train_step, "choose_schedule", partial(schedule_of, table))
    step = gradients(plan)
    if proof.is_known(one.parts, step.parts):
        return
    params, expected_loss, expected = expected_of(model)
    loss, ours = step(params)
    ours = leaves_by_path(ours)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for path, reference in leaves_by_path(expected).items():
        tolerance = 1e-5 * np.abs(reference).max() + 2e-8  # a bias of keys has no gradient but rounding
        np.testing.assert_allclose(ours[path], reference, rtol=1e-4, atol=tolerance, err_msg=path)
