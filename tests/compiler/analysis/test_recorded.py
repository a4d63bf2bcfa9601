"""Programs that the compilers of TPUs and GPUs made (tests/schedules), read back and held against what was declared."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshloom.compiler.analysis.compiled_step import inspect_text
from meshloom.compiler.analysis.lint import lint
from meshloom.compiler.analysis.program_devices import ProgramDevices
from meshloom.compiler.analysis.program_memory import read_peak
from meshloom.compiler.analysis.schedule_analysis import NOT_DECLARED, ScheduleAnalysis, analyse_schedule
from meshloom.compiler.analysis.timeline_events import with_memory
from meshloom.compiler.core.known import Unknown, first_unknown
from meshloom.compiler.core.traffic import TrafficSource
from meshloom.compiler.declare.compose import Request, read_spec
from meshloom.compiler.driver import plan_run
from meshloom.compiler.estimate.communication import PlannedCollective
from meshloom.compiler.estimate.estimate import estimate_step
from meshloom.compiler.plan import Plan
from meshloom.compiler.report.views.timeline import layer_views
from meshloom.compiler.xla.hlo import HloError, parse_module
from meshloom.compiler.xla.schedule.prices import Chip
from meshloom.compiler.xla.schedule.program import read_steps
from meshloom.compiler.xla.schedule.steps import Compute, Loop, Start, every
from meshloom.models.family_configs import DecoderConfig
from support.recorded import SCHEDULES, recorded_text

COMMANDS, FOR_MEMORY = (
    dict(re.findall(r"^\*\*(\w+)\*\*:.*\n\n    meshloom compile (.*)$", section, re.M))
    for section in (SCHEDULES / "README.md").read_text().split("\n## ")[1:]
)
SCRIPTS = ("windowed_einsum", *(f"pipeline_{name}" for name in ("1f1b", "gpipe", "slices", "shared", "hangs")))
V5E = Chip("tpu", 1.5e9, {"bfloat16": 197e12}, 819e9)
MADE = "made by the compiler"


@cache
def recorded(name: str) -> tuple[Plan, tuple[PlannedCollective, ...], ScheduleAnalysis]:
    plan = read_spec(Request(tuple(COMMANDS[name].split())), then=plan_run)
    planned = estimate_step(plan).communication
    return plan, planned, analyse_schedule(parse_module(recorded_text(name)), plan, planned)


def test_every_recorded_program_has_its_command():
    files = {path.name.removesuffix(".txt.xz"): path.stat().st_size for path in SCHEDULES.glob("*.xz")}
    assert set(files) == {*COMMANDS, *FOR_MEMORY, *SCRIPTS}
    assert max(files.values()) < 100_000


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e_fsdp16", {("all-gather", "synchronous"): 7, ("all-gather", "collective fusion"): 11,
                        ("all-reduce", "synchronous"): 5}),
        ("v5e_tensor", {("all-gather", "collective fusion"): 14, ("reduce-scatter", "synchronous"): 9}),
        ("v6e_sparsecore", {("all-gather", "sparsecore call"): 19, ("reduce-scatter", "sparsecore call"): 11,
                            ("all-reduce", "synchronous"): 3}),
        ("h100_fsdp", {("all-gather", "all-gather-start"): 7, ("reduce-scatter", "reduce-scatter-start"): 3}),
        ("two_slices", {("all-reduce", "send"): 13, ("all-gather", "collective fusion"): 11}),
    ],
)  # fmt: skip
def test_each_form_is_found_as_often_as_the_text_has_it(name, expected):
    found = Counter((each.kind, each.form) for each in recorded(name)[2].collectives)
    assert {key: found[key] for key in expected} == expected


FASTER = {
    "tpu": (
        ("target.chip.hbm_bytes_per_second", 1.7), ("target.network.link_bytes_per_second", 1.3),
        ("target.network.host_bytes_per_second", 3.0),
    ),
    "gpu": (
        ("target.chip.hbm_bytes_per_second", 1.7), ("target.network.chip_bytes_per_second", 1.3),
        ("target.network.node_bytes_per_second", 3.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["two_slices", "h100_fsdp"])
def test_more_bandwidth_is_never_slower(name):
    """One after the other, and none of them removes a collective: only their times change."""
    plan, planned, before = recorded(name)
    module, overrides = parse_module(recorded_text(name)), tuple(COMMANDS[name].split())
    for key, times in FASTER[plan.target.platform]:
        figure = plan.target.chip if ".chip." in key else plan.target.network
        value = getattr(figure, key.rpartition(".")[2]) * times
        overrides = (*overrides, f"{key}={value}")
        faster = read_spec(Request(overrides), then=plan_run)
        after = analyse_schedule(module, faster, planned)
        assert seconds(after.step.step_seconds) <= seconds(before.step.step_seconds), key
        assert len(after.collectives) == len(before.collectives)
        before = after
    assert seconds(before.step.step_seconds) < seconds(recorded(name)[2].step.step_seconds)


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", COMMANDS)
def test_what_was_found_adds_up(name):
    plan, _, analysis = recorded(name)
    step, found = analysis.step, analysis.collectives
    assert isinstance(analysis.step.step_seconds, float)
    assert step.num_unpriced == 0
    assert {each.confidence for each in found} == {"high"}
    assert seconds(step.step_seconds) == pytest.approx(seconds(step.compute_seconds, step.exposed_seconds))
    waits = step.exposed_by_axes.get("slices", 0.0)
    assert step.exposed_seconds == pytest.approx(seconds(*(each.exposed_seconds for each in found), waits))
    rest = seconds(step.step_seconds) - waits
    assert waits == pytest.approx((0.014 if plan.target.num_slices == 2 else 0.0) * rest), "of one doubling on v5e"
    for each in found:
        assert seconds(each.hidden_seconds, each.exposed_seconds) == pytest.approx(each.alone_seconds)
    trips = {each.where for each in found if each.where != "once"}
    assert isinstance(plan.spec.model, DecoderConfig)
    num_layers = plan.spec.model.num_layers
    # XLA's compiler for GPUs takes a trip out of the backward loop.
    loops = {num_layers, num_layers - 1} if plan.target.platform == "gpu" else {num_layers}
    assert trips == {f"in a loop of {number} iterations" for number in loops}


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", COMMANDS)
def test_each_instruction_has_its_part_of_the_step(name):
    """What a trace is compared with: times by instruction, and which instructions wait for which collective."""
    _, _, analysis = recorded(name)
    assert sum(analysis.compute_seconds.values()) == pytest.approx(analysis.step.compute_seconds)
    found = {each.name: each for each in analysis.collectives}
    assert set(analysis.dones.values()) == set(found), "each is waited for somewhere"
    for each in found.values():
        assert 0 < seconds(analysis.latency_seconds[each.name]) <= seconds(each.alone_seconds)


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_layer_forward_and_one_backward_are_found_in_the_timeline(name):
    """Each is a whole iteration: as long as what fills it, and all iterations together as what the loop takes."""
    plan, _, analysis = recorded(name)
    on_compute = [each for each in analysis.events if each.track == "compute"]
    forward, backward = layer_views(analysis.events)
    for view, loop in ((forward, "layers, forward"), (backward, "layers, backward")):
        assert view.name.startswith(f"{loop}, iteration ")
        within = [each for each in on_compute if view.start_ns <= round(each.start_seconds * 1e9) < view.end_ns]
        assert {each.loop for each in within} == {loop}
        assert len({each.iteration for each in within}) == 1
        length = (view.end_ns - view.start_ns) / 1e9
        assert seconds(*(each.seconds for each in within)) == pytest.approx(length, rel=1e-5)
        whole = seconds(*(each.seconds for each in on_compute if each.loop == loop))
        assert isinstance(plan.spec.model, DecoderConfig)
        assert whole == pytest.approx(length * plan.spec.model.num_layers, rel=0.5)
    assert backward.end_ns - backward.start_ns > forward.end_ns - forward.start_ns


def test_events_are_named_by_what_they_do():
    events = recorded("v5e_fsdp16")[2].events
    names = {each.name for each in events}
    assert {"gather mlp/up", "gather attention/query", "gather head/kernel", "optimizer"} <= names
    gathers = [each for each in events if each.name == "gather mlp/up" and each.kind == "all-gather"]
    sources = {"layers/mlp/up_EM, forward", "layers/mlp/up_EM, recomputed"}
    assert {each.arguments["source"] for each in gathers} <= sources
    assert {each.arguments["over"] for each in gathers} == {"fsdp"}
    assert all(each.instruction for each in events)


def test_the_timeline_has_the_memory_that_is_in_use():
    peak = read_peak(parse_module(recorded_text("v5e_fsdp16")))
    events = with_memory(recorded("v5e_fsdp16")[2].events, peak)
    known = [each for each in events if each.live_bytes is not None]
    assert {each.track for each in known} == {"compute"}
    assert [each for each in events if each.kind in ("matmul", "loop") and each.live_bytes is None] == []
    assert max(each.live_bytes or 0 for each in known) <= peak.num_bytes
    assert min(each.live_bytes or 0 for each in known) > 0


@pytest.mark.cases(plain=1)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_by_itself_takes_the_same_times(name):
    """Without its plan it keeps everything but the names of parameters and the rates; without metadata, too."""
    plan, _, analysis = recorded(name)
    devices, text = ProgramDevices(plan.mesh.placement), recorded_text(name)
    alone = inspect_text(text, devices)
    assert [replace(each, origin=TrafficSource(), line="") for each in alone.analysis.collectives] == [
        replace(each, origin=TrafficSource(), line="") for each in analysis.collectives
    ]
    undeclared: dict[str, Any] = dict.fromkeys(("mfu", "tokens_per_second_per_chip"), Unknown(NOT_DECLARED))
    assert alone.analysis.step == analysis.step.model_copy(update=undeclared)
    unnamed = {"name": "", "arguments": {}}
    assert [each.model_copy(update=unnamed) for each in alone.analysis.events] == [
        each.model_copy(update=unnamed) for each in analysis.events
    ]
    assert alone.peak == read_peak(parse_module(text))
    stripped = inspect_text(re.sub(r", metadata=\{[^}]*\}", "", text), devices)
    assert {each.line for each in stripped.analysis.collectives} == {""}
    assert stripped.analysis.step.step_seconds == analysis.step.step_seconds


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_our_programs_lies_inside_tiles_that_matter(name):
    """Their layers are stacked along the first dimension. What XLA itself slices is a few numbers: the place of each
    device in u32[8], the scales of a norm."""
    plan, _, _ = recorded(name)
    found = inspect_text(recorded_text(name), ProgramDevices(plan.mesh.placement)).findings
    assert [each.what for each in found if each.rule.endswith("-inside-tiles")] == []


def seconds(*known: float | Unknown) -> float:
    assert not first_unknown(known)
    return sum(each for each in known if not isinstance(each, Unknown))


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_collective_is_known_by_name_or_size(name):
    plan, planned, analysis = recorded(name)
    assert [each.name for each in analysis.collectives if MADE in each.source] == []
    findings = lint(plan, analysis.collectives, analysis.matches, planned, ())
    assert [finding.what for finding in findings if finding.rule == "unplanned-collective"] == []


@pytest.mark.parametrize("name", ["v5e_fsdp16", "v6e_sparsecore", "h100_fsdp"])
def test_the_bytes_of_the_program_are_those_of_the_plan(name):
    """Weights are gathered in bfloat16, gradients reduced in float32, whatever the compiler makes of either."""
    _, planned, analysis = recorded(name)
    for kind, dtype in (("all-gather", "bf16"), ("reduce-scatter", "f32")):
        crossing = sum(p.bytes for p in planned if p.kind == kind)
        of_type = [each for each in analysis.collectives if each.dtype == dtype and each.bytes > 256]
        assert {each.kind for each in of_type} <= {kind, "all-reduce"}
        assert sum(each.bytes for each in of_type) == crossing


@pytest.mark.cases(plain=2)
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("v5e_fsdp16", "layers/mlp/up_EM and 6 more, backward (inferred from its size)"),
        ("v5e_fsdp16", "head/norm/scale_E, forward (inferred from its size)"),
        (
            "two_slices",
            "one of layers/mlp/down_ME, layers/mlp/gate_EM, layers/mlp/up_EM, backward (inferred from its size)",
        ),
        ("two_slices", "layers/attention_norm/scale_E and 1 more, backward (inferred from its size)"),
    ],
)
def test_sources_by_size(name, source):
    assert source in {each.source for each in recorded(name)[2].collectives}


def test_gradients_that_became_all_reduces_are_findings():
    plan, planned, analysis = recorded("v5e_fsdp16")
    findings = lint(plan, analysis.collectives, analysis.matches, planned, ())
    assert [finding.rule for finding in findings] == ["gradient-not-scattered"]
    layers, others = findings[0].where.removeprefix("2 places: ").split("; ")
    assert layers.startswith("layers/mlp/up_EM and 6 more, backward")
    assert others.startswith("head/kernel_EV and 4 more, backward")
    assert "sharding.parameters[0]" in layers


def test_across_slices_are_sums_over_replicas():
    """Of a gradient's shard each, on the network between the slices; what is over all devices has a part within."""
    _, planned, analysis = recorded("two_slices")
    across = [each for each in analysis.collectives if each.link == "DCN"]
    assert {(each.kind, each.mesh_axes, each.group_size) for each in across} == {("all-reduce", ("replica",), 2)}
    gradients = sum(p.bytes for p in planned if p.mesh_axes == ("replica",))
    assert gradients <= sum(each.bytes for each in across) <= gradients + 4 * 512  # scalars are padded to a row


