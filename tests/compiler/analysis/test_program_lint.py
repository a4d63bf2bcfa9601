"""What a program does that costs time or memory, found without a plan."""

import pytest

from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.core.format import human_seconds
from meshloom.compiler.schema import Finding
from meshloom.compiler.target.placement import plan_own_order
from support.programs import target_of
from support.schedules import START, compute, module

LARGE = 2**21  # elements: 8 MiB in float32
REDUCE = f"  %r = f32[{LARGE}]{{0}} all-reduce(%y), replica_groups={{{{0,1,2,3}}}}, to_apply=%add"
ARGUMENT = f"  %y = f32[{LARGE}]{{0}} parameter(1)"
SLICE = f"f32[{LARGE // 4}]{{0}} dynamic-slice(%r, %i), dynamic_slice_sizes={{{LARGE // 4}}}"
INDEX = "  %i = s32[] parameter(2)"


def findings(*lines: str, before: str = "", target: str = "v5e-4", is_assumed: bool = True) -> dict[str, Finding]:
    text = module(*lines, before=before).replace("num_partitions=4", f"num_partitions={target_of(target).num_devices}")
    devices = ProgramDevices(plan_own_order(target_of(target)), is_assumed=is_assumed)
    return {each.rule: each for each in inspect_text(text, devices).findings}


def test_a_sum_of_which_a_part_is_used_moves_half_for_nothing():
    found = findings(ARGUMENT, INDEX, compute("a", 5), REDUCE, f"  ROOT %s = {SLICE}")["reduced-then-sliced"]
    assert "4.0 MiB a step are moved for nothing" in found.what


@pytest.mark.parametrize(
    ("after", "is_found"),
    [
        (("  %s = " + SLICE, "  ROOT %n = f32[2097152]{0} negate(%r)"), False),
        (("  %c = f32[2097152]{0} copy(%r)", "  ROOT %s = " + SLICE.replace("%r", "%c")), True),
        (("  %s = " + SLICE, "  ROOT %t = (f32[2097152]{0}, f32[524288]{0}) tuple(%r, %s)"), False),
        (("  ROOT %f = f32[524288]{0} fusion(%r, %i), kind=kLoop, calls=%sliced",), True),
        (("  ROOT %f = f32[524288]{0} fusion(%r, %i), kind=kLoop, calls=%whole",), False),
        (("  ROOT %s = f32[524288]{0} slice(%r), slice={[0:524288]}",), False),
        (("  ROOT %s = " + SLICE.replace("524288", "16384"),), False),
        ((), False),
    ],
    ids=[
        "also whole",
        "through a copy",
        "is a result",
        "in a fusion",
        "whole in a fusion",
        "the same on each device",
        "of another number of parts",
        "unused",
    ],
)
def test_it_is_found_where_only_parts_are_used(after, is_found):
    parameters = "  %r = f32[2097152]{0} parameter(0)\n  %i = s32[] parameter(1)"
    before = (
        f"%sliced (r: f32[2097152], i: s32[]) -> f32[524288] {{\n{parameters}\n  ROOT %s = {SLICE}\n}}\n\n"
        f"%whole (r: f32[2097152], i: s32[]) -> f32[524288] {{\n{parameters}\n  %s = {SLICE}\n"
        "  %n = f32[2097152]{0} negate(%r)\n  ROOT %m = f32[524288]{0} slice(%n), slice={[0:524288]}\n}\n"
    )
    lines = [ARGUMENT, INDEX, compute("a", 5), REDUCE, *after]
    assert ("reduced-then-sliced" in findings(*lines, before=before)) == is_found


@pytest.mark.parametrize(
    ("layout", "times"),
    [("{2,0,1:T(8,128)}", "8 times"), ("{2,1,0:T(8,128)}", ""), ("{0,2,1:T(8,128)}", "128 times")],
    ids=["second innermost", "outermost", "innermost"],
)
def test_an_update_of_a_layer_that_lies_inside_tiles_is_named_with_its_share(layout, times):
    stack, layer = f"f32[16,512,7168]{layout}", "f32[1,512,7168]{2,0,1:T(1,128)}"
    update = f"  %d = {stack} dynamic-update-slice(%stack, %layer, %i, %i, %i)"
    lines = [
        f"  %stack = {stack} parameter(1)",
        f"  %layer = {layer} parameter(2)",
        "  %i = s32[] parameter(3)",
        update,
    ]
    found = findings(*lines, compute("a", 10**6), target="v5p-8")
    assert ("update-inside-tiles" in found) == bool(times)
    if times:
        said = found["update-inside-tiles"]
        assert times in said.what
        assert "of the step" in said.what
        assert layout in said.where
        assert "first dimension" in said.fix


