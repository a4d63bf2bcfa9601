"""Findings in collectives made by hand, against what the plan has; and none in what is compiled as planned."""

import re
from dataclasses import replace

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from conftest import plan_of
from meshloom.compiler.analysis.lint import (
    FULL_REMAT,
    HEAD_IN_CHUNKS,
    MORE_TOKENS,
    SPLIT_OVER_TENSOR,
    SPLIT_THE_GROUP,
    TOO_MUCH_BUBBLE,
    find_too_much_bubble,
    lint,
    reduced_in_bfloat16,
)
from meshloom.compiler.analysis.program_memory import HeldArray
from meshloom.compiler.analysis.schedule_analysis import Match, analyse_schedule
from meshloom.compiler.core.known import Unknown, each_known
from meshloom.compiler.core.scopes import OperationName
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.communication import PlannedCollective
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.schema import CollectiveReport, Finding
from meshloom.compiler.xla.aot import REMATERIALIZATION
from meshloom.compiler.xla.hlo import parse_module
from meshloom.runtime.core.stderr_capture import captured_stderr
from support import reports
from support.programs import programs_of
from support.tiers import tiered
from support.traffic import origin

MIB = 2**20
UNTIMED = Unknown("simulated devices have no links")
PLANNED = PlannedCollective(
    kind="all-gather", mesh_axes=("fsdp",), group_size=8, bytes=4 * 64 * MIB, count=4, dtype="bfloat16",
    origin=origin("layers/mlp/up_EM, forward"), rule="sharding.parameters[0]",
)  # fmt: skip
SCATTER = replace(
    PLANNED, kind="reduce-scatter", bytes=4 * 128 * MIB, dtype="float32", origin=origin("layers/mlp/up_EM, backward")
)


def found(**changes) -> CollectiveReport:
    values = {
        "kind": "all-gather", "mesh_axes": ("fsdp",), "group_size": 8, "link": "ICI", "bytes": 4 * 64 * MIB,
        "dtype": "bf16", "count": 4, "alone_seconds": UNTIMED, "hidden_seconds": UNTIMED, "exposed_seconds": UNTIMED,
        "hidden_behind": (), "is_async": False, "form": "synchronous", "origin": origin("layers/mlp/up_EM, forward"),
        "where": "in a loop of 4 iterations", "confidence": "high", "name": "all-gather.1", "line": "",
    }  # fmt: skip
    return CollectiveReport(**(values | changes))