def test_a_windowed_einsum_sends_both_ways_within_its_loop():
    """Eight devices on a ring of devices: each window goes one hop and meets a matmul."""
    steps = read_steps(parse_module(recorded_text("windowed_einsum")), V5E)
    gathered, scattered = every(steps, Loop)
    assert (gathered.num_trips, scattered.num_trips) == (2, 2)
    for loop in (gathered, scattered):
        sent = [step.collective for step in loop.body if isinstance(step, Start)]
        assert {each.kind for each in sent} == {"collective-permute"}
        assert len(sent) == 4
        assert all(each.is_async and each.num_bytes == 1024 * 4096 * 2 for each in sent)
        forth = {pair for each in sent for pair in each.groups if pair[1] == (pair[0] + 1) % 8}
        assert len(forth) == 8
        assert sum(step.kind == "matmul" for step in loop.body if isinstance(step, Compute)) >= 2


@pytest.mark.parametrize("name", ["v6e_sparsecore", "h100_fsdp"])
def test_a_text_that_ends_early_is_refused_with_its_line(name):
    lines = recorded_text(name).splitlines(keepends=True)
    for cut in range(1, len(lines) - 2, len(lines) // 7):
        with pytest.raises(HloError, match=r"line \d+|no ENTRY"):
            parse_module("".join(lines[:cut]) + lines[cut][: len(lines[cut]) // 2])
