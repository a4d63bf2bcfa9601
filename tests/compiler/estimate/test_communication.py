"""The collectives that the plan predicts, against those of the compiled program."""

from collections import Counter

import jax
import pytest

from conftest import WHOLE_STREAM, plan_of
from meshloom.compiler.core.traffic import MOVING, Traffic
from meshloom.compiler.estimate.communication import plan_communication, sent_bytes
from meshloom.compiler.estimate.estimated_step import read_step
from meshloom.compiler.estimate.regions import price_regions
from meshloom.compiler.xla.programs import lower
from support.collectives import collective_elements_per_step, collectives_per_step

TENSOR_8 = ("sharding=tensor", "mesh.data=1", "mesh.tensor=8")


def _planned(*overrides):
    plan = plan_of(*overrides)
    step = price_regions(read_step(plan), plan.target.compiler)
    return [one for one in plan_communication(plan, step) if one.bytes_each > 8]


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    "overrides",
    [
        ("sharding=fsdp_tensor", "remat=full", "model.vocab_size=1024", "loss.max_logits_bytes=16384"),
        ("sharding=zero2", "num_microbatches=2"),
        *(
            pytest.param(overrides, marks=pytest.mark.ci)
            for overrides in (
                WHOLE_STREAM,
                ("sharding=fsdp",),
                ("sharding=hsdp", "remat=full"),
                ("sharding=ddp",),
                ("sharding=zero1", "num_microbatches=2"),
                TENSOR_8,
                ("sharding=fsdp_tensor",),
                ("sharding=fsdp_tensor", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "model.embeddings=tied"),
            )
        ),
    ],
)
def test_planned_collectives_are_the_compiled_ones(overrides):
    """Kinds, numbers and bytes, in float32. What a compiled reduce-scatter or all-to-all shows is its result,
    a device's part."""
    plan = plan_of(*overrides)
    hlo = lower(plan, plan.mesh.of_devices(jax.devices()))["train"].compile().as_text()
    counts, num_bytes = Counter(), Counter()
    for one in _planned(*overrides):
        counts[one.kind] += one.count
        shards = one.group_size if one.kind in ("reduce-scatter", "all-to-all") else 1
        num_bytes[one.kind] += one.bytes // shards
    assert counts == +collectives_per_step(hlo)
    assert num_bytes == {kind: 4 * n for kind, n in collective_elements_per_step(hlo).items() if n}


def test_each_weight_is_gathered_forward_and_backward_by_the_rule_that_splits_it():
    plan = plan_of("sharding=fsdp")
    rows = [one for one in _planned("sharding=fsdp") if one.origin.name == "layers/mlp/up_EM"]
    facts = {(one.kind, one.origin.in_pass, one.count, one.rule) for one in rows}
    rule = "sharding.parameters[0]"
    assert facts == {
        ("all-gather", "forward", 3, rule),
        ("all-gather", "backward", 3, rule),
        ("reduce-scatter", "backward", 3, rule),
    }
    assert {one.mesh_axes for one in rows} == {("fsdp",)}
    assert {one.bytes_each for one in rows} == {4 * 32 * 64}
    assert {one.origin.name for one in _planned("sharding=fsdp")} >= {p.array.path for p in plan.sharding.parameters}


def test_updated_parameters_are_gathered_by_the_rule_of_the_optimizers_state():
    gathers = [one for one in _planned("sharding=zero1") if one.kind == "all-gather"]
    assert {(one.origin.in_pass, one.count, one.rule) for one in gathers} == {("update", 1, "sharding.optimizer[0]")}


def test_sums_over_tensor_are_there_by_the_rule_of_activations():
    assert {one.rule for one in _planned(*TENSOR_8)} == {"sharding.activations[1]"}


@pytest.mark.parametrize("sharding", ["fsdp", "zero1"])
def test_types_are_those_of_the_precision(sharding):
    rows = _planned(f"sharding={sharding}", "precision=bfloat16_params")
    ids = {one.dtype for one in rows if one.origin.name == "embed/table_VE" and one.dtype == "int32"}  # of tokens
    assert {one.dtype for one in rows} - ids == {"bfloat16"}


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("sharding", ["fsdp", "zero1"])
@pytest.mark.parametrize(("crossing", "accumulated"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_cross_in_a_type_of_their_own(sharding, crossing, accumulated):
    types = (f"precision.gradient_reduction={crossing}", f"precision.gradients={accumulated}")
    rows = _planned(f"sharding={sharding}", "precision=bfloat16", "num_microbatches=2", *types)
    assert {one.dtype for one in rows if "/" in one.origin.name and one.kind not in MOVING} == {crossing}


def test_what_a_device_sends():
    """Rings of n devices over an array of V bytes: (n-1)/n V a gather or scatter, twice that a sum for all."""
    send = {kind: sent_bytes(Traffic(kind, ("fsdp",), 8, 800))
            for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")}  # fmt: skip
    assert send == {"all-gather": 700, "reduce-scatter": 700, "all-reduce": 1400, "all-to-all": 87}


@pytest.mark.ci
def test_what_a_pipeline_sends_between_stages_is_there_by_no_rule():
    rows = _planned(
        "model=tiny_moe", "model.num_layers=3", "sharding=fsdp_expert", "mesh.fsdp=1", "mesh.expert=2", "mesh.stage=2",
        "target=cpu-4", "num_microbatches=4", "pipeline.layers=[2,1]",
    )  # fmt: skip
    assert "layers/mlp/up_XEM" in {one.origin.name for one in rows if one.mesh_axes == ("stage",)}
    assert {one.rule for one in rows if one.mesh_axes == ("stage",)} == {None}
    assert None not in {one.rule for one in rows if one.mesh_axes == ("expert",)}
