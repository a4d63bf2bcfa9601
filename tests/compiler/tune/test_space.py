"""The space of a search: its meshes against brute force, its rules against what plans a declaration."""

from collections import Counter
from itertools import product

import pytest

from conftest import LINEAR_STACK, SMALL, spec_of
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.estimate import estimate_declared, estimate_step
from meshloom.compiler.search.candidates import Candidate, applied, estimate_allowed, overlap_candidates
from meshloom.compiler.tune.answer import estimate_spec
from meshloom.compiler.tune.space import (
    NO_STAGES,
    PARAMETERS_TOO_LARGE,
    Variant,
    check_pins,
    find_candidates,
    mesh_axes,
    mesh_sizes,
    with_layout,
)

STACK = (*LINEAR_STACK, "precision=bfloat16", "target=v5p-16")


def _variant(*overrides):
    return Variant((("sharding", "fsdp_tensor"),), spec_of(*STACK, "sharding=fsdp_tensor", *overrides))


@pytest.mark.parametrize("num_devices", [1, 8, 12, 30])
def test_meshes_are_all_factorisations(num_devices):
    axes = ("replica", "fsdp", "tensor")
    found = {tuple(sizes.values()) for sizes in mesh_sizes(axes, num_devices, {})}
    every = product(range(1, num_devices + 1), repeat=3)
    assert found == {sizes for sizes in every if sizes[0] * sizes[1] * sizes[2] == num_devices}


def test_an_axis_has_only_the_sizes_that_it_may_have():
    found = list(mesh_sizes(("fsdp", "tensor"), 16, {"tensor": (1, 4)}))
    assert found == [{"fsdp": 4, "tensor": 4}, {"fsdp": 16, "tensor": 1}]


@pytest.mark.parametrize(
    ("sharding", "axes"),
    [
        ("fsdp_tensor", ("replica", "fsdp", "tensor")),
        ("zero1", ("replica", "data", "tensor")),
        ("ddp", ("replica",)),
        ("fsdp_context", ("replica", "fsdp", "context", "tensor")),
    ],
)
def test_the_axes_of_a_space_are_those_that_its_rules_use_and_each_role_once(sharding, axes):
    assert mesh_axes(spec_of(*STACK, f"sharding={sharding}")) == axes


def test_rules_refuse_what_cannot_be_planned_and_nothing_else():
    """Sixteen sequences, a width of 32: some meshes and microbatches divide, and others do not."""
    variant = _variant()
    candidates, refused = find_candidates([variant])
    allowed = {(tuple(one.mesh.sizes.items()), one.num_microbatches) for one in candidates}
    num_refused = 0
    for sizes in mesh_sizes(("replica", "fsdp", "tensor"), 8, {}):
        whole = dict.fromkeys(type(variant.spec.mesh).model_fields, 1) | sizes
        spec = with_layout(variant.spec, whole, 1)
        try:
            plan_run(spec)
            assert (tuple(whole.items()), 1) in allowed
        except ConfigError:
            num_refused += 1
            assert (tuple(whole.items()), 1) not in allowed
    assert num_refused == 0
    assert refused.total == 0
    assert all(16 % (one.num_microbatches * one.sequences_of_device) == 0 for one in candidates)


def test_a_refusal_is_counted_with_its_reason():
    """Seven does not divide by any size of tensor but one."""
    candidates, refused = find_candidates([_variant("model.embed_dim=28", "tune.mesh={replica:[1]}")])
    assert {one.mesh.sizes["fsdp"] for one in candidates} <= {1, 2, 4}
    reason = next(reason for reason in refused.counts if "(fsdp=8)" in reason)
    assert "has size 28, not divisible by 8 shards" in reason
    assert refused.examples[reason][-1].startswith("num_microbatches=")


def test_parameters_that_are_larger_than_a_device_are_refused_before_anything_is_traced():
    variant = _variant("model.embed_dim=262144", "sharding.on_replicated=allow", "tune.microbatches=[1]")
    _, refused = find_candidates([variant])
    assert refused.counts[PARAMETERS_TOO_LARGE] > 0


def test_a_pinned_axis_is_honoured():
    candidates, _ = find_candidates([_variant("tune.pin.mesh.tensor=4", "tune.pin.num_microbatches=2")])
    assert candidates
    assert {(one.mesh.sizes["tensor"], one.num_microbatches) for one in candidates} == {(4, 2)}


def test_a_pin_of_what_is_not_searched_is_an_error():
    with pytest.raises(ConfigError, match=r"tune\.pin\.seed: is not a key that is searched"):
        check_pins({"seed": 1, "remat": "full"}, ["remat"])


def test_every_order_of_devices_is_a_candidate_that_places_its_mesh_otherwise():
    """16 GPUs in two nodes: fsdp 8 x tensor 2, 4 x 4 and 2 x 8 lie in two ways each, one axis of all devices in one."""
    words = ("target=h100-16", "tune.mesh={replica: [1]}", "tune.microbatches=[1]", "model.embed_dim=512")
    own, _ = find_candidates([_variant(*words)])
    every, _ = find_candidates([_variant(*words, "tune.device_orders=all")])
    placed = {(one.sizes, str(one.mesh.placement.describe())) for one in every}
    assert len(placed) == len(every)
    assert placed > {(one.sizes, str(one.mesh.placement.describe())) for one in own}
    assert sorted(Counter(one.sizes for one in every).values()) == [1, 2, 2, 2]
    one = next(one for one in every if one.device_order == ("fsdp", "tensor"))
    assert "device_order=[fsdp,tensor]" in one.overrides
    assert plan_run(one.spec()).mesh.placement.describe() == one.mesh.placement.describe()