@pytest.mark.parametrize(
    ("kind", "moved"),
    [("update", 2 * 8 / 0.25 - 1 / 0.85), ("slice", (8 - 1) / 0.85)],  # layers, at the whole bandwidth
    ids=["update", "slice"],
)
def test_a_fusion_with_a_part_inside_tiles_is_named_with_what_the_tiles_cost(kind, moved):
    """All else that it reads and writes would be moved anyway."""
    stack, layer = "f32[16,512,7168]{2,0,1:T(8,128)}", "f32[1,512,7168]{2,0,1:T(1,128)}"
    of = {
        "update": (stack, f"%n = {layer} negate(%u)\n  ROOT %d = {stack} dynamic-update-slice(%s, %n, %i, %i, %i)"),
        "slice": (layer, f"%d = {layer} dynamic-slice(%s, %i, %i, %i)\n  ROOT %n = {layer} add(%d, %u)"),
    }
    result, lines = of[kind]
    fused = (
        f"%fused (s: f32[], u: f32[], i: s32[]) -> f32[] {{\n  %s = {stack} parameter(0)\n"
        f"  %u = {layer} parameter(1)\n  %i = s32[] parameter(2)\n  {lines}\n}}\n"
    )
    given = (f"  %stack = {stack} parameter(1)", f"  %layer = {layer} parameter(2)", "  %i = s32[] parameter(3)")
    fusion = f"  %f = {result} fusion(%stack, %layer, %i), kind=kLoop, calls=%fused"
    found = findings(*given, fusion, compute("a", 10**6), before=fused, target="v5p-8")
    said = found[f"{kind}-inside-tiles"]
    assert human_seconds(moved * 4 * 512 * 7168 / 2.765e12) in said.what
    assert f"1 {kind} of a part of an array" in said.what
    assert "8 times" in said.what
    assert "T(8,128)" in said.where
    assert "first dimension" in said.fix


@pytest.mark.parametrize(
    ("size", "sharding", "target", "is_found"),
    [
        (16, "{replicated}", "v5e-4", True),
        (15, "{replicated}", "v5e-4", False),  # MiB elements of float32: below 64 MiB
        (16, "{devices=[4]<=[4]}", "v5e-4", False),
        (16, "{replicated}", "v5e-1", False),
    ],
)
def test_a_large_argument_that_is_whole_everywhere_is_named(size, sharding, target, is_found):
    named = f"sharding={sharding}, metadata={{op_name=\"params[\\'table\\']\"}}"
    found = findings(f"  %y = f32[{size * 2**20}]{{0}} parameter(1), {named}", compute("a", 5), target=target)
    assert ("replicated-array" in found) == is_found
    if is_found:
        assert "params['table'] (64.0 MiB)" in found["replicated-array"].where


@pytest.mark.parametrize(
    ("dtype", "size", "is_found"), [("f32", LARGE, True), ("bf16", LARGE, False), ("f32", 8, False)]
)
def test_large_transfers_in_float32_are_noted(dtype, size, is_found):
    lines = [line.replace("f32", dtype).replace(str(LARGE), str(size)) for line in (ARGUMENT, REDUCE)]
    found = findings(*lines, compute("a", 5))
    assert ("wide-collective" in found) == is_found


@pytest.mark.parametrize(("milliseconds", "is_found"), [(1, True), (1000, False)])
def test_synchronous_collectives_are_named_if_they_cost_a_share_of_the_step(milliseconds, is_found):
    """8 MiB over 4 chips of a v5e: some 0.1 ms."""
    found = findings(ARGUMENT, compute("a", milliseconds * 1_500_000), REDUCE)
    assert ("synchronous-collective" in found) == is_found


def test_an_asynchronous_collective_is_not_synchronous():
    big = START.replace("[8]", f"[{LARGE}]").replace("[32]", f"[{4 * LARGE}]").replace("(%x)", "(%z)")
    lines = [f"  %z = bf16[{LARGE}]{{0}} parameter(1)", f"  %s = {big}",
             f"  ROOT %d = bf16[{4 * LARGE}]{{0}} all-gather-done(%s)", compute("a", 5)]  # fmt: skip
    assert "synchronous-collective" not in findings(*lines)


@pytest.mark.parametrize(
    ("groups", "is_assumed", "is_found"),
    [("{{0,1},{2,3}}", True, True), ("{{0,1},{2,3}}", False, False), ("{{0,1,2,3}}", True, False)],
)
def test_where_links_follow_from_an_assumed_order_it_is_said(groups, is_assumed, is_found):
    lines = [ARGUMENT, REDUCE.replace("{{0,1,2,3}}", groups), compute("a", 5)]
    found = findings(*lines, is_assumed=is_assumed)
    assert ("assumed-order" in found) == is_found


@pytest.mark.parametrize(
    ("name", "is_found"),
    [("jit(step)/jit(_bernoulli)/random_bits", True), ("jit(step)/threefry2x32", True), ("jit(step)/mlp/psum", False)],
)
def test_random_bits_that_are_transferred_are_named(name, is_found):
    line = REDUCE.replace("f32", "u32") + f', metadata={{op_name="{name}"}}'
    last = f"  ROOT %out = u32[{LARGE}]{{0}} negate(%r)"
    found = findings(ARGUMENT.replace("f32", "u32"), line, compute("a", 5), last)
    assert ("random-bits" in found) == is_found
