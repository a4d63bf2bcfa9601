"""Collectives that hang: among stages, in a branch that not all of them take."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshloom.compiler.analysis import compiled_step
from meshloom.compiler.analysis.compiled_step import find_hangs
from meshloom.compiler.core.errors import ConfigError
from meshloom.compiler.xla.hlo import parse_module
from meshloom.compiler.xla.schedule.alike import find_divergent
from support.recorded import recorded_text
from support.schedules import module

STAGES = [0, 0, 1, 1]  # of 4 devices
MESH = {"stage": 4, "fsdp": 2}
ACROSS, WITHIN, ALL = "replica_groups={{0,2},{1,3}}", "replica_groups={{0,1},{2,3}}", "replica_groups={}"

# Predicates, each the value %which.
BY_STAGE = ["  %id = u32[] partition-id()", "  %two = u32[] constant(2)",
            "  %which = pred[] compare(%id, %two), direction=LT"]  # fmt: skip
BY_CONSTANT = ["  %one = u32[] constant(1)", "  %which = pred[] compare(%one, %one), direction=EQ"]
BY_SUM = ["  %id = u32[] partition-id()", f"  %sum = u32[] all-reduce(%id), {ALL}, to_apply=%add",
          "  %which = pred[] compare(%sum, %sum), direction=EQ"]  # fmt: skip
BY_SUM_WITHIN = [BY_SUM[0], BY_SUM[1].replace(ALL, WITHIN), BY_SUM[2]]
BY_SUM_ACROSS = [BY_SUM[0], BY_SUM[1].replace(ALL, ACROSS), BY_SUM[2]]


def program(predicate: list[str], collective: str, *, through: str = "") -> Any:
    """A conditional, whose second branch has a collective. through: what calls it there."""
    inner = "%branch" if not through else "%inner"
    run = "  ROOT %run = bf16[8]{0} " + through.replace("CALLED", "%inner")
    before = "\n".join([
        "%add (a: u32[], b: u32[]) -> u32[] {", "  %a = u32[] parameter(0)", "  %b = u32[] parameter(1)",
        "  ROOT %sum = u32[] add(%a, %b)", "}",
        "%idle (i: bf16[8]) -> bf16[8] {", "  ROOT %i = bf16[8]{0} parameter(0)", "}",
        f"{inner} (q: bf16[8]) -> bf16[8] {{", "  %q = bf16[8]{0} parameter(0)", collective, "}",
        *(["%branch (v: bf16[8]) -> bf16[8] {", "  %v = bf16[8]{0} parameter(0)", run, "}"] if through else []), "",
    ])  # fmt: skip
    choose = "  ROOT %c = bf16[8]{0} conditional(%which, %x, %x), branch_computations={%idle, %branch}"
    return parse_module(module(*predicate, choose, before=before))


def reduced(groups: str) -> str:
    return f"  ROOT %reduce = bf16[8]{{0}} all-reduce(%q), channel_id=1, {groups}, to_apply=%add"


@pytest.mark.parametrize(
    ("predicate", "groups", "hangs"),
    [
        (BY_STAGE, ACROSS, True), (BY_STAGE, ALL, True), (BY_STAGE, WITHIN, False),
        (BY_CONSTANT, ACROSS, False), (BY_SUM, ALL, False),
        (BY_SUM_ACROSS, ACROSS, False), (BY_SUM_ACROSS, ALL, True), (BY_SUM_WITHIN, ACROSS, True),
    ],
)  # fmt: skip
def test_stages_of_a_group_have_to_have_the_same_predicate(predicate, groups, hangs):
    found = find_divergent(program(predicate, reduced(groups)), STAGES)
    expected = [("reduce", "c", (0, 1))] if hangs else []
    assert [(each.collective.name, each.conditional.name, each.stages) for each in found] == expected


@pytest.mark.parametrize(
    "collective",
    [
        "  ROOT %p = bf16[8]{0} collective-permute(%q), channel_id=1, source_target_pairs={{0,2},{1,3}}",
        "  ROOT %p = (bf16[8]{0}, bf16[32]{0}) all-gather-start(%q), channel_id=1, replica_groups={}, dimensions={0}",
        "  ROOT %p = (bf16[8]{0}, u32[], token[]) send(%q, %q), channel_id=1, "
        '_xla_send_recv_source_target_pairs="{{0,2},{1,3}}"',
        "  ROOT %p = bf16[8]{0} all-reduce(%q), to_apply=%add",
    ],
)
def test_every_form_is_found(collective):
    (found,) = find_divergent(program(BY_STAGE, collective), STAGES)
    assert found.collective.name == "p"
    assert find_divergent(program(BY_STAGE, collective), [0, 0, 0, 0]) == ()


@pytest.mark.parametrize(
    "through",
    [
        "call(%v), to_apply=CALLED",
        "fusion(%v), kind=kLoop, calls=CALLED",
        "while(%v), condition=%idle, body=CALLED",
        "conditional(%v, %v, %v), branch_computations={%idle, CALLED}",
    ],
)
def test_what_a_branch_calls_is_in_it(through):
    found = find_divergent(program(BY_STAGE, reduced(ACROSS), through=through), STAGES)
    assert ("reduce", "c") in {(each.collective.name, each.conditional.name) for each in found}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "slices", "shared"])
def test_recorded_pipelines_do_not_hang(name):
    """Also with gathers over `fsdp` in the slots, and with sums among the stages that all of them run together."""
    assert list(find_hangs(parse_module(recorded_text(f"pipeline_{name}")), MESH)) == []


def test_a_recorded_program_that_hangs_is_found():
    module = parse_module(recorded_text("pipeline_hangs"))
    found = list(find_hangs(module, MESH))
    assert len(found) == 1
    assert "is a collective among 4 stages in a branch of conditional." in found[0].what
    assert "slot=F/shared_end=last" in found[0].what
    assert list(find_hangs(module, {"stage": 1, "fsdp": 8})) == []


def test_a_program_that_hangs_is_an_error_at_compile_time(monkeypatch):
    monkeypatch.setattr(compiled_step, "analyse_schedule", lambda *_, **__: None)
    plan: Any = SimpleNamespace(mesh=SimpleNamespace(sizes=MESH), pipeline=None)

    def problems(name: str) -> int:
        try:
            compiled_step.read_text(recorded_text(name), plan, ())
        except ConfigError as error:
            return len(error.problems)
        return 0

    assert (problems("pipeline_hangs"), problems("pipeline_shared")) == (1, 0)
