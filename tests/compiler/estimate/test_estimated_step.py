"""What an estimate takes a search of the overlap to find."""

import math

import pytest

from conftest import SMALL, plan_of
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.estimate.estimated_step import assume_overlap, overrides_of
from meshloom.compiler.estimate.step_time import plan_hiding
from meshloom.compiler.spec.compiler_traits import read_compiler_traits

TENSOR = (*SMALL, "sharding=fsdp_tensor", "mesh.tensor=2", "precision=bfloat16", "overlap=auto")
SEARCHED = [
    (*TENSOR, "target=v5p-16", "global_batch_size=16"),  # four sequences of a device
    (*TENSOR, "target=v5p-16", "global_batch_size=4"),  # one: nothing to split
    (*TENSOR, "target=v5e-32", "global_batch_size=32"),  # permutes wait there
    (*TENSOR, "target=h100-8", "global_batch_size=16"),
    (*SMALL, "sharding=fsdp", "precision=bfloat16", "overlap=auto", "target=h100-8"),
]


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("overrides", SEARCHED, ids=lambda words: " ".join(words[-2:]))
def test_what_is_compiled_is_what_was_estimated(overrides):
    """The estimate of a search, and that of the declaration which is compiled for it."""
    searched = plan_of(*overrides)
    compiled = plan_of(*overrides, *overrides_of(assume_overlap(searched), searched.spec.overlap))
    assert compiled.spec.overlap.search is None
    assert plan_hiding(compiled) == plan_hiding(searched)
    assert estimate_step(compiled) == estimate_step(searched)
    assert overrides_of(assume_overlap(compiled), compiled.spec.overlap) == ()


def test_a_split_batch_needs_other_memory_than_a_whole_one():
    """The estimate of the step that is taken to be found, not of the one that is declared before the search."""
    searched = plan_of(*SEARCHED[0])
    whole = plan_of(*SEARCHED[0], "overlap.search=null")
    assert estimate_step(searched).memory.peak_bytes != estimate_step(whole).memory.peak_bytes


def test_a_batch_is_split_where_halves_can_wait_for_one_another():
    splits = [assume_overlap(plan_of(*overrides)).layers.batch_split for overrides in SEARCHED]
    assert splits == [2, 1, 1, 2, 1]


@pytest.mark.ci
def test_parts_in_turns_wait_for_a_share_of_what_is_sent_between_matmuls():
    """Where nothing else is sent. A whole batch waits for all of it."""
    of_parts = read_compiler_traits("gpu", "h100").exposed_in_turns
    assert of_parts is not None
    for num_parts, share in ((1, 1.0), (2, of_parts.share)):
        plan = plan_of(*SMALL, "sharding=tensor", "mesh.tensor=2", "mesh.data=1", "precision=bfloat16", "target=h100-2",
                       f"overlap.layers.batch_split={num_parts}")  # fmt: skip
        estimate = estimate_step(plan)
        seconds = (one.count * (plan.mesh.alone_seconds(one.kind, one.bytes_each, one.mesh_axes) or math.nan)
                   for one in estimate.communication)  # fmt: skip
        assert estimate.figures.exposed_seconds == pytest.approx(share * sum(seconds))


def test_one_collective_at_a_time_leaves_more_over_tensor_between_nodes():
    """There weights cross the nodes meanwhile. Within a node it makes no difference."""

    def share(num_devices, *presets):
        plan = plan_of(*SMALL, "sharding=fsdp_tensor", "mesh.tensor=2", f"target=h100-{num_devices}",
                       f"global_batch_size={num_devices}", "overlap.layers.batch_split=2", *presets)  # fmt: skip
        return plan_hiding(plan).activations_exposed

    of_parts = read_compiler_traits("gpu", "h100").exposed_in_turns
    assert of_parts is not None
    assert share(16) == share(8) == share(8, "overlap.flag_presets=[]") == of_parts.share
    assert share(16, "overlap.flag_presets=[]") == of_parts.one_at_a_time > of_parts.share


def test_a_preset_is_assumed_only_where_it_hides_more():
    """XLA overlaps the collectives of weights on GPUs by itself; on v5p it needs options."""
    assert assume_overlap(plan_of(*SEARCHED[-1])).flag_presets == ()
    assert "sparse_core" in assume_overlap(plan_of(*SEARCHED[0])).flag_presets


def test_a_split_that_is_assumed_has_the_presets_that_one_that_is_declared_has():
    gpus = ("target=h100-16", "sharding=fsdp_tensor", "mesh.tensor=2", "mesh.fsdp=8", "global_batch_size=16")
    assumed = assume_overlap(plan_of(*gpus, "overlap=auto"))
    declared = plan_of(*gpus, f"overlap.layers.batch_split={assumed.layers.batch_split}").spec.overlap
    assert assumed.layers.batch_split > 1
    assert assumed.flag_presets == declared.flag_presets == ("concurrent",)