def test_the_nearest_axis_is_also_tried_as_a_block_of_chips():
    """On 8 x 8 chips that do not wrap, tensor=4 is four in a row, two by two, or the far one of both."""
    words = ("target=v6e-64", "tune.mesh={replica: [1], fsdp: [16]}", "tune.microbatches=[1]", "model.embed_dim=512",
             "global_batch_size=64")  # fmt: skip
    every, _ = find_candidates([_variant(*words, "tune.device_orders=all")])
    placed = {one.device_order: one.mesh.placement.describe()["tensor"] for one in every}
    assert placed["tensor:2x2", "fsdp"] == "ICI x (2 of 8) x ICI y (2 of 8)"
    assert "ICI x (4 of 8)" in placed.values()
    one = next(one for one in every if one.device_order[0] == "tensor:2x2")
    assert "device_order=[tensor:2x2,fsdp]" in one.overrides
    assert plan_run(one.spec()).mesh.placement.describe() == one.mesh.placement.describe()


def test_blocks_over_which_gradients_stay_scattered_are_tried_without_being_asked_for():
    """On v5e gradients over more than 4 x 4 chips are all-reduced (docs/results/overlap.md)."""
    words = ("tune.mesh={tensor: [1]}", "tune.microbatches=[1]", "model.embed_dim=512", "global_batch_size=64")
    blocks = {("fsdp:4x4",), ("replica:4x4",)}
    for target, found in (("v5e-64", blocks), ("v5e-16", set()), ("v6e-64", set())):
        candidates, _ = find_candidates([_variant(f"target={target}", *words)])
        assert {one.device_order for one in candidates} == {(), *found}
    declared, _ = find_candidates([_variant("target=v5e-64", "device_order=[fsdp]", *words)])
    assert {one.device_order for one in declared} == {("fsdp",)}
    candidates, _ = find_candidates([_variant("target=v5e-64", *words)])
    one = next(one for one in candidates if one.device_order == ("fsdp:4x4",))
    assert "device_order=[fsdp:4x4]" in one.overrides
    assert one.mesh.placement.describe()["fsdp"] == "ICI x (4 of 8) x ICI y (4 of 8)"


def test_a_variant_whose_speed_is_not_known_is_refused_and_the_others_are_not():
    found, refused = find_candidates([_variant("precision=float32"), _variant()])
    assert found
    assert {one.variant.spec.precision.compute for one in found} == {"bfloat16"}
    (reason,) = (text for text in refused.counts if "speed" in text)
    assert reason == "precision.compute: the speed of v5p-16 in float32 is not known"


def test_a_space_that_is_too_large_is_refused_with_its_size():
    """Of 16 sequences, tensor 1, 2, 4 and 8 leave 4, 3, 2 and 1 meshes with 2, 3, 4 and 5 numbers of microbatches."""
    number = 4 * 2 + 3 * 3 + 2 * 4 + 1 * 5
    with pytest.raises(
        ConfigError, match=rf"one variant has {number} candidates, more than tune\.max_candidates={number - 1}"
    ):
        find_candidates([_variant(f"tune.max_candidates={number - 1}")])
    assert len(find_candidates([_variant(f"tune.max_candidates={number}")])[0]) == number


def test_schedules_of_pipelines_are_candidates_where_there_are_stages():
    """Without stages the programs are the same, and the first schedule stands for all."""
    words = (*STACK, "model.num_layers=4", "sharding=fsdp_tensor", "remat=full", "tune.mesh.stage=[1,2]")
    variants = [
        Variant((("pipeline", name),), spec_of(*words, f"pipeline={name}", "tune.microbatches=[4]"))
        for name in ("1f1b", "gpipe")
    ]
    candidates, refused = find_candidates(variants)
    found = Counter((one.num_stages, one.values["pipeline"]) for one in candidates)
    assert set(found) == {(1, "1f1b"), (2, "1f1b"), (2, "gpipe")}
    assert found[2, "1f1b"] == found[2, "gpipe"]
    assert refused.counts[NO_STAGES] >= found[1, "1f1b"]


DECLARED = (*SMALL, *LINEAR_STACK, "precision=bfloat16", "target=h100-16", "sharding=fsdp", "global_batch_size=32")


def replan(more: tuple[str, ...]):
    return read_spec(Request((*DECLARED, *more)), then=plan_run)


def test_a_candidate_of_a_space_is_what_its_overrides_declare():
    candidates, _ = find_candidates([Variant((("remat", "full"),), replan(("remat=full",)).spec)])
    found = estimate_allowed(candidates[-1], replan)
    assert found is not None
    assert found[1] == estimate_spec(candidates[-1].spec()).figures


@pytest.mark.ci
def test_a_candidate_of_overlap_search_is_what_its_overrides_declare():
    plan = replan(())
    for one in overlap_candidates(plan, estimate_declared(plan))[:3]:
        found = estimate_allowed(one, replan)
        assert found is not None
        assert found[1] == estimate_step(plan_run(applied(one.way, plan.spec))).figures


def test_a_candidate_that_the_declaration_does_not_allow_has_no_figures():
    assert estimate_allowed(Candidate(("global_batch_size=33",)), replan) is None