def rules_of(*collectives: CollectiveReport, overrides: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> list[str]:
    return [finding.rule for finding in lint(plan_of(*overrides), collectives, {}, (PLANNED, SCATTER), notes)]


def test_what_is_as_planned_is_no_finding():
    assert rules_of(found(), found(kind="reduce-scatter", bytes=4 * 128 * MIB, dtype="f32")) == []


def test_the_chunks_of_a_planned_gather_are_no_finding():
    chunk = {"kind": "collective-permute", "bytes": 4 * 8 * MIB}
    assert rules_of(found(**chunk)) == []
    assert rules_of(found(**chunk, mesh_axes=("tensor",))) == ["unplanned-collective"]


def test_small_ones_are_none():
    assert rules_of(found(kind="all-to-all", bytes=1000)) == []


def test_a_transfer_that_the_plan_does_not_have():
    (finding,) = lint(plan_of(), [found(kind="all-to-all")], {}, (PLANNED,), ())
    assert finding.rule == "unplanned-collective"
    assert "all-to-all of 64.0 MiB over fsdp" in finding.what
    assert "sharding.parameters[0]" in finding.where
    assert rules_of(found(mesh_axes=("tensor",))) == ["unplanned-collective"]


def test_a_sum_that_is_larger_than_all_that_the_plan_adds_up_is_not_planned():
    """The plan always has sums of scalars: the loss, the norm of the gradient."""
    scalar = replace(
        PLANNED, kind="all-reduce", bytes=4 * 4, dtype="float32", origin=origin("step: psum, forward"), rule=None
    )
    large = found(kind="all-reduce", dtype="f32")
    findings = lint(plan_of(), [large], {}, (PLANNED, scalar), ())
    assert [finding.rule for finding in findings] == ["unplanned-collective"]
    both = replace(scalar, bytes=4 * 32 * MIB)
    assert lint(plan_of(), [large], {}, (PLANNED, both, both), ()) == ()


def test_an_all_reduce_in_place_of_a_reduce_scatter():
    whole = found(kind="all-reduce", bytes=4 * 128 * MIB, dtype="f32", origin=origin("layers/mlp/up_EM, backward"))
    (finding,) = lint(plan_of(), [whole], {whole.name: (Match(1, (SCATTER,)),)}, (PLANNED, SCATTER), ())
    assert finding.rule == "gradient-not-scattered"
    assert "layers/mlp/up_EM, backward, sharding.parameters[0]" in finding.where


def test_a_preset_that_keeps_reduce_scatters_is_named_where_the_target_has_one():
    whole = found(kind="all-reduce", bytes=4 * 128 * MIB, dtype="f32", origin=origin("layers/mlp/up_EM, backward"))
    matches = {whole.name: (Match(1, (SCATTER,)),)}
    v5p = ("target=v5p-16", "precision=bfloat16")
    fixes = [
        lint(plan_of(*overrides), [whole], matches, (PLANNED, SCATTER), ())[0].fix
        for overrides in ((*v5p, "overlap.flag_presets=[]"), v5p, ("target=v5e-16", "precision=bfloat16"))
    ]
    assert fixes[0].startswith("set overlap.flag_presets=[sparse_core], which keeps reduce-scatters of most shapes")
    assert all(fix.startswith("reduce gradients in bfloat16") for fix in fixes[1:])


def test_a_reduction_in_bfloat16_is_proposed_with_what_it_saves_at_most():
    """Half of the 30 ms that compute waits for float32 sums are saved, and nothing of a gather's 5 ms."""
    sums = [
        found(kind=kind, bytes=4 * 128 * MIB, dtype="f32", name=f"{kind}.1", exposed_seconds=seconds)
        for kind, seconds in (("all-reduce", 0.02), ("reduce-scatter", 0.01), ("all-gather", 0.005))
    ]
    advice = reduced_in_bfloat16(sums)
    assert advice.text.startswith("reduce gradients in bfloat16, which saves half the bytes, and up to 15.0 ms a step")
    proposed = advice.text.split(": ")[-1]
    for declared, is_followed in (("precision=bfloat16", False), ("precision=float32", True)):
        assert advice.is_followed(plan_of(declared)) is is_followed
    assert advice.is_followed(plan_of("precision=bfloat16", proposed))


def test_advice_that_is_followed_is_not_given():
    whole = found(kind="all-reduce", bytes=4 * 128 * MIB, dtype="f32", origin=origin("layers/mlp/up_EM, backward"))
    matches = {whole.name: (Match(1, (SCATTER,)),)}
    fixes = [
        lint(plan_of(*overrides), [whole], matches, (PLANNED, SCATTER), ())[0].fix
        for overrides in ((), ("sharding=hsdp",))
    ]
    assert fixes[0] == "split the group: sharding=hsdp"  # a model that computes in float32 reduces in it
    assert fixes[1] == MORE_TOKENS
    (finding,) = held(TABLE, "remat=full")
    assert finding.fix == "num_microbatches=1 with fewer sequences, or split it more: sharding=fsdp_tensor"


@pytest.mark.parametrize(
    ("advice", "overrides"),
    [
        (SPLIT_THE_GROUP, ["sharding=hsdp"]), (SPLIT_OVER_TENSOR, ["sharding=fsdp_tensor"]),
        (HEAD_IN_CHUNKS, ["parallel.lm_head=vocab_chunks"]), (FULL_REMAT, ["remat=full"]),
    ],
)  # fmt: skip
def test_each_advice_is_followed_by_what_it_says(advice, overrides):
    assert advice.text.endswith(overrides[0])
    assert not advice.is_followed(plan_of())
    assert advice.is_followed(plan_of(*overrides))


def test_float32_where_bfloat16_was_meant():
    assert rules_of(found(dtype="f32", bytes=4 * 128 * MIB)) == ["wide-collective"]


def test_a_gather_in_the_loop_of_microbatches():
    more = found(count=8, bytes=8 * 64 * MIB)
    assert rules_of(more, overrides=("num_microbatches=2",)) == ["repeated-gather"]
    assert rules_of(more) == [], "without microbatches it is remat that gathers again"
    smaller = found(count=8, bytes=8 * 16 * MIB)
    assert rules_of(smaller, overrides=("num_microbatches=2",)) == [], "another array, of which there are more"


def test_the_kernel_that_was_not_used():
    odd = ("target=v5e-8", "sequence_length=200")
    (finding,) = lint(plan_of(*odd), (), {}, (), ())
    assert (finding.rule, finding.where) == ("attention-fallback", "parallel.attention")
    assert finding.what == (
        "attention keeps all scores in memory: splash is not used: sequence_length=200 is not a multiple of 128"
    )
    assert lint(plan_of(*odd, "parallel.attention=xla"), (), {}, (), ()) == ()


def test_what_the_compiler_says_itself_and_the_costly_ones_first():
    cheap, dear = found(kind="all-to-all", bytes=4 * MIB), found(kind="all-to-all", bytes=400 * MIB, name="dear")
    findings = lint(plan_of(), [cheap, dear], {}, (PLANNED,), ("Involuntary full rematerialization of x",))
    assert [finding.rule for finding in findings] == ["unplanned-collective", "gathered-whole"]
    assert findings[0].where.index("(dear,") < findings[0].where.index("(all-gather")


def test_what_differs_in_its_place_and_size_alone_is_one_finding():
    """The number of all, the places of those that cost most, the largest size; all together cost most."""
    alike = [found(kind="all-to-all", name=f"all-to-all.{i}", source=f"layers/{i}") for i in range(5)]
    dearer = found(kind="all-to-all", name="dearer", count=8, bytes=8 * 64 * MIB, origin=origin("layers/5"))
    dearest = found(kind="all-to-all", name="dearest", bytes=9 * 4 * 64 * MIB)
    other = found(name="other", mesh_axes=("tensor",), count=1, bytes=600 * MIB)
    findings = lint(plan_of(), [*alike, dearest, other, dearer], {}, (PLANNED,), ())
    assert [re.findall(r"up to [\d.]+ MiB|[\d.]+ MiB", each.what) for each in findings] == [
        ["up to 576.0 MiB"], ["600.0 MiB"],
    ]  # fmt: skip
    assert "places" not in findings[1].where
    count, places = findings[0].where.split(": ", 1)
    assert count == "7 places"
    assert re.findall(r"\((\S+), (?:in a loop|once)", places) == ["dearest", "dearer", "all-to-all.0"]
    assert places.endswith(" and 4 more")
    (same, _) = lint(plan_of(), [*alike, dearer, other], {}, (PLANNED,), ())
    assert "up to" not in same.what
    shuffled = lint(plan_of(), [other, dearer, *reversed(alike), dearest], {}, (PLANNED,), ())
    assert shuffled == findings


def test_what_the_partitioner_says_of_several_arrays_is_one_finding():
    """As XLA itself says it, with the time and the thread before each line."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("y", None, "x"))
    other = NamedSharding(mesh, PartitionSpec(None, ("x", "y")))

    def moved(a, b):
        return [jax.lax.with_sharding_constraint(2 * x, other) for x in (a, b)]

    x = jax.ShapeDtypeStruct((16, 16, 16), "float32", sharding=split)
    with captured_stderr() as captured:
        jax.jit(moved).lower(x, x).compile()
    notes = [line for line in captured.lines if REMATERIALIZATION in line]
    (finding,) = lint(plan_of(), (), {}, (), notes)
    assert re.match(r"an array of f32\[8,16,4\] is gathered whole: from sharding {.*'?} to {", finding.what)
    assert re.fullmatch(r"2 places: a \(param[.\d]*\); b \(param[.\d]*\)", finding.where)
    (unnamed,) = lint(plan_of(), (), {}, (), [notes[0].replace('op_name="a"', "")])
    assert unnamed.where.startswith("made by the compiler (param")
    (plain,) = lint(plan_of(), (), {}, (), ["W1 2 x.cc:1] [SPMD] Involuntary full rematerialization in other words"])
    assert plain.what == "Involuntary full rematerialization in other words"


TABLE = HeldArray(
    name="custom-call.4", kind="gradients", num_bytes=500 * MIB, shape=(32000, 4096),
    names=(OperationName("jit(train_step)/shard_map/while/body/closed_call/add"),),
    over_microbatches=("while.1",), over_others=(),
)  # fmt: skip
LLAMA = ("model=llama2_7b", "target=cpu-8", "data=synthetic", "sharding=fsdp")


def held(array: HeldArray, *overrides: str) -> list[Finding]:
    plan = read_spec(Request((*LLAMA, *overrides)), then=plan_run)
    return list(lint(plan, (), {}, (), (), held=[array]))


def test_what_a_rule_splits_and_the_program_holds_whole_for_all_microbatches():
    (finding,) = held(TABLE)
    assert (finding.rule, finding.severity) == ("held-whole", "warning")
    assert "the gradient of embed/table_VE is whole in memory for all microbatches: 500.0 MiB" in finding.what
    assert "embed over fsdp by parameters[0] (custom-call.4)" in finding.where
    assert held(replace(TABLE, shape=(32000, 512), num_bytes=63 * MIB)) == [], "a shard"
    assert held(TABLE, "sharding.replicated_bytes_threshold=1000000000") == []
    assert held(TABLE, "sharding=ddp", "sharding.on_replicated=allow") == [], "no rule splits it"


def test_a_name_says_which_of_two_arrays_of_the_same_sizes_it_is():
    names = (OperationName("jit(f)/jvp(head)/weight=head/kernel_EV/all_gather"),)
    kept = replace(TABLE, kind="gathered_weights", names=names, over_microbatches=(), over_others=("while.2",))
    (finding,) = held(kept)
    assert (finding.severity, finding.what.split()[0]) == ("note", "head/kernel_EV")
    assert held(replace(kept, over_others=())) == [], "the loop that it lives through reads it"


@pytest.mark.ci
@pytest.mark.parametrize("sharding", tiered(["ddp", "fsdp", "fsdp_tensor", "zero1"], plain=["fsdp_tensor"]))
def test_real_programs_cross_what_the_plan_says(monkeypatch, sharding):
    """However small: every collective of the compiled program has its like in the plan, but for sums of scalars."""
    monkeypatch.setattr("meshloom.compiler.analysis.lint.LEAST_BYTES", 1024)
    plan = plan_of(f"sharding={sharding}")
    planned = estimate_step(plan).communication
    analysis = analyse_schedule(parse_module(programs_of(plan)["train"].as_text()), plan, planned)
    findings = lint(plan, analysis.collectives, analysis.matches, planned, ())
    assert [finding.rule for finding in findings if finding.rule == "unplanned-collective"] == []


STAGED = ("mesh.stage=2", "num_microbatches=4", "model.num_layers=4")


def waiting(share: float | Unknown):
    seconds = each_known(share, lambda known: 10 * known)
    return reports.fits()[0].compiled.model_copy(update={"bubble_fraction": share, "bubble_seconds": seconds})


def bubble_finding(plan, step):
    return find_too_much_bubble(plan.spec.pipeline.max_bubble, plan.pipeline, step)


def test_only_a_bubble_above_the_limit_is_a_finding():
    plan = plan_of(*STAGED, "pipeline.max_bubble=0.2")
    assert bubble_finding(plan, waiting(0.2)) is None
    assert bubble_finding(plan_of(*STAGED), waiting(0.9)) is None
    found = bubble_finding(plan, waiting(0.21))
    assert found is not None
    assert found.rule == TOO_MUCH_BUBBLE
    assert "21.0 %" in found.what
    assert "num_microbatches=4" in found.fix


def test_a_bubble_that_is_not_known_does_not_meet_a_limit():
    found = bubble_finding(plan_of(*STAGED, "pipeline.max_bubble=0.2"), waiting(Unknown("no table")))
    assert found is not None
    assert "not known" in found.what


@pytest.mark.parametrize("setting", ["schedule=gpipe", "max_bubble=0.1"])
def test_a_setting_without_stages_is_told(setting):
    plan = plan_of(f"pipeline.{setting}")
    assert [problem.where for problem in plan.warnings] == [f"pipeline.{setting.split('=')[0]}"]
    assert bubble_finding(plan, waiting(0.9)) is None
