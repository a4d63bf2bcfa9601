"""Other declarations beside a step's own: each is what `explain` says of it, and differs in one thing."""

from functools import cache

import pytest

from conftest import LINEAR_STACK, SMALL
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.report.explain import plan_as_json
from meshloom.compiler.schema import Alternative
from meshloom.compiler.search.candidates import find_alternatives

OVERRIDES = (*SMALL, "precision=bfloat16", "model.head_dim=8", "remat=full")


LINEAR = (*SMALL, "precision=bfloat16", *LINEAR_STACK, "remat=full")


def replanned(*overrides: str, to: tuple[str, ...] = OVERRIDES):
    return cache(lambda more: read_spec(Request((*to, *overrides, *more)), then=plan_run))


def alternatives_of(replan):
    plan = replan(())
    return find_alternatives(plan, estimate_step(plan), replan)


def seconds_of(one: Alternative) -> float:
    return one.figures.step_seconds or 0.0


@pytest.mark.ci
def test_each_is_what_the_estimate_says_of_its_declaration():
    replan = replanned("target=h100-16", "sharding=fsdp", "global_batch_size=32")
    own, *others = alternatives_of(replan)
    assert own.overrides == ()
    assert [each.overrides for each in others] == [
        ("remat=save_names",),
        ("remat=save_dots",),
        ("remat=minimal",),
        ("remat=none",),
        ("sharding=hsdp", "mesh.replica=2", "mesh.fsdp=8"),  # a node has eight GPUs
        ("sharding=fsdp_tensor", "mesh.fsdp=4", "mesh.tensor=4"),
        ("overlap=none",),
    ]
    for each in (own, *others[2:5], others[-1]):
        estimate = estimate_step(replan(each.overrides))
        assert each.figures == estimate.figures
        assert (each.figures.peak_bytes, each.figures.fits) == (estimate.memory.peak_bytes, True)


@pytest.mark.ci
def test_on_v5e_replicas_are_blocks_over_which_gradients_are_scattered():
    found = alternatives_of(replanned("target=v5e-64", "sharding=fsdp", "global_batch_size=64", "model.embed_dim=64"))
    (hsdp,) = [each for each in found if "sharding=hsdp" in each.overrides]
    assert hsdp.overrides == ("sharding=hsdp", "mesh.replica=4", "mesh.fsdp=16", "device_order=[fsdp:4x4]")


@pytest.mark.ci
def test_the_declared_mesh_is_no_alternative_and_what_is_refused_is_left_out():
    """The 3 heads of this model are not divided by 4 tensor shards."""
    replan = replanned("target=v5e-8", "sharding=hsdp", "mesh.replica=2", "model.num_heads=3", "model.num_kv_heads=3")
    found = alternatives_of(replan)
    shardings = [each.overrides[0] for each in found if "sharding" in "".join(each.overrides)]
    assert shardings == ["sharding=fsdp"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("declared", "longer", "shorter"),
    [
        pytest.param("overlap=xla", ["overlap=none", "overlap=auto"], [], marks=pytest.mark.ci),
        pytest.param("overlap.flag_presets=[]", [], ["overlap=auto"], marks=pytest.mark.ci),  # xla is the same then
        ("overlap=none", [], ["overlap=xla", "overlap=auto"]),
    ],
)
def test_overlaps_are_alternatives_where_the_estimate_knows_a_difference(declared, longer, shorter):
    replan = replanned("target=v6e-16", "sharding=fsdp", "global_batch_size=32", declared, to=LINEAR)
    own, *found = alternatives_of(replan)
    overlaps = {each.overrides[0]: each for each in found if each.overrides[0].startswith("overlap")}
    assert [name for name, each in overlaps.items() if seconds_of(each) > seconds_of(own)] == longer
    assert [name for name, each in overlaps.items() if seconds_of(each) < seconds_of(own)] == shorter
    assert len(overlaps) == len(longer) + len(shorter)


@pytest.mark.parametrize(
    "overrides",
    [
        ("target=cpu-8",),  # its times are not known
        pytest.param(("target=h100-8", "sharding=fsdp_context", "mesh.context=2"), marks=pytest.mark.ci),  # by length
    ],
)
def test_there_are_none_where_nothing_can_be_compared(overrides):
    replan = replanned(*overrides)
    found = alternatives_of(replan)
    assert [each.overrides for each in found if any("sharding" in text for text in each.overrides)] == []
    assert bool(found) is ("target=cpu-8" not in overrides)


@pytest.mark.ci
@pytest.mark.parametrize(("room", "found"), [(None, 1), (2, 0)])
def test_experts_with_room_for_any_imbalance_have_the_step_with_room_for_the_usual_one(room, found):
    words = ("model=tiny_moe", "target=v5p-16", "sharding=fsdp_expert", "mesh.expert=2", "data=synthetic")
    room_word = () if room is None else (f"moe.max_imbalance={room}",)

    def replan(more):
        return read_spec(Request((*words, *room_word, *more)), then=plan_run)

    usual = [each for each in alternatives_of(replan) if each.overrides == ("moe.max_imbalance=1.25",)]
    assert len(usual) == found
    for each in usual:
        assert each.figures == estimate_step(replan(each.overrides)).figures
        told = plan_as_json(replan(()))["estimate"]["usual_imbalance"]
        assert told["overrides"] == list(each.overrides)
        assert told["figures"] == each.figures.model_dump(mode="json")
        assert told["time"]["seconds"] == each.figures.step_seconds
        assert told["peak_bytes_per_device"] == each.figures.peak_bytes
